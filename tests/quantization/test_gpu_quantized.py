"""Quantized layers of the GPU path: what can be checked without a GPU."""

import dataclasses

import pytest
import torch

import monoblock as mb
from monoblock.inference.fast_linear import (
    Choices,
    FastQuantizedLinear,
    FusedQuantizedLinear,
    can_join_quantized,
    join_matrices,
    multiply,
)
from monoblock.inference.fast_modules import make_fast
from monoblock.kernels import gpu_quantized
from monoblock.kernels.gpu import Activations
from monoblock.kernels.gpu_quantized import prepare_matrix
from monoblock.quantization.modules import QuantizedLinear
from monoblock.quantization.packing import pack, unpack

ON_GPU = Choices(fuse=True, quantized=True, native=False)


def quantized(bits, rows=6, bias=False):
    layer = QuantizedLinear.from_linear(torch.nn.Linear(64, rows, bias=bias), bits, 32)
    return FastQuantizedLinear(layer, ON_GPU)


def test_scales_and_minima_of_four_bits_share_a_word():
    matrix = pack(torch.randn(5, 64), 4, 32)
    words = prepare_matrix(*matrix).scales
    assert words.dtype == torch.int32
    assert words.shape == (5, 2)
    low, high = (words << 16).view(torch.float32), (words & -65536).view(torch.float32)
    assert torch.equal(low, matrix.scale.float())
    assert torch.equal(high, matrix.least.float())


def test_joined_matrices_are_those_of_their_layers():
    for bits in (8, 4):
        layers = [quantized(bits, rows) for rows in (6, 4)]
        joined = join_matrices(layers)
        assert torch.equal(joined.packed, torch.cat([layer.packed for layer in layers]))
        scales = [prepare_matrix(*layer.packed_matrix).scales for layer in layers]
        assert torch.equal(joined.scales, torch.cat(scales))


def test_a_layer_quantized_in_inference_mode_has_a_matrix():
    with torch.inference_mode():
        layer = quantized(4)
    assert torch.equal(join_matrices([layer]).packed, layer.packed)


def test_a_fused_layer_computes_what_its_layers_do():
    layers = [quantized(8, rows, bias=True) for rows in (6, 4, 4)]
    assert can_join_quantized(layers)
    assert not can_join_quantized([layers[0], quantized(4, bias=True)])
    assert not can_join_quantized([layers[0], quantized(8)])
    fused, x = FusedQuantizedLinear(layers), torch.randn(2, 3, 64)
    assert fused.sizes == [6, 4, 4]
    torch.testing.assert_close(fused(Activations(x)), torch.cat([layer(x) for layer in layers], -1))


def test_a_layer_without_a_kernel_dequantizes():
    layer, x = quantized(8, bias=True), torch.randn(1, 64)
    assert not layer.has_kernel(x)
    expected = x.double() @ unpack(layer.packed_matrix, 64, torch.float64).T + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
    residual = torch.randn(1, 6)
    found = multiply(layer, Activations(x), residual).values
    torch.testing.assert_close(found.double(), expected + residual.double(), rtol=1e-5, atol=1e-5)


def test_optimize_leaves_a_quantized_model_on_a_cpu_as_it_is():
    model = mb.quantize(mb.Transformer(mb.tiny("llama-7b")), bits=8)
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    mb.optimize(model.eval())
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before


LLAMA = mb.llama(vocab=32, width=64, depth=2, heads=2, hidden=192, context=16)


@pytest.fixture
def any_rows(monkeypatch):
    monkeypatch.setattr(gpu_quantized, "MIN_NORM_ROWS", 32)


def begun_norms(config, bits=4, group=32):
    """The norms that each layer of a quantized model, arranged as on a GPU, begins in its products, and its blocks."""
    decoder = make_fast(mb.quantize(mb.Transformer(config), bits=bits, group=group).eval(), ON_GPU).decoder
    return decoder.next_norms, decoder.blocks


def test_the_products_around_a_norm_compute_it(any_rows):
    norms, (first, second) = begun_norms(LLAMA)
    assert [list(layer) for layer in norms] == [["attention", "feedforward"], ["attention"]]  # the head reads the last
    expected = [first.feedforward_norm, second.attention_norm, second.feedforward_norm]
    found = [norms[0]["attention"], norms[0]["feedforward"], norms[1]["attention"]]
    for begun, norm in zip(found, expected, strict=True):
        assert begun.weight is norm.weight
        assert begun.eps == norm.config.eps


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LLAMA, {"bits": 8}),  # is slower
        (LLAMA, {"group": 96}),  # rows of 64 are padded to 96, which the kernel of the next product does not read
        (mb.vary(LLAMA, norm="layer"), {}),
        (mb.vary(LLAMA, norm_place="sandwich"), {}),  # normalizes an output before it is added
        (mb.vary(LLAMA, norm_place="output"), {}),
        (mb.vary(LLAMA, residual="parallel"), {}),
        (mb.vary(LLAMA, residual="none"), {}),
    ],
)
def test_other_norms_have_their_own_kernel(config, options, any_rows):
    assert not any(begun_norms(config, **options)[0])


def test_small_models_keep_their_kernels_of_norms():
    assert not any(begun_norms(LLAMA)[0])


def test_a_block_that_runs_twice_begins_the_norm_that_comes_next_each_time(any_rows):
    run = mb.Repeat(blocks=(LLAMA.decoder.pattern[0].blocks[0],), times=2, tied=True)
    last = mb.Repeat(blocks=(LLAMA.decoder.pattern[0].blocks[0],))
    config = dataclasses.replace(LLAMA, decoder=dataclasses.replace(LLAMA.decoder, pattern=(run, last)))
    norms, (first, again, other) = begun_norms(config)
    assert first is again
    assert norms[0]["feedforward"].weight is first.attention_norm.weight
    assert norms[1]["feedforward"].weight is other.attention_norm.weight
