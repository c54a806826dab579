"""What a file does not say is what the published class would take, and what it says is either read or refused."""

import json
import warnings

import pytest

transformers = pytest.importorskip("transformers")

from monoblock.errors import MonoblockError  # noqa: E402
from monoblock.interop.hf_config import MISSING  # noqa: E402
from monoblock.interop.hf_harmless import HARMLESS, NEUTRAL  # noqa: E402
from monoblock.interop.hf_table import FAMILIES  # noqa: E402


def published(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.CONFIG_MAPPING[kind]()


def fields(family):
    return {name: default for row in family.rows for name, default in row.names.items()}


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_are_those_of_the_published_class(kind):
    """None stands for what follows from other fields, and is left to the comparison of logits."""
    given = json.loads(published(kind).to_json_string())
    for name, default in fields(FAMILIES[kind]).items():
        if default is not MISSING and default is not None and given.get(name) is not None:
            assert given[name] == (list(default) if isinstance(default, tuple) else default), name


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_field_of_the_published_class_is_known(kind):
    given = json.loads(published(kind).to_json_string())
    known = {*fields(FAMILIES[kind]), *FAMILIES[kind].synonyms}
    unknown = {name for name in given if name not in known and name not in HARMLESS}
    assert not {name for name in unknown if given[name] not in NEUTRAL.get(name, ())}


# The published classes do not look at these, or only where another field does not speak, or under another class.
SWITCH = {"use_sliding_window", "max_window_layers"}  # layer_types decides, or a window of None
PARTIAL = {"partial_rotary_factor"}  # stands in rope_parameters as well, which decide
UNHEEDED = {
    "qwen2": SWITCH,
    "qwen3": SWITCH,
    "qwen3_moe": SWITCH | {"intermediate_size"},
    "smollm3": SWITCH | {"no_rope_layer_interval"},
    "phi3": {"original_max_position_embeddings"},
    "gemma3_text": {"_sliding_window_pattern"},
    "gpt_bigcode": {"num_key_value_heads"},
    "gpt_neox": {"is_decoder"},
    "mpt": {"learned_pos_emb"},
    "falcon": {"num_kv_heads"},
    "biogpt": {"layer_norm_eps"},
    "distilbert": {"sinusoidal_pos_embds"},
    "t5": {"scale_decoder_outputs", "tie_word_embeddings"},  # settled with the tensors
    "vit": {"pooler_output_size"},
    "deit": {"pooler_output_size"},
    "clip_vision_model": {"projection_dim"},
    "clip_text_model": {"projection_dim"},
}
OTHER = {bool: lambda v: not v, int: lambda v: v + 4, float: lambda v: v / 2 + 3e-3, str: lambda v: v + "x"}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_field_that_is_read_is_not_silently_dropped(kind):
    """Another value gives another configuration, or is refused; what neither does must be known to be unheeded."""
    family = FAMILIES[kind]
    given = json.loads(published(kind).to_json_string())
    name = next(iter(family.classes))
    usual = family.config(family.tree(given, name), tied=False)
    silent = set()
    for field, value in given.items():
        if field not in fields(family) or type(value) not in OTHER:
            continue
        try:
            changed = family.config(family.tree(given | {field: OTHER[type(value)](value)}, name), tied=False)
        except MonoblockError:
            continue
        if changed == usual:
            silent.add(field)
    assert silent <= PARTIAL | UNHEEDED.get(kind, set()), silent
