"""The engine: requests come, go and share a batch; what cannot be asked is answered in one line."""

import pytest
import torch
from support import build, toy

import monoblock as mb
from monoblock.decoding.engine import Engine
from monoblock.decoding.settings import Settings
from monoblock.decoding.speculative import Draft, LookUp

VOCAB, CONTEXT = 31, 41


def model(seed=0, **more):
    return build(mb.gpt(vocab=VOCAB, width=12, depth=2, heads=3, context=CONTEXT, **more), seed=seed)


def prompts(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (3 + n % 5,), generator=draw).tolist() for n in range(count)]


SETTINGS = [
    Settings(max_new_tokens=7),
    Settings(max_new_tokens=11, temperature=0.9, seed=2),
    Settings(max_new_tokens=9, temperature=1.4, top_k=5, seed=3),
    Settings(max_new_tokens=5, repetition_penalty=1.5, no_repeat_ngram_size=2),
    Settings(max_new_tokens=13, temperature=1.0, top_p=0.7, min_p=0.05, seed=4, bad_words_ids=[[3], [4, 5]]),
    Settings(max_new_tokens=6, min_new_tokens=3, eos_token_id=(1, 2, 3, 4, 5, 6, 7), forced_eos_token_id=1),
    Settings(max_new_tokens=8, temperature=1.0, seed=5, typical_p=0.6, suppress_tokens=(9,)),
]


def alone(engine_model, ids, settings):
    """The new tokens of one request with nobody beside it."""
    return run(Engine(engine_model), [(ids, settings)])[0]


def run(engine, requests):
    numbers = [engine.add(ids, settings) for ids, settings in requests]
    found = drain(engine)
    return [found[number] for number in numbers]


def drain(engine, found=None):
    found = {} if found is None else found
    while engine.busy:
        collect(engine, found)
    return found


def collect(engine, found):
    for event in engine.step():
        found.setdefault(event.id, []).extend(event.tokens)


def test_requests_with_different_settings_share_a_batch_and_say_what_they_say_alone():
    net, asked = model(), list(zip(prompts(len(SETTINGS)), SETTINGS, strict=True))
    assert run(Engine(net), asked) == [alone(net, ids, settings) for ids, settings in asked]


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_more_requests_than_rows_wait_their_turn(rows):
    net, asked = model(), list(zip(prompts(len(SETTINGS)), SETTINGS, strict=True))
    engine, most = Engine(net, rows=rows), 0
    numbers = [engine.add(ids, settings) for ids, settings in asked]
    found = {}
    while engine.busy:
        collect(engine, found)
        most = max(most, len(engine.lanes))
    assert most <= rows
    assert [found[number] for number in numbers] == [alone(net, ids, settings) for ids, settings in asked]


@pytest.mark.parametrize(("beams", "proposer"), [(1, None), (1, "draft"), (1, "look-up"), (3, None)])
def test_requests_may_come_while_others_run(beams, proposer):
    """One more before each step, so that some begin, some run and some are over at any time."""
    net = model()
    made = {None: lambda: None, "draft": lambda: Draft(model(seed=1), 3), "look-up": lambda: LookUp(4)}[proposer]
    kinds = [
        Settings(max_new_tokens=3 + 4 * n % 9, num_beams=beams, eos_token_id=(2,)) if beams > 1 else SETTINGS[n % 7]
        for n in range(17)
    ]
    asked = list(zip(prompts(17), kinds, strict=True))
    engine, found, numbers = Engine(net, rows=9 * beams, proposer=made()), {}, []
    for ids, settings in asked:
        numbers.append(engine.add(ids, settings))
        collect(engine, found)
    drain(engine, found)
    assert [found[number] for number in numbers] == [alone(net, ids, settings) for ids, settings in asked]


def test_beams_and_single_texts_take_turns():
    net, ids = model(), prompts(4)
    kinds = [Settings(max_new_tokens=5, num_beams=n) for n in (1, 3, 1, 2)]
    asked = list(zip(ids, kinds, strict=True))
    assert run(Engine(net), asked) == [alone(net, one, settings) for one, settings in asked]


def test_samples_beams_and_groups_take_turns_though_they_need_as_many_rows():
    net, ids = model(), prompts(5)
    kinds = [
        Settings(max_new_tokens=7, num_return_sequences=4, temperature=1.0, seed=1),
        Settings(max_new_tokens=6, num_beams=4, num_return_sequences=2),
        Settings(max_new_tokens=7, num_beams=4, num_beam_groups=2, diversity_penalty=0.7),
        Settings(max_new_tokens=6, num_beams=4, num_return_sequences=2),
        Settings(max_new_tokens=5, num_return_sequences=4, temperature=1.0, seed=2),
    ]
    asked = list(zip(ids, kinds, strict=True))
    assert run(Engine(net), asked) == [alone(net, one, settings) for one, settings in asked]


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_cancelled_request_says_no_more_and_leaves_the_others_alone(after):
    net, asked = model(), [(ids, Settings(max_new_tokens=9)) for ids in prompts(5)]
    engine, found = Engine(net), {}
    numbers = [engine.add(ids, settings) for ids, settings in asked]
    for _ in range(after):
        collect(engine, found)
    engine.cancel(numbers[2])
    drain(engine, found)
    assert len(found.get(numbers[2], [])) == after
    others = [0, 1, 3, 4]
    assert [found[numbers[n]] for n in others] == [alone(net, *asked[n]) for n in others]


