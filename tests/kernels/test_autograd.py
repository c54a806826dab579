"""The kernels for training on a CPU: values and gradients against fp64, threads, and when torch runs instead."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from monoblock import vary
from monoblock.config.presets import tiny
from monoblock.kernels.cpu import autograd, library
from monoblock.model import Transformer

ODD = autograd.MIN_ELEMENTS + 3  # not divisible by the width of a vector


@pytest.fixture
def kernels():
    if not library.load_kernels().is_ready:
        pytest.fail(f"the kernels were not built: {library.load_kernels().reason}")


@pytest.fixture
def calls(monkeypatch):
    """The number of calls of each kernel."""
    counts = {"gelu": 0, "attention": 0}

    def count_calls(name, function):
        original = function.apply

        def apply(*args):
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(function, "apply", apply)

    count_calls("gelu", autograd._GeluFunction)
    count_calls("attention", autograd._CausalAttentionFunction)
    return counts


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- linear layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(512, 192, 65), (1024, 70, 200), (300, 257, 31)])
def test_a_linear_layer_and_its_gradients_are_as_accurate_as_torchs(kernels, rows, inputs, outputs):
    x, weight, bias = randn(2, rows // 2, inputs), randn(outputs, inputs, seed=1), randn(outputs, seed=2)
    grad = randn(2, rows // 2, outputs, seed=3)

    def run(function, dtype):
        tensors = [t.to(dtype).requires_grad_() for t in (x, weight, bias)]
        out = function(*tensors)
        return [out.detach(), *torch.autograd.grad(out, tensors, grad.to(dtype))]

    exact, ours, torchs = (
        run(F.linear, torch.float64),
        run(autograd._LinearFunction.apply, torch.float32),
        run(F.linear, torch.float32),
    )
    for number, reference, expected in zip(ours, torchs, exact, strict=True):
        limit = 1.5 * float((reference - expected).norm()) + 1e-7 * float(expected.norm())
        assert float((number - expected).norm()) <= limit


def test_linear_products_at_the_ends_of_the_range(kernels):
    """Tiny, huge and mixed magnitudes keep the accuracy of fp32; what is not finite stays so."""
    weight = randn(48, 64, seed=1)
    for scale in (1e-18, 1e-4, 1e25):
        x = scale * randn(32, 64) * torch.logspace(-6, 6, 64)
        exact = x.double() @ weight.double().T
        result = torch.ops.monoblock.linear_tiles(x, weight, None)
        assert float((result - exact).norm()) <= 1e-6 * float(exact.norm())
    for value in (float("nan"), float("inf")):
        x = randn(32, 64)
        x[5, 7] = value
        result = torch.ops.monoblock.linear_tiles(x, weight, None)
        assert not bool(result[5].isfinite().any())
        assert bool(result[6].isfinite().all())


def test_second_derivatives_of_a_linear_layer(kernels):
    x, weight = randn(4, 8, 6).double().float().requires_grad_(), randn(5, 6, seed=1).requires_grad_()
    first = torch.autograd.grad(autograd._LinearFunction.apply(x, weight, None).pow(2).sum(), x, create_graph=True)[0]
    expected = torch.autograd.grad(F.linear(x, weight).pow(2).sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.pow(2).sum(), weight)[0]
    torch.testing.assert_close(second, torch.autograd.grad(expected.pow(2).sum(), weight)[0], rtol=1e-4, atol=1e-4)


# -- GELU ------------------------------------------------------------------------------------------------------------


def formula(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def value_and_slope(function, x):
    x = x.clone().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


def test_gelu_and_its_slope_are_the_formula_in_fp64(kernels, calls):
    x = torch.linspace(-20, 20, ODD)
    for actual, expected in zip(
        value_and_slope(autograd.gelu_tanh, x), value_and_slope(formula, x.double()), strict=True
    ):
        torch.testing.assert_close(actual.double(), expected, rtol=5e-7, atol=5e-7)
    assert calls["gelu"] == 1


def test_gelu_of_extreme_values_is_torchs(kernels, calls):
    x = randn(ODD)
    x[:7] = torch.tensor([math.inf, -math.inf, math.nan, 1e15, -1e15, 0.0, 1e-40])
    pairs = zip(
        value_and_slope(autograd.gelu_tanh, x), value_and_slope(lambda x: F.gelu(x, approximate="tanh"), x), strict=True
    )
    for actual, expected in pairs:
        torch.testing.assert_close(actual[:7], expected[:7], rtol=1e-6, atol=1e-6, equal_nan=True)
    assert calls["gelu"] == 1


def test_the_gradient_of_gelu_accepts_a_gradient_that_is_not_contiguous(kernels):
    x, grad = randn(257, 263).requires_grad_(), randn(263, 1, seed=1).expand(263, 257).T
    (actual,) = torch.autograd.grad(autograd.gelu_tanh(x), x, grad)
    wide = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(formula(wide), wide, grad.double())
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)


# -- causal attention ------------------------------------------------------------------------------------------------


def heads(batch, queries, groups, length, size, value_size):
    """Queries, keys and values as views of one tensor, as a fused projection returns them."""
    wide = randn(batch, length, queries * size + groups * (size + value_size))
    parts = wide.split([queries * size, groups * size, groups * value_size], dim=-1)
    counts = (queries, groups, groups)
    return [part.unflatten(-1, (count, -1)).transpose(1, 2) for part, count in zip(parts, counts, strict=True)]


def equation(q, k, v, scale):
    group_size = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
    length = q.shape[2]
    scores = (q @ k.mT * scale).masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)
    return scores.softmax(-1) @ v


def value_and_gradients(function, inputs, scale, grad):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs, scale)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


SHAPES = [(2, 6, 6, 257, 32, 32), (3, 6, 2, 101, 37, 41), (2, 5, 1, 129, 64, 64), (1, 2, 2, 1021, 33, 17)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_causal_attention_and_its_gradients_are_equation_1_in_fp64(kernels, shape):
    q, k, v = inputs = heads(*shape)
    assert autograd.supports_causal_attention(q.requires_grad_(), k, v)
    grad = randn(shape[0], shape[3], shape[1], shape[5], seed=1).transpose(1, 2)
    actual = value_and_gradients(autograd.attend_causal, inputs, 0.3, grad)
    expected = value_and_gradients(equation, [x.double() for x in inputs], 0.3, grad.double())
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-5)


def test_a_later_token_changes_no_bit_of_an_earlier_one(kernels):
    inputs = heads(2, 6, 6, 257, 32, 32)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[:, :, 131:] = 7.0
    before, after = autograd.attend_causal(*inputs, None), autograd.attend_causal(*changed, None)
    assert torch.equal(before[:, :, :131], after[:, :, :131])


def test_large_scores_neither_overflow_nor_lose_the_largest(kernels):
    inputs = heads(2, 6, 6, 257, 32, 32)
    grad = randn(2, 6, 257, 32, seed=1)
    actual = value_and_gradients(autograd.attend_causal, inputs, 40.0, grad)
    expected = value_and_gradients(equation, [x.double() for x in inputs], 40.0, grad.double())
    assert all(bool(x.isfinite().all()) for x in actual)
    torch.testing.assert_close(actual[0].double(), expected[0], rtol=0, atol=2e-3)  # fp32 scores of some hundreds


# -- threads, and when torch runs instead -----------------------------------------------------------------------------


def test_the_number_of_threads_changes_no_bit(kernels):
    x, inputs, grad = randn(ODD), heads(3, 6, 2, 101, 64, 64), randn(3, 6, 101, 64, seed=1)
    threads = torch.get_num_threads()
    runs = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            runs.append(
                (
                    *value_and_slope(autograd.gelu_tanh, x),
                    *value_and_gradients(autograd.attend_causal, inputs, 0.3, grad),
                )
            )
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert all(torch.equal(first, other) for first, other in zip(runs[0], run, strict=True))


def test_gelu_can_be_differentiated_twice(kernels, calls):
    x = (2 * randn(ODD)).requires_grad_()
    (slope,) = torch.autograd.grad(autograd.gelu_tanh(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x)
    wide = x.detach().double().requires_grad_()
    (slope,) = torch.autograd.grad(formula(wide).sum(), wide, create_graph=True)
    torch.testing.assert_close(second.double(), torch.autograd.grad(slope.sum(), wide)[0], rtol=1e-5, atol=1e-5)
    assert calls["gelu"] == 1


def test_attention_can_be_differentiated_twice_even_if_one_tensor_is_passed_three_times(kernels):
    def second_gradient(function, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(function(x, x, x, 0.3).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    x = 0.5 * heads(1, 2, 2, 13, 7, 7)[0]
    expected = second_gradient(equation, x.double())
    torch.testing.assert_close(second_gradient(autograd.attend_causal, x).double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # raised by torch's forward mode
def test_torch_runs_whenever_this_is_not_plain_training(kernels, calls):
    def run(x):
        return autograd.gelu_tanh(x)

    x = randn(ODD).requires_grad_()
    run(x[:101])  # too small to compile kernels for
    run(x.detach())
    with torch.no_grad():
        run(x)
    with torch.inference_mode():
        run(x)
    with torch.autocast("cpu", torch.bfloat16):
        run(x)
    run(x.double()), run(x.bfloat16()), run(x.to("meta")), run(x[::2])
    torch.func.grad(lambda x: run(x).sum())(x)
    torch.vmap(run)(x.detach()[None])
    with forward_ad.dual_level():
        run(forward_ad.make_dual(x, torch.ones_like(x)))
    torch.compile(run, backend="eager", fullgraph=True)(x)
    with FlopCounterMode(display=False):
        run(x)
    assert calls["gelu"] == 0


def test_a_model_in_training_uses_both_kernels_and_has_the_gradients_of_fp64(kernels, calls):
    config = vary(tiny("gpt2"), width=48, heads=3, hidden=97, dropout=0.0)
    torch.manual_seed(0)
    model, ids = Transformer(config).train(), torch.randint(61, (41, 37))
    wide = Transformer(config).double()
    wide.load_state_dict(model.state_dict())
    losses = [F.cross_entropy(m(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for m in (model, wide.train())]
    assert calls == {"gelu": config.depth, "attention": config.depth}
    for loss in losses:
        loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=2e-6, msg=name)


def test_the_same_step_twice_gives_the_same_bits(kernels, calls):
    torch.manual_seed(0)
    model, ids = Transformer(vary(tiny("gpt2"), width=48, heads=3, hidden=97)).train(), torch.randint(61, (41, 37))
    runs = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)  # for dropout
        model(ids).square().mean().backward()
        runs.append([weight.grad for weight in model.parameters()])
    assert calls["gelu"] == 2 * model.config.depth
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


def test_torch_runs_without_a_compiler(monkeypatch, calls):
    monkeypatch.setattr(autograd, "load_kernels", lambda: library.KernelStatus(False, "none here"))
    x = randn(ODD).requires_grad_()
    assert torch.equal(autograd.gelu_tanh(x), F.gelu(x, approximate="tanh"))
    q, k, v = heads(2, 6, 6, 257, 32, 32)
    assert not autograd.supports_causal_attention(q.requires_grad_(), k, v)
    assert calls["gelu"] == 0
