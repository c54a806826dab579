"""The CPU kernels give what the plain products give: every format, odd sizes, many rows, with and without compiler."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from operator_support import kernel_layer, use_cpu_kernels
from support import (
    assert_near,
    assert_near_in_norm,
    build_model,
    example_inputs,
    has_decoder,
    random_tokens,
    run_model,
    tiny_model,
    tiny_names,
)
from torch import nn

import monoblock as mb
from monoblock.inference import fast_linear as fast_linear_module
from monoblock.inference.fast_linear import KERNEL_ROWS, FastQuantizedMatrix, fast_linear
from monoblock.kernels.cpu import library
from monoblock.quantization.modules import QuantizedLinear
from monoblock.quantization.packing import pack, unpack

FORMATS = [("dense", 0), ("int8", 32), ("int8", 96), ("int4", 32), ("int4", 64)]


@pytest.fixture(scope="module", autouse=True)
def compiler():
    """Require a compiler: without one these tests would test nothing."""
    kernels = library.load_kernels()
    assert kernels.is_ready, kernels.reason


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def store_matrix(kind, group, rows, inputs):
    weight = draw(rows, inputs)
    return weight if kind == "dense" else pack(weight, 8 if kind == "int8" else 4, group)


def run_kernel(x, matrix, **options):
    return torch.ops.monoblock.linear(x, *matrix, **options)


def dequantize(matrix, inputs):
    return matrix.double() if isinstance(matrix, torch.Tensor) else unpack(matrix, inputs, torch.float64)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7, 13])
@pytest.mark.parametrize(("kind", "group"), FORMATS)
def test_the_kernel_agrees_with_fp64(kind, group, batch):
    rows, inputs = 23, 96 if kind == "dense" else 83
    matrix, x, bias = store_matrix(kind, group, rows, inputs), draw(batch, inputs, seed=1), draw(rows, seed=2)
    result = run_kernel(x, (matrix,) if kind == "dense" else matrix, bias=bias)
    exact = F.linear(x.double(), dequantize(matrix, inputs), bias.double())
    if kind == "dense":
        return assert_near(result, exact.float())
    assert bool(((result - exact).abs() <= rounding_bound(x, matrix, inputs, group) + 2e-5 * (1 + exact.abs())).all())
    assert_near_in_norm(result.double(), exact, 1e-4)


def rounding_bound(x, matrix, inputs, group):
    """Bound the change of each output when x is rounded to 65535 steps over the range of its group."""
    scaled = unpack(matrix._replace(least=None if matrix.least is None else 0 * matrix.least), inputs, torch.float64)
    magnitudes, weights = (F.pad(t.abs(), (0, -inputs % group)).unflatten(1, (-1, group)) for t in (x.double(), scaled))
    return magnitudes.amax(-1) / 65534 @ weights.sum(-1).T


def product(matrix, inputs, activation_bits=16):
    """The product of up to 15 rows with a matrix, or 8 with one of fp32, by its kernel."""
    if isinstance(matrix, torch.Tensor):
        return lambda x: fast_linear(x, matrix, None, KERNEL_ROWS["dense"])
    module = kernel_layer(matrix, inputs, activation_bits=activation_bits)
    module.kernel_rows = range(1, 16)
    return module


@pytest.mark.parametrize("activation_bits", [16, 8])
@pytest.mark.parametrize(("kind", "group"), FORMATS)
def test_a_row_is_the_same_bit_for_bit_alone_and_among_others(kind, group, activation_bits):
    """Speculative decoding relies on it: tokens checked together get the logits they get one by one."""
    multiply = product(store_matrix(kind, group, 29, 192), 192, activation_bits)
    x = draw(8 if kind == "dense" else 15, 192, seed=1)
    assert torch.equal(multiply(x), torch.cat([multiply(row[None]) for row in x]))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_extreme_inputs_and_long_groups(kind):
    """Zeros, tiny and huge rows, NaN and infinity, and one group of 16,384 in which no sum may overflow."""
    matrix = store_matrix(kind, 32, 5, 64)
    exact = unpack(matrix, 64, torch.float64)
    for scale in (0.0, 1e-42, 1e-20, 1e25):
        x = scale * draw(1, 64, seed=1)
        torch.testing.assert_close(
            run_kernel(x, matrix).double(), x.double() @ exact.T, rtol=1e-4, atol=scale * 1e-3 + 1e-35
        )
    for value in (float("nan"), float("inf")):
        x = draw(1, 64, seed=1)
        x[0, 7] = value
        assert not bool(run_kernel(x, matrix).isfinite().any())
    long_group = pack(torch.full((3, 16384), 1.0), 8 if kind == "int8" else 4, 16384)
    result = run_kernel(torch.ones(1, 16384), long_group)
    torch.testing.assert_close(result, unpack(long_group, 16384).sum(-1)[None], rtol=2e-4, atol=0)


@pytest.mark.parametrize(("kind", "group"), FORMATS)
def test_a_matrix_that_is_split_among_threads(kind, group):
    rows, inputs = 1009, 192
    matrix, x = store_matrix(kind, group, rows, inputs), draw(1, inputs, seed=1)
    multiply = product(matrix, inputs)
    expected = (x.double() @ dequantize(matrix, inputs).T).float()
    with torch.no_grad():
        assert_near_in_norm(multiply(x), expected, 1e-4)
        assert_near_in_norm(multiply(x.expand(3, 2, -1))[2, 1], expected[0], 1e-4)


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_wide_4_bit_matrices_agree_with_fp64(batch):
    """Rows of a multiple of 128 weights in groups of 32 have a kernel of their own."""
    matrix, x = store_matrix("int4", 32, 29, 384), draw(batch, 384, seed=1)
    x[0, 32:64] = 0
    x[-1, 64:96] *= 1e4
    result = run_kernel(x, matrix)
    exact = x.double() @ dequantize(matrix, 384).T
    limit = 1.01 * rounding_bound(x, matrix, 384, 32) + 2e-5 * (1 + exact.abs())
    assert bool(((result - exact).abs() <= limit).all())
    assert torch.equal(result, torch.cat([run_kernel(row[None], matrix) for row in x]))


@pytest.mark.parametrize("batch", [17, 33, 70])
@pytest.mark.parametrize(("kind", "group"), [("int8", 32), ("int8", 64), ("int8", 96), ("int4", 32), ("int4", 64)])
def test_many_rows_of_quantized_weights_agree_with_fp64(kind, group, batch):
    """In matrix tiles, where the processor has them, or in panels; rows, outputs and inputs fill no whole tile."""
    rows, inputs = 71, 83
    matrix, x, bias = store_matrix(kind, group, rows, inputs), draw(batch, inputs, seed=1), draw(rows, seed=2)
    result = run_kernel(x, matrix, bias=bias)
    exact = F.linear(x.double(), dequantize(matrix, inputs), bias.double())
    assert bool(((result - exact).abs() <= rounding_bound(x, matrix, inputs, group) + 2e-5 * (1 + exact.abs())).all())
    alone = run_kernel(x[:17], matrix, bias=bias)
    assert torch.equal(result[:17], alone), "a row is the same with fewer other rows"
    x[3, 5] = float("nan")
    assert not bool(run_kernel(x, matrix, bias=bias)[3].isfinite().any())


@pytest.mark.parametrize("activation_bits", [16, 8])
@pytest.mark.parametrize("batch", [1, 2, 16, 17, 31, 32, 33, 49, 70, 161])
@pytest.mark.parametrize("group", [32, 64, 96, 128, 512])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_products_are_those_of_the_quantized_numbers(kind, group, batch, activation_bits):
    """The reference quantizes x as well, and adds up exact sums of integers in fp64."""
    if kind == "int4" and batch >= 17 and library.has_matrix_tiles():
        pytest.skip("tiles multiply 4 bits in bfloat16")
    rows, inputs = (61, 577) if group < 512 else (13, 1025)
    inputs += (
        31 if batch == 1 else 0
    )  # 608 in groups of 32 are 640 columns, for which 4 bits have a kernel of their own
    matrix, x, bias = store_matrix(kind, group, rows, inputs), draw(batch, inputs, seed=1), draw(rows, seed=2)
    x[0, :group] = 0
    x[-1, group : 2 * group] *= 1e4
    result = run_kernel(x, matrix, bias=bias, activation_bits=activation_bits)
    exact = bias.double() + quantized_product(x, matrix, inputs, group, activation_bits)
    size = F.linear(x.double().abs(), added_magnitudes(matrix, inputs)) + 1  # of what is added up in fp32
    assert bool(((result - exact).abs() <= 4e-6 * size).all())


def added_magnitudes(matrix, inputs):
    """|s q| + |m| of each weight: with 4 bits, s q and m are added up separately and nearly cancel out."""
    if matrix.least is None:
        return dequantize(matrix, inputs).abs()
    zero = torch.zeros_like
    scaled, least = matrix._replace(least=zero(matrix.least)), matrix._replace(scale=zero(matrix.scale))
    return dequantize(scaled, inputs).abs() + dequantize(least, inputs).abs()


def quantized_product(x, matrix, inputs, group, activation_bits):
    """Round x with a step for each group, and return its product with a quantized matrix in fp64."""
    wide = F.pad(x, (0, -inputs % group)).unflatten(1, (-1, group))
    limit = 32639 if activation_bits == 16 else 127  # the largest of two signed bytes, or of one
    largest = wide.abs().amax(-1, keepdim=True)
    factor = torch.where(largest > 1e-30, torch.full_like(largest, limit) / largest, 0.0)  # limit / x is limit (1 / x)
    integers = (wide.double() * factor.double()).round()  # the product is exact
    unscaled = matrix._replace(scale=torch.ones_like(matrix.scale), least=None)
    if matrix.least is not None:
        unscaled = unscaled._replace(least=torch.zeros_like(matrix.least))
    weights = unpack(unscaled, wide[0].numel(), torch.float64).unflatten(1, (-1, group))
    sums = torch.einsum("bgi,rgi->brg", integers.double(), weights)  # exact: integers below 2^53
    result = torch.einsum("brg,bg,rg->br", sums, (largest / limit)[..., 0].double(), matrix.scale.double())
    if matrix.least is None:
        return result
    added = integers.sum(-1) * (largest / limit)[..., 0].double()
    return result + added @ matrix.least.double().T


def test_many_rows_without_matrix_tiles():
    """Where the processor has matrix tiles, run the tests of many rows once more without them."""
    if not library.has_matrix_tiles():
        pytest.skip("the other tests run without matrix tiles already")
    names = "many_rows_of or quantized_numbers or same_logits"
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", names]
    environment = os.environ | {"MONOBLOCK_NO_TILES": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_transposed_input_is_read_correctly():
    linear = nn.Linear(64, 17)
    x = draw(64, 5, seed=1).T
    with torch.no_grad():
        assert_near(fast_linear(x, linear.weight, linear.bias, range(1, 9)), linear(x))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", tiny_names(has_decoder))
def test_a_model_with_kernels_gives_the_same_logits(name, bits):
    model = mb.quantize(tiny_model(name), bits=bits)
    fast_model = use_cpu_kernels(model)
    with torch.no_grad():
        for rows, length in ((1, 1), (2, 5), (11, 13)):
            ids = random_tokens(rows, length)
            assert_near_in_norm(run_model(fast_model, ids), run_model(model, ids))
        cache, ids = fast_model.make_cache(2, 5), random_tokens(2, 5)
        assert_near_in_norm(run_model(fast_model, ids, cache=cache), run_model(model, ids))


def test_matrices_go_through_the_kernel_and_are_not_copied():
    model = mb.quantize(build_model(mb.gpt(vocab=61, width=64, depth=2, heads=4, context=37)))
    fast_model = use_cpu_kernels(model)
    layers = [module for module in fast_model.modules() if isinstance(module, FastQuantizedMatrix)]
    assert len(layers) == 2 * 6 + 1
    assert fast_model.decoder.get_submodule("1.feedforward.up").packed.data_ptr() == (
        model.decoder.get_submodule("1.feedforward.up").packed.data_ptr()
    )
    assert type(model.decoder.get_submodule("1.feedforward.up")) is QuantizedLinear, "the original model is not changed"


def test_many_rows_other_dtypes_and_gradients_use_the_plain_product():
    module = kernel_layer(store_matrix("int8", 32, 19, 64), 64)
    module.kernel_rows = KERNEL_ROWS["quantized"]  # as without a kernel for many rows
    for x in (draw(33, 64), draw(2, 64).double()):
        assert_near(module(x), F.linear(x, unpack(module.packed_matrix, 64, x.dtype)))
    x = draw(2, 64).requires_grad_()
    module(x).sum().backward()
    assert_near(x.grad, module.weight.sum(0).expand(2, -1))


def test_torch_compile_traces_the_operators_in_one_graph():
    model = use_cpu_kernels(mb.quantize(build_model(mb.gpt(vocab=61, width=64, depth=1, heads=4, context=37)), bits=4))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        traced = torch.compile(model, backend=backend, fullgraph=True)
        assert_near(traced(random_tokens(1, 1)), model(random_tokens(1, 1)))
    names = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert {"monoblock.linear", "monoblock.linear.default"} & names


def test_the_operators_pass_torchs_own_checks():
    for arguments in (pack(draw(7, 64), 4, 32), (*pack(draw(7, 64), 8, 32), draw(7), 8), (draw(7, 64),)):
        torch.library.opcheck(torch.ops.monoblock.linear.default, (draw(2, 64), *arguments))


def test_without_a_compiler_the_model_itself_is_used_and_the_reason_is_one_line(monkeypatch):
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    kernels = library.load_kernels.__wrapped__()
    assert not kernels.is_ready
    assert "no C++ compiler" in kernels.reason
    assert "\n" not in kernels.reason
    monkeypatch.setattr(fast_linear_module, "load_kernels", lambda: kernels)
    model, ids = mb.quantize(tiny_model("gpt2")), random_tokens(2, 5)
    assert torch.equal(use_cpu_kernels(model)(ids), model(ids))


def test_a_compiler_that_fails_is_named(monkeypatch, tmp_path):
    broken = tmp_path / "g++"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "kernels.cpp:1: error: no such thing" >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setattr(library.shutil, "which", lambda name: str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernels = library.load_kernels.__wrapped__()
    assert not kernels.is_ready
    assert "error: no such thing" in kernels.reason
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_kernels_serve_every_family():
    for name in ("bert-base", "t5-small", "vit-b16"):
        model = mb.quantize(tiny_model(name))
        with torch.no_grad():
            assert_near_in_norm(
                use_cpu_kernels(model)(*example_inputs(model, 2, 5)), model(*example_inputs(model, 2, 5))
            )
