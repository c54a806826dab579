"""Requests of one engine do not affect each other: what is wrong is refused at once, and a failure ends one request."""

import pytest
import torch
from generate_support import IDS, NEW, eager, gpt, translator

import monoblock as mb
from monoblock.errors import InputError
from monoblock.inference.engine import Engine
from monoblock.inference.settings import Settings
from monoblock.inference.speculative import PromptLookup


def drain(engine):
    """Run an engine to its end; return the tokens and the last output of each sequence."""
    tokens, last = {}, {}
    while engine.busy:
        for output in engine.step():
            key = (output.request_id, output.sequence_index)
            assert key not in last, "an output after the last one"
            tokens[key] = (*tokens.get(key, ()), *output.tokens)
            if output.finish_reason:
                last[key] = output
    return tokens, last


@pytest.mark.parametrize(
    ("ids", "source", "message"),
    [
        ([1.5], [3], "the prompt must be a sequence of token ids"),
        ("abc", [3], "the prompt must be a sequence of token ids"),
        (None, [3], "the prompt must be a sequence of token ids"),
        ([1], [2.0], "the source must be a sequence of token ids"),
        ([1], [-3], "token id -3 is outside the vocabulary of 31 tokens; encode the source"),
        ([1], [31], "token id 31 is outside the vocabulary"),
        ([31], [3], "token id 31 is outside the vocabulary of 31 tokens; encode the prompt"),
        ([], [3], "the prompt is empty"),
        ([1], [], "the source is empty"),
        ([1], None, "needs a source"),
    ],
)
def test_a_wrong_prompt_is_refused_when_it_is_added(ids, source, message):
    engine = Engine(translator())
    with pytest.raises(InputError, match=message):
        engine.add(ids, source=source)
    assert not engine.busy


def test_a_source_beyond_the_learned_positions_of_the_encoder_is_refused():
    model = mb.Transformer(mb.bart(vocab=31, width=24, depth=1, heads=3, context=13)).eval()
    engine = Engine(model)
    with pytest.raises(InputError, match="longer than the encoder's 13 positions"):
        engine.add([1], source=[3] * 14)
    engine.add([1], Settings(max_new_tokens=2), source=[3] * 13)
    assert len(drain(engine)[0][1, 0]) == 2


@pytest.mark.parametrize("settings", [{"num_beams": 10**9}, {"num_return_sequences": 10**9, "temperature": 1}])
def test_settings_have_upper_limits(settings):
    with pytest.raises(InputError, match="write at most 1024"):
        Settings(**settings)


def test_a_seed_fits_in_64_bits_and_bad_words_are_limited():
    with pytest.raises(InputError, match="below 2\\*\\*63"):
        Settings(seed=2**64)
    with pytest.raises(InputError, match="give at most 10000"):
        Settings(bad_words_ids=[[1]] * 100_000)
    with pytest.raises(InputError, match="no token is left"):
        gpt().generate(IDS, suppress_tokens=list(range(31)))


def test_a_model_with_a_huge_context_allocates_what_its_requests_need():
    model = mb.Transformer(mb.llama(vocab=31, width=16, depth=1, heads=2, kv_heads=2, hidden=16, context=2**22)).eval()
    engine = Engine(model)
    engine.add([1, 2], Settings(max_new_tokens=3))
    engine.step()
    assert engine.pages.num_in_use == 1
    assert engine.runner.cache.count < 10
    long = engine.add([1] * 5000, Settings(max_new_tokens=3))
    assert len(drain(engine)[0][long, 0]) == 3


# -- failures in a step ---------------------------------------------------------------------------------------------


class FailingPrompts:
    """A hook that fails if a token occurs among the inputs of a pass."""

    def __init__(self, model, token):
        self.token = token
        model.input.register_forward_pre_hook(self)

    def __call__(self, module, arguments):
        if bool((arguments[0] == self.token).any()):
            raise MemoryError("no room")


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_a_request_that_fails_ends_alone_and_its_neighbours_are_unchanged(options):
    model, settings = gpt(), Settings(max_new_tokens=NEW, suppress_tokens=(30,), **options)
    rows = ([5, 7, 11], [30, 2], [1, 2, 3, 4], [9], [4, 30], [8, 8])
    alone = {
        tuple(row): model.generate(torch.tensor([row]), max_new_tokens=NEW, suppress_tokens=30, **options)
        for row in rows
    }
    FailingPrompts(model, 30)
    engine = Engine(model)
    requests = {engine.add(row, settings): row for row in rows[:1]}
    outputs = [engine.step(), engine.step()]
    requests |= {engine.add(row, settings): row for row in rows[1:]}
    tokens, last = {}, {}
    while engine.busy:
        outputs.append(engine.step())
    for output in (one for step in outputs for one in step):
        tokens[output.request_id] = [*tokens.get(output.request_id, []), *output.tokens]
        if output.finish_reason:
            assert output.request_id not in last
            last[output.request_id] = output
    assert last.keys() == requests.keys()
    for request, row in requests.items():
        if 30 in row:
            assert last[request].finish_reason == "error"
            assert isinstance(last[request].error, MemoryError)
        else:
            assert tokens[request] == alone[tuple(row)][0, len(row) :].tolist()


