"""Configurations: an invalid one is a one-line error with advice, and JSON round-trips."""

import dataclasses
import json
from dataclasses import replace

import pytest

from monoblock.config.families import bert, build_stack, gpt, t5, vit
from monoblock.config.model import (
    Alibi,
    AttentionConfig,
    BlockConfig,
    Buckets,
    EmbeddingConfig,
    ExpertsConfig,
    FeedForwardConfig,
    HeadConfig,
    InitConfig,
    Learned,
    ModelConfig,
    NormConfig,
    PatchConfig,
    RecurrentConfig,
    Repeat,
    Rotary,
    Scaling,
    Sinusoid,
    StackConfig,
)
from monoblock.config.presets import PRESETS
from monoblock.config.schema import from_dict, nearest_divisor, to_dict
from monoblock.errors import ConfigError

ATTENTION, FEEDFORWARD = AttentionConfig(heads=3), FeedForwardConfig(hidden=7)
BLOCK = BlockConfig(width=12, attention=ATTENTION, feedforward=FEEDFORWARD)
FULL = replace(BLOCK, attention=replace(ATTENTION, mask="full"))
CROSS = replace(BLOCK, cross=replace(ATTENTION, mask="full"))
EMBEDDING = EmbeddingConfig(vocab=11, context=13)
LM_HEAD = HeadConfig(kind="language_model")
GPT = gpt(vocab=11, width=12, depth=2, heads=3, context=13)
T5 = t5(vocab=11, width=12, depth=2, heads=3)


def assert_config_error(message, build):
    """Assert that `build` raises a one-line ConfigError that matches."""
    with pytest.raises(ConfigError, match=message) as problem:
        build()
    assert "\n" not in str(problem.value)


# -- invalid configurations ------------------------------------------------------------------------------------------

