"""Whatever users attach to a sub-module runs in every forward pass of any length: every module is called."""

import pytest
import torch
from support import assert_near, build_model, example_inputs, random_tokens, tiny_model, tiny_names
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations, parametrize

import monoblock as mb
from monoblock.baselines.lstm import Recurrent
from monoblock.config.families import bert, gpt, t5
from monoblock.config.model import RecurrentConfig
from monoblock.nn.lora import LoraLinear
from monoblock.nn.tap import is_customized

LONG = 600
QUERY = "decoder.0.attention.query"


def long_model():
    torch.manual_seed(0)
    return build_model(mb.llama(vocab=61, width=12, depth=2, heads=3, hidden=23, context=LONG), torch.float64)


def long_ids(length=LONG):
    return random_tokens(1, length)


def leaves(model):
    """The modules without sub-modules, by name; parameters outside of modules belong to their parents."""
    return {name: module for name, module in model.named_modules() if not list(module.children())}


def names_called(model, *inputs):
    called = set()
    handles = [
        module.register_forward_hook(lambda module, args, out, name=name: called.add(name))
        for name, module in model.named_modules()
    ]
    with torch.no_grad():
        model(*inputs)
    for handle in handles:
        handle.remove()
    return called


MODELS = {
    "gpt": (lambda: gpt(vocab=61, width=12, depth=2, heads=3, context=LONG), (long_ids(),)),
    "bert": (lambda: bert(vocab=61, width=12, depth=2, heads=3, context=LONG, head="masked_lm"), (long_ids(),)),
    "t5": (lambda: t5(vocab=61, width=12, depth=2, heads=3, hidden=23), (long_ids(), long_ids(LONG + 1))),
    "untied": (lambda: mb.llama(vocab=61, width=12, depth=1, heads=3, context=LONG, tie="none"), (long_ids(),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_hooks_of_all_modules_run_on_long_inputs(name):
    config, inputs = MODELS[name]
    model = build_model(config())
    assert names_called(model, *inputs) == {name for name, _ in model.named_modules()}


@pytest.mark.parametrize("name", tiny_names())
def test_hooks_of_all_modules_run_in_every_preset(name):
    model = build_model(tiny_model(name).config)
    assert names_called(model, *example_inputs(model)) == {name for name, _ in model.named_modules()}


@pytest.mark.parametrize("kind", ["language_model", "encoder_decoder"])
@pytest.mark.parametrize("tie", [True, False])
def test_hooks_of_all_modules_run_in_an_lstm(kind, tie):
    model = Recurrent(RecurrentConfig(kind=kind, vocab=13, width=11, depth=2, tie=tie)).eval()
    inputs = (random_tokens(2, 5, 13), random_tokens(2, 7, 13))[: 1 if kind == "language_model" else 2]
    assert set(leaves(model)) <= names_called(model, *inputs)


@pytest.mark.parametrize("length", [7, LONG])
def test_what_a_forward_hook_returns_is_used(length):
    model = long_model()
    ids, layer = long_ids(length), model.get_submodule(QUERY)
    plain = model(ids)
    handle = layer.register_forward_hook(lambda module, args, out: 2 * out)
    hooked = model(ids)
    handle.remove()
    with torch.no_grad():
        layer.weight.mul_(2)
    assert not torch.allclose(plain, hooked)
    assert_near(hooked, model(ids))


@pytest.mark.parametrize(
    "register", ["register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook"]
)
@pytest.mark.parametrize("target", [QUERY, "decoder.1.feedforward.gate"])
def test_pre_hooks_and_backward_hooks_run(register, target):
    model, calls = long_model(), []
    getattr(model.get_submodule(target), register)(lambda *args: calls.append(target))
    model(long_ids()).sum().backward()
    assert calls == [target]


def test_global_hooks_see_every_module():
    model, seen = long_model(), set()
    handle = torch_module.register_module_forward_hook(lambda module, args, out: seen.add(module))
    model(long_ids())
    handle.remove()
    assert seen == set(model.modules())


class TripledLinear(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


def tripled(module):
    layer = TripledLinear(module.in_features, module.out_features, bias=module.bias is not None, dtype=torch.float64)
    layer.load_state_dict(module.state_dict())
    return layer


def with_forward(module):
    module.forward = lambda x: 3 * nn.functional.linear(x, module.weight, module.bias)
    return module


class Tripled(nn.Module):
    def forward(self, weight):
        return 3 * weight


def parametrized(module):
    parametrize.register_parametrization(module, "weight", Tripled())
    return module


def adapted(module):
    layer = LoraLinear(module, rank=12, alpha=12)  # as wide as the input, so that B A can be twice W
    with torch.no_grad():
        layer.a.copy_(torch.eye(12))
        layer.b.copy_(2 * module.weight)
    return layer


@pytest.mark.parametrize("change", [tripled, with_forward, parametrized, adapted])
@pytest.mark.parametrize("target", ["attention.query", "attention.value", "feedforward.up", "feedforward.gate"])
def test_changed_projections_are_run_not_bypassed(change, target):
    model, expected = long_model(), long_model()
    block, _, name = f"decoder.1.{target}".rpartition(".")
    setattr(model.get_submodule(block), name, change(model.get_submodule(f"{block}.{name}")))
    with torch.no_grad():
        expected.get_submodule(f"{block}.{name}").weight.mul_(3)
    for ids in (long_ids(7), long_ids()):
        assert_near(model(ids), expected(ids))


def test_weight_norm_is_run_not_bypassed():
    model, ids = long_model(), long_ids()
    layer = model.get_submodule(QUERY)
    plain = model(ids)
    parametrizations.weight_norm(layer)
    assert_near(model(ids), plain)
    with torch.no_grad():
        layer.parametrizations.weight.original0.mul_(2)  # the norms
    assert not torch.allclose(model(ids), plain)
    model(ids).sum().backward()
    assert layer.parametrizations.weight.original0.grad.any()


def test_any_module_of_one_argument_may_replace_the_feedforward():
    model, ids = long_model(), long_ids()
    model.decoder.blocks[0].feedforward = nn.Sequential(nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 12)).double()
    replaced = model(ids)
    with torch.no_grad():
        model.decoder.blocks[0].feedforward[2].weight.zero_()
    assert not torch.allclose(model(ids), replaced)


@pytest.mark.parametrize("target", ["input.token", "input.position", "head.output"])
def test_a_hook_on_an_embedding_or_the_output_changes_the_result(target):
    model = build_model(gpt(vocab=61, width=12, depth=1, heads=3, context=LONG, tie="none"))
    plain = model(long_ids(7))
    model.get_submodule(target).register_forward_hook(lambda module, args, out: 2 * out)
    assert not torch.allclose(model(long_ids(7)), plain)


def test_a_layer_is_customized_when_something_is_attached():
    layer = nn.Linear(3, 5)
    assert not is_customized(layer)
    handle = layer.register_forward_hook(lambda module, args, out: None)
    assert is_customized(layer)
    handle.remove()
    assert not is_customized(layer)
    layer.compile(backend="eager")
    assert is_customized(layer)
