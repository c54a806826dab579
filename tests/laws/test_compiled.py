"""The model is one graph: compiled without a break, checkpointed and pickled it computes the same."""

import pickle

import pytest
import torch
from support import B, T, bit_equal, blocks, close, given, has_experts, is_text, presets, tokens, toy
from torch.nn import functional as F

import monoblock as mb
from monoblock.config import Rotary, Scaling

WHOLE = presets(lambda config: not has_experts(config))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_is_traced_as_one_graph(name):
    model = toy(name)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    inputs = given(model)
    close(compiled(*inputs), model(*inputs))


@pytest.mark.parametrize("name", presets(lambda config: is_text(config) and not has_experts(config)))
def test_a_padded_pass_is_traced_as_one_graph(name):
    model = toy(name)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, :3] = False
    both = model.config.family == "encoder-decoder"
    inputs = (tokens(), tokens()) if both else (tokens(),)
    options = {"target_mask" if both else "attention_mask": mask}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    close(compiled(*inputs, **options), model(*inputs, **options))


@pytest.mark.parametrize("name", presets(has_experts))
def test_experts_compile_with_breaks(name):
    model = toy(name)
    with torch.no_grad():
        close(torch.compile(model, backend="eager")(*given(model)), model(*given(model)))


@pytest.mark.parametrize("name", presets())
def test_recomputed_activations_change_no_gradient(name):
    model = mb.Transformer(mb.tiny(name)).double().train()
    inputs = [i.double() if i.is_floating_point() else i for i in given(model)]
    found = []
    for mode in (False, True):
        model.recompute(mode).zero_grad()
        torch.manual_seed(7)  # for dropout
        model(*inputs).square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        bit_equal(one, other)


@pytest.mark.parametrize("name", presets())
def test_a_model_survives_pickling(name):
    model = toy(name)
    bit_equal(pickle.loads(pickle.dumps(model))(*given(model)), model(*given(model)))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_scalings_that_look_at_the_length_look_at_each_row_alone(kind):
    factors = {"short_factors": (1.0, 1.5, 2.0), "long_factors": (2.0, 3.0, 4.0)} if kind == "longrope" else {}
    scaling = Scaling(kind=kind, factor=4.0, original_context=7, **factors)
    config = mb.gpt(vocab=61, width=18, depth=2, heads=3, context=37, positions="rotary")
    config = mb.vary(config, scaling=scaling)
    assert all(isinstance(block.attention.positions, Rotary) for block in blocks(config))
    torch.manual_seed(0)
    model = mb.Transformer(config).double().eval()
    short = tokens()[:1, :5]
    padded = torch.cat((F.pad(short, (0, 6)), tokens()[1:2, :11]))
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, 5:] = False
    torch.testing.assert_close(model(padded, mask)[:1, :5], model(short), rtol=0, atol=1e-10)
