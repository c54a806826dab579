"""Quantized layers of the GPU path: what can be checked without a GPU."""

import operator

import pytest
import torch

import monoblock as mb
from monoblock.inference.backends.fast_modules.gpu_quantized_linear import (
    FusedQuantizedLinear,
    InferenceQuantizedLinear,
    JoinedMatrix,
    can_join_quantized,
)
from monoblock.inference.backends.fast_modules.joined_norms import join_norms
from monoblock.inference.backends.inference_copy import _copy_module, _fuse_weights
from monoblock.kernels import gpu_quantized
from monoblock.kernels.gpu import NormInput, QuantizedVector, get_quantized
from monoblock.kernels.gpu_quantized import get_started_norm, prepare_matrix
from monoblock.quantization.modules import QuantizedLinear
from monoblock.quantization.packing import pack, unpack


def quantized(bits, rows=6, bias=False):
    layer = QuantizedLinear.from_linear(torch.nn.Linear(64, rows, bias=bias), bits, 32)
    layer.__class__ = InferenceQuantizedLinear
    return layer


def test_scales_and_minima_of_four_bits_share_a_word():
    matrix = pack(torch.randn(5, 64), 4, 32)
    words = prepare_matrix(*matrix).scales
    assert words.dtype == torch.int32
    assert words.shape == (5, 2)
    low, high = (words << 16).view(torch.float32), (words & -65536).view(torch.float32)
    assert torch.equal(low, matrix.scale.float())
    assert torch.equal(high, matrix.least.float())


def test_joined_matrices_follow_their_layers():
    for bits in (8, 4):
        layers = [quantized(bits, rows) for rows in (6, 4)]
        joined = JoinedMatrix(layers)
        packed = joined.get().packed
        assert torch.equal(packed, torch.cat([layer.packed for layer in layers]))
        assert joined.get().packed is packed, "nothing has changed"
        for layer in layers:
            layer.packed.copy_(layer.packed.flip(0))
            layer.scale.mul_(2)
        before = [*joined._matrix[:2]]
        matrix = joined.get()
        assert torch.equal(matrix.packed, torch.cat([layer.packed for layer in layers]))
        scales = [prepare_matrix(*layer.packed_matrix).scales for layer in layers]
        assert torch.equal(matrix.scales, torch.cat(scales))
        assert all(map(operator.is_, matrix, before)), "a recorded graph reads these tensors"


def test_a_layer_quantized_in_inference_mode_has_a_matrix():
    with torch.inference_mode():
        layer = quantized(4)
    assert torch.equal(JoinedMatrix([layer]).get().packed, layer.packed)


def test_a_fused_layer_computes_what_its_layers_do():
    layers = [quantized(8, rows, bias=True) for rows in (6, 4, 4)]
    assert can_join_quantized(layers)
    assert not can_join_quantized([layers[0], quantized(4, bias=True)])
    assert not can_join_quantized([layers[0], quantized(8)])
    fused, x = FusedQuantizedLinear(layers), torch.randn(2, 3, 64)
    assert fused.sizes == [6, 4, 4]
    torch.testing.assert_close(fused(x), torch.cat([layer(x) for layer in layers], -1))


def test_a_layer_without_a_kernel_dequantizes():
    layer, x = quantized(8, bias=True), torch.randn(1, 64)
    assert not layer.supports_kernel(x)
    assert not layer.can_add_residual(x)
    expected = x.double() @ unpack(layer.packed_matrix, 64, torch.float64).T + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_optimize_leaves_a_quantized_model_on_a_cpu_as_it_is():
    model = mb.quantize(mb.Transformer(mb.tiny("llama-7b")), bits=8)
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    mb.optimize(model.eval())
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before


LLAMA = mb.llama(vocab=32, width=64, depth=2, heads=2, hidden=192, context=16)


@pytest.fixture
def any_rows(monkeypatch):
    monkeypatch.setattr(gpu_quantized, "MIN_NORM_ROWS", 32)


def joined_decoder(config, bits=4, group=32):
    """Return the decoder of an inference copy of a quantized model, arranged as on a GPU."""
    model = mb.quantize(mb.Transformer(config), bits=bits, group=group)
    copied = _copy_module(model)
    _fuse_weights(copied)
    join_norms(copied.decoder)
    return copied.decoder


def test_the_products_around_a_norm_compute_it(any_rows):
    first, second = joined_decoder(LLAMA).blocks
    norms = [first.feedforward_norm, second.attention_norm, second.feedforward_norm]
    layers = [first.attention.output, first.feedforward.down, second.attention.output]
    for norm, layer in zip(norms, layers, strict=True):
        assert layer.next_norm.weight is norm.weight
        assert layer.next_norm.eps == norm.config.eps
        assert norm.unread.isnan().all()
    assert first.attention_norm.unread is None, "its input is an embedding, not a product"
    assert second.feedforward.down.next_norm is None, "the head reads the last norm"


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
    for block in joined_decoder(config, **options).blocks:
        assert block.attention.output.next_norm is None
        assert block.feedforward.down.next_norm is None
        assert block.feedforward_norm.unread is None


def test_small_models_keep_their_kernels_of_norms():
    assert all(block.feedforward_norm.unread is None for block in joined_decoder(LLAMA).blocks)


def test_only_the_norm_that_a_product_has_started_is_taken_over():
    x, weight, unread = torch.randn(1, 1, 64), torch.randn(64), torch.full((1,), float("nan"))
    started = NormInput(QuantizedVector.empty(64, x.device), torch.empty(2), 1e-5)
    assert get_started_norm(x, weight, unread) is None
    x._norm_input = (weight, started)
    assert get_started_norm(x, weight.clone(), unread) is None, "another norm"
    assert get_started_norm(x, weight, unread.double()) is None
    normalized = get_started_norm(x, weight, unread)
    assert get_quantized(normalized) is started
    assert normalized.shape == x.shape
    assert normalized.isnan().all(), "nothing else can read it"
