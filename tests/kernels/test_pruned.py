"""Operators on layers of different sizes: no layer reads what a larger one left in a buffer."""

import copy
from dataclasses import replace

import pytest
import torch
from operator_support import use_cpu_kernels, use_kernels_for_toys
from paged_support import PagedRows, assert_close, draw_rows, no_sources, on_whole_sequences
from support import build_model, random_tokens

import monoblock as mb
from monoblock.config.model import Repeat
from monoblock.inference.engine import Engine
from monoblock.inference.fast_modules import build_fast_model
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
def kernels(monkeypatch):
    status = library.load_kernels()
    assert status.is_ready, status.reason
    use_kernels_for_toys(monkeypatch)


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
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids, fast = random_tokens(*mask.shape, 37), build_fast_model(model)
    assert fast.encoder.cpu_encoder is not None
    set_threads(2)
    results = [fast.encode(ids, mask) for _ in range(13)]
    set_threads(1)
    expected = model.double().encode(ids, mask)[mask]
    for memory in results:
        torch.testing.assert_close(memory[mask].double(), expected, rtol=0, atol=2e-5)


def test_a_search_with_pruned_heads_finds_the_texts_of_fp64(set_threads):
    model = prune_heads(build_model(mb.vaswani(**TRANSLATOR), seed=5), ENCODER | DECODER)
    assert mb.optimize(model).model.decoder.cpu_stack is not None
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
def test_a_small_layer_after_a_large_one_reads_zeros_behind_its_rows(build, bits, set_threads):
    set_threads(1)
    model = mb.quantize(build(), bits=bits, group=32).eval()
    inputs = draw_rows((12, 11), 64)
    sources = draw_rows((17, 4), 64) if model.encoder is not None else no_sources(inputs)
    expected = on_whole_sequences(copy.deepcopy(model.decoder).double(), inputs, sources)
    for count in (1, 2):
        set_threads(count)
        for sizes in ((1, 2), (11, 9)):
            assert_close(PagedRows(use_cpu_kernels(model).decoder, sources).run(inputs, sizes), expected, 3e-3)
