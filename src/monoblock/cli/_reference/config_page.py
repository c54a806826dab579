"""The page docs/config.md: the families, the knobs, and every field of the configuration classes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

from monoblock.cli._reference.markdown import code, join_page, table
from monoblock.cli._shared.value_text import format_python
from monoblock.config import model
from monoblock.config.field_description import allows_none, describe_fields, list_choices, type_words
from monoblock.config.knob_options import StyleKnobs
from monoblock.config.knob_table import list_knobs, read_knob
from monoblock.interop.huggingface.families import FAMILIES as PUBLISHED_FAMILIES
from monoblock.recipes.schema import FAMILIES

INTRODUCTION = """# Configurations

A model is described by a `ModelConfig`: frozen data that says which parts a model has. There are four ways to get
one.

```python
import monoblock as mb

mb.preset("gpt2")                                                       # a published model
mb.gpt(vocab=4096, width=128, depth=4, heads=4, context=256)            # a family, by its sizes
mb.vary(mb.preset("gpt2"), norm="rms", positions="rotary", kv_heads=4)  # a change of some choices: knobs
mb.ModelConfig.from_json(open("config.json").read())                    # the file of a model folder
```

The families take every knob as a further argument, and a recipe has the same names in its section
[`[model]`](recipes.md). `monoblock ls presets` lists the published models, and `monoblock ls knobs` the knobs."""

# Sizes that differ from those of the other arguments; the values do not matter.
SIZES = {"vocab": 8, "width": 8, "depth": 1, "heads": 2, "context": 8, "image": 8, "patch": 4, "classes": 2}

CLASSES = (
    model.ModelConfig,
    model.EmbeddingConfig,
    model.PatchConfig,
    model.FramesConfig,
    model.StackConfig,
    model.Repeat,
    model.BlockConfig,
    model.AttentionConfig,
    model.FeedForwardConfig,
    model.ExpertsConfig,
    model.NormConfig,
    model.Learned,
    model.Sinusoid,
    model.Rotary,
    model.Scaling,
    model.Alibi,
    model.Buckets,
    model.HeadConfig,
    model.InitConfig,
    model.QuantizeConfig,
    model.RecurrentConfig,
)
CLASS_NAMES = {cls.__name__ for cls in CLASSES}


def build_config_page() -> str:
    return join_page(
        INTRODUCTION,
        "## Families",
        _family_table(),
        "This is how the families differ. Where two values are given, the first is that of the encoder.",
        _family_knob_table(),
        "## Published families",
        f"Folders of {len(PUBLISHED_FAMILIES)} Hugging Face families (`model_type`) are read and written:",
        ", ".join(sorted(map(code, PUBLISHED_FAMILIES))) + ".",
        "## Knobs",
        "A knob changes one choice everywhere in a model and keeps the rest. The default is that of the configuration "
        "classes, which a family or preset may change (see above); — means that the family or preset always decides.",
        _knob_table(),
        "## Fields",
        "The classes that a `ModelConfig` is made of, with all their fields. A field without a default (—) must be "
        "given. Every value is checked when an object is built; a wrong one raises `ConfigError`, which says what to "
        "write instead.",
        *(part for cls in CLASSES for part in _describe_class(cls)),
    )


def _family_table() -> str:
    rows = []
    for name, build in FAMILIES.items():
        arguments = [item for item in inspect.signature(build).parameters.values() if item.kind is item.KEYWORD_ONLY]
        needed = ", ".join(code(item.name) for item in arguments if item.default is item.empty)
        optional = ", ".join(
            code(item.name if item.default is None else f"{item.name}={format_python(item.default)}")
            for item in arguments
            if item.default is not item.empty
        )
        about = (inspect.getdoc(build) or "").split("\n\n")[0]
        rows.append((code(name), " ".join(about.split()), needed, optional))
    return table(("family", "architecture", "required", "optional"), rows)


def _family_knob_table() -> str:
    """Return a table of the style knobs that are not the same in all families."""
    configs = [_build_family(name) for name in FAMILIES]
    rows = []
    for knob in get_type_hints(StyleKnobs):
        values = [", ".join(format_python(value) for value in read_knob(config, knob)) for config in configs]
        if len({value for value in values if value}) > 1:
            rows.append((code(knob), *(code(value) or "—" for value in values)))
    return table(("knob", *FAMILIES), rows)


def _build_family(name: str) -> model.ModelConfig:
    arguments = inspect.signature(FAMILIES[name]).parameters.values()
    needed = [item.name for item in arguments if item.kind is item.KEYWORD_ONLY and item.default is item.empty]
    return FAMILIES[name](**{argument: SIZES[argument] for argument in needed})


def _knob_table() -> str:
    rows = [
        (
            code(knob.name),
            _value_text(knob.hint),
            code(format_python(knob.default)),
            _link_values(knob.meaning),
            knob.paper,
        )
        for knob in list_knobs()
    ]
    return table(("knob", "values", "default", "meaning", "paper"), rows)


def _describe_class(cls: type) -> Iterator[str]:
    yield f"### {cls.__name__}"
    yield inspect.getdoc(cls) or ""
    rows = [
        (code(field.name), _value_text(field.hint), code(format_python(field.default)), _link_values(field.meaning))
        for field in describe_fields(cls)
    ]
    yield table(("field", "values", "default", "meaning"), rows)


def _value_text(hint: Any) -> str:
    """Describe a type, with links to the classes in it."""
    words = [re.sub(r"[A-Z]\w+", _link_class, word) for word in type_words(hint)]
    words += [code(format_python(choice)) for choice in list_choices(hint)]
    return ", ".join([*words, *([code("None")] if allows_none(hint) else [])])


def _link_class(match: re.Match[str]) -> str:
    name = match[0]
    return f"[{name}](#{name.lower()})" if name in CLASS_NAMES else name


def _link_values(meaning: str) -> str:
    """Write "None" in a meaning as code."""
    return re.sub(r"\bNone\b", "`None`", meaning)
