"""Recorded beam search without a GPU: replaying runs the step again, in the same buffers."""

from dataclasses import replace

import pytest
import torch
from support import block_configs, tiny_model, tiny_names

import monoblock as mb
from monoblock.errors import InputError
from monoblock.inference import fast_modules
from monoblock.inference.backends import select
from monoblock.inference.backends.search import cuda_search, device_search
from monoblock.inference.backends.search.cuda_search import MAX_IDLE_BUFFERS, BufferPool, round_up_searches
from monoblock.inference.engine import Engine
from monoblock.inference.settings import Settings
from monoblock.inference.supported_models import SUPPORTED, unsupported_field
from monoblock.nn.attention import attend

SOURCES = ([5, 7, 11, 2, 3], [1, 2, 3], [9, 8, 7, 6, 5, 4, 3], [12, 13], [40, 8, 1, 30])
SETTINGS = Settings(max_new_tokens=13, num_beams=3, num_return_sequences=2, eos_token_id=(2, 7, 19))


@pytest.fixture(autouse=True)
def searches_begun(monkeypatch):
    """Search as on a GPU; the list has the sizes of the buffers of each batch."""
    begun, take = [], BufferPool.take

    def count(self, key):
        begun.append(key)
        return take(self, key)

    monkeypatch.setattr(BufferPool, "take", count)
    monkeypatch.setattr(select, "supports_cuda_graph", lambda model: True)
    return begun


def make_engine(model, **options):
    return Engine(mb.optimize(model), **{"capacity": 26, "max_rows": 64, **options})


def plain_engine(model, **options):
    return Engine(model, **{"capacity": 26, "max_rows": 64, **options})


def add(engine, prompts, settings):
    has_encoder = engine.model.config.encoder is not None
    own = settings if isinstance(settings, list) else [settings] * len(prompts)
    pairs = zip(prompts, own, strict=True)
    return [engine.add([0], s, source=p) if has_encoder else engine.add(p, s) for p, s in pairs]


def collect(engine, found):
    for output in engine.step():
        assert output.error is None
        found[output.request_id, output.sequence_index] = output.tokens, output.score, output.finish_reason


def search(engine, prompts=SOURCES, settings=SETTINGS):
    """The (tokens, score, finish reason) of each returned sequence, in the order of the prompts."""
    requests, found = add(engine, prompts, settings), {}
    while engine.busy:
        collect(engine, found)
    return [found[key] for key in sorted(found) if key[0] in requests]


def assert_same(actual, expected):
    assert [row[0] for row in actual] == [row[0] for row in expected]
    assert [row[2] for row in actual] == [row[2] for row in expected]
    assert [row[1] for row in actual] == pytest.approx([row[1] for row in expected], abs=2e-5, rel=2e-5)


def is_supported(config):
    blocks = block_configs(config)
    return config.decoder is not None and all(unsupported_field(block, SUPPORTED) is None for block in blocks)


SUPPORTED_PRESETS = tiny_names(is_supported)
ENCODER_DECODERS = tiny_names(lambda config: is_supported(config) and config.family == "encoder-decoder")
DECODERS = ["gpt2", "llama-7b", "mistral-7b", "bloom-560m", "gemma2-2b"]


@pytest.mark.parametrize("name", [*ENCODER_DECODERS, *(name for name in DECODERS if name in SUPPORTED_PRESETS)])
def test_texts_and_scores_are_those_of_the_plain_model(name, searches_begun):
    model = tiny_model(name)
    expected = search(plain_engine(model))
    assert not searches_begun
    assert_same(search(make_engine(model)), expected)
    assert len(searches_begun) == 1


# -- the kernels of a GPU -----------------------------------------------------------------------------------------


