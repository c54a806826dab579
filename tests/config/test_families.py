"""The family constructors build the published structures at any size."""

import pytest
import torch
from support import B, T, block_configs, build_model, random_pixels, random_source, random_tokens, run_model

from monoblock.config.families import bart, bert, build_stack, gpt, llama, t5, vaswani, vit
from monoblock.config.model import Buckets, Learned, NormConfig, Rotary, Sinusoid
from monoblock.config.parts import HEADS_WITH_CLASSES
from monoblock.errors import ConfigError

SIZES = {"vocab": 61, "width": 12, "depth": 2, "heads": 3}
FAMILIES = {
    "gpt": gpt(**SIZES, context=37),
    "llama": llama(**SIZES, context=37),
    "bert": bert(**SIZES, context=37),
    "vaswani": vaswani(**SIZES),
    "t5": t5(**SIZES),
    "bart": bart(**SIZES, context=37),
    "vit": vit(image=6, patch=2, width=12, depth=2, heads=3, classes=7),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_builds_and_runs(name):
    config = FAMILIES[name]
    model = build_model(config)
    if config.family == "vision":
        assert model(random_pixels(config)).shape == (B, 7)
    else:
        assert run_model(model, random_tokens()).shape[0] == B


def test_gpt_is_gpt2():
    config, block = FAMILIES["gpt"], block_configs(FAMILIES["gpt"])[0]
    assert (block.norm_place, block.norm.kind, block.feedforward.activation) == ("pre", "layer", "gelu_tanh")
    assert (block.feedforward.hidden, block.attention.bias) == (48, "qkvo")
    assert isinstance(config.input.positions, Learned)
    assert config.tie == "output"
    assert config.decoder.norm is not None


def test_llama_has_no_bias_and_a_hidden_size_of_8_thirds_of_the_width():
    config, block = FAMILIES["llama"], block_configs(FAMILIES["llama"])[0]
    assert (block.norm.kind, block.feedforward.gated, block.feedforward.activation) == ("rms", True, "silu")
    assert (block.attention.bias, block.feedforward.bias) == ("", False)
    assert isinstance(block.attention.positions, Rotary)
    assert config.tie == "none"
    for width in (12, 768, 3072):
        hidden = block_configs(llama(**{**SIZES, "width": width}, context=37))[0].feedforward.hidden
        assert hidden % 32 == 0
        assert 0 <= hidden - 8 * width / 3 < 32


def test_vaswani_is_the_base_model_of_the_paper_by_default():
    config = vaswani(vocab=61)
    block = block_configs(config)[-1]
    assert (config.width, config.encoder.depth, config.decoder.depth) == (512, 6, 6)
    assert (block.attention.heads, block.feedforward.hidden, block.feedforward.activation) == (8, 2048, "relu")
    assert (block.norm_place, config.decoder.norm, config.tie) == ("post", None, "three_way")
    assert (config.input.scale, config.input.positions) == ("sqrt_width", Sinusoid())


def test_vaswani_with_two_vocabularies_ties_the_output_to_the_target():
    config = vaswani(**SIZES, target_vocab=53)
    assert (config.tie, config.target.vocab, config.target_input.vocab) == ("output", 53, 53)
    assert build_model(config)(random_source(), random_tokens(vocab=53)).shape == (B, T, 53)


def test_t5_has_buckets_unscaled_scores_and_no_bias():
    config, block = FAMILIES["t5"], block_configs(FAMILIES["t5"])[-1]
    assert (block.attention.scale, block.attention.bias, block.cross.positions) == (1.0, "", None)
    assert isinstance(block.attention.positions, Buckets)
    assert config.head.scale == "inverse_sqrt_width"
    assert "decoder.position_bias.weight" in build_model(config).state_dict()


def test_bart_has_positions_for_source_and_target_and_one_token_table():
    names = build_model(FAMILIES["bart"]).state_dict()
    assert {"input.position.weight", "target.position.weight", "input.token.weight"} <= set(names)
    assert "target.token.weight" not in names
    assert "head.fixed_bias" in names


@pytest.mark.parametrize(
    ("head", "shape"),
    [("pooled", (B, 12)), ("masked_lm", (B, T, 61)), ("classifier", (B, 5)), ("regression", (B, 5)),
     ("tagger", (B, T, 5)), ("spans", (B, T, 2))],
)  # fmt: skip
def test_bert_takes_any_head(head, shape):
    classes = 5 if head in HEADS_WITH_CLASSES else None
    assert build_model(bert(**SIZES, context=37, head=head, classes=classes))(random_tokens()).shape == shape


def test_bert_without_a_head_returns_hidden_states():
    assert build_model(bert(**SIZES, context=37, head="none"))(random_tokens()).shape == (B, T, 12)


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "vaswani", "t5", "bart"])
def test_any_knob_may_be_added(name):
    build = {"gpt": gpt, "llama": llama, "bert": bert, "vaswani": vaswani, "t5": t5, "bart": bart}[name]
    config = build(**SIZES, context=37, dropout=0.1, norm="rms", kv_heads=1)
    assert {block.norm.kind for block in block_configs(config)} == {"rms"}
    assert {block.attention.num_kv_heads for block in block_configs(config)} == {1}


