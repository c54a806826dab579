"""docs/how-to/own-loop.md: the loop of the example learns, and what it uses changes memory and speed, not gradients."""

import sys
from pathlib import Path

import pytest
import torch

import monoblock as mb

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture(scope="module")
def loop():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import own_loop
    finally:
        sys.path.remove(str(EXAMPLES))
    return own_loop


def build(loop, dropout=0.0):
    torch.manual_seed(3)
    config = mb.gpt(vocab=loop.VOCAB, width=12, depth=3, heads=2, context=loop.LENGTH, dropout=dropout)
    return mb.Transformer(config).train()


def gradients(loop, model, **options):
    torch.manual_seed(5)
    model.zero_grad()
    loop.compute_gradients(model, loop.make_batch(7, torch.Generator().manual_seed(1)), **options)
    return {name: weight.grad for name, weight in model.named_parameters()}


def test_the_loop_learns_in_mixed_precision_with_recomputed_blocks(loop):
    model, losses = loop.train(12)
    assert losses[-1] < 0.95 * losses[0]
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.zeros(1, 3, dtype=torch.long)).dtype == torch.bfloat16


@pytest.mark.parametrize("mode", ["selective", True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputing_keeps_less_and_changes_no_gradient(loop, mode, dtype):
    found, kept = {}, {}
    for recompute in (False, mode):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: (saved.append(t.nbytes), t)[1], lambda t: t
        ):
            model = build(loop, dropout=0.2).recompute(recompute)
            found[recompute] = gradients(loop, model, parts=1, dtype=dtype)
        kept[recompute] = sum(saved)
    assert kept[mode] < kept[False]
    for name, gradient in found[False].items():
        assert torch.equal(gradient, found[mode][name]), name


def test_the_number_of_parts_changes_no_gradient(loop):
    model = build(loop).double()
    whole, parts = (
        gradients(loop, model, parts=1, dtype=torch.float32),
        gradients(loop, model, parts=3, dtype=torch.float32),
    )
    for name, gradient in whole.items():
        torch.testing.assert_close(gradient, parts[name], rtol=0, atol=1e-7)


def test_each_weight_is_in_one_group_and_lower_blocks_learn_more_slowly(loop):
    model = build(loop)
    groups = loop.build_optimizer(model).param_groups
    weights = [id(weight) for group in groups for weight in group["params"]]
    assert sorted(weights) == sorted(map(id, model.parameters()))
    rates = [group["lr"] for group in groups]
    assert rates == sorted(rates)
    assert len(set(rates)) == len(model.decoder.blocks) + 1
