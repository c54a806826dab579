"""The families by their usual names are the published structures, at any size."""

import pytest
import torch
from support import B, T, blocks, build, pixels, read, source, tokens

from monoblock.config import Buckets, Learned, NormConfig, Rotary, Sinusoid
from monoblock.errors import ConfigError
from monoblock.families import bart, bert, gpt, llama, stack, t5, vaswani, vit

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
def test_a_family_builds_and_answers(name):
    config = FAMILIES[name]
    model = build(config)
    if config.family == "vision":
        assert model(pixels(config)).shape == (B, 7)
    else:
        assert read(model, tokens()).shape[0] == B


def test_gpt_is_gpt2():
    config, block = FAMILIES["gpt"], blocks(FAMILIES["gpt"])[0]
    assert (block.norm_place, block.norm.kind, block.feedforward.activation) == ("pre", "layer", "gelu_tanh")
    assert (block.feedforward.hidden, block.attention.bias) == (48, "qkvo")
    assert isinstance(config.input.positions, Learned)
    assert config.tie == "output"
    assert config.decoder.norm is not None


def test_llama_has_no_bias_and_two_thirds_of_four_widths():
    config, block = FAMILIES["llama"], blocks(FAMILIES["llama"])[0]
    assert (block.norm.kind, block.feedforward.gated, block.feedforward.activation) == ("rms", True, "silu")
    assert (block.attention.bias, block.feedforward.bias) == ("", False)
    assert isinstance(block.attention.positions, Rotary)
    assert config.tie == "none"
    for width in (12, 768, 3072):
        hidden = blocks(llama(**{**SIZES, "width": width}, context=37))[0].feedforward.hidden
        assert hidden % 32 == 0
        assert 0 <= hidden - 8 * width / 3 < 32


def test_vaswani_is_the_papers_base_model_by_default():
    config = vaswani(vocab=61)
    block = blocks(config)[-1]
    assert (config.width, config.encoder.depth, config.decoder.depth) == (512, 6, 6)
    assert (block.attention.heads, block.feedforward.hidden, block.feedforward.activation) == (8, 2048, "relu")
    assert (block.norm_place, config.decoder.norm, config.tie) == ("post", None, "three_way")
    assert (config.input.scale, config.input.positions) == ("sqrt_width", Sinusoid())


def test_vaswani_with_two_vocabularies_ties_the_output_to_the_target():
    config = vaswani(**SIZES, target_vocab=53)
    assert (config.tie, config.target.vocab, config.output_input.vocab) == ("output", 53, 53)
    assert build(config)(source(), tokens(vocab=53)).shape == (B, T, 53)


def test_t5_has_buckets_unscaled_scores_and_no_bias():
    config, block = FAMILIES["t5"], blocks(FAMILIES["t5"])[-1]
    assert (block.attention.scale, block.attention.bias, block.cross.positions) == (1.0, "", None)
    assert isinstance(block.attention.positions, Buckets)
    assert config.head.scale == "inverse_sqrt_width"
    assert "decoder.position_bias.weight" in build(config).state_dict()


def test_bart_has_positions_for_each_side_and_one_table_of_words():
    names = build(FAMILIES["bart"]).state_dict()
    assert {"input.position.weight", "target.position.weight", "input.token.weight"} <= set(names)
    assert "target.token.weight" not in names
    assert "head.fixed_bias" in names


@pytest.mark.parametrize(
    ("head", "shape"),
    [("pooled", (B, 12)), ("masked_lm", (B, T, 61)), ("classifier", (B, 5)), ("tagger", (B, T, 5)),
     ("spans", (B, T, 2))],
)  # fmt: skip
def test_bert_takes_any_head(head, shape):
    classes = 5 if head in ("classifier", "tagger") else None
    assert build(bert(**SIZES, context=37, head=head, classes=classes))(tokens()).shape == shape


def test_bert_without_a_head_gives_hidden_states():
    assert build(bert(**SIZES, context=37, head="none"))(tokens()).shape == (B, T, 12)


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "vaswani", "t5", "bart"])
def test_any_knob_may_be_added(name):
    make = {"gpt": gpt, "llama": llama, "bert": bert, "vaswani": vaswani, "t5": t5, "bart": bart}[name]
    config = make(**SIZES, context=37, dropout=0.1, norm="rms", kv_heads=1)
    assert {block.norm.kind for block in blocks(config)} == {"rms"}
    assert {block.attention.groups for block in blocks(config)} == {1}


def test_a_mistyped_knob_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'dropout'"):
        gpt(**SIZES, context=37, dropuot=0.1)


def test_a_head_bert_does_not_have_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="masked_lm"):
        bert(**SIZES, context=37, head="masked-lm")


MAKE = {"gpt": gpt, "llama": llama, "bert": bert, "vaswani": vaswani, "t5": t5, "bart": bart, "vit": vit}
NEEDED = {"vit": {"image": 6, "patch": 2, "width": 12, "depth": 2, "heads": 3, "classes": 7}}


@pytest.mark.parametrize("name", ["llama", "vaswani", "t5", "bart", "vit"])
def test_a_hidden_size_of_zero_is_refused_and_not_replaced(name):
    with pytest.raises(ConfigError, match="hidden=0 is too small"):
        MAKE[name](**NEEDED.get(name, SIZES | {"context": 37}), hidden=0)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("width", ["12", None, 0, 12.0])
def test_a_width_that_is_no_number_is_blamed_itself(name, width):
    with pytest.raises(ConfigError, match=r"^width="):
        MAKE[name](**NEEDED.get(name, SIZES | {"context": 37}) | {"width": width})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"head": "classifier", "classes": 0}, "classes=0 is too small"),
        ({"head": "tagger", "classes": "5"}, "classes='5' cannot be"),
        ({"head": "pooled", "classes": 7}, "classes=7 goes with a classifier or tagger, not with head='pooled'"),
        ({"head": "none", "classes": 7}, "classes=7 goes with a classifier or tagger"),
        ({"head": None}, "head=None is none of pooled"),
    ],
)
def test_bert_refuses_classes_and_heads_that_cannot_be(asked, message):
    with pytest.raises(ConfigError, match=message):
        bert(**SIZES, context=37, **asked)


def test_bert_knows_two_classes_where_nothing_is_said():
    assert bert(**SIZES, context=37, head="classifier").head.classes == 2


@pytest.mark.parametrize("name", MAKE)
def test_a_size_left_out_is_named_by_python_as_for_any_function(name):
    with pytest.raises(TypeError, match=r"missing .* required keyword-only argument.*'(vocab|image)'"):
        MAKE[name]()


def test_blocks_take_turns_in_a_stack():
    one, two = blocks(gpt(**SIZES, context=37))[0], blocks(llama(**SIZES, context=37))[0]
    assert list(stack(5, one, two).layers()) == [one, two, one, two, one]
    assert stack(5, one, norm=NormConfig()).norm == NormConfig()


def test_dropout_of_a_family_is_felt_in_training():
    model = build(gpt(**SIZES, context=37, dropout=0.5)).train()
    torch.manual_seed(0)
    assert not torch.equal(model(tokens()), model(tokens()))
