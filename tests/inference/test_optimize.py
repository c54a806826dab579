"""The fast copy of a model, and weights that are arranged in memory for it: the same logits, stored once."""

import pytest
import torch
from support import tiny_names

from monoblock.config.families import gpt, llama
from monoblock.config.presets import tiny
from monoblock.inference.fast_linear import FusedLinear, arrange_weights
from monoblock.inference.fast_modules import FastAttention, FastFeedForward, build_fast_model
from monoblock.inference.optimized import optimize
from monoblock.inference.supported_models import reason_not_to_optimize
from monoblock.kernels.gpu import Activations
from monoblock.model import Transformer
from monoblock.nn.linear import can_join


def build(config, seed=3):
    torch.manual_seed(seed)
    return Transformer(config).double().eval()


def inputs(model, batch=2, length=5):
    torch.manual_seed(7)
    ids = torch.randint(model.config.input.vocab, (batch, length))
    return (ids, ids) if model.encoder is not None and model.decoder is not None else (ids,)


@pytest.mark.parametrize("name", tiny_names(lambda config: config.decoder is not None))
@pytest.mark.parametrize("fuse", [False, True])
def test_a_fast_copy_gives_the_models_logits(name, fuse):
    model = build(tiny(name))
    args = inputs(model)
    logits = model(*args)
    torch.testing.assert_close(build_fast_model(model, fuse=fuse)(*args), logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(model(*args), logits, rtol=0, atol=0)  # the model is unchanged


def test_projections_of_one_input_are_fused():
    model = build_fast_model(build(llama(vocab=11, width=12, depth=1, heads=3, hidden=7, context=13)), fuse=True)
    block = model.decoder.blocks[0]
    assert isinstance(block.attention, FastAttention)
    assert isinstance(block.feedforward, FastFeedForward)
    assert block.attention.fused.weight.shape == (36, 12)
    assert block.feedforward.fused.weight.shape == (14, 12)


def test_joined_weights_of_an_optimized_model_are_stored_once():
    model = build(gpt(vocab=11, width=12, depth=1, heads=3, context=13))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attention = model.decoder.blocks[0].attention
    copied = build_fast_model(model, fuse=True).decoder.blocks[0].attention.fused
    assert attention.query.weight.data_ptr() != copied.weight.data_ptr()
    arrange_weights(model)
    fused = build_fast_model(model, fuse=True).decoder.blocks[0].attention.fused
    assert attention.query.bias.data_ptr() == fused.bias.data_ptr()
    assert attention.query.weight.data_ptr() == fused.weight.data_ptr()
    assert attention.value.weight.untyped_storage().data_ptr() == fused.weight.untyped_storage().data_ptr()
    again = build_fast_model(model, fuse=True).decoder.blocks[0].attention.fused
    assert again.weight.data_ptr() == fused.weight.data_ptr()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_joined_model_is_saved_and_loaded_as_before(tmp_path):
    model = build(gpt(vocab=11, width=12, depth=2, heads=3, context=13)).float()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    arrange_weights(model)
    model.save_pretrained(tmp_path)
    loaded = Transformer.from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == before.keys()
    assert all(torch.equal(loaded[name], before[name]) for name in before)


class WithLength(Transformer):
    def length(self):
        return 5


class Doubled(Transformer):
    def forward(self, *args, **options):
        return 2 * super().forward(*args, **options)


class Silent(Transformer):
    def generate(self, ids, **options):
        return ids


@pytest.mark.parametrize(("kind", "reason"), [(WithLength, None), (Doubled, "a Doubled"), (Silent, "a Silent")])
def test_a_subclass_has_a_fast_copy_unless_it_overrides_something(kind, reason):
    found = reason_not_to_optimize(kind(tiny("gpt2")).eval())
    assert found is None if reason is None else reason in found


def test_weights_created_in_inference_mode_can_be_fused():
    with torch.inference_mode():
        model = build(gpt(vocab=11, width=12, depth=1, heads=3, context=13))
        args = inputs(model)
        logits = model(*args)
        for _ in range(2):
            torch.testing.assert_close(build_fast_model(model)(*args), logits, rtol=0, atol=1e-10)
            torch.testing.assert_close(build_fast_model(model, fuse=True)(*args), logits, rtol=0, atol=1e-10)


def test_projections_with_and_without_a_bias_are_not_fused():
    biased, unbiased = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3, bias=False)
    assert can_join([biased, biased])
    assert FusedLinear([biased, biased])(Activations(torch.ones(2, 4))).shape == (2, 6)
    assert not can_join([biased, unbiased])


def test_a_long_job_on_the_modules_of_a_large_model_points_to_optimize():
    model = build(gpt(vocab=1009, width=256, depth=3, heads=4, context=97)).float()
    ids = torch.zeros(100, 3, dtype=torch.long)
    with pytest.warns(UserWarning, match=r"mb\.optimize\(model\)\.generate"):
        list(zip(range(1), model.stream(ids, max_new_tokens=20), strict=False))
    list(zip(range(1), model.stream(ids[:1], max_new_tokens=20), strict=False))  # a short one does not
    list(zip(range(1), optimize(model).stream(ids, max_new_tokens=20), strict=False))
