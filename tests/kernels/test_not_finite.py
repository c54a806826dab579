"""NaN and infinities pass through the kernels as through torch: an output that torch has as NaN is no number here."""

import math

import pytest
import torch
import torch.nn.functional as F
from operator_cases import draw, paged_pass, stack
from torch.nn.attention import SDPBackend, sdpa_kernel

from monoblock.inference.supported_models import NATIVE_ACTIVATIONS
from monoblock.kernels.cpu import library

NOT_FINITE = [math.nan, math.inf, -math.inf]


@pytest.fixture(autouse=True)
def compiled():
    if not library.load_kernels().is_ready:
        pytest.skip(library.load_kernels().reason)


def changed_stack(changes):
    """A stack whose first block has other fields; a float stands for a weight with one such element."""
    arguments = stack()
    first = dict(arguments["blocks"][0])
    for field, value in changes.items():
        if isinstance(value, float) and isinstance(first[field], torch.Tensor):
            first[field] = first[field].clone()
            first[field][3, 2] = value
        else:
            first[field] = value
    arguments["blocks"] = [first, *arguments["blocks"][1:]]
    return torch.classes.monoblock.NativeStack(**arguments)


def step_outputs(native):
    given = paged_pass()
    return native.run(**given)[torch.arange(2) < given["counts"][:, None]]


# -- stacks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_nan_in_a_weight_of_attention_makes_every_output_nan(part):
    changes = {f"attention.{part}.weight": math.nan}
    assert step_outputs(changed_stack(changes)).isnan().all()


@pytest.mark.parametrize("activation", NATIVE_ACTIVATIONS)
@pytest.mark.parametrize("part", ["gate", "up"])
def test_nan_in_a_weight_passes_every_activation(part, activation):
    changes = {f"feedforward.{part}.weight": math.nan, "activation": activation}
    assert step_outputs(changed_stack(changes)).isnan().all()


@pytest.mark.parametrize("causal", [True, False])
def test_nan_in_one_row_stays_in_it(causal):
    native, given = changed_stack({}), paged_pass()
    expected = native.run(**given | {"causal": causal})
    given["x"][0, 0, 2] = math.nan
    out = native.run(**paged_pass() | {"x": given["x"], "causal": causal})
    assert out[0].isnan().all()
    assert torch.equal(out[1:], expected[1:])


# -- attention --------------------------------------------------------------------------------------------------------


def causal_heads(name, value, length):
    """q (2, 4, length, 8), k and v (2, 2, length, 8) with one element of position 5 that is not finite."""
    heads = {"q": draw(2, 4, length, 8), "k": draw(2, 2, length, 8), "v": draw(2, 2, length, 9)[..., 1:].contiguous()}
    heads[name][0, 0, 5, 2] = value
    return list(heads.values())


@pytest.mark.parametrize("length", [13, 77])
@pytest.mark.parametrize("value", NOT_FINITE, ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_causal_attention_is_nan_where_torchs_is_from_that_position_on(name, value, length):
    heads = causal_heads(name, value, length)
    out, _ = torch.ops.monoblock.attend_causal(*heads, 0.3)
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernel gives zeros for a query of NaN with few keys
        expected = F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out[:, :, 5:], expected[:, :, 5:], rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("length", [13, 29])
@pytest.mark.parametrize("value", NOT_FINITE, ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradients_of_causal_attention_are_nan_where_torchs_are(name, value, length):
    heads = causal_heads(name, value, length)
    out, log_sums = torch.ops.monoblock.attend_causal(*heads, 0.3)
    grads = torch.ops.monoblock.attend_causal_backward(draw(*out.shape), *heads, out, log_sums, 0.3)
    inputs = [x.clone().requires_grad_() for x in heads]
    eager = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3, enable_gqa=True)
    expected = torch.autograd.grad(eager, inputs, draw(*out.shape))
    for own, theirs, first in zip(grads, expected, (5, 0, 0), strict=True):  # earlier queries do not see position 5
        assert own[:, :, first:][theirs[:, :, first:].isnan()].isnan().all()


def test_an_infinite_value_of_no_weight_gives_nan_as_in_torch():
    q, k, v = torch.ones(1, 1, 3, 8), torch.zeros(1, 1, 3, 8), draw(1, 1, 3, 8)
    k[0, 0, 0], v[0, 0, 0, 2] = -100.0, math.inf  # its score is 800 less than those of the others
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    out, _ = torch.ops.monoblock.attend_causal(q, k, v, 1.0)
    torch.testing.assert_close(out, expected, equal_nan=True)
    assert expected[0, 0, 2, 2].isnan()


def test_an_infinite_value_of_no_weight_is_not_lost_in_a_step():
    given, native = paged_pass(), changed_stack({"attention.scale": 1e6, "attention.sinks": None})
    page = given["tables"][3, 0]
    for values in given["values"]:
        values[page, :, 3] = math.inf
    given |= {"counts": torch.tensor([2, 1, 2, 1])}
    out = native.run(**given)
    assert not out[3, 0].isfinite().any()
    assert out[0].isfinite().all()
