"""A model computes the same when compiled (as one graph), checkpointed and pickled."""

import pickle

import pytest
import torch
from support import (
    B,
    T,
    assert_bit_equal,
    assert_near,
    block_configs,
    example_inputs,
    has_experts,
    is_text,
    law_names,
    random_tokens,
    tiny_config,
    tiny_model,
)
from torch.nn import functional as F

import monoblock as mb
from monoblock.config.model import Rotary, Scaling

WITHOUT_EXPERTS = law_names(lambda config: not has_experts(config))
# Presets that are traced in the quick run: one of each kind of mask, positions and norm. The rest is slow.
QUICK = ("gpt-tiny", "llama-7b", "gemma2-2b", "bloom-560m", "bert-base", "t5-small")


def quick_or_slow(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(autouse=True)
def reset_dynamo():
    torch._dynamo.reset()


@pytest.mark.parametrize("name", quick_or_slow(WITHOUT_EXPERTS))
def test_a_model_is_traced_as_one_graph(name):
    model = tiny_model(name)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    inputs = example_inputs(model)
    assert_near(compiled(*inputs), model(*inputs))


@pytest.mark.parametrize("name", quick_or_slow(law_names(lambda config: is_text(config) and not has_experts(config))))
def test_a_padded_pass_is_traced_as_one_graph(name):
    model = tiny_model(name)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, :3] = False
    is_pair = model.config.family == "encoder-decoder"
    inputs = (random_tokens(), random_tokens()) if is_pair else (random_tokens(),)
    options = {"target_mask" if is_pair else "attention_mask": mask}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_near(compiled(*inputs, **options), model(*inputs, **options))


@pytest.mark.parametrize("name", law_names(has_experts))
def test_experts_compile_with_graph_breaks(name):
    model = tiny_model(name)
    with torch.no_grad():
        assert_near(torch.compile(model, backend="eager")(*example_inputs(model)), model(*example_inputs(model)))


@pytest.mark.parametrize("name", law_names())
def test_recomputed_activations_change_no_gradient(name):
    model = mb.Transformer(tiny_config(name)).double().train()
    inputs = [i.double() if i.is_floating_point() else i for i in example_inputs(model)]
    runs = []
    for mode in (False, True, "selective"):
        model.recompute(mode).zero_grad()
        torch.manual_seed(7)  # for dropout
        model(*inputs).square().mean().backward()
        runs.append([p.grad.clone() for p in model.parameters()])
    for plain, recomputed, selective in zip(*runs, strict=True):
        assert_bit_equal(plain, recomputed)
        assert_bit_equal(plain, selective)


@pytest.mark.parametrize("name", law_names())
def test_a_model_survives_pickling(name):
    model = tiny_model(name)
    assert_bit_equal(pickle.loads(pickle.dumps(model))(*example_inputs(model)), model(*example_inputs(model)))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_scalings_that_depend_on_the_length_treat_each_row_alone(kind):
    factors = {"short_factors": (1.0, 1.5, 2.0), "long_factors": (2.0, 3.0, 4.0)} if kind == "longrope" else {}
    scaling = Scaling(kind=kind, factor=4.0, original_context=7, **factors)
    config = mb.gpt(vocab=61, width=18, depth=2, heads=3, context=37, positions="rotary")
    config = mb.vary(config, scaling=scaling)
    assert all(isinstance(block.attention.positions, Rotary) for block in block_configs(config))
    torch.manual_seed(0)
    model = mb.Transformer(config).double().eval()
    short = random_tokens()[:1, :5]
    padded = torch.cat((F.pad(short, (0, 6)), random_tokens()[1:2, :11]))
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, 5:] = False
    torch.testing.assert_close(model(padded, mask)[:1, :5], model(short), rtol=0, atol=1e-10)
