"""`generate` runs a model as its user left it: drafts, replaced modules, patched classes, changes during a stream."""

import copy

import pytest
import torch
from operator_support import use_kernels_for_toys
from support import build_model
from torch import nn

import monoblock as mb

IDS = torch.tensor([[5, 7, 11, 2, 3], [1, 2, 3, 9, 4]])
NEW = 7


def gpt(seed=0, **changes):
    return build_model(mb.gpt(vocab=31, width=24, depth=2, heads=3, context=41, **changes), seed=seed)


def translator(seed=0):
    return build_model(mb.vaswani(vocab=31, width=24, depth=2, heads=3, context=41), seed=seed)


def eager(model, ids=IDS, new=NEW):
    """Greedy tokens (B, T + new) by whole passes of the model itself, in evaluation mode."""
    model.eval()
    for _ in range(new):
        with torch.no_grad():
            ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), 1)
    return ids


def generate(model, ids=IDS, **options):
    return model.generate(ids, max_new_tokens=NEW, **options)


@pytest.fixture(params=["plain", "kernels"])
def kernels(request, monkeypatch):
    """Toys by torch alone, and by the CPU kernels that larger models use."""
    if request.param == "kernels":
        use_kernels_for_toys(monkeypatch)
    return request.param


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
    from monoblock.decoding.engine import Engine
    from monoblock.decoding.settings import Settings
    from monoblock.decoding.speculative import DraftModel

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
