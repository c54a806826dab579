"""Activations of 8 bits: how they are rounded, in torch and by the kernels, and the models that use them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from operator_support import kernel_layer
from support import (
    assert_bit_equal,
    assert_near,
    assert_near_in_norm,
    example_inputs,
    tiny_model,
)
from torch import nn

import monoblock as mb
from monoblock.quantization.convert import dequantize
from monoblock.quantization.modules import QuantizedLinear
from monoblock.quantization.packing import pack, round_activations, unpack


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def round_by_hand(x, group):
    """Round a row of numbers group by group, in Python."""
    rounded = []
    for start in range(0, len(x), group):
        part = x[start : start + group]
        step = max(map(abs, part)) / 127
        rounded += [0.0 if step == 0 else round(value / step) * step for value in part]
    return rounded


@pytest.mark.parametrize(("inputs", "group"), [(53, 32), (64, 64), (200, 128)])
def test_activations_are_rounded_with_a_step_for_each_group(inputs, group):
    x = draw(5, inputs).double()
    x[1] = 0
    x[2, :group] *= 1e6
    expected = torch.tensor([round_by_hand(row, group) for row in x.tolist()], dtype=torch.float64)
    assert_near(round_activations(x, group), expected)
    assert torch.equal(round_activations(x.float(), group)[1], torch.zeros(inputs))
    assert round_activations(x.bfloat16(), group).dtype == torch.bfloat16


def test_the_scale_of_a_group_is_rounded_once():
    """In fp32, as numpy divides: torch computes a number / x as a number * (1 / x), which moves a few values."""
    x = draw(300_000, 32)
    groups = x.numpy()
    largest = np.abs(groups).max(-1, keepdims=True)
    expected = np.rint(groups * (np.float32(127) / largest)) * (largest / np.float32(127))
    assert_bit_equal(round_activations(x, 32), torch.from_numpy(expected))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_group_that_is_not_finite_becomes_nan(value):
    x = draw(1, 96)
    x[0, 40] = value
    rounded = round_activations(x, 32)[0]
    assert bool(rounded[32:64].isnan().all())
    assert bool(rounded[:32].isfinite().all() and rounded[64:].isfinite().all())


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b", "t5-small", "vit-b16"])
def test_every_quantized_matrix_reads_rounded_inputs(name, monkeypatch):
    """The reference is the model of the dequantized weights, in which every product gets a rounded input."""
    model = tiny_model(name)
    quantized = mb.quantize(model, activation_bits=8)
    reference = dequantize(quantized)
    group, plain_linear = quantized.config.quantize.group, nn.functional.linear
    routers = {id(parameter) for key, parameter in reference.named_parameters() if "router" in key}

    def linear(x, weight, bias=None):
        return plain_linear(x if id(weight) in routers else round_activations(x, group), weight, bias)

    with torch.no_grad():
        result = quantized(*example_inputs(model))
        monkeypatch.setattr(nn.functional, "linear", linear)
        expected = reference(*example_inputs(model))
    assert float((result - expected).norm()) < 1e-5 * float(expected.norm())


def test_gradients_pass_rounded_activations():
    x = draw(3, 50).requires_grad_()
    weights = draw(3, 50, seed=1)
    (round_activations(x, 32) * weights).sum().backward()
    assert_bit_equal(x.grad, weights)


# -- kernels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 21, 40])
@pytest.mark.parametrize(("kind", "group", "inputs"), [("int8", 32, 83), ("int8", 64, 128), ("int4", 32, 384)])
def test_infinities_and_nan_reach_the_outputs_of_their_row_alone(kind, group, inputs, batch):
    matrix, x = pack(draw(29, inputs), 8 if kind == "int8" else 4, group), draw(batch, inputs, seed=1)
    module = kernel_layer(matrix, inputs, activation_bits=8)
    clean = module(x)
    for value in (float("nan"), float("inf"), -float("inf")):
        changed = x.clone()
        changed[batch // 2, 5] = value
        result = module(changed)
        others = torch.arange(batch) != batch // 2
        assert not bool(result[batch // 2].isfinite().any())
        assert torch.equal(result[others], clean[others])


def test_a_number_of_bits_without_kernel_is_refused():
    matrix = pack(draw(5, 64), 8, 32)
    for bits in (0, 4, 12, 32):
        with pytest.raises(RuntimeError, match=f"activation_bits is {bits}; 16 or 8 is needed"):
            torch.ops.monoblock.linear(draw(1, 64), *matrix, None, bits)


@pytest.mark.parametrize("batch", [1, 5, 33])
@pytest.mark.parametrize(("kind", "group"), [("int8", 64), ("int8", 96), ("int4", 32)])
def test_rounding_in_torch_gives_what_the_kernel_gives(kind, group, batch):
    """Other dtypes, gradients and devices round x in torch; here they may round another way where x is between two."""
    matrix, x, bias = pack(draw(29, 200), 8 if kind == "int8" else 4, group), draw(batch, 200, seed=1), draw(29, seed=2)
    module = kernel_layer(matrix, 200, bias, activation_bits=8)
    plain = QuantizedLinear(matrix, 200, torch.float32)
    plain.register_parameter("bias", nn.Parameter(bias, requires_grad=False))
    plain.activation_bits = 8
    assert_near_in_norm(module(x), plain(x), 1e-3)
    assert_near_in_norm(module.linear(x.double(), bias.double()).float(), plain(x), 1e-3)
    exact = F.linear(x.double(), unpack(matrix, 200, torch.float64), bias.double()).float()
    assert float((plain(x) - exact).norm()) > 2e-3 * float(exact.norm()), "x is rounded"
    x.requires_grad_()
    module(x).sum().backward()
    assert_near(x.grad, module.weight.sum(0).expand(batch, -1))
