"""What activation checkpointing recomputes, also in compiled models; tests/laws/test_compiled.py compares gradients."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import monoblock as mb
from monoblock.runs.recipe import read_recipe


class CountOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function._schema.name.split("::")[1]] += 1
        return function(*args, **(kwargs or {}))


def build_model(**changes):
    torch.manual_seed(0)
    return mb.Transformer(mb.gpt(vocab=32, width=64, depth=3, heads=2, context=16, **changes)).train()


def train_step(model, mode):
    ids = torch.arange(32).view(2, 16)
    model.recompute(mode).zero_grad()
    model(ids).square().mean().backward()
    return [weight.grad.clone() for weight in model.parameters()]


def count_operators(mode):
    model = build_model()
    with CountOperators() as counter:
        train_step(model, mode)
    counts = counter.counts
    attention = sum(number for name, number in counts.items() if "attention" in name and "backward" not in name)
    return counts["mm"] + counts["addmm"], attention, counts["native_layer_norm"]


def test_selective_checkpointing_recomputes_norms_but_no_product_and_no_attention():
    products, attentions, norms = count_operators(False)
    assert (attentions, norms) == (3, 7)
    assert count_operators("selective") == (products, attentions, norms + 6)
    # Recomputation stops at the last tensor that is needed: all products of a block but that of `down` are repeated.
    assert count_operators(True) == (products + 3 * 5, 2 * attentions, norms + 6)


@pytest.mark.parametrize("mode", [pytest.param(True, marks=pytest.mark.slow), "selective"])
def test_checkpointing_of_a_compiled_model_changes_no_gradient(mode):
    model = build_model()
    expected = train_step(model, False)
    compiled = torch.compile(model.recompute(mode), backend="aot_eager", fullgraph=True)
    model.zero_grad()
    compiled(torch.arange(32).view(2, 16)).square().mean().backward()
    for weight, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, grad)


def test_an_unknown_mode_is_refused():
    with pytest.raises(mb.ConfigError, match="='selectiv' is not true or false or 'selective'; did"):
        read_recipe("gpt-tiny", ["train.activation_checkpointing=selectiv"])


def gradients(config, mode, *, length, bf16=False):
    """Return the gradients of one step; dropout is the same in every mode."""
    torch.manual_seed(0)
    model = mb.Transformer(config).train().recompute(mode)
    ids = torch.arange(2 * length).view(2, length) % 32
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(ids).float().square().mean()
    loss.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.mark.parametrize("mode", [True, "selective"])
@pytest.mark.parametrize("changes", [{"attention_dropout": 0.2}, {"value_dim": 8}, {"softcap": 5.0}, {"heads": 1}])
def test_sparse_attention_without_a_fused_kernel_can_be_recomputed(mode, changes):
    """Banded attention changes its scores in place, so that they cannot be kept."""
    config = mb.gpt(vocab=32, width=32, depth=2, heads=2, context=640, window=64)
    config = mb.vary(config, **changes)
    torch.testing.assert_close(gradients(config, mode, length=600), gradients(config, False, length=600))


@pytest.mark.parametrize("mode", [True, "selective"])
def test_a_block_that_runs_several_times_can_be_recomputed_under_autocast(mode):
    config = mb.tiny("albert-xxlarge")
    assert config.encoder.pattern[0].tied
    found, expected = (gradients(config, one, length=16, bf16=True) for one in (mode, False))
    assert (found - expected).norm() < 0.02 * expected.norm()
