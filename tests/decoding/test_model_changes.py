"""A model that is changed between two tokens of a stream: the next token is that of the changed model."""

import pytest
import torch
from operator_support import use_kernels_for_toys
from support import build_model
from torch import nn

import monoblock as mb

IDS = torch.tensor([[5, 7, 11, 2, 3], [1, 2, 3, 9, 4]])
NEW = 7


def gpt(seed=0):
    return build_model(mb.gpt(vocab=31, width=24, depth=2, heads=3, context=41), seed=seed)


@pytest.fixture(params=["plain", "kernels"])
def kernels(request, monkeypatch):
    """Toys by torch alone, and by the CPU kernels that larger models use."""
    if request.param == "kernels":
        use_kernels_for_toys(monkeypatch)
    return request.param


def replace_feedforward(model):
    model.decoder.blocks[0].feedforward = nn.ReLU()


def add_changing_hook(model):
    model.decoder.blocks[1].register_forward_hook(lambda module, args, out: out.flip(-1))


def assign_other_weights(model):
    model.load_state_dict(gpt(seed=1).state_dict(), assign=True)


def convert_to_double(model):
    model.double()


def write_in_place(model):
    with torch.no_grad():
        for name, weight in gpt(seed=1).named_parameters():
            model.get_parameter(name).copy_(weight)


def rebind_data(model):
    for name, weight in gpt(seed=1).named_parameters():
        model.get_parameter(name).data = weight.data


def replace_forward(model):
    forward = model.decoder.norm.forward
    model.decoder.norm.forward = lambda x: forward(x).flip(-1)


CHANGES = {
    "hook": add_changing_hook,
    "load_state_dict(assign=True)": assign_other_weights,
    "double": convert_to_double,
    "in place": write_in_place,
    "data": rebind_data,
    "feed-forward": replace_feedforward,
    "forward": replace_forward,
}


def cached_passes(model, change, at):
    """Greedy tokens by passes of the model itself with a cache; `change(model)` after `at` tokens."""
    model, tokens = model.eval(), []
    cache = model.make_cache(2, 20)
    ids = IDS
    for step in range(NEW):
        if step == at:
            change(model)
            dtype = next(model.parameters()).dtype
            for layer in cache.layers:
                layer.map_tensors(lambda t, dtype=dtype: t.to(dtype))
        with torch.no_grad():
            logits = model(ids, cache=cache)[:, -1]
        cache.advance(ids.shape[1])
        ids = logits.argmax(-1, keepdim=True)
        tokens.append(ids[:, 0])
    return torch.stack(tokens, 1)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("at", [0, 3])
def test_a_change_between_two_tokens_of_a_stream_takes_effect_from_the_next_token(change, at, kernels):
    wanted = cached_passes(gpt(), CHANGES[change], at)
    if change != "double":
        assert not torch.equal(wanted, cached_passes(gpt(), lambda model: None, at))
    model, found = gpt(), []
    steps = model.stream(IDS, max_new_tokens=NEW)
    for step in range(NEW):
        if step == at:
            CHANGES[change](model)
        found.append(next(steps))
    assert torch.equal(torch.stack(found, 1), wanted)
    assert next(steps, None) is None


@pytest.mark.parametrize("options", [{"num_return_sequences": 3, "temperature": 1.0, "seed": 0}, {"prompt_lookup": 3}])
def test_a_stream_with_other_options_goes_on_after_a_hook_is_added(options):
    model, calls = gpt(), []
    wanted = list(model.stream(IDS, max_new_tokens=NEW, **options))
    steps = model.stream(IDS, max_new_tokens=NEW, **options)
    found = [next(steps), next(steps)]
    model.decoder.blocks[1].register_forward_hook(lambda *_: calls.append(1))
    found += list(steps)
    assert calls
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_stream_of_an_unchanged_model_prepares_it_once(monkeypatch):
    from monoblock.decoding.backends import select

    model, calls = gpt(), []
    prepare_model = select.prepare
    monkeypatch.setattr(select, "prepare", lambda model: calls.append(1) or prepare_model(model))
    list(model.stream(IDS, max_new_tokens=NEW))
    assert len(calls) == 1
