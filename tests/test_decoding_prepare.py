"""A model made ready for steps: the same numbers out of the same memory, with less done for each."""

import pytest
import torch
from support import presets

from monoblock.decoding.prepare import Joined, StepAttention, StepFeedForward, prepared
from monoblock.families import gpt, llama
from monoblock.model import Transformer
from monoblock.presets import tiny


def built(config, seed=3):
    torch.manual_seed(seed)
    return Transformer(config).double().eval()


def inputs(model, batch=2, length=5):
    torch.manual_seed(7)
    ids = torch.randint(model.config.input.vocab, (batch, length))
    return (ids, ids) if model.encoder is not None and model.decoder is not None else (ids,)


@pytest.mark.parametrize("name", presets(lambda config: config.decoder is not None))
def test_a_prepared_model_gives_the_models_logits(name):
    model = built(tiny(name))
    given = inputs(model)
    wanted = model(*given)
    torch.testing.assert_close(prepared(model)(*given), wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(model(*given), wanted, rtol=0, atol=0)  # and the model is what it was


def test_projections_of_one_input_are_one_product():
    model = prepared(built(llama(vocab=11, width=12, depth=1, heads=3, hidden=7, context=13)))
    block = model.decoder.blocks[0]
    assert isinstance(block.attention, StepAttention)
    assert isinstance(block.feedforward, StepFeedForward)
    assert block.attention.joined.weight.shape == (36, 12)
    assert block.feedforward.joined.weight.shape == (14, 12)


def test_nothing_is_stored_twice():
    model = built(gpt(vocab=11, width=12, depth=1, heads=3, context=13))
    attention = model.decoder.blocks[0].attention
    joined = prepared(model).decoder.blocks[0].attention.joined
    assert attention.query.weight.data_ptr() == joined.weight.data_ptr()
    assert attention.value.weight.untyped_storage().data_ptr() == joined.weight.untyped_storage().data_ptr()
    again = prepared(model).decoder.blocks[0].attention.joined
    assert again.weight.data_ptr() == joined.weight.data_ptr()  # laid side by side once


def test_what_training_changes_is_changed_in_the_twin():
    model = built(gpt(vocab=11, width=12, depth=1, heads=3, context=13))
    twin, given = prepared(model), inputs(model)
    model.train()
    before = model(*given).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(*given).logsumexp(-1).sum().backward()
    optimizer.step()
    after = model.eval()(*given)
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(twin(*given), after, rtol=0, atol=1e-10)


def test_a_joined_model_is_saved_and_loaded_as_before(tmp_path):
    model = built(gpt(vocab=11, width=12, depth=2, heads=3, context=13)).float()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepared(model)
    model.save_pretrained(tmp_path)
    loaded = Transformer.from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == kept.keys()
    assert all(torch.equal(loaded[name], kept[name]) for name in kept)


def test_weights_made_in_inference_mode_can_be_joined_too():
    with torch.inference_mode():
        model = built(gpt(vocab=11, width=12, depth=1, heads=3, context=13))
        given = inputs(model)
        wanted = model(*given)
        for _ in range(2):
            torch.testing.assert_close(prepared(model)(*given), wanted, rtol=0, atol=1e-10)


def test_projections_with_and_without_a_bias_stay_apart():
    one, two = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3, bias=False)
    assert Joined.fits([one, one])
    assert not Joined.fits([one, two])
