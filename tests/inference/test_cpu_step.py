"""A step of a stack in one operator gives the logits and the cache of the plain path."""

import pytest
import torch
from operator_support import record_operator_steps
from support import (
    assert_near,
    assert_near_in_norm,
    build_model,
    has_decoder,
    is_encoder_decoder,
    random_source,
    random_tokens,
    tiny_model,
    tiny_names,
)

import monoblock as mb
from monoblock.inference.backends import cpu_step
from monoblock.inference.engine import Engine
from monoblock.inference.fast_modules import build_fast_model
from monoblock.inference.settings import Settings
from monoblock.inference.supported_models import NATIVE_ACTIVATIONS
from monoblock.kernels.cpu import library

ROWS, CAPACITY = 3, 23
LENGTHS = torch.tensor([7, 4, 5])


@pytest.fixture(scope="module", autouse=True)
def compiler():
    status = library.load_kernels()
    assert status.is_ready, status.reason


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Whether the operator took each step."""
    return record_operator_steps(monkeypatch)


def build_tiny(name, bits):
    return tiny_model(name) if bits is None else mb.quantize(tiny_model(name), bits=bits)


class CachedRun:
    """A model with a cache that holds rows of different lengths."""

    def __init__(self, model, rows=ROWS, lengths=LENGTHS):
        self.model, self.has_encoder = model, is_encoder_decoder(model.config)
        self.cache = model.make_cache(rows, CAPACITY, chunk=int(lengths.max()))
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        self.source_mask = torch.arange(17) < torch.tensor([17, 11, 13])[:rows, None]
        memory = model.encode(random_source(rows), self.source_mask) if self.has_encoder else None
        self.first_logits = self.run(random_tokens(rows, mask.shape[1]), None if mask.all() else mask, memory)
        self.cache.advance(mask.sum(-1))

    def run(self, ids, mask=None, memory=None, **options):
        if self.has_encoder:
            source_mask = self.source_mask if memory is not None else None
            return self.model.decode(ids, memory, source_mask, mask, cache=self.cache, **options)
        return self.model(ids, mask, cache=self.cache, **options)

    def step(self, seed, active=None):
        logits = self.run(random_tokens(self.cache.batch, 1, seed=seed), None if active is None else active[:, None])
        self.cache.advance(1 if active is None else active.long())
        return logits


def assert_same_cache(actual, expected, assert_equal=assert_near):
    assert torch.equal(actual.lengths, expected.lengths)
    assert torch.equal(actual.max_written, expected.max_written)
    indices = zip(actual.index_by_capacity.values(), expected.index_by_capacity.values(), strict=True)
    for index, expected_index in indices:
        assert torch.equal(index.token_index, expected_index.token_index)
        assert torch.equal(index.positions[:, :-1], expected_index.positions[:, :-1])  # the last column is scratch
    for layer, expected_layer in zip(actual.layers, expected.layers, strict=True):
        assert_equal(layer.keys[:, :, :-1], expected_layer.keys[:, :, :-1])
        assert_equal(layer.values[:, :, :-1], expected_layer.values[:, :, :-1])


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("name", tiny_names(has_decoder))
@torch.no_grad()
def test_a_step_gives_the_logits_and_cache_of_the_plain_path(name, bits, taken):
    model, assert_equal = build_tiny(name, bits), assert_near if bits is None else assert_near_in_norm
    plain, fused = CachedRun(model), CachedRun(build_fast_model(model))
    for seed in range(9):  # beyond the sliding windows
        assert_equal(fused.step(seed), plain.step(seed))
    active = torch.tensor([True, False, True])
    assert_equal(fused.step(9, active)[active], plain.step(9, active)[active])
    assert_equal(fused.step(10), plain.step(10))
    assert_same_cache(fused.cache, plain.cache, assert_equal)
    assert taken == ([] if has_experts(model) else [True] * 11)


def has_experts(model):
    return any(block.feedforward.experts for block in model.config.decoder.layers())


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("name", tiny_names(has_decoder))
@torch.no_grad()
def test_several_tokens_of_a_row_give_the_logits_and_cache_of_the_plain_path(name, bits, taken):
    """Some are not committed, as when a proposal was wrong."""
    model, assert_equal = build_tiny(name, bits), assert_near if bits is None else assert_near_in_norm
    plain, fused = (CachedRun(each, 1, LENGTHS[:1]) for each in (model, build_fast_model(model)))
    for seed, (size, count) in enumerate([(5, 2), (7, 0), (2, 2), (3, 1)]):
        ids = random_tokens(1, size, seed=seed)
        assert_equal(fused.run(ids), plain.run(ids))
        for run in (plain, fused):
            run.cache.advance(count)
    assert_same_cache(fused.cache, plain.cache, assert_equal)
    assert taken == ([] if has_experts(model) else [True] * 4)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "t5-small"])
@torch.no_grad()
def test_a_step_with_activations_of_8_bits_gives_the_logits_of_the_plain_path_in_fp64(name, bits, taken):
    """A rounding error in fp32 may round an activation another way, so that some rows differ by more."""
    model = mb.quantize(tiny_model(name), bits=bits, activation_bits=8)
    fused, plain = CachedRun(build_fast_model(model)), CachedRun(model.double())
    pairs = [(fused.step(seed).double(), plain.step(seed)) for seed in range(7)]
    actual, expected = (torch.stack(logits).flatten(0, -2) for logits in zip(*pairs, strict=True))
    errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(errors.quantile(0.25)) < 1e-4
    assert float(errors.max()) < 0.1
    assert taken == [True] * 7


@pytest.mark.parametrize(("rows", "size"), [(1, 9), (2, 19)])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", tiny_names(has_decoder))
@torch.no_grad()
def test_prompts_of_a_quantized_model_give_the_logits_and_cache_of_the_plain_path(name, bits, rows, size, taken):
    """From an empty cache on, and with two steps behind it."""
    model = build_tiny(name, bits)
    runs = plain, fused = [
        CachedRun(each, rows, torch.full((rows,), size)) for each in (model, build_fast_model(model))
    ]
    assert_near_in_norm(fused.first_logits, plain.first_logits)
    for seed in range(2):
        assert_near_in_norm(fused.step(seed), plain.step(seed))
    assert_same_cache(*(run.cache for run in runs), assert_near_in_norm)
    takes_prompts = not (fused.has_encoder or has_experts(model) or library.has_matrix_tiles())
    assert taken == ([] if has_experts(model) else [True] * (3 if takes_prompts else 2))


@pytest.mark.parametrize("bits", [8, 4])
@torch.no_grad()
def test_prompts_with_activations_of_8_bits_give_the_logits_of_the_plain_path_in_fp64(bits):
    model = mb.quantize(tiny_model("gpt2"), bits=bits, activation_bits=8)
    ids = random_tokens(1, 20)
    actual = build_fast_model(model)(ids, cache=model.make_cache(1, CAPACITY))[0].double()
    expected = model.double()(ids)[0]
    errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(errors.quantile(0.25)) < 1e-4
    assert float(errors.max()) < 0.1


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("bits", "activation_bits"), [(None, 16), (8, 16), (4, 16), (8, 8), (4, 8)])
@torch.no_grad()
def test_several_tokens_at_once_equal_single_steps_bit_for_bit(bits, activation_bits, window, taken):
    config = mb.llama(vocab=61, width=64, depth=2, heads=4, kv_heads=2, hidden=160, context=CAPACITY, window=window)
    model = build_model(config)
    model = model if bits is None else mb.quantize(model, bits=bits, activation_bits=activation_bits)
    several, single = (CachedRun(build_fast_model(model), 2, LENGTHS[:2]) for _ in range(2))
    for seed, (size, rows) in enumerate([(3, [True, True]), (4, [True, False]), (2, [True, True])]):
        ids, active = random_tokens(2, size, seed=seed), torch.tensor(rows)
        logits = several.run(ids, active[:, None].expand(ids.shape))
        several.cache.advance(size * active.long())
        for position in range(size):
            step_logits = single.run(ids[:, position : position + 1], active[:, None])
            single.cache.advance(active.long())
            assert torch.equal(step_logits[active, 0], logits[active, position])
    assert taken == [True] * 12


@pytest.mark.parametrize("name", ["gpt2", "mistral-7b", "t5-small"])
@torch.no_grad()
def test_truncating_reordering_and_longer_passes_between_steps(name, taken):
    model = tiny_model(name)
    plain, fused = CachedRun(model), CachedRun(build_fast_model(model))
    for run in (plain, fused):
        run.step(0)
        run.cache.truncate(LENGTHS)
        run.step(1)
        if not run.has_encoder:
            run.cache.select(torch.tensor([2, 0, 0, 1]))
        run.run(random_tokens(run.cache.batch, 3, seed=5))  # more tokens than the operator takes
        run.cache.advance(3)
    for seed in range(2, 5):
        assert_near(fused.step(seed), plain.step(seed))
    assert_same_cache(fused.cache, plain.cache)
    assert taken == [True] * 5


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 11])
@torch.no_grad()
def test_any_number_of_rows(rows, taken):
    model = tiny_model("qwen2-0.5b")
    lengths = torch.arange(rows) % 4 + 2
    plain = CachedRun(model, rows, lengths)
    fused = CachedRun(build_fast_model(model), rows, lengths)
    for seed in range(2):
        assert_near(fused.step(seed), plain.step(seed))
    assert taken == ([True, True] if rows <= cpu_step.MAX_TOKENS else [])


@pytest.mark.parametrize("activation", NATIVE_ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
@torch.no_grad()
def test_every_activation_and_odd_sizes(activation, gated, taken):
    config = mb.gpt(
        vocab=61, width=35, depth=2, heads=5, hidden=83, context=CAPACITY, activation=activation, gated=gated
    )
    model = build_model(config)
    plain, fused = CachedRun(model), CachedRun(build_fast_model(model))
    assert_near(fused.step(0), plain.step(0))
    assert taken == [True]


@pytest.fixture
def set_num_threads():
    """torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3])
