"""What docs/serving.md says has no way to other servers is what the code refuses to write as a Hugging Face folder."""

import re
from collections.abc import Iterator
from typing import get_args, get_type_hints

import pytest
from site_pages import ROOT

from monoblock.config.field_description import list_choices
from monoblock.config.knobs import list_knobs, vary
from monoblock.config.parts import Scaling
from monoblock.config.presets import preset
from monoblock.errors import ConfigError
from monoblock.interop.huggingface.decoders import DECODERS
from monoblock.interop.huggingface.export import choose_family

# A value of each knob that is a number, which most models do not have, and what it needs.
NUMBERS = {
    **{
        "vocab": 1000,
        "context": 64,
        "width": 256,
        "depth": 2,
        "heads": 8,
        "kv_heads": 1,
        "head_dim": 32,
        "hidden": 600,
    },
    **{"value_dim": 48, "scale": 0.1, "softcap": 30.0, "embedding_scale": 2.0, "segments": 2, "eps": 1e-4, "std": 0.1},
    **{"window": 64, "random_blocks": 1, "block_size": 32, "rotary_base": 500.0, "rotary_dim": 16},
    **{"experts": 4, "top_k": 3, "dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1},
    **{"word_dropout": 0.1, "head_dropout": 0.1},
}
NEEDED = {
    "global_tokens": {"window": 64},
    "random_blocks": {"window": 64},
    "block_size": {"window": 64, "random_blocks": 1},
}
NOT_OF_TEXT = {"image", "patch", "channels", "classes"}
FACTORS = {"short_factors": (1.0,) * 64, "long_factors": (2.0,) * 64}
# Each has what the others lack.
BASES = [
    "llama-7b",
    "gpt2",
    "gemma2-2b",
    "mixtral-8x7b",
    "bloom-560m",
    "pythia-160m",
    "gptj-6b",
    "olmo2-7b",
    "opt-125m",
]


def settings() -> Iterator[tuple[str, dict[str, object]]]:
    """Yield a knob as the page writes it, and what it is set with."""
    for knob in list_knobs():
        if knob.name in NOT_OF_TEXT:
            continue
        if knob.name == "scaling":
            for kind in get_args(get_type_hints(Scaling)["kind"]):
                more = {} if kind in ("linear", "ntk", "proportional") else {"original_context": 2048}
                more |= FACTORS if kind == "longrope" else {}
                yield f'scaling.kind="{kind}"', {"scaling": Scaling(kind=kind, factor=2.0, **more)}
            continue
        for choice in list_choices(knob.hint):
            shown = f'"{choice}"' if isinstance(choice, str) else choice
            yield f"{knob.name}={shown}", {knob.name: choice} | (NEEDED.get(knob.name, {}) if choice else {})
        if not list_choices(knob.hint) or knob.name in NUMBERS:
            yield knob.name, {knob.name: NUMBERS[knob.name]} | NEEDED.get(knob.name, {})


def is_written(config):
    for family in DECODERS:
        try:
            choose_family(config, family.model_type)
            return True
        except ConfigError:
            pass
    return False


@pytest.mark.slow
def test_the_knobs_without_a_way_are_those_that_the_code_refuses():
    page = (ROOT / "docs" / "serving.md").read_text()
    (sentence,) = re.findall(r"These knobs have no way there: (.*?)\.\n", page, re.DOTALL)
    refused, models = set(), [vary(preset(name), depth=1) for name in BASES]
    for shown, values in settings():
        variants = []
        for base in models:
            try:
                variants.append(vary(base, **values))
            except ConfigError:  # no decoder of text has this
                continue
        if variants and not any(map(is_written, variants)):
            refused.add(shown)
    assert set(re.findall(r"`([^`]+)`", sentence)) == refused


def test_the_families_that_run_by_the_class_of_transformers_are_those_whose_class_allows_it():
    transformers = pytest.importorskip("transformers")
    table = (
        (ROOT / "docs" / "serving.md")
        .read_text()
        .partition("| family | vLLM | SGLang |")[2]
        .partition("| all others")[0]
    )
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    families = {family.model_type: family for family in DECODERS}
    for row in rows:
        for name in re.findall(r"`(\w+)`", row):
            supports = getattr(transformers, next(iter(families[name].classes)))._supports_attention_backend
            assert supports == ("class of transformers" in row or name == "persimmon"), name
    assert len(rows) == 4
