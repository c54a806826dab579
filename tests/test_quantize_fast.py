"""The kernels say what the plain path says: every format, odd sizes, many rows, compiled, and without a compiler."""

import pytest
import torch
import torch.nn.functional as F
from support import build, close, given, is_decoder, near, presets, read, tokens, toy
from torch import nn

import monoblock as mb
from monoblock.native import library
from monoblock.quantize import fast
from monoblock.quantize.fast import Fast, joined, prepared
from monoblock.quantize.modules import QuantizedLinear
from monoblock.quantize.packing import pack, unpack

FORMATS = [("dense", 0), ("half", 0), ("int8", 32), ("int8", 96), ("int4", 32), ("int4", 64)]


@pytest.fixture(scope="module", autouse=True)
def compiler():
    """Whoever tests has a compiler (torch.compile needs one as well); without one these tests would say nothing."""
    found = library.load()
    assert found.ready, found.reason


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(kind, group, rows, inputs):
    weight = draw(rows, inputs)
    if kind in ("dense", "half"):
        return weight if kind == "dense" else weight.bfloat16()
    return pack(weight, 8 if kind == "int8" else 4, group)


def wide(held, inputs):
    return held.double() if isinstance(held, torch.Tensor) else unpack(held, inputs, torch.float64)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7, 13])
@pytest.mark.parametrize(("kind", "group"), FORMATS)
def test_the_kernel_agrees_with_fp64(kind, group, batch):
    rows, inputs = 23, 96 if kind in ("dense", "half") else 83
    held, x, bias = stored(kind, group, rows, inputs), draw(batch, inputs, seed=1), draw(rows, seed=2)
    parts = (held,) if isinstance(held, torch.Tensor) else tuple(part for part in held if part is not None)
    found = getattr(torch.ops.monoblock, "dense" if kind == "half" else kind)(x, *parts, bias)
    exact = F.linear(x.double(), wide(held, inputs), bias.double())
    if kind in ("dense", "half"):
        return close(found, exact.float())
    assert bool(((found - exact).abs() <= rounding(x, held, inputs, group) + 2e-5 * (1 + exact.abs())).all())
    near(found.double(), exact, 1e-4)


def rounding(x, held, inputs, group):
    """The most that rounding x to 65535 steps between its group's largest numbers can change each output."""
    scaled = unpack(held._replace(least=None if held.least is None else 0 * held.least), inputs, torch.float64)
    sizes, weights = (F.pad(t.abs(), (0, -inputs % group)).unflatten(1, (-1, group)) for t in (x.double(), scaled))
    return sizes.amax(-1) / 65534 @ weights.sum(-1).T


@pytest.mark.parametrize(("kind", "group"), FORMATS)
def test_a_row_is_the_same_bit_for_bit_alone_and_among_others(kind, group):
    """So what is checked several tokens at a time is what would have been said one by one."""
    held, x = stored(kind, group, 29, 192), draw(15, 192, seed=1)
    parts = (held,) if isinstance(held, torch.Tensor) else tuple(part for part in held if part is not None)
    run = getattr(torch.ops.monoblock, "dense" if kind == "half" else kind)
    assert torch.equal(run(x, *parts, None), torch.cat([run(row[None], *parts, None) for row in x]))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_odd_numbers_and_long_groups(kind):
    """Zeros, tiny and huge rows, one group of 16,384 in which no sum may overflow; what is no number stays none."""
    parts = tuple(part for part in pack(draw(5, 64), 8 if kind == "int8" else 4, 32) if part is not None)
    run = getattr(torch.ops.monoblock, kind)
    exact = unpack(pack(draw(5, 64), 8 if kind == "int8" else 4, 32), 64, torch.float64)
    for size in (0.0, 1e-42, 1e-20, 1e25):
        x = size * draw(1, 64, seed=1)
        torch.testing.assert_close(
            run(x, *parts, None).double(), x.double() @ exact.T, rtol=1e-4, atol=size * 1e-3 + 1e-35
        )
    for odd in (float("nan"), float("inf")):
        x = draw(1, 64, seed=1)
        x[0, 7] = odd
        assert not bool(run(x, *parts, None).isfinite().any())
    long = pack(torch.full((3, 16384), 1.0), 8 if kind == "int8" else 4, 16384)
    found = run(torch.ones(1, 16384), *(part for part in long if part is not None), None)
    torch.testing.assert_close(found, unpack(long, 16384).sum(-1)[None], rtol=2e-4, atol=0)


@pytest.mark.parametrize(("kind", "group"), FORMATS)
def test_a_matrix_large_enough_for_every_thread(kind, group):
    rows, inputs = 1009, 192
    held, x = stored(kind, group, rows, inputs), draw(1, inputs, seed=1)
    module = Fast(held, inputs)
    expected = (x.double() @ wide(held, inputs).T).float()
    with torch.no_grad():
        near(module(x), expected, 1e-4)
        near(module(x.expand(3, 2, -1))[2, 1], expected[0], 1e-4)


