"""`generate` runs a model as its user left it: drafts, patched classes, replaced masks and modules."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from generate_support import IDS, eager, generate, gpt
from operator_support import use_kernels_for_toys
from support import has_decoder, tiny_model, tiny_names
from torch import nn

import monoblock as mb
from monoblock.inference.supported_models import reason_not_to_optimize
from monoblock.nn.attention import Attention
from monoblock.nn.block import Block
from monoblock.nn.feedforward import FeedForward
from monoblock.nn.heads import Head
from monoblock.nn.norm import Norm
from monoblock.nn.stack import Stack

# -- drafts ---------------------------------------------------------------------------------------------------------


def add_hook(draft, calls):
    draft.decoder.blocks[0].register_forward_hook(lambda module, *_: calls.append(module.training))


def add_own_forward(draft, calls):
    forward = draft.decoder.norm.forward
    draft.decoder.norm.forward = lambda x: calls.append(draft.decoder.norm.training) or forward(x)


@pytest.mark.parametrize("customize", [add_hook, add_own_forward])
def test_a_draft_runs_in_evaluation_mode_and_keeps_the_mode_of_each_module(customize):
    model, draft, calls = gpt(), gpt(dropout=0.5).train(), []
    draft.decoder.blocks[1].eval()
    customize(draft, calls)
    modes = {name: module.training for name, module in draft.named_modules()}
    assert torch.equal(generate(model, draft=draft), eager(model))
    assert calls
    assert not any(calls)
    assert {name: module.training for name, module in draft.named_modules()} == modes


def test_a_draft_that_equals_the_model_is_accepted_in_training_mode():
    from monoblock.inference.engine import Engine
    from monoblock.inference.settings import Settings
    from monoblock.inference.speculative import DraftModel

    model = gpt(dropout=0.5)
    draft = copy.deepcopy(model).train()
    draft.decoder.blocks[0].register_forward_hook(lambda *_: None)
    proposer = DraftModel(draft)
    engine = Engine(model, proposer=proposer)
    engine.add([5, 7, 11], Settings(max_new_tokens=13))
    while engine.busy:
        engine.step()
    assert proposer.proposed == proposer.accepted > 0


def test_a_draft_whose_modules_need_gradients_off_only_leaves_inference_mode():
    model, draft, modes = gpt(), gpt(seed=1), []
    draft.decoder.norm.register_forward_hook(lambda *_: modes.append(torch.is_inference_mode_enabled()))
    assert torch.equal(generate(model, draft=draft, num_return_sequences=1), eager(model))
    assert modes
    assert not any(modes)


# -- patched classes and replaced masks -----------------------------------------------------------------------------


GREEDY_AND_BEAMS = ({}, {"num_beams": 3})
PATCHES = {
    "Attention.forward": (Attention, "forward", lambda out: 0.2 * out),
    "Attention.split_heads": (Attention, "split_heads", lambda out: out.flip(-1)),
    "Block.forward": (Block, "forward", lambda out: out.flip(-1)),
    "FeedForward.forward": (FeedForward, "forward", lambda out: -out),
    "Norm.forward": (Norm, "forward", lambda out: out.roll(1, -1)),
    "Stack.forward": (Stack, "forward", lambda out: out.flip(-1)),
    "Head.forward": (Head, "forward", lambda out: out.roll(1, -1)),
    "Linear.forward": (nn.Linear, "forward", lambda out: 0.5 * out.flip(-1)),
    "Module.__call__": (nn.Module, "__call__", lambda out: out.roll(1, -1)),
}


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patched_class_is_run(patch, monkeypatch):
    use_kernels_for_toys(monkeypatch)
    kind, name, change = PATCHES[patch]
    original, model, calls = getattr(kind, name), gpt(), []
    plain = [generate(model, **options) for options in GREEDY_AND_BEAMS]

    @functools.wraps(original)
    def wrapper(*args, **arguments):
        calls.append(1)
        return change(original(*args, **arguments))

    with monkeypatch.context() as patched:
        patched.setattr(kind, name, wrapper)
        assert reason_not_to_optimize(model) is not None
        for options, before in zip(GREEDY_AND_BEAMS, plain, strict=True):
            found = generate(model, **options)
            assert torch.equal(found, generate(model, use_cache=False, **options))
            assert not torch.equal(found, before)
            assert calls
    assert reason_not_to_optimize(model) is None
    assert torch.equal(generate(model), plain[0])


def test_a_patched_linear_is_not_skipped_by_a_joined_product(monkeypatch):
    model, ids = gpt(), torch.arange(640).view(16, 40) % 31
    wanted = 2 * model.decoder.blocks[0].attention.query(torch.ones(16, 40, 24))
    attention, seen = model.decoder.blocks[0].attention, []
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: seen.append(self) or 2 * forward(self, x))
    assert torch.equal(attention.query(torch.ones(16, 40, 24)), wanted)
    model(ids)
    assert attention.query in seen


def use_short_window(model):
    model.decoder.masks = [mb.causal & mb.window(2)]


def change_masks_in_place(model):
    model.decoder.masks[0] = mb.causal & mb.window(2)


def scale_attention(model):
    attention = model.decoder.blocks[1].attention
    attention.config = replace(attention.config, scale=3.0)


def change_activation_config(model):
    feedforward = model.decoder.blocks[1].feedforward
    feedforward.config = replace(feedforward.config, activation="relu")
    feedforward.activation = torch.relu


@pytest.mark.parametrize("change", [use_short_window, change_masks_in_place, scale_attention, change_activation_config])
def test_replaced_masks_and_configurations_are_used(change, kernels):
    model = gpt()
    plain = generate(model)
    change(model)
    found = generate(model)
    assert not torch.equal(found, plain)
    assert torch.equal(found, generate(copy.deepcopy(model)))
    assert torch.equal(found, generate(model, use_cache=False))
    assert torch.equal(generate(model, num_beams=3), generate(model, use_cache=False, num_beams=3))


@pytest.mark.parametrize("name", tiny_names(has_decoder))
def test_models_of_every_preset_are_of_this_package_s_modules(name):
    assert reason_not_to_optimize(tiny_model(name)) in (None, "it generates no text")


# -- taps -----------------------------------------------------------------------------------------------------------


class Relu(nn.Module):
    """A feed-forward of one argument."""

    def forward(self, x):
        return 2 * x.relu()


class MeanOfValues(nn.Module):
    """An attention without the argument `tap`, and without attention."""

    def __init__(self, attention):
        super().__init__()
        self.value = attention.value

    def forward(self, x, context, *, layer_cache=None, cache_write=None, memory=None):
        return self.value(x)


class PlainBlock(nn.Module):
    """A block without the argument `tap`."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, context, *, memory, memory_context, layer_cache, cache_write, cross_cache):
        return self.block(x, context, layer_cache=layer_cache, cache_write=cache_write)