def reference_beams(q, k, v, keys, values, writers, lengths, *, scale):
    """What `attend_beams` computes, with a mask and the plain formula."""
    beams, size = q.shape[2:]
    slots = (lengths[:, None] * beams + torch.arange(beams))[:, None, :, None].expand(-1, k.shape[1], -1, size)
    keys.scatter_(2, slots, k)
    values.scatter_(2, slots, v)
    known = writers.masked_fill(torch.arange(writers.shape[2]) > lengths[:, None, None], beams)
    visible = (known[..., None] == torch.arange(beams)).flatten(2)[:, None]
    columns = slice(visible.shape[-1])
    out = attend(q, keys[:, :, columns], values[:, :, columns], visible, scale=scale)
    return out.transpose(1, 2).flatten(2)


def reference_source(q, keys, values, valid, *, scale):
    mask = None if valid is None else valid[:, None, None]
    return attend(q, keys, values, mask, scale=scale).transpose(1, 2).flatten(2)


def reference_tokens(logits, scores, count):
    """What `best_tokens` computes, by sorting all continuations."""
    totals = (logits.log_softmax(-1) + scores.float()[..., None]).flatten(1)
    values, indices = (found[:, :count] for found in totals.sort(dim=-1, descending=True, stable=True))
    return values.double(), indices // logits.shape[-1], indices % logits.shape[-1]


@pytest.fixture
def kernel_calls(monkeypatch):
    """Use the formulas above as if they were the kernels of a GPU; return the list of the calls."""
    calls = []

    def counted(function):
        return lambda *args, **options: calls.append(function.__name__) or function(*args, **options)

    monkeypatch.setattr(fast_modules, "supports_beams", lambda x, size, queries: True)
    monkeypatch.setattr(fast_modules, "attend_beams", counted(reference_beams))
    monkeypatch.setattr(fast_modules, "attend_source", counted(reference_source))
    monkeypatch.setattr(device_search, "supports_best_tokens", lambda logits, count: True)
    monkeypatch.setattr(device_search, "best_tokens", counted(reference_tokens))
    return calls


# Windows, biases and caps of the scores have no kernel.
WITH_BEAM_KERNEL = ("vaswani-base", "bart-base", "gpt2", "llama-7b", "llama3-8b", "qwen3-0.6b")
WITH_SOURCE_KERNEL = ("vaswani-base", "bart-base", "t5-small", "mt5-small")


@pytest.mark.parametrize(
    "name", dict.fromkeys((*WITH_BEAM_KERNEL, *WITH_SOURCE_KERNEL, "mistral-7b", "bloom-560m", "gemma2-2b"))
)
def test_with_the_kernels_texts_and_scores_are_the_same(name, kernel_calls):
    model = tiny_model(name)
    expected = search(plain_engine(model))
    assert_same(search(make_engine(model)), expected)
    assert "reference_tokens" in kernel_calls
    assert ("reference_beams" in kernel_calls) == (name in WITH_BEAM_KERNEL)
    assert ("reference_source" in kernel_calls) == (name in WITH_SOURCE_KERNEL)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("penalty", [-0.7, 1.3])
def test_searches_end_as_those_of_the_plain_model(early_stopping, penalty):
    model = tiny_model("vaswani-base")
    settings = replace(SETTINGS, early_stopping=early_stopping, length_penalty=penalty, max_new_tokens=17)
    assert_same(search(make_engine(model), settings=settings), search(plain_engine(model), settings=settings))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_beams": 8, "num_return_sequences": 8},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2, "eos_token_id": ()},
        {"min_new_tokens": 5, "suppress_tokens": (3, 4), "begin_suppress_tokens": (9, 11)},
    ],
)
def test_settings(changes, searches_begun):
    model, settings = tiny_model("gpt2"), replace(SETTINGS, **changes)
    results = search(make_engine(model), settings=settings)
    assert_same(results, search(plain_engine(model), settings=settings))
    assert searches_begun[0].is_constrained == ("min_new_tokens" in changes)


