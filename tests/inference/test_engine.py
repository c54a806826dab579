"""The engine: requests come, go and share a batch; an invalid request is an error of one line."""

import pytest
import torch
from support import build_model, tiny_model

import monoblock as mb
from monoblock.inference.engine import Engine
from monoblock.inference.settings import Settings
from monoblock.inference.speculative import DraftModel, PromptLookup

VOCAB, CONTEXT = 31, 41


def gpt(seed=0, **changes):
    return build_model(mb.gpt(vocab=VOCAB, width=12, depth=2, heads=3, context=CONTEXT, **changes), seed=seed)


def random_prompts(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (3 + n % 5,), generator=generator).tolist() for n in range(count)]


SETTINGS = [
    Settings(max_new_tokens=7),
    Settings(max_new_tokens=11, temperature=0.9, seed=2),
    Settings(max_new_tokens=9, temperature=1.4, top_k=5, seed=3),
    Settings(max_new_tokens=5, repetition_penalty=1.5, no_repeat_ngram_size=2),
    Settings(max_new_tokens=13, temperature=1.0, top_p=0.7, min_p=0.05, seed=4, bad_words_ids=[[3], [4, 5]]),
    Settings(max_new_tokens=6, min_new_tokens=3, eos_token_id=(1, 2, 3, 4, 5, 6, 7), forced_eos_token_id=1),
    Settings(max_new_tokens=8, temperature=1.0, seed=5, typical_p=0.6, suppress_tokens=(9,)),
]


def decode(engine, requests):
    """The new tokens of each request."""
    request_ids = [engine.add(ids, settings) for ids, settings in requests]
    tokens = run_to_end(engine)
    return [tokens[request_id] for request_id in request_ids]


def decode_alone(model, requests):
    """The new tokens of each request, decoded by an engine of its own."""
    return [decode(Engine(model), [request])[0] for request in requests]


def run_to_end(engine, tokens=None):
    tokens = {} if tokens is None else tokens
    while engine.busy:
        collect_step(engine, tokens)
    return tokens


def collect_step(engine, tokens):
    """Take a step and append its tokens by request."""
    for output in engine.step():
        tokens.setdefault(output.request_id, []).extend(output.tokens)


def test_requests_with_different_settings_in_one_batch_give_the_texts_they_give_alone():
    model, requests = gpt(), list(zip(random_prompts(len(SETTINGS)), SETTINGS, strict=True))
    assert decode(Engine(model), requests) == decode_alone(model, requests)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_more_requests_than_rows_wait(rows):
    model, requests = gpt(), list(zip(random_prompts(len(SETTINGS)), SETTINGS, strict=True))
    engine, most = Engine(model, max_rows=rows), 0
    request_ids = [engine.add(ids, settings) for ids, settings in requests]
    tokens = {}
    while engine.busy:
        collect_step(engine, tokens)
        most = max(most, len(engine.running))
    assert most <= rows
    assert [tokens[request_id] for request_id in request_ids] == decode_alone(model, requests)


@pytest.mark.parametrize(("beams", "proposer"), [(1, None), (1, "draft"), (1, "prompt lookup"), (3, None)])
def test_requests_may_come_while_others_run(beams, proposer):
    """One more before each step, so that at any time some begin, some run and some are finished."""
    model = gpt()
    proposers = {"draft": DraftModel(gpt(seed=1), 3), "prompt lookup": PromptLookup(4)}
    settings = [
        Settings(max_new_tokens=3 + 4 * n % 9, num_beams=beams, eos_token_id=(2,)) if beams > 1 else SETTINGS[n % 7]
        for n in range(17)
    ]
    requests = list(zip(random_prompts(17), settings, strict=True))
    engine, tokens, request_ids = Engine(model, max_rows=9 * beams, proposer=proposers.get(proposer)), {}, []
    for request in requests:
        request_ids.append(engine.add(*request))
        collect_step(engine, tokens)
    run_to_end(engine, tokens)
    assert [tokens[request_id] for request_id in request_ids] == decode_alone(model, requests)


def test_requests_with_different_numbers_of_beams_run_one_after_the_other():
    model, settings = gpt(), [Settings(max_new_tokens=5, num_beams=n) for n in (1, 3, 1, 2)]
    requests = list(zip(random_prompts(4), settings, strict=True))
    assert decode(Engine(model), requests) == decode_alone(model, requests)


