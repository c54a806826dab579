"""Config fields against the published classes: the same defaults, and every field is either read or refused."""

import json
import warnings

import pytest

transformers = pytest.importorskip("transformers")

from monoblock.errors import MonoblockError  # noqa: E402
from monoblock.interop.huggingface.field_rules import MISSING, is_harmless  # noqa: E402
from monoblock.interop.huggingface.load import FAMILIES  # noqa: E402


def default_config(model_type):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.CONFIG_MAPPING[model_type]()


# A family computes what these say if they are null or false, and refuses another value.
OFF = {"add_cross_attention", "apply_residual_connection_post_layernorm", "is_decoder", "use_bidirectional_attention"}


def default_fields(family):
    return {name: default for rule in family.fields for name, default in rule.defaults.items()}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_the_published_class(model_type):
    """Defaults of None, which follow from other fields, are left to the comparison of logits."""
    published = json.loads(default_config(model_type).to_json_string())
    for name, default in default_fields(FAMILIES[model_type]).items():
        if default is not MISSING and default is not None and published.get(name) is not None:
            assert published[name] == (list(default) if isinstance(default, tuple) else default), name


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_of_the_published_class_has_a_rule_or_is_harmless_whatever_its_value(model_type):
    published = json.loads(default_config(model_type).to_json_string())
    known = {*default_fields(FAMILIES[model_type]), *FAMILIES[model_type].field_aliases}
    unknown = {name for name in published if name not in known and not is_harmless(name, "another value")}
    assert unknown <= {name for name in OFF & {*published} if is_harmless(name, published[name])}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_classes_of_a_family_are_published(model_type):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [name for name in FAMILIES[model_type].classes if not hasattr(transformers, name)] == []


# The published classes do not use these fields, or only if another one is absent, or only with another head.
WINDOW_SWITCHES = {"use_sliding_window", "max_window_layers"}  # layer_types takes precedence, or a window of None
PARTIAL_ROTARY = {"partial_rotary_factor"}  # rope_parameters takes precedence
UNUSED_FIELDS = {
    "qwen2": WINDOW_SWITCHES,
    "qwen3": WINDOW_SWITCHES,
    "qwen3_moe": WINDOW_SWITCHES | {"intermediate_size"},
    "smollm3": WINDOW_SWITCHES | {"no_rope_layer_interval"},
    "phi3": {"original_max_position_embeddings"},
    "gemma3_text": {"_sliding_window_pattern"},
    "gpt_bigcode": {"num_key_value_heads"},
    "gpt_neox": {"is_decoder"},
    "mpt": {"learned_pos_emb"},
    "falcon": {"num_kv_heads"},
    "biogpt": {"layer_norm_eps"},
    "distilbert": {"sinusoidal_pos_embds"},
    "modernbert": {"classifier_pooling", "classifier_activation", "classifier_bias"},  # only with a head
    "t5": {"scale_decoder_outputs", "tie_word_embeddings"},  # decided by the tensors
    "vit": {"pooler_output_size"},
    "deit": {"pooler_output_size"},
    "clip_vision_model": {"projection_dim"},
    "clip_text_model": {"projection_dim"},
}
CHANGE_VALUE = {bool: lambda v: not v, int: lambda v: v + 4, float: lambda v: v / 2 + 3e-3, str: lambda v: v + "x"}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_another_value_of_a_field_changes_the_configuration_or_is_refused(model_type):
    """Fields for which neither happens must be known to be unused."""
    family = FAMILIES[model_type]
    published = json.loads(default_config(model_type).to_json_string())
    class_name = next(iter(family.classes))
    original = family.build_config(family.config_tree(published, class_name), {}, tied=False)
    ignored = set()
    for field, value in published.items():
        if field not in default_fields(family) or type(value) not in CHANGE_VALUE:
            continue
        try:
            changed_fields = published | {field: CHANGE_VALUE[type(value)](value)}
            changed = family.build_config(family.config_tree(changed_fields, class_name), {}, tied=False)
        except MonoblockError:
            continue
        if changed == original:
            ignored.add(field)
    assert ignored <= PARTIAL_ROTARY | UNUSED_FIELDS.get(model_type, set()), ignored