def test_cancelling_all_or_what_is_not_there_is_harmless():
    engine = Engine(model())
    number = engine.add([1, 2], Settings(max_new_tokens=9))
    engine.step()
    engine.cancel(number)
    engine.cancel(number)
    assert not engine.busy
    assert engine.step() == []
    assert len(run(engine, [([1, 2], Settings(max_new_tokens=4))])[0]) == 4


def test_an_event_says_why_a_text_is_over():
    net = model()
    engine = Engine(net, capacity=10)
    free = alone(net, [3, 4, 5], Settings(max_new_tokens=6))
    stop = engine.add([3, 4, 5], Settings(max_new_tokens=6, eos_token_id=(free[2],)))
    count = engine.add([3, 4, 5], Settings(max_new_tokens=2))
    full = engine.add([3, 4, 5], Settings(max_new_tokens=50))
    last = {}
    sizes = {}
    while engine.busy:
        for event in engine.step():
            sizes[event.id] = sizes.get(event.id, 0) + len(event.tokens)
            if event.finished:
                last[event.id] = event.finished
    first = free.index(free[2]) + 1
    assert last == {stop: "stop", count: "length", full: "length"}
    assert sizes == {stop: first, count: 2, full: 7}


def test_a_long_text_ends_where_the_context_does():
    net, ids = model(), torch.tensor(prompts(1))
    for asked in ({}, {"num_beams": 3}, {"prompt_lookup": 5}, {"draft": model(seed=1)}):
        assert net.generate(ids, max_new_tokens=1000, **asked).shape == (1, CONTEXT), asked


def test_generating_leaves_the_model_in_the_mode_it_was_in_and_drops_nothing_out():
    net, ids = model(dropout=0.5), torch.tensor(prompts(1))
    wanted = net.generate(ids, max_new_tokens=9)
    net.train()
    assert torch.equal(net.generate(ids, max_new_tokens=9), wanted)
    assert net.training
    assert torch.equal(torch.stack(list(net.stream(ids, max_new_tokens=9)), 1), wanted[:, ids.shape[1] :])
    assert net.training


