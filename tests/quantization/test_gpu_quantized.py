"""Quantized layers of the GPU path: what can be checked without a GPU."""

import torch

import monoblock as mb
from monoblock.decoding.backends.inference.gpu_quantized_linear import (
    FusedQuantizedLinear,
    InferenceQuantizedLinear,
    JoinedMatrix,
    can_join_quantized,
)
from monoblock.kernels.gpu_quantized import prepare_matrix
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
        layers[1].packed.copy_(layers[1].packed.flip(0))
        assert torch.equal(joined.get().packed, torch.cat([layer.packed for layer in layers]))


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
    assert mb.optimize(model) is model
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