def test_x_that_does_not_lie_in_a_row_is_read_right():
    linear = nn.Linear(64, 17)
    module, x = fast._fast(linear), draw(64, 5, seed=1).T
    with torch.no_grad():
        close(module(x), linear(x))


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("name", presets(is_decoder))
def test_a_prepared_model_gives_the_models_logits(name, bits):
    model = toy(name) if bits is None else mb.quantized(toy(name), bits=bits)
    ready, alike = prepared(model), close if bits is None else near
    with torch.no_grad():
        for rows, length in ((1, 1), (2, 5), (11, 13)):
            alike(read(ready, tokens(rows, length)), read(model, tokens(rows, length)))
        cache = ready.make_cache(2, 5)
        alike(read(ready, tokens(2, 5), cache=cache), read(model, tokens(2, 5)))


def test_dense_matrices_of_whole_chunks_go_through_the_kernel_and_are_not_copied():
    model = build(mb.gpt(vocab=61, width=64, depth=2, heads=4, context=37))
    ready = prepared(model)
    made = [module for module in ready.modules() if isinstance(module, Fast)]
    assert len(made) == 2 * 6 + 1
    assert ready.decoder.get_submodule("1.feedforward.up").parts[0].data_ptr() == (
        model.decoder.get_submodule("1.feedforward.up").weight.data_ptr()
    )
    assert isinstance(model.decoder.get_submodule("1.feedforward.up"), nn.Linear), "the model given is left alone"
    with torch.no_grad():
        for length in (1, 5, 13):  # one and 5 rows go through the kernel, 13 through F.linear
            close(ready(tokens(1, length)), model(tokens(1, length)))


def test_many_rows_other_dtypes_and_gradients_go_the_plain_way():
    module = Fast(stored("int8", 32, 19, 64), 64)
    for x in (draw(33, 64), draw(2, 64).double()):
        close(module(x), F.linear(x, module.wide(x.dtype)))
    x = draw(2, 64).requires_grad_()
    module(x).sum().backward()
    close(x.grad, module.wide(torch.float32).sum(0).expand(2, -1))


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_joined_matrices_give_their_outputs_side_by_side(bits):
    linears = [nn.Linear(64, size) for size in (17, 5, 11)]
    parts = linears if bits is None else [QuantizedLinear.of_linear(one, bits, 32) for one in linears]
    x = draw(2, 3, 64)
    with torch.no_grad():
        (close if bits is None else near)(joined(parts)(x), torch.cat([part(x) for part in parts], -1))
    assert joined([linears[0], nn.Linear(64, 5, bias=False)]) is None
    assert joined([linears[0], QuantizedLinear.of_linear(linears[1], 8, 32)]) is None


def test_the_operators_are_traced_in_one_graph():
    model = prepared(mb.quantized(build(mb.gpt(vocab=61, width=64, depth=1, heads=4, context=37)), bits=4))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        traced = torch.compile(model, backend=backend, fullgraph=True)
        close(traced(tokens(1, 1)), model(tokens(1, 1)))
    names = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert {"monoblock.int4", "monoblock.int8"} <= names or {
        "monoblock.int4.default",
        "monoblock.int8.default",
    } <= names


def test_the_operators_pass_torchs_own_checks():
    numbers, scale, least = pack(draw(7, 64), 4, 32)
    torch.library.opcheck(torch.ops.monoblock.int4.default, (draw(2, 64), numbers, scale, least, None))
    numbers, scale, _ = pack(draw(7, 64), 8, 32)
    torch.library.opcheck(torch.ops.monoblock.int8.default, (draw(2, 64), numbers, scale, draw(7)))
    torch.library.opcheck(torch.ops.monoblock.dense.default, (draw(2, 64), draw(7, 64), None))


def test_without_a_compiler_the_model_itself_is_used_and_the_reason_is_one_line(monkeypatch):
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    found = library.load.__wrapped__()
    assert not found.ready
    assert "no C++ compiler" in found.reason
    assert "\n" not in found.reason
    monkeypatch.setattr(fast, "load", lambda: found)
    assert prepared(toy("gpt2")) is toy("gpt2")


def test_a_compiler_that_fails_is_named(monkeypatch, tmp_path):
    broken = tmp_path / "g++"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "kernels.cpp:1: error: no such thing" >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setattr(library.shutil, "which", lambda name: str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = library.load.__wrapped__()
    assert not found.ready
    assert "error: no such thing" in found.reason
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_given_is_read_by_every_family():
    for name in ("bert-base", "t5-small", "vit-b16"):
        model = mb.quantized(toy(name))
        with torch.no_grad():
            near(prepared(model)(*given(model, 2, 5)), model(*given(model, 2, 5)))
