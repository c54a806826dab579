"""Habits of users: gradients of each sample, taps that return nothing, accounts of stored models."""

import json

import pytest
import torch
from support import build_model
from torch.func import functional_call, grad, vmap

import monoblock as mb
from monoblock.errors import InputError

SIZES = {"vocab": 31, "width": 24, "depth": 2, "heads": 3, "context": 16}
MODELS = {
    "gpt": mb.gpt(**SIZES),
    "llama": mb.llama(**SIZES, kv_heads=3, hidden=32),
    "bert": mb.bert(**SIZES),
    "vaswani": mb.vaswani(**SIZES),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_each_sample_by_vmap_equal_those_of_single_samples(name):
    model = build_model(MODELS[name]).double()
    weights = {key: weight.detach() for key, weight in model.named_parameters()}
    ids = torch.randint(31, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[0, -3:] = False

    def loss(weights, ids, mask):
        pair = name == "vaswani"
        inputs = (ids[None], ids[None], mask[None], mask[None]) if pair else (ids[None], mask[None])
        return functional_call(model, weights, inputs).logsumexp(-1).sum()

    together = vmap(grad(loss), in_dims=(None, 0, 0))(weights, ids, mask)
    for row in range(3):
        single = grad(loss)(weights, ids[row], mask[row])
        for key in weights:
            torch.testing.assert_close(together[key][row], single[key], atol=1e-10, rtol=1e-8)


def test_a_tap_that_returns_nothing_is_one_line():
    with pytest.raises(InputError, match="the tap returned NoneType at"):
        build_model(MODELS["gpt"])(torch.tensor([[1, 2]]), tap=lambda name, tensor: None)


def test_account_takes_configurations_models_presets_and_folders(tmp_path):
    model = build_model(MODELS["gpt"])
    model.save_pretrained(tmp_path / "model")
    expected = sum(weight.numel() for weight in model.parameters())
    for what in (model, model.config, tmp_path / "model", str(tmp_path / "model" / "config.json")):
        assert mb.account(what).parameters == expected
    assert mb.account("gpt2").parameters == 124_439_808
    assert mb.account("gpt2").name == "gpt2"
    sizes = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
    fields = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new"}
    (tmp_path / "config.json").write_text(json.dumps(fields | sizes))
    assert mb.account(tmp_path).parameters == 124_439_808
    with pytest.raises(mb.FileError, match="there is no file or folder runs/none"):
        mb.account("runs/none")