def test_what_training_changes_the_next_text_knows():
    """The twin that decodes shares the weights, also after an optimizer step."""
    net, ids = model(), torch.tensor(prompts(1))
    net.generate(ids, max_new_tokens=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    net(ids).logsumexp(-1).sum().backward()
    optimizer.step()
    with torch.no_grad():
        whole = net.generate(ids, max_new_tokens=1)[:, -1]
        assert torch.equal(whole, net(ids)[:, -1].argmax(-1))


# -- one line each ----------------------------------------------------------------------------------------------------

ONE = torch.tensor([[1, 2, 3]])
BAD = {
    "a prompt longer than the context": (lambda m: m.generate(torch.ones(1, 50, dtype=torch.long)), "leaves no room"),
    "a prompt as long as the context": (lambda m: m.generate(torch.ones(1, 41, dtype=torch.long)), "leaves no room"),
    "an empty prompt": (lambda m: m.generate(torch.ones(1, 0, dtype=torch.long)), "empty prompt"),
    "a prompt of padding": (lambda m: m.generate(ONE, attention_mask=torch.zeros(1, 3)), "empty prompt"),
    "an empty prompt for the engine": (lambda m: Engine(m).add([]), "empty prompt"),
    "beams with sampling": (lambda m: m.generate(ONE, num_beams=4, temperature=0.7), "temperature=0 or num_beams=1"),
    "a negative temperature": (lambda m: m.generate(ONE, temperature=-0.5), "temperature=-0.5 cannot be"),
    "a temperature that is no number": (lambda m: m.generate(ONE, temperature=float("nan")), "temperature=nan"),
    "an unknown stop token": (lambda m: m.generate(ONE, eos_token_id=31), "the vocabulary ends at 30"),
    "a negative stop token": (lambda m: m.generate(ONE, eos_token_id=-1), "0 or more"),
    "a draft with another vocabulary": (
        lambda m: m.generate(ONE, draft=build(mb.gpt(vocab=29, width=12, depth=1, heads=3, context=41))),
        "the same vocabulary",
    ),
    "a draft without a decoder": (lambda m: m.generate(ONE, draft=toy("bert-base")), "draft"),
    "a draft and beams": (lambda m: m.generate(ONE, draft=model(1), num_beams=2), "single sequences"),
    "a draft without a cache": (lambda m: m.generate(ONE, draft=model(1), use_cache=False), "use_cache=True"),
    "a draft and looking up": (lambda m: m.generate(ONE, draft=model(1), prompt_lookup=2), "give one of them"),
    "a token the model has not": (lambda m: m.generate(torch.tensor([[1, 31]])), "outside the vocabulary"),
    "ids that are numbers with a point": (lambda m: m.generate(torch.ones(1, 3)), "token numbers"),
    "ids of one axis": (lambda m: m.generate(torch.tensor([1, 2])), r"\(batch, length\)"),
    "a mask of another shape": (lambda m: m.generate(ONE, attention_mask=torch.ones(1, 4)), "does not fit"),
    "a misspelt word": (lambda m: m.generate(ONE, tempereture=1.0), "did you mean 'temperature'"),
    "top_p of nothing": (lambda m: m.generate(ONE, top_p=0.0, temperature=1.0), "top_p=0.0 cannot be"),
    "no new tokens": (lambda m: m.generate(ONE, max_new_tokens=0), "max_new_tokens=0 cannot be"),
    "more best texts than beams": (lambda m: m.generate(ONE, num_beams=2, num_return_sequences=3), "num_beams=2"),
    "several greedy texts": (lambda m: m.generate(ONE, num_return_sequences=3), "all be the same"),
    "groups that do not divide the beams": (lambda m: m.generate(ONE, num_beams=4, num_beam_groups=3), "divide"),
    "an early stopping of another word": (lambda m: m.generate(ONE, early_stopping="soon"), "'never'"),
    "a stream of beams": (lambda m: m.stream(ONE, num_beams=2), "num_beams=1"),
    "a source for a decoder": (lambda m: Engine(m).add([1], source=[2]), "no encoder"),
    "a target without a source": (lambda m: Engine(toy("t5-small"), capacity=9).add([1]), "needs a source"),
    "an encoder": (lambda m: toy("bert-base").generate(ONE), "continues no text"),
    "more beams than rows": (lambda m: Engine(m, rows=3).add([1], Settings(num_beams=4)), "3 rows"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_one_line_that_says_what_to_write(case):
    call, said = BAD[case]
    with pytest.raises(mb.InputError, match=said) as caught:
        call(model())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ["a draft and beams", "an unknown stop token"])
def test_a_refused_request_leaves_no_trace(case):
    net = model()
    wanted = net.generate(ONE, max_new_tokens=5)
    with pytest.raises(mb.InputError):
        BAD[case][0](net)
    assert torch.equal(net.generate(ONE, max_new_tokens=5), wanted)


@pytest.mark.parametrize("proposer", ["draft", "look-up"])
def test_several_samples_of_a_source_are_the_same_with_proposals(proposer):
    """Requests end at different steps, and the others go on with sources of their own."""
    both, small = (
        build(mb.vaswani(vocab=23, width=16, depth=1, heads=2, context=40), seed=seed).eval() for seed in (0, 1)
    )
    draw = torch.Generator().manual_seed(1)
    sources = [torch.randint(3, 23, (2 + n % 5,), generator=draw).tolist() for n in range(7)]

    def texts(made):
        engine, found = Engine(both, capacity=30, proposer=made), {}
        for n, source in enumerate(sources):
            settings = Settings(max_new_tokens=3 + 3 * n, num_return_sequences=3, temperature=1.0, seed=n)
            engine.add([1], settings, source)
        while engine.busy:
            for event in engine.step():
                found.setdefault((event.id, event.number), []).extend(event.tokens)
        return found

    assert texts(Draft(small, 3) if proposer == "draft" else LookUp(3)) == texts(None)


def test_sources_that_come_while_others_are_searched_change_nothing():
    """Beams of an encoder-decoder end at different steps, and new sources of other lengths take their places."""
    torch.manual_seed(0)
    both = mb.Transformer(mb.vaswani(vocab=23, width=16, depth=1, heads=2, context=40)).eval()
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 9, (17,), generator=draw).tolist()
    sources = [torch.randint(3, 23, (length,), generator=draw).tolist() for length in lengths]
    settings = Settings(max_new_tokens=12, num_beams=5, early_stopping=True, eos_token_id=(2, 5, 7, 9, 11))

    def texts(rows):
        engine = Engine(both, rows=rows, capacity=20)
        asked = [engine.add([1], settings, source) for source in sources]
        found = drain(engine)
        return [found[number] for number in asked]

    together = texts(rows=1000)
    assert len(set(map(len, together))) > 1  # some end before others
    assert texts(rows=20) == together