@pytest.mark.parametrize(
    "changes", [{"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, {"repetition_penalty": 1.3}]
)
def test_other_settings_take_plain_steps(changes, searches_begun):
    model, settings = tiny_model("gpt2"), replace(SETTINGS, **changes)
    assert_same(search(make_engine(model), settings=settings), search(plain_engine(model), settings=settings))
    assert not searches_begun


def test_rows_that_reach_the_context_take_plain_steps():
    model, long = tiny_model("gpt2"), [[1 + n % 50 for n in range(20)], *SOURCES]
    assert_same(search(make_engine(model), long), search(plain_engine(model), long))


def test_buffers_and_recordings_are_reused_by_batches_of_other_sizes(searches_begun, monkeypatch):
    recorded, record = [], cuda_search.record
    monkeypatch.setattr(cuda_search, "record", lambda *args: recorded.append(args) or record(*args))
    model = tiny_model("vaswani-base")
    engine, plain = make_engine(model), plain_engine(model)
    batches = [SOURCES + SOURCES[:1], SOURCES, [[7] * 12] * 6, SOURCES[1:] + SOURCES[2:3]]
    for prompts in batches:
        assert_same(search(engine, prompts), search(plain, prompts))
    assert len(searches_begun) == 4
    assert len(set(searches_begun)) == 1
    assert len(recorded) == 1


def test_a_bounded_number_of_buffers_waits_for_the_next_batch():
    model = tiny_model("vaswani-base")
    engine = make_engine(model)
    for count in range(1, 5):
        search(engine, [*SOURCES, *SOURCES][: 2 * count])
    pool = engine.model._search_buffers
    for count in (1, 2, 3):
        pool.give_back(pool.take(pool.idle[0].key._replace(searches=count)))
    assert len(pool.idle) == MAX_IDLE_BUFFERS
    assert [buffers.key.searches for buffers in pool.idle[-3:]] == [1, 2, 3]


def test_numbers_of_searches_are_rounded_up():
    assert [round_up_searches(count) for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 1000)] == [
        *(1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 1024)
    ]  # fmt: skip


def test_requests_wait_for_the_end_of_a_search(searches_begun):
    model, prompts = tiny_model("vaswani-base"), [*SOURCES, *SOURCES[::-1], *SOURCES]
    engine, plain = make_engine(model, max_rows=12), plain_engine(model, max_rows=12)
    assert_same(search(engine, prompts), search(plain, prompts))
    assert len(searches_begun) == 4  # batches of 4, 4, 4 and 3


def test_a_cancelled_request_does_not_change_the_others():
    model, settings = tiny_model("vaswani-base"), replace(SETTINGS, eos_token_id=())
    expected = search(plain_engine(model), settings=settings)
    engine, found = make_engine(model), {}
    requests = add(engine, SOURCES, settings)
    collect(engine, found)
    assert not found
    engine.cancel(requests[1])
    while engine.busy:
        collect(engine, found)
    assert_same([found[key] for key in sorted(found)], expected[:2] + expected[4:])


@pytest.mark.parametrize("name", ["vaswani-base", "mistral-7b", "bloom-560m"])
def test_a_search_that_is_ended_continues_in_plain_steps(name):
    model = tiny_model(name)
    expected = search(plain_engine(model))
    engine, found = make_engine(model), {}
    add(engine, SOURCES, SETTINGS)
    collect(engine, found)
    with engine.backend.inference():
        engine.state.end_search()
    assert not engine.state.is_closed
    while engine.busy:
        collect(engine, found)
    assert_same([found[key] for key in sorted(found)], expected)


def test_nan_logits_end_the_request_with_an_error():
    model = tiny_model("vaswani-base")
    engine = make_engine(model)
    add(engine, SOURCES[:1], SETTINGS)
    weight = model.decoder.blocks[0].feedforward.down.weight
    kept = weight[0, 0].item()
    try:
        weight.data[0, 0] = torch.nan
        (*_, output) = [output for _ in range(9) if engine.busy for output in engine.step()]
        assert isinstance(output.error, InputError)
        assert "NaN" in str(output.error)
    finally:
        weight.data[0, 0] = kept