def replace_feedforward(model):
    model.decoder.blocks[0].feedforward = Relu()


def replace_feedforward_by_sequential(model):
    model.decoder.blocks[0].feedforward = nn.Sequential(nn.Linear(24, 24), nn.GELU())


def replace_forward_of_feedforward(model):
    model.decoder.blocks[0].feedforward.forward = lambda x: 3 * x


def replace_attention(model):
    model.decoder.blocks[0].attention = MeanOfValues(model.decoder.blocks[0].attention)


def replace_block(model):
    setattr(model.decoder, "0", PlainBlock(model.decoder.blocks[0]))


@pytest.mark.parametrize(
    "change",
    [
        *(replace_feedforward, replace_feedforward_by_sequential, replace_forward_of_feedforward),
        *(replace_attention, replace_block),
    ],
)
def test_modules_without_a_tap_argument_run_under_a_tap(change):
    model, names = gpt(), []
    change(model)
    tapped = generate(model, tap=lambda name, tensor: names.append(name) or tensor)
    assert torch.equal(tapped, generate(model))
    assert torch.equal(tapped, eager(model))
    assert "decoder.1.feedforward.hidden" in names
    torch.testing.assert_close(mb.trace(model, IDS).logits, model(IDS))
    assert ("decoder.0.feedforward.hidden" in names) == (change is replace_attention)