def test_a_mistyped_knob_is_an_error_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'dropout'"):
        gpt(**SIZES, context=37, dropuot=0.1)


def test_an_unknown_head_is_an_error_that_lists_the_heads():
    with pytest.raises(ConfigError, match="masked_lm"):
        bert(**SIZES, context=37, head="masked-lm")


BUILDERS = {"gpt": gpt, "llama": llama, "bert": bert, "vaswani": vaswani, "t5": t5, "bart": bart, "vit": vit}
SIZES_OF = {"vit": {"image": 6, "patch": 2, "width": 12, "depth": 2, "heads": 3, "classes": 7}}


@pytest.mark.parametrize("name", ["llama", "vaswani", "t5", "bart", "vit"])
def test_a_hidden_size_of_zero_is_no_feed_forward_network_and_not_the_default(name):
    config = BUILDERS[name](**SIZES_OF.get(name, SIZES | {"context": 37}), hidden=0)
    assert all(block.sublayers[-1] != "feedforward" for stack in config.stacks.values() for block in stack.layers())


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("width", ["12", None, 0, 12.0])
def test_an_invalid_width_is_named_in_the_error(name, width):
    with pytest.raises(ConfigError, match=r"^width="):
        BUILDERS[name](**SIZES_OF.get(name, SIZES | {"context": 37}) | {"width": width})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "classifier", "classes": 0}, "classes=0 is too small"),
        ({"head": "tagger", "classes": "5"}, "classes='5' is not a whole number"),
        ({"head": "regression", "classes": 0}, "classes=0 is too small"),
        (
            {"head": "pooled", "classes": 7},
            "the heads classifier, tagger, regression, not for head='pooled'",
        ),
        ({"head": "none", "classes": 7}, "classes=7 is only for the heads classifier"),
        ({"head": None}, "head=None is not one of pooled"),
    ],
)
def test_invalid_classes_and_heads_of_bert_are_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        bert(**SIZES, context=37, **options)


def test_a_bert_classifier_has_two_classes_by_default():
    assert bert(**SIZES, context=37, head="classifier").head.classes == 2


def test_a_bert_regression_gives_one_number_by_default():
    assert bert(**SIZES, context=37, head="regression").head.classes == 1


@pytest.mark.parametrize("name", BUILDERS)
def test_a_missing_size_is_a_type_error_as_for_any_function(name):
    with pytest.raises(TypeError, match=r"missing .* required keyword-only argument.*'(vocab|image)'"):
        BUILDERS[name]()


def test_a_stack_cycles_through_its_blocks():
    first, second = block_configs(gpt(**SIZES, context=37))[0], block_configs(llama(**SIZES, context=37))[0]
    assert list(build_stack(5, first, second).layers()) == [first, second, first, second, first]
    assert build_stack(5, first, norm=NormConfig()).norm == NormConfig()


def test_dropout_of_a_family_is_active_in_training():
    model = build_model(gpt(**SIZES, context=37, dropout=0.5)).train()
    torch.manual_seed(0)
    assert not torch.equal(model(random_tokens()), model(random_tokens()))