@torch.no_grad()
def test_the_number_of_threads_does_not_matter(count, taken, set_num_threads):
    model = build_model(mb.llama(vocab=61, width=128, depth=3, heads=8, kv_heads=2, hidden=352, context=CAPACITY))
    set_num_threads(count)
    plain, fused = CachedRun(model), CachedRun(build_fast_model(model))
    for seed in range(3):
        assert_near(fused.step(seed), plain.step(seed))
    assert taken == [True] * 3


@torch.no_grad()
def test_positions_with_a_gap_run_on_the_plain_path(taken):
    model = tiny_model("llama-7b")
    plain, fused = CachedRun(model), CachedRun(build_fast_model(model))
    logits = {plain: [], fused: []}
    for run in (plain, fused):
        logits[run].append(run.run(random_tokens(ROWS, 1), positions=LENGTHS[:, None] + 2))
        run.cache.advance(1)
        logits[run].append(run.step(0))
    for actual, expected in zip(logits[fused], logits[plain], strict=True):
        assert_near(actual, expected)
    assert taken == [False, False]


@torch.no_grad()
def test_the_operator_follows_training(taken):
    model = build_model(mb.gpt(vocab=61, width=36, depth=2, heads=3, context=CAPACITY))
    copied = build_fast_model(model)
    before = CachedRun(copied).step(0)
    for weight in model.parameters():
        weight.mul_(1.25)
    after = CachedRun(copied).step(0)
    assert (after - before).abs().max() > 1e-2
    assert_near(after, CachedRun(model).step(0))
    assert taken == [True, True]


def decode(model, optimize, **options):
    engine = Engine(mb.optimize(model) if optimize else model, capacity=CAPACITY)
    prompts, sources = random_tokens(4, 7).tolist(), random_source(4).tolist()
    has_encoder = is_encoder_decoder(model.config)
    for index, (prompt, source) in enumerate(zip(prompts, sources, strict=True)):
        settings = Settings(max_new_tokens=11 + index, **options)
        engine.add(prompt[: 3 + index], settings, source if has_encoder else None)
    tokens = {}
    while engine.busy:
        for output in engine.step():
            tokens.setdefault((output.request_id, output.sequence_index), []).extend(output.tokens)
    return tokens


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("name", ["gpt2", "smollm2-135m", "gemma3-1b", "bart-base", "t5-small"])
def test_the_engine_generates_the_same_tokens(name, bits, taken):
    model = build_tiny(name, bits)
    for options in ({}, {"num_beams": 2}):
        assert decode(model, True, **options) == decode(model, False, **options)
    assert sum(taken) > 20


def test_gradients_are_computed_on_the_plain_path(taken):
    run = CachedRun(build_fast_model(tiny_model("gpt2")))
    assert run.step(0).requires_grad
    assert taken == []