class FailingLookup(PromptLookup):
    """A proposer that fails for prompts that contain a token, after the model has run them."""

    def propose(self, rows, limits):
        if any(30 in row.request.prompt.ids for row in rows):
            raise MemoryError("no room")
        return super().propose(rows, limits)


def test_rows_of_a_request_that_fails_half_way_are_dropped():
    model, settings = gpt(), Settings(max_new_tokens=NEW)
    engine = Engine(model, proposer=FailingLookup(num_proposals=1))  # so that the first request takes several steps
    first = engine.add([5, 7, 11], settings)
    outputs = engine.step()
    bad, after = engine.add([30, 2], settings), engine.add([1, 2, 3, 4], settings)
    while engine.busy:
        outputs += engine.step()
    for request, row in ((first, [5, 7, 11]), (after, [1, 2, 3, 4])):
        tokens = [token for output in outputs if output.request_id == request for token in output.tokens]
        assert tokens == eager(model, torch.tensor([row]))[0, len(row) :].tolist()
    assert [output.finish_reason for output in outputs if output.request_id == bad] == [None, "error"]


def test_an_error_of_every_row_ends_the_batch_but_not_the_engine():
    model, calls = gpt(), []
    model.decoder.blocks[0].register_forward_hook(
        lambda *_: calls.append(1) or (1 / 0 if len(calls) in (3, 4, 5) else None)
    )
    engine = Engine(model)  # it fails with both, then with each of them
    first, second = engine.add([1, 2]), engine.add([3])
    last = drain(engine)[1]
    assert [last[request, 0].finish_reason for request in (first, second)] == ["error", "error"]
    assert all(isinstance(output.error, ZeroDivisionError) for output in last.values())
    after = engine.add([1, 2], Settings(max_new_tokens=NEW))
    assert drain(engine)[0][after, 0] == tuple(eager(gpt(), torch.tensor([[1, 2]]))[0, 2:].tolist())


def test_generate_raises_the_error_of_a_hook():
    model = gpt()
    model.decoder.blocks[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.generate(IDS)
    with pytest.raises(ZeroDivisionError):
        next(model.stream(IDS))


# -- settings of one request ----------------------------------------------------------------------------------------


def test_each_search_of_a_batch_has_its_own_diversity_penalty():
    model = gpt(seed=3)
    settings = [
        Settings(num_beams=4, num_beam_groups=2, diversity_penalty=penalty, max_new_tokens=NEW, num_return_sequences=4)
        for penalty in (0.0, 5.0, 0.5)
    ]
    engine = Engine(model)
    requests = [engine.add([5, 7, 11], own) for own in settings]
    together = drain(engine)[0]
    for request, own in zip(requests, settings, strict=True):
        single = Engine(model)
        single.add([5, 7, 11], own)
        alone = drain(single)[0]
        assert [together[request, index] for index in range(4)] == [alone[1, index] for index in range(4)]
    assert {together[requests[0], n] for n in range(4)} != {together[requests[1], n] for n in range(4)}


def test_a_search_with_fewer_hypotheses_than_asked_for_ends_every_sequence():
    model = mb.Transformer(mb.gpt(vocab=3, width=12, depth=1, heads=3, context=5)).eval()
    engine = Engine(model)
    engine.add([1], Settings(num_beams=8, num_return_sequences=8, max_new_tokens=1))
    tokens, last = drain(engine)
    reasons = [last[1, index].finish_reason for index in range(8)]
    assert reasons == ["length"] * 3 + ["no_hypothesis"] * 5
    assert [len(tokens[1, index]) for index in range(8)] == [1] * 3 + [0] * 5


def test_the_finish_reason_tells_the_limit_from_the_context():
    model = gpt()  # a context of 41 tokens
    for options in ({}, {"num_beams": 2}):
        engine = Engine(model)
        full = engine.add([1] * 38, Settings(max_new_tokens=9, **options))
        limit = engine.add([1] * 32, Settings(max_new_tokens=9, **options))
        last = drain(engine)[1]
        assert (last[full, 0].finish_reason, last[limit, 0].finish_reason) == ("context", "length")


@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}, {"temperature": 1.0, "seed": 1}])
@pytest.mark.parametrize("interrupted", [False, True])
def test_each_token_of_a_prompt_is_scored_once(options, interrupted):
    model, prompt = gpt(), [5, 7, 11, 2, 3, 9, 1]
    engine = Engine(model, max_rows=6, prefill_chunk=2)
    request = engine.add(prompt, Settings(max_new_tokens=3, score_prompt=True, **options))
    outputs = [*engine.step(), *engine.step()]
    if interrupted:  # a request that needs all rows takes the place of the other, whose prompt is half run
        engine.add([4], Settings(max_new_tokens=2, num_beams=6, priority=1))
    while engine.busy:
        outputs += [output for output in engine.step() if output.request_id == request]
    with torch.no_grad():
        log_probs = model(torch.tensor([prompt]))[0].log_softmax(-1)
    wanted = [float(log_probs[place, token]) for place, token in enumerate(prompt[1:])]
    assert [score.logprob for score in outputs[0].prompt_scores] == pytest.approx(wanted, abs=1e-5)
    assert not any(output.prompt_scores for output in outputs[1:])
