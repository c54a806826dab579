"""The kernels for training on a CPU against fp64: values, gradients, threads, and all that is left to torch."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from monoblock import vary
from monoblock.linear import joined
from monoblock.model import Transformer
from monoblock.native import gradients, library
from monoblock.presets import tiny

ODD = gradients.MANY + 3  # no whole number of vectors


@pytest.fixture
def kernels():
    if not library.load().ready:
        pytest.fail(f"the kernels of training were not built: {library.load().reason}")


@pytest.fixture
def calls(monkeypatch):
    """How often each kernel is asked for."""
    counted = {"gelu": 0, "attention": 0}

    def counting(name, function):
        plain = function.apply

        def apply(*given):
            counted[name] += 1
            return plain(*given)

        monkeypatch.setattr(function, "apply", apply)

    counting("gelu", gradients._Gelu)
    counting("attention", gradients._Attention)
    return counted


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- GELU ------------------------------------------------------------------------------------------------------------


def formula(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def with_slope(function, x):
    x = x.clone().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


def test_gelu_and_its_slope_are_the_formula_in_fp64(kernels, calls):
    x = torch.linspace(-20, 20, ODD)
    for found, wanted in zip(with_slope(gradients.gelu_tanh, x), with_slope(formula, x.double()), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=5e-7, atol=5e-7)
    assert calls["gelu"] == 1


def test_gelu_where_nothing_is_finite_is_what_torch_gives(kernels, calls):
    x = numbers(ODD)
    x[:7] = torch.tensor([math.inf, -math.inf, math.nan, 1e15, -1e15, 0.0, 1e-40])
    pairs = zip(with_slope(gradients.gelu_tanh, x), with_slope(lambda x: F.gelu(x, approximate="tanh"), x), strict=True)
    for found, wanted in pairs:
        torch.testing.assert_close(found[:7], wanted[:7], rtol=1e-6, atol=1e-6, equal_nan=True)
    assert calls["gelu"] == 1


def test_the_gradient_of_gelu_takes_a_gradient_that_is_not_in_one_piece(kernels):
    x, grad = numbers(257, 263).requires_grad_(), numbers(263, 1, seed=1).expand(263, 257).T
    (found,) = torch.autograd.grad(gradients.gelu_tanh(x), x, grad)
    wide = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(formula(wide), wide, grad.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


# -- causal attention ------------------------------------------------------------------------------------------------


def heads(batch, queries, groups, length, size, value_size):
    """Queries, keys, values: as views of a wider tensor, as the projections give them."""
    wide = numbers(batch, length, queries * size + groups * (size + value_size))
    parts = wide.split([queries * size, groups * size, groups * value_size], dim=-1)
    counts = (queries, groups, groups)
    return [part.unflatten(-1, (count, -1)).transpose(1, 2) for part, count in zip(parts, counts, strict=True)]


def equation(q, k, v, scale):
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    length = q.shape[2]
    scores = (q @ k.mT * scale).masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)
    return scores.softmax(-1) @ v


def with_gradients(function, given, scale, grad):
    given = [x.detach().requires_grad_() for x in given]
    out = function(*given, scale)
    return out.detach(), *torch.autograd.grad(out, given, grad)


SHAPES = [(2, 6, 6, 257, 32, 32), (3, 6, 2, 101, 37, 41), (2, 5, 1, 129, 64, 64), (1, 2, 2, 1021, 33, 17)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_causal_attention_and_its_gradients_are_equation_1_in_fp64(kernels, shape):
    q, k, v = given = heads(*shape)
    assert gradients.fits(q.requires_grad_(), k, v)
    grad = numbers(shape[0], shape[3], shape[1], shape[5], seed=1).transpose(1, 2)
    found = with_gradients(gradients.attend_causal, given, 0.3, grad)
    wanted = with_gradients(equation, [x.double() for x in given], 0.3, grad.double())
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=2e-5)


def test_a_later_token_moves_no_bit_of_an_earlier_one(kernels):
    given = heads(2, 6, 6, 257, 32, 32)
    later = [x.clone() for x in given]
    for x in later:
        x[:, :, 131:] = 7.0
    one, two = gradients.attend_causal(*given, None), gradients.attend_causal(*later, None)
    assert torch.equal(one[:, :, :131], two[:, :, :131])


def test_large_scores_neither_overflow_nor_lose_the_largest(kernels):
    given = heads(2, 6, 6, 257, 32, 32)
    grad = numbers(2, 6, 257, 32, seed=1)
    found = with_gradients(gradients.attend_causal, given, 40.0, grad)
    wanted = with_gradients(equation, [x.double() for x in given], 40.0, grad.double())
    assert all(bool(x.isfinite().all()) for x in found)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=0, atol=2e-3)  # fp32 scores of some hundreds


# -- threads, and what is left to torch ------------------------------------------------------------------------------


def test_the_number_of_threads_changes_no_bit(kernels):
    x, given, grad = numbers(ODD), heads(3, 6, 2, 101, 64, 64), numbers(3, 6, 101, 64, seed=1)
    threads = torch.get_num_threads()
    runs = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            runs.append(
                (*with_slope(gradients.gelu_tanh, x), *with_gradients(gradients.attend_causal, given, 0.3, grad))
            )
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(runs[0], run, strict=True))


def test_a_gradient_has_a_gradient(kernels, calls):
    x = (2 * numbers(ODD)).requires_grad_()
    (slope,) = torch.autograd.grad(gradients.gelu_tanh(x).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x)
    wide = x.detach().double().requires_grad_()
    (slope,) = torch.autograd.grad(formula(wide).sum(), wide, create_graph=True)
    torch.testing.assert_close(bend.double(), torch.autograd.grad(slope.sum(), wide)[0], rtol=1e-5, atol=1e-5)
    assert calls["gelu"] == 1


def test_a_gradient_of_attention_has_a_gradient_even_of_one_tensor_given_thrice(kernels):
    def bend(function, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(function(x, x, x, 0.3).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    x = 0.5 * heads(1, 2, 2, 13, 7, 7)[0]
    wanted = bend(equation, x.double())
    torch.testing.assert_close(bend(gradients.attend_causal, x).double(), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward mode asks for it
def test_what_is_no_ordinary_training_is_left_to_torch(kernels, calls):
    def run(x):
        return gradients.gelu_tanh(x)

    x = numbers(ODD).requires_grad_()
    run(x[:101])  # too few to ask for a compiler
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


def test_a_model_in_training_uses_both_and_has_the_gradients_of_fp64(kernels, calls):
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
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_without_a_compiler_all_is_torch(monkeypatch, calls):
    monkeypatch.setattr(gradients, "load", lambda: library.Kernels(False, "none here"))
    x = numbers(ODD).requires_grad_()
    assert torch.equal(gradients.gelu_tanh(x), F.gelu(x, approximate="tanh"))
    q, k, v = heads(2, 6, 6, 257, 32, 32)
    assert not gradients.fits(q.requires_grad_(), k, v)
    assert calls["gelu"] == 0


@pytest.mark.parametrize("how", ["side by side", "apart", "in another order"])
def test_gradients_of_a_split_are_put_together_in_their_order(kernels, how):
    sizes, x = [96, 32, 48], numbers(7, 101, 176).requires_grad_()
    wanted = numbers(7, 101, 176, seed=1)
    given = list(wanted.split(sizes, dim=-1))
    if how == "apart":
        given = [grad.clone() for grad in given]
    if how == "in another order":
        given[0], given[1] = torch.cat((given[1], given[0]), dim=-1).split([32, 96], dim=-1)[::-1]
    parts = gradients.split(x, sizes)
    assert all(torch.equal(one, two) for one, two in zip(parts, x.split(sizes, dim=-1), strict=True))
    (found,) = torch.autograd.grad(parts, x, given)
    assert torch.equal(found, wanted)
    assert (found.data_ptr() == wanted.data_ptr()) == (how == "side by side")


def test_queries_keys_and_values_made_by_one_product_have_gradients_that_are_not_copied(kernels, monkeypatch):
    layers = [torch.nn.Linear(48, 48) for _ in range(3)]
    q, k, v = (part.unflatten(-1, (3, 16)).transpose(1, 2) for part in joined(numbers(41, 37, 48), layers))
    out = gradients.attend_causal(q, k, v, None)
    copies = []
    monkeypatch.setattr(torch, "cat", lambda *given, **options: copies.append(given))
    out.sum().backward()
    assert not copies
    assert all(layer.weight.grad is not None for layer in layers)
