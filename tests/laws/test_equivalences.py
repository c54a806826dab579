"""Two ways to say the same thing give the same numbers."""

import json

import pytest
import torch
from support import (
    Asks,
    B,
    S,
    T,
    all_experts,
    bit_equal,
    blocks,
    build,
    close,
    given,
    has_both,
    has_encoder,
    has_experts,
    is_decoder,
    is_single_text,
    is_text,
    presets,
    read,
    tokens,
    toy,
)

from monoblock.config import ModelConfig
from monoblock.knobs import vary
from monoblock.model import Transformer
from monoblock.presets import preset, tiny


def hidden(model, ids, **options):
    """States or logits for each token, whatever the head."""
    return model.encode(ids, **options) if model.encoder is not None else model(ids, **options)


@pytest.mark.parametrize("name", presets(is_single_text))
def test_packed_documents_are_separate_documents(name):
    model, lengths = toy(name), (7, 11, 2)
    texts = [tokens(length=length, seed=seed) for seed, length in enumerate(lengths)]
    documents = torch.cat([torch.full((B, length), number) for number, length in enumerate(lengths)], 1)
    with torch.no_grad():
        packed = hidden(model, torch.cat(texts, 1), documents=documents)
        for part, text in zip(packed.split(lengths, 1), texts, strict=True):
            close(part, hidden(model, text))


@pytest.mark.parametrize("name", presets(is_text))
def test_a_window_as_long_as_the_text_is_no_window(name):
    inside, without = (build(vary(tiny(name), window=window)) for window in (max(S, T), None))
    arguments = given(inside)
    with torch.no_grad():
        close(inside(*arguments), without(*arguments))


@pytest.mark.parametrize("name", presets(is_text))
def test_a_window_shorter_than_the_text_is_felt(name):
    near, without = (build(vary(tiny(name), window=window)) for window in (2, None))
    arguments = given(near)
    with torch.no_grad():
        assert not torch.allclose(near(*arguments), without(*arguments), atol=1e-3)


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_heads_are_full_heads_with_keys_and_values_repeated(name, groups):
    config = vary(tiny(name), heads=6, kv_heads=groups)
    grouped, full = build(config), Transformer(vary(config, kv_heads=None)).eval()
    weights = dict(grouped.state_dict())
    for key, wanted in full.state_dict().items():
        if weights[key].shape != wanted.shape:
            by_head = weights[key].unflatten(0, (groups, -1))
            weights[key] = by_head.repeat_interleave(6 // groups, 0).reshape(wanted.shape)
    full.load_state_dict(weights)
    arguments = given(grouped)
    with torch.no_grad():
        close(full(*arguments), grouped(*arguments))


@pytest.mark.parametrize("name", presets())
def test_plain_attention_is_fused_attention(name):
    model, tap = toy(name), Asks("attention.weights", "cross.weights")
    with torch.no_grad():
        close(model(*given(model), tap=tap), model(*given(model)))
    assert len(tap.seen) == sum(1 + (block.cross is not None) for block in blocks(model.config))


@pytest.mark.parametrize("name", presets())
def test_attention_weights_are_distributions(name):
    model, tap = toy(name), Asks("weights")
    with torch.no_grad():
        model(*given(model), tap=tap)
    for weights in tap.seen.values():
        assert (weights >= 0).all()
        close(weights.sum(-1), torch.ones(weights.shape[:-1]))


@pytest.mark.parametrize("name", presets(has_experts))
def test_gathered_experts_are_all_experts_weighed(name):
    model = toy(name)
    with torch.no_grad():
        close(model(*given(model)), model(*given(model), tap=all_experts()))


@pytest.mark.parametrize("name", presets(is_decoder))
def test_logits_asked_for_at_some_places_are_picked_from_all(name):
    model, ids = toy(name), tokens()
    places = torch.randint(0, T, (B, 3), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close(read(model, ids, logits_at=places), read(model, ids)[torch.arange(B)[:, None], places])


@pytest.mark.parametrize("name", presets())
def test_a_rerun_gives_the_same_bits(name):
    model = toy(name)
    with torch.no_grad():
        bit_equal(model(*given(model)), model(*given(model)))


@pytest.mark.parametrize("name", presets())
def test_the_seed_decides_every_weight(name):
    models = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        models.append(Transformer(tiny(name)).state_dict())
    one, same, other = models
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", presets())
def test_saved_then_loaded_is_the_same_model_bit_for_bit(name, tmp_path):
    model = toy(name)
    model.save_pretrained(tmp_path)
    loaded = Transformer.from_pretrained(tmp_path).eval()
    assert loaded.config == model.config
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for key, weight in model.state_dict().items():
        bit_equal(loaded.state_dict()[key], weight)
    with torch.no_grad():
        bit_equal(loaded(*given(model)), model(*given(model)))


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("shrunk", [True, False])
def test_a_configuration_survives_json(name, shrunk):
    config = tiny(name) if shrunk else preset(name)
    text = config.to_json()
    assert ModelConfig.from_json(text) == config
    assert ModelConfig.from_json(text).to_json() == text
    assert json.loads(text) == config.to_dict()


# -- position -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets(has_encoder))
def test_without_positions_an_encoder_sees_a_bag_of_tokens(name):
    blind = build(vary(tiny(name), positions="none", window=None))
    ids, order = tokens(), torch.randperm(T, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        close(blind.encode(ids[:, order]), blind.encode(ids)[:, order])


@pytest.mark.parametrize("name", presets(is_text))
def test_no_preset_of_tokens_is_blind_to_position(name):
    """Two different tokens, 3 and 6, change places: the last token notices, by more than rounding."""
    model, order = toy(name), torch.arange(T)
    ids = torch.rand(B, model.config.input.vocab, generator=torch.Generator().manual_seed(4)).argsort(1)[:, :T]
    order[3], order[6] = 6, 3
    with torch.no_grad():
        if is_decoder(model.config):
            before, after = read(model, ids)[:, -1], read(model, ids[:, order])[:, -1]
        else:
            before, after = model.encode(ids)[:, -1], model.encode(ids[:, order])[:, -1]
    assert (before - after).abs().amax(-1).gt(1e-4).all()


@pytest.mark.parametrize("name", presets(lambda config: is_decoder(config) and not has_both(config)))
def test_given_positions_are_the_counted_ones(name):
    model, ids = toy(name), tokens()
    with torch.no_grad():
        close(model(ids, positions=torch.arange(T).expand(B, T)), model(ids))
