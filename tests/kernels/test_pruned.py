"""Operators on layers of different sizes: no layer reads what a larger one left in a buffer."""

from dataclasses import replace

import pytest
import torch
from operator_support import record_operator_steps, search_operators
from support import assert_near_in_norm, build_model, random_source, random_tokens

import monoblock as mb
from monoblock.config.model import Repeat
from monoblock.inference.backends.cpu_search import CpuSearchDecoderState
from monoblock.inference.engine import Engine
from monoblock.inference.fast_modules import build_fast_model
from monoblock.inference.prompt import Prompt
from monoblock.inference.settings import Settings
from monoblock.inspection.pruning import prune_heads
from monoblock.kernels.cpu import library

TRANSLATOR = {"vocab": 37, "width": 48, "depth": 3, "heads": 6, "hidden": 29, "context": 211}
ENCODER = {"encoder.1.attention": [0, 1, 2, 4, 5], "encoder.2.attention": [3]}
DECODER = {
    "decoder.0.attention": [2],
    "decoder.1.attention": [0, 1, 3, 5],
    "decoder.1.cross": [4],
    "decoder.2.cross": [1, 2, 3],
}
FACTOR = 2.0**13  # how much larger the activations of the large layer are


@pytest.fixture(autouse=True)
def operator_steps(monkeypatch):
    """Whether the operator took each step."""
    status = library.load_kernels()
    assert status.is_ready, status.reason
    return record_operator_steps(monkeypatch)


@pytest.fixture
def set_threads():
    """Set the number of threads until the end of a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# -- many rows ---------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_several_threads_encode_with_unequal_layers_as_fp64_does(set_threads):
    """One thread stays in a layer with a long text while the other goes on to the next with short ones."""
    model = prune_heads(build_model(mb.vaswani(**TRANSLATOR), seed=5), ENCODER)
    lengths = [199] + [2 + n % 3 for n in range(67)]
    prompts = [Prompt((1,), tuple(row.tolist())) for row in random_tokens(1, sum(lengths), 37)[0].split(lengths)]
    operators = search_operators(model)
    assert operators.encoder is not None
    set_threads(2)
    copy = mb.optimize(model).model
    results = [CpuSearchDecoderState(copy, 17, 1, operators=operators)._encode_sources(prompts) for _ in range(13)]
    set_threads(1)
    mask = results[0][1]
    ids = torch.zeros(mask.shape, dtype=torch.long)
    ids[mask] = torch.tensor([token for prompt in prompts for token in prompt.source])
    expected = model.double().encode(ids, mask)[mask]
    for memory, _ in results:
        torch.testing.assert_close(memory[mask].double(), expected, rtol=0, atol=2e-5)


def test_a_search_with_pruned_heads_finds_the_texts_of_fp64(set_threads):
    model = prune_heads(build_model(mb.vaswani(**TRANSLATOR), seed=5), ENCODER | DECODER)
    assert search_operators(model) is not None
    settings = Settings(max_new_tokens=11, num_beams=4, eos_token_id=(2,))

    def texts(**options):
        engine, events = Engine(model if options else mb.optimize(model), **options), {}
        order = [
            engine.add((1,), settings, tuple(row[: 3 + n % 5].tolist()))
            for n, row in enumerate(random_tokens(9, 7, 37))
        ]
        while engine.busy:
            events |= {order.index(event.request_id): event for event in engine.step()}
        return events

    set_threads(2)
    runs = [texts() for _ in range(2)]
    set_threads(1)
    model.double()
    expected = texts(use_cache=False)
    for run in runs:
        assert {n: event.tokens for n, event in run.items()} == {n: event.tokens for n, event in expected.items()}
        assert all(event.score == pytest.approx(expected[n].score, abs=2e-5) for n, event in run.items())


# -- rows of quantized weights, which are read in groups ---------------------------------------------------------------


def prompt_and_step_logits(model, count=3):
    """The logits of a prompt, many rows, and of some single-token steps after it."""
    has_source, cache = model.encoder is not None, model.make_cache(2, 17, chunk=5)
    memory = model.encode(random_source(2)) if has_source else None
    logits = []
    for number in range(count + 1):
        ids = random_tokens(2, 1 if number else 9, seed=number)
        logits.append(model.decode(ids, memory, cache=cache) if has_source else model(ids, cache=cache))
        cache.advance(ids.shape[1])
        memory = None
    return torch.cat(logits, dim=1)


@torch.no_grad()
def enlarge(layer, next_layer):
    """Make the output of a layer much larger, and the weight of the next one as much smaller."""
    layer.weight.mul_(FACTOR)
    if layer.bias is not None:
        layer.bias.mul_(FACTOR)
    next_layer.weight.div_(FACTOR)


def few_heads():
    model = build_model(mb.gpt(vocab=61, width=64, depth=3, heads=4, hidden=544, context=23))
    attention = model.decoder.blocks[0].attention
    enlarge(attention.value, attention.output)
    return prune_heads(model, {"decoder.1.attention": [2]})  # 48 inputs in 64 columns


def few_cross_heads():
    model = build_model(mb.vaswani(vocab=61, width=64, depth=2, heads=4, hidden=544, context=23))
    attention = model.decoder.blocks[1].attention  # right before the cross-attention
    enlarge(attention.value, attention.output)
    return prune_heads(model, {"decoder.1.cross": [0]})


def few_hidden():
    config = mb.llama(vocab=61, width=64, depth=3, heads=4, hidden=544, context=23)
    first, second, third = config.decoder.layers()
    second = replace(second, feedforward=replace(second.feedforward, hidden=83))
    pattern = tuple(Repeat(blocks=(block,)) for block in (first, second, third))
    model = build_model(replace(config, decoder=replace(config.decoder, pattern=pattern)))
    enlarge(model.decoder.blocks[0].feedforward.up, model.decoder.blocks[0].feedforward.down)
    return model


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("build", [few_heads, few_cross_heads, few_hidden])
@torch.no_grad()
def test_a_small_layer_after_a_large_one_reads_zeros_behind_its_rows(build, bits, operator_steps, set_threads):
    set_threads(1)
    model = mb.quantize(build(), bits=bits, group=32)
    expected = prompt_and_step_logits(model)
    assert not operator_steps
    for count in (1, 2):
        set_threads(count)
        assert_near_in_norm(prompt_and_step_logits(build_fast_model(model)), expected)
    takes_prompts = model.encoder is None and not library.has_matrix_tiles()
    assert operator_steps == [True] * (8 if takes_prompts else 6)