def test_samples_beams_and_groups_of_as_many_rows_run_one_after_the_other():
    model = gpt()
    settings = [
        Settings(max_new_tokens=7, num_return_sequences=4, temperature=1.0, seed=1),
        Settings(max_new_tokens=6, num_beams=4, num_return_sequences=2),
        Settings(max_new_tokens=7, num_beams=4, num_beam_groups=2, diversity_penalty=0.7),
        Settings(max_new_tokens=6, num_beams=4, num_return_sequences=2),
        Settings(max_new_tokens=5, num_return_sequences=4, temperature=1.0, seed=2),
    ]
    requests = list(zip(random_prompts(5), settings, strict=True))
    assert decode(Engine(model), requests) == decode_alone(model, requests)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_cancelled_request_stops_and_does_not_change_the_others(steps):
    model, requests = gpt(), [(ids, Settings(max_new_tokens=9)) for ids in random_prompts(5)]
    engine, tokens = Engine(model), {}
    request_ids = [engine.add(ids, settings) for ids, settings in requests]
    for _ in range(steps):
        collect_step(engine, tokens)
    engine.cancel(request_ids[2])
    run_to_end(engine, tokens)
    assert len(tokens.get(request_ids[2], [])) == steps
    others = [0, 1, 3, 4]
    assert [tokens[request_ids[n]] for n in others] == decode_alone(model, [requests[n] for n in others])


def test_cancelling_every_request_or_an_unknown_one_is_harmless():
    engine = Engine(gpt())
    request_id = engine.add([1, 2], Settings(max_new_tokens=9))
    engine.step()
    engine.cancel(request_id)
    engine.cancel(request_id)
    assert not engine.busy
    assert engine.step() == []
    assert len(decode(engine, [([1, 2], Settings(max_new_tokens=4))])[0]) == 4


def test_the_last_output_gives_the_finish_reason():
    model = gpt()
    engine = Engine(model, capacity=10)
    (tokens,) = decode_alone(model, [([3, 4, 5], Settings(max_new_tokens=6))])
    eos = engine.add([3, 4, 5], Settings(max_new_tokens=6, eos_token_id=(tokens[2],)))
    limit = engine.add([3, 4, 5], Settings(max_new_tokens=2))
    full = engine.add([3, 4, 5], Settings(max_new_tokens=50))
    reasons, lengths = {}, {}
    while engine.busy:
        for output in engine.step():
            lengths[output.request_id] = lengths.get(output.request_id, 0) + len(output.tokens)
            if output.finish_reason:
                reasons[output.request_id] = output.finish_reason
    assert reasons == {eos: "stop", limit: "length", full: "context"}
    assert lengths == {eos: tokens.index(tokens[2]) + 1, limit: 2, full: 7}


def test_a_long_text_ends_where_the_context_does():
    model, ids = gpt(), torch.tensor(random_prompts(1))
    for options in ({}, {"num_beams": 3}, {"prompt_lookup": 5}, {"draft": gpt(seed=1)}):
        assert model.generate(ids, max_new_tokens=1000, **options).shape == (1, CONTEXT), options


def test_generating_keeps_the_training_mode_and_uses_no_dropout():
    model, ids = gpt(dropout=0.5), torch.tensor(random_prompts(1))
    expected = model.generate(ids, max_new_tokens=9)
    model.train()
    assert torch.equal(model.generate(ids, max_new_tokens=9), expected)
    assert model.training
    assert torch.equal(torch.stack(list(model.stream(ids, max_new_tokens=9)), 1), expected[:, ids.shape[1] :])
    assert model.training


