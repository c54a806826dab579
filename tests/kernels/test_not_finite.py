"""NaN and infinities pass through the kernels as through torch: an output that torch has as NaN is no number here."""

import math

import pytest
import torch
import torch.nn.functional as F
from operator_cases import D, beam_search, draw, prompt, search_model, stack, step
from torch.nn.attention import SDPBackend, sdpa_kernel

from monoblock.inference.supported_models import NATIVE_ACTIVATIONS
from monoblock.kernels.cpu import library

NOT_FINITE = [math.nan, math.inf, -math.inf]


@pytest.fixture(autouse=True)
def compiled():
    if not library.load_kernels().is_ready:
        pytest.skip(library.load_kernels().reason)


def changed_stack(changes, **options):
    """A stack whose first block has other fields; a float stands for a weight with one such element."""
    arguments = stack(**options)
    first = dict(arguments["blocks"][0])
    for field, value in changes.items():
        if isinstance(value, float):
            first[field] = first[field].clone()
            first[field][3, 2] = value
        else:
            first[field] = value
    arguments["blocks"] = [first, *arguments["blocks"][1:]]
    return torch.classes.monoblock.NativeStack(**arguments)


def encode(native, x=None):
    return torch.ops.monoblock.encode(native, draw(12, D) if x is None else x, torch.tensor([5, 0, 7]))


# -- stacks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_nan_in_a_weight_of_attention_makes_every_output_nan(part):
    changes = {f"attention.{part}.weight": math.nan}
    assert encode(changed_stack(changes, is_plain=True, has_cross=False)).isnan().all()
    assert changed_stack(changes).step(**step()).isnan().all()


@pytest.mark.parametrize("activation", NATIVE_ACTIVATIONS)
@pytest.mark.parametrize("part", ["gate", "up"])
def test_nan_in_a_weight_passes_every_activation(part, activation):
    changes = {f"feedforward.{part}.weight": math.nan, "activation": activation}
    assert encode(changed_stack(changes, is_plain=True, has_cross=False)).isnan().all()
    assert changed_stack(changes).step(**step()).isnan().all()


def test_nan_in_one_text_stays_in_it():
    native, x = changed_stack({}, is_plain=True, has_cross=False), draw(12, D)
    x[3, 2] = math.nan
    out = encode(native, x)
    assert out[:5].isnan().all()
    assert torch.equal(out[5:], encode(native)[5:])


def test_a_search_with_nan_in_a_query_weight_finds_nothing_with_a_score():
    native = changed_stack({"attention.query.weight": math.nan}, is_plain=True)
    model = torch.classes.monoblock.SearchModel(**search_model() | {"stack": native})
    search = torch.classes.monoblock.BeamSearchBatch(**beam_search() | {"model": model})
    for _ in range(2):
        search.add(**prompt())
    search.step(None, [])
    (scores, _), _ = search.hypotheses(0)
    assert not any(math.isfinite(score) for score in scores)


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
    last = torch.ops.monoblock.attend_one_query(q[:, :, 2:], k, v, None, 1.0)
    assert expected[0, 0, 2, 2].isnan()
    torch.testing.assert_close(last[0], expected[0, :, 2], equal_nan=True)