INVALID = {
    # sizes that do not fit
    "heads=5 does not divide width=12; try heads=4": lambda: replace(BLOCK, attention=AttentionConfig(heads=5)),
    "kv_heads=4 does not divide heads=6; try kv_heads=3": lambda: AttentionConfig(heads=6, kv_heads=4),
    "the head size is 3; make it even": lambda: replace(BLOCK, attention=AttentionConfig(heads=4, positions=Rotary())),
    "rotary dim=5 must be even": lambda: Rotary(dim=5),
    "rotary dim=0 must be even": lambda: Rotary(dim=0),
    "rotary dim=6 is larger than the head size 4; write dim=4": lambda: replace(
        BLOCK, attention=AttentionConfig(heads=3, positions=Rotary(dim=6))
    ),
    "patch=5 does not divide image=12; try patch=(4|6)": lambda: PatchConfig(image=12, patch=5),
    "top_k=4 is more than count=3 experts": lambda: ExpertsConfig(count=3, top_k=4),
    "max_distance=4 must exceed": lambda: Buckets(count=8, max_distance=4),
    "heads=0 is too small; write 1 or more": lambda: AttentionConfig(heads=0),
    "vocab=0 is too small": lambda: EmbeddingConfig(vocab=0),
    "offset=-1 is too small": lambda: Learned(offset=-1),
    "dropout=1.0 is not a rate": lambda: replace(BLOCK, dropout=1.0),
    "dropout=-0.1 is not a rate": lambda: FeedForwardConfig(hidden=7, dropout=-0.1),
    "factor=0.0 must be positive": lambda: Scaling(kind="linear", factor=0.0),
    # choices that contradict each other
    "a norm of kind 'rms' has no affine='scale_shift'; write affine='scale' or 'none'": lambda: NormConfig(kind="rms"),
    "reach beyond a window; write window=": lambda: AttentionConfig(heads=3, global_tokens=True),
    "write window=": lambda: AttentionConfig(heads=3, random_blocks=2),
    "window cannot be combined with mask='prefix'": lambda: AttentionConfig(heads=3, mask="prefix", window=3),
    "cross-attention has no window": lambda: replace(BLOCK, cross=AttentionConfig(heads=3, mask="full", window=3)),
    "cross-attention sees the whole source": lambda: replace(BLOCK, cross=AttentionConfig(heads=3)),
    "positions=None": lambda: replace(BLOCK, cross=AttentionConfig(heads=3, mask="full", positions=Alibi())),
    "residual='parallel' is possible only with pre-norm": lambda: replace(
        BLOCK, residual="parallel", norm_place="post"
    ),
    "without cross-attention": lambda: replace(CROSS, residual="parallel_shared"),
    "attention_norm=False needs norm_place='pre'": lambda: replace(BLOCK, attention_norm=False, norm_place="post"),
    "yarn scaling needs the length .* write original_context=": lambda: Scaling(kind="yarn"),
    "learned positions need a context": lambda: EmbeddingConfig(vocab=11, positions=Learned()),
    "form='grid' is for images": lambda: EmbeddingConfig(vocab=11, positions=Sinusoid(form="grid")),
    "classifier and tagger need classes": lambda: HeadConfig(kind="classifier"),
    "teacher=True needs kind='classifier'": lambda: HeadConfig(kind="regression", teacher=True),
    "head kind='language_model' with classes=3": lambda: HeadConfig(kind="language_model", classes=3),
    "pools nothing; drop pooling": lambda: HeadConfig(kind="tagger", classes=3, pooling="mean"),
    "a pooled head has no logits": lambda: HeadConfig(kind="pooled", softcap=3.0),
    "normalize=True is for pooled vectors": lambda: HeadConfig(kind="spans", normalize=True),
    "letters of 'qkvo'": lambda: AttentionConfig(heads=3, bias="qx"),
    "each once": lambda: AttentionConfig(heads=3, bias="qq"),
    # inconsistent models
    "needs an encoder, a decoder or both": lambda: ModelConfig(input=EMBEDDING),
    "encoder block sees all tokens": lambda: ModelConfig(input=EMBEDDING, encoder=build_stack(1, BLOCK)),
    "must not see the future": lambda: ModelConfig(input=EMBEDDING, decoder=build_stack(1, FULL)),
    "exactly when there is an encoder": lambda: ModelConfig(input=EMBEDDING, decoder=build_stack(1, CROSS)),
    "and decoder width 24 differ": lambda: replace(T5, decoder=build_stack(1, replace(CROSS, width=24))),
    "patches are read by an encoder only": lambda: ModelConfig(
        input=PatchConfig(image=6, patch=2), decoder=build_stack(1, BLOCK)
    ),
    "with one stack leave target=None": lambda: replace(GPT, target=EMBEDDING),
    "has only one input; write tie='output'": lambda: replace(GPT, tie="three_way"),
    "share one input, but tie='output' does not tie them; write tie='three_way'": lambda: replace(T5, tie="output"),
    "need the same vocab and dim": lambda: replace(T5, target=EmbeddingConfig(vocab=17)),
    "needs a language_model or masked_lm head": lambda: replace(GPT, head=None),
    "a language_model head needs a decoder": lambda: ModelConfig(
        input=EMBEDDING, encoder=build_stack(1, FULL), head=LM_HEAD
    ),
    "a masked_lm head needs an encoder-only model": lambda: replace(GPT, head=HeadConfig(kind="masked_lm")),
    "is for a model of one stack": lambda: replace(T5, tie="source_target", head=HeadConfig(kind="pooled")),
    "a regression head is for": lambda: replace(T5, tie="source_target", head=HeadConfig(kind="regression")),
    # wrong types
    r"AttentionConfig.heads='3' is not a whole number": lambda: AttentionConfig(heads="3"),
    r"AttentionConfig.heads=True is not a whole number": lambda: AttentionConfig(heads=True),
    r"kv_heads=1.5 is not a whole number or none": lambda: AttentionConfig(heads=3, kv_heads=1.5),
    r"NormConfig.kind='layre' is not one of 'layer', 'rms', 'batch', 'none'; did you mean 'layer'": lambda: NormConfig(
        kind="layre"
    ),
    r"activation='swish' is not one of": lambda: FeedForwardConfig(hidden=7, activation="swish"),
    r"eps=nan is not a number": lambda: NormConfig(eps=float("nan")),
}


@pytest.mark.parametrize("message", INVALID)
def test_an_invalid_configuration_is_a_one_line_error(message):
    assert_config_error(message, INVALID[message])


@pytest.mark.parametrize(
    "build",
    [
        lambda: AttentionConfig(heads=3, softcap=0.0),
        lambda: AttentionConfig(heads=3, clip=-1.0),
        lambda: NormConfig(eps=-1e-5),
        lambda: Rotary(base=0.0),
        lambda: PatchConfig(image=6, patch=2, registers=-1),
        lambda: Scaling(kind="longrope", original_context=13),
        lambda: PatchConfig(image=6, patch=2, positions=Learned(offset=2)),
        lambda: HeadConfig(kind="language_model", softcap=0.0),
        lambda: Scaling(kind="llama3", original_context=13, low_freq_factor=4.0),
    ],
    ids=[
        "softcap 0",
        "negative clip",
        "negative eps",
        "base 0",
        "negative registers",
        "longrope without factors",
        "patches with an offset",
        "head softcap 0",
        "llama3 without a ramp",
    ],
)
def test_a_value_that_would_fail_later_is_rejected_at_once(build):
    with pytest.raises(ConfigError):
        build()


# -- values and derived values ---------------------------------------------------------------------------------------

CLASSES = [
    NormConfig,
    Scaling,
    Rotary,
    Alibi,
    Buckets,
    Sinusoid,
    Learned,
    AttentionConfig,
    ExpertsConfig,
    FeedForwardConfig,
    EmbeddingConfig,
    PatchConfig,
    HeadConfig,
    InitConfig,
    BlockConfig,
    Repeat,
    StackConfig,
    ModelConfig,
    RecurrentConfig,
]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_part_is_frozen_and_keyword_only(cls):
    assert cls.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(cls))


