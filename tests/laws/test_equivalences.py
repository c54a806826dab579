"""Two ways to compute the same thing give the same numbers."""

import json

import pytest
import torch
from support import (
    ActivationTap,
    B,
    S,
    T,
    all_experts_tap,
    assert_bit_equal,
    assert_near,
    block_configs,
    build_model,
    example_inputs,
    has_decoder,
    has_encoder,
    has_experts,
    is_encoder_decoder,
    is_single_text,
    is_text,
    law_names,
    random_tokens,
    run_model,
    tiny_config,
    tiny_model,
    tiny_names,
)

from monoblock.config.knobs import vary
from monoblock.config.model import ModelConfig
from monoblock.config.presets import preset, tiny
from monoblock.model import Transformer


def hidden_states(model, ids, **options):
    """Hidden states or logits of each token, whatever the head."""
    return model.encode(ids, **options) if model.encoder is not None else model(ids, **options)


@pytest.mark.parametrize("name", law_names(is_single_text))
def test_packed_documents_are_separate_documents(name):
    model, lengths = tiny_model(name), (7, 11, 2)
    texts = [random_tokens(length=length, seed=seed) for seed, length in enumerate(lengths)]
    documents = torch.cat([torch.full((B, length), number) for number, length in enumerate(lengths)], 1)
    with torch.no_grad():
        packed = hidden_states(model, torch.cat(texts, 1), documents=documents)
        for packed_text, text in zip(packed.split(lengths, 1), texts, strict=True):
            assert_near(packed_text, hidden_states(model, text))


@pytest.mark.parametrize("name", tiny_names(is_text))
def test_a_window_as_long_as_the_text_is_no_window(name):
    windowed, full = (build_model(vary(tiny(name), window=window)) for window in (max(S, T), None))
    arguments = example_inputs(windowed)
    with torch.no_grad():
        assert_near(windowed(*arguments), full(*arguments))


@pytest.mark.parametrize("name", tiny_names(is_text))
def test_a_window_shorter_than_the_text_changes_the_result(name):
    windowed, full = (build_model(vary(tiny(name), window=window)) for window in (2, None))
    arguments = example_inputs(windowed)
    with torch.no_grad():
        assert not torch.allclose(windowed(*arguments), full(*arguments), atol=1e-3)


@pytest.mark.parametrize("name", law_names())
@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_heads_are_full_heads_with_keys_and_values_repeated(name, groups):
    config = vary(tiny_config(name), heads=6, kv_heads=groups)
    grouped, full = build_model(config), Transformer(vary(config, kv_heads=None)).eval()
    weights = dict(grouped.state_dict())
    for key, expected in full.state_dict().items():
        if weights[key].shape != expected.shape:
            by_head = weights[key].unflatten(0, (groups, -1))
            weights[key] = by_head.repeat_interleave(6 // groups, 0).reshape(expected.shape)
    full.load_state_dict(weights)
    arguments = example_inputs(grouped)
    with torch.no_grad():
        assert_near(full(*arguments), grouped(*arguments))


@pytest.mark.parametrize("name", law_names())
def test_plain_attention_is_fused_attention(name):
    model, tap = tiny_model(name), ActivationTap("attention.weights", "cross.weights")
    with torch.no_grad():
        assert_near(model(*example_inputs(model), tap=tap), model(*example_inputs(model)))
    assert len(tap.activations) == sum(1 + (block.cross is not None) for block in block_configs(model.config))


@pytest.mark.parametrize("name", tiny_names())
def test_attention_weights_are_distributions(name):
    model, tap = tiny_model(name), ActivationTap("weights")
    with torch.no_grad():
        model(*example_inputs(model), tap=tap)
    for weights in tap.activations.values():
        assert (weights >= 0).all()
        assert_near(weights.sum(-1), torch.ones(weights.shape[:-1]))


@pytest.mark.parametrize("name", law_names(has_experts))
def test_gathered_experts_equal_all_experts_weighted(name):
    model = tiny_model(name)
    with torch.no_grad():
        assert_near(model(*example_inputs(model)), model(*example_inputs(model), tap=all_experts_tap()))


@pytest.mark.parametrize("name", law_names(has_decoder))
def test_logits_at_some_tokens_are_those_of_the_full_pass(name):
    model, ids = tiny_model(name), random_tokens()
    index = torch.randint(0, T, (B, 3), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_near(run_model(model, ids, logits_at=index), run_model(model, ids)[torch.arange(B)[:, None], index])


@pytest.mark.parametrize("name", law_names())
def test_a_rerun_gives_the_same_bits(name):
    model = tiny_model(name)
    with torch.no_grad():
        assert_bit_equal(model(*example_inputs(model)), model(*example_inputs(model)))


@pytest.mark.parametrize("name", law_names())
def test_the_seed_decides_every_weight(name):
    models = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        models.append(Transformer(tiny_config(name)).state_dict())
    first, same, other = models
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", law_names())
def test_saved_then_loaded_is_the_same_model_bit_for_bit(name, tmp_path):
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    loaded = Transformer.from_pretrained(tmp_path).eval()
    assert loaded.config == model.config
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for key, weight in model.state_dict().items():
        assert_bit_equal(loaded.state_dict()[key], weight)
    with torch.no_grad():
        assert_bit_equal(loaded(*example_inputs(model)), model(*example_inputs(model)))


@pytest.mark.parametrize("name", tiny_names())
@pytest.mark.parametrize("is_tiny", [True, False])
def test_a_configuration_survives_json(name, is_tiny):
    config = tiny(name) if is_tiny else preset(name)
    text = config.to_json()
    assert ModelConfig.from_json(text) == config
    assert ModelConfig.from_json(text).to_json() == text
    assert json.loads(text) == config.to_dict()


# -- position -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny_names(has_encoder))
def test_an_encoder_without_positions_is_permutation_equivariant(name):
    model = build_model(vary(tiny(name), positions="none", window=None))
    ids, order = random_tokens(), torch.randperm(T, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert_near(model.encode(ids[:, order]), model.encode(ids)[:, order])


@pytest.mark.parametrize("name", law_names(is_text))
def test_every_text_preset_depends_on_positions(name):
    """Swapping the different tokens 3 and 6 changes the last token by more than rounding."""
    model, order = tiny_model(name), torch.arange(T)
    ids = torch.rand(B, model.config.input.vocab, generator=torch.Generator().manual_seed(4)).argsort(1)[:, :T]
    order[3], order[6] = 6, 3
    with torch.no_grad():
        if has_decoder(model.config):
            before, after = run_model(model, ids)[:, -1], run_model(model, ids[:, order])[:, -1]
        else:
            before, after = model.encode(ids)[:, -1], model.encode(ids[:, order])[:, -1]
    assert (before - after).abs().amax(-1).gt(1e-4).all()


@pytest.mark.parametrize("name", law_names(lambda config: has_decoder(config) and not is_encoder_decoder(config)))
def test_given_positions_are_the_counted_ones(name):
    model, ids = tiny_model(name), random_tokens()
    with torch.no_grad():
        assert_near(model(ids, positions=torch.arange(T).expand(B, T)), model(ids))