def test_the_next_text_follows_training():
    """The inference copy shares the weights, also after an optimizer step."""
    model, ids = gpt(), torch.tensor(random_prompts(1))
    model.generate(ids, max_new_tokens=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(ids).logsumexp(-1).sum().backward()
    optimizer.step()
    with torch.no_grad():
        token = model.generate(ids, max_new_tokens=1)[:, -1]
        assert torch.equal(token, model(ids)[:, -1].argmax(-1))


# -- errors -----------------------------------------------------------------------------------------------------------

IDS = torch.tensor([[1, 2, 3]])
INVALID = {
    "a prompt longer than the context": (lambda m: m.generate(torch.ones(1, 50, dtype=torch.long)), "leaves no room"),
    "a prompt as long as the context": (lambda m: m.generate(torch.ones(1, 41, dtype=torch.long)), "leaves no room"),
    "an empty prompt": (lambda m: m.generate(torch.ones(1, 0, dtype=torch.long)), "prompt is empty"),
    "a prompt of padding": (lambda m: m.generate(IDS, attention_mask=torch.zeros(1, 3)), "prompt is empty"),
    "an empty prompt for the engine": (lambda m: Engine(m).add([]), "prompt is empty"),
    "beams with sampling": (lambda m: m.generate(IDS, num_beams=4, temperature=0.7), "temperature=0 or num_beams=1"),
    "a negative temperature": (lambda m: m.generate(IDS, temperature=-0.5), "temperature=-0.5 is not valid"),
    "a temperature of nan": (lambda m: m.generate(IDS, temperature=float("nan")), "temperature=nan"),
    "an unknown stop token": (lambda m: m.generate(IDS, eos_token_id=31), "the vocabulary ends at 30"),
    "a negative stop token": (lambda m: m.generate(IDS, eos_token_id=-1), "0 or more"),
    "a draft with another vocabulary": (
        lambda m: m.generate(IDS, draft=build_model(mb.gpt(vocab=29, width=12, depth=1, heads=3, context=41))),
        "same vocabulary",
    ),
    "a draft without a decoder": (lambda m: m.generate(IDS, draft=tiny_model("bert-base")), "draft"),
    "a draft and beams": (lambda m: m.generate(IDS, draft=gpt(1), num_beams=2), "single sequences"),
    "a draft without a cache": (lambda m: m.generate(IDS, draft=gpt(1), use_cache=False), "use_cache=True"),
    "a draft and prompt lookup": (lambda m: m.generate(IDS, draft=gpt(1), prompt_lookup=2), "give one of them"),
    "a token outside the vocabulary": (lambda m: m.generate(torch.tensor([[1, 31]])), "outside the vocabulary"),
    "ids of floating point": (lambda m: m.generate(torch.ones(1, 3)), "token ids"),
    "ids of one axis": (lambda m: m.generate(torch.tensor([1, 2])), r"\(batch, length\)"),
    "a mask of another shape": (lambda m: m.generate(IDS, attention_mask=torch.ones(1, 4)), "does not fit"),
    "a misspelt option": (lambda m: m.generate(IDS, tempereture=1.0), "did you mean 'temperature'"),
    "top_p of 0": (lambda m: m.generate(IDS, top_p=0.0, temperature=1.0), "top_p=0.0 is not valid"),
    "no new tokens": (lambda m: m.generate(IDS, max_new_tokens=0), "max_new_tokens=0 is not valid"),
    "more sequences than beams": (lambda m: m.generate(IDS, num_beams=2, num_return_sequences=3), "num_beams=2"),
    "several greedy sequences": (lambda m: m.generate(IDS, num_return_sequences=3), "return the same text"),
    "groups that do not divide the beams": (lambda m: m.generate(IDS, num_beams=4, num_beam_groups=3), "divide"),
    "another value of early_stopping": (lambda m: m.generate(IDS, early_stopping="soon"), "'never'"),
    "a stream of beams": (lambda m: m.stream(IDS, num_beams=2), "num_beams=1"),
    "a source for a decoder": (lambda m: Engine(m).add([1], source=[2]), "no encoder"),
    "a target without a source": (lambda m: Engine(tiny_model("t5-small"), capacity=9).add([1]), "needs a source"),
    "an encoder": (lambda m: tiny_model("bert-base").generate(IDS), "generates no text"),
    "more beams than rows": (lambda m: Engine(m, max_rows=3).add([1], Settings(num_beams=4)), "3 rows"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_call_is_an_error_of_one_line(case):
    call, message = INVALID[case]
    with pytest.raises(mb.InputError, match=message) as error:
        call(gpt())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", ["a draft and beams", "an unknown stop token"])
def test_an_invalid_call_does_not_affect_the_next(case):
    model = gpt()
    expected = model.generate(IDS, max_new_tokens=5)
    with pytest.raises(mb.InputError):
        INVALID[case][0](model)
    assert torch.equal(model.generate(IDS, max_new_tokens=5), expected)


@pytest.mark.parametrize("proposer", ["draft", "prompt lookup"])
def test_several_samples_of_a_source_are_the_same_with_proposals(proposer):
    """Requests end at different steps, and the others keep their sources."""
    model, draft = (
        build_model(mb.vaswani(vocab=23, width=16, depth=1, heads=2, context=40), seed=seed).eval() for seed in (0, 1)
    )
    generator = torch.Generator().manual_seed(1)
    sources = [torch.randint(3, 23, (2 + n % 5,), generator=generator).tolist() for n in range(7)]

    def sample(proposer):
        engine, tokens = Engine(model, capacity=30, proposer=proposer), {}
        for n, source in enumerate(sources):
            settings = Settings(max_new_tokens=3 + 3 * n, num_return_sequences=3, temperature=1.0, seed=n)
            engine.add([1], settings, source)
        while engine.busy:
            for output in engine.step():
                tokens.setdefault((output.request_id, output.sequence_index), []).extend(output.tokens)
        return tokens

    assert sample(DraftModel(draft, 3) if proposer == "draft" else PromptLookup(3)) == sample(None)


def test_sources_that_join_a_running_beam_search_change_nothing():
    """Searches of an encoder-decoder end at different steps, and sources of other lengths take their rows."""
    torch.manual_seed(0)
    model = mb.Transformer(mb.vaswani(vocab=23, width=16, depth=1, heads=2, context=40)).eval()
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 9, (17,), generator=generator).tolist()
    sources = [torch.randint(3, 23, (length,), generator=generator).tolist() for length in lengths]
    settings = Settings(max_new_tokens=12, num_beams=5, early_stopping=True, eos_token_id=(2, 5, 7, 9, 11))

    def search(max_rows):
        engine = Engine(model, max_rows=max_rows, capacity=20)
        request_ids = [engine.add([1], settings, source) for source in sources]
        tokens = run_to_end(engine)
        return [tokens[request_id] for request_id in request_ids]

    together = search(max_rows=1000)
    assert len(set(map(len, together))) > 1  # some end before others
    assert search(max_rows=20) == together