def test_configurations_are_values():
    again = gpt(vocab=11, width=12, depth=2, heads=3, context=13)
    assert again == GPT
    assert hash(again) == hash(GPT)
    assert {GPT: 1}[again] == 1


def test_derived_values_follow_replaced_fields():
    wider = replace(BLOCK, width=24)
    assert (wider.attention.key_size(24), wider.attention.value_size(24)) == (8, 8)
    assert replace(ATTENTION, kv_heads=1).num_kv_heads == 1
    assert ATTENTION.num_kv_heads == 3
    assert PatchConfig(image=12, patch=3, registers=2).context == 16 + 1 + 2
    assert (GPT.depth, T5.depth) == (2, 4)


def test_the_family_follows_from_the_stacks():
    families = {config.family for config in (row.config for row in PRESETS.values())}
    assert families == {"decoder-only", "encoder-only", "encoder-decoder", "vision"}
    assert GPT.family == "decoder-only"
    assert T5.family == "encoder-decoder"
    assert bert(vocab=11, width=12, depth=1, heads=3, context=13).family == "encoder-only"
    assert vit(image=6, patch=2, width=12, depth=1, heads=3, classes=5).family == "vision"


def test_layers_are_the_blocks_of_the_pattern_in_order():
    local = replace(BLOCK, attention=replace(ATTENTION, window=3))
    pattern = StackConfig(pattern=(Repeat(blocks=(local, BLOCK), times=2, tied=True), Repeat(blocks=(local,))))
    assert list(pattern.layers()) == [local, BLOCK, local, BLOCK, local]
    assert list(pattern.layers_with_ownership()) == [
        (local, True),
        (BLOCK, True),
        (local, False),
        (BLOCK, False),
        (local, True),
    ]
    assert (pattern.depth, pattern.width) == (5, 12)


@pytest.mark.parametrize(
    ("number", "wanted", "divisor"), [(12, 5, 4), (12, 12, 12), (13, 6, 1), (12, 100, 12), (7, 5, 7)]
)
def test_the_nearest_divisor_is_suggested(number, wanted, divisor):
    assert nearest_divisor(number, wanted) == divisor


# -- JSON ------------------------------------------------------------------------------------------------------------


def test_json_contains_choices_and_no_derived_values():
    data = json.loads(GPT.to_json())
    assert "family" not in data
    assert data["decoder"]["pattern"][0]["blocks"][0]["attention"]["kv_heads"] is None
    assert data["input"]["positions"] == {"kind": "learned", "offset": 0}


def test_missing_fields_have_their_defaults():
    data = {"input": {"kind": "tokens", "vocab": 11}, "decoder": to_dict(build_stack(1, BLOCK))}
    assert ModelConfig.from_dict(data) == ModelConfig(input=EmbeddingConfig(vocab=11), decoder=build_stack(1, BLOCK))


def changed_json(**changes):
    return {**json.loads(GPT.to_json()), **changes}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed_json(dekoder=None), "ModelConfig has no field 'dekoder'; did you mean 'decoder'"),
        (changed_json(input={"kind": "tokens", "vocab": 11, "contxt": 5}),
         "input has no field 'contxt'; did you mean 'context'"),
        (changed_json(input={"kind": "tokens"}), "input lacks the field 'vocab'"),
        (changed_json(input={"kind": "token", "vocab": 11}),
         "input.kind='token' is not one of 'tokens', 'patches', 'frames'; did you mean 'tokens'"),
        (changed_json(input=None), "input"),
        (changed_json(input=[1, 2]), "input"),
        (changed_json(decoder={"pattern": [{"blocks": [], "times": 1}]}), "at least one block"),
        (changed_json(decoder={"pattern": 3}), "pattern"),
        (changed_json(decoder={"pattern": ["x"]}), r"decoder.pattern.0 must be an object"),
        (changed_json(tie="outputs"), "did you mean 'output'"),
        ([], "must be an object with named fields"),
        (None, "must be an object with named fields"),
    ],
)  # fmt: skip
def test_a_mistake_in_json_is_reported_with_its_path(data, message):
    assert_config_error(message, lambda: ModelConfig.from_dict(data))


@pytest.mark.parametrize("text", ["", "{", "nonsense", '{"input": NaN', "[1]", "12"])
def test_text_that_is_not_a_configuration_is_an_error(text):
    with pytest.raises(ConfigError):
        ModelConfig.from_json(text)


@pytest.mark.parametrize("cls", [AttentionConfig, NormConfig])
def test_parts_round_trip_on_their_own(cls):
    part = ATTENTION if cls is AttentionConfig else NormConfig(kind="rms", affine="scale")
    assert from_dict(cls, json.loads(json.dumps(to_dict(part)))) == part
