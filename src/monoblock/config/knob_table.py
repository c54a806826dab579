"""List the knobs of `vary` with their values, defaults, meanings and papers, and what each family sets them to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from monoblock.config.field_description import REQUIRED, allows_none, describe_fields, list_choices
from monoblock.config.knob_options import KNOB_PAPERS, Knobs
from monoblock.config.knobs import KNOBS, SetField, SetSelfAttention, vary
from monoblock.config.model import (
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    ModelConfig,
    PatchConfig,
    Repeat,
    StackConfig,
)
from monoblock.errors import ConfigError


class KnobDescription(NamedTuple):
    name: str
    hint: Any  # the type annotation
    default: Any  # REQUIRED if the family or preset decides
    meaning: str
    paper: str


def list_knobs() -> list[KnobDescription]:
    """Describe all knobs, in the order of KNOBS."""
    options = {option.name: option for option in describe_fields(Knobs)}
    return [
        KnobDescription(
            name, options[name].hint, _default_value(name, options[name].hint), options[name].meaning, KNOB_PAPERS[name]
        )
        for name in KNOBS
    ]


def _default_value(name: str, hint: Any) -> Any:
    """Return the value of a knob in a configuration that says nothing about it."""
    classes, setter = KNOBS[name][0]
    match setter:
        case SetField(field):
            default = _field_default(classes[0], field)
            return REQUIRED if default is None and not allows_none(hint) else default
        case SetSelfAttention(field):
            return _field_default(AttentionConfig, field)
    values = read_knob(PLAIN_CONFIG, name)
    return values[0] if len(values) == 1 else REQUIRED


def _field_default(cls: type, name: str) -> Any:
    return next(field.default for field in dataclasses.fields(cls) if field.name == name)


def read_knob(config: ModelConfig, name: str) -> list[Any]:
    """Return the different values that a knob has in the parts of a configuration; [] if no part has it."""
    if name in READERS:
        return READERS[name](config)
    classes, setter = KNOBS[name][0]
    values: list[Any] = []
    for part in _parts(config):
        if isinstance(part, classes):
            match setter:
                case SetField(field):
                    values.append(getattr(part, field))
                case SetSelfAttention(field):
                    values.append(getattr(getattr(part, "attention", None), field))
                case _:
                    choices = list_choices(_knob_hint(name))
                    kept = [choice for choice in choices if _keeps(config, name, choice)]
                    return kept if len(kept) < len(choices) else []  # if all leave it as it is, it has no such part
    return _unique(values)


def _knob_hint(name: str) -> Any:
    return next(option.hint for option in describe_fields(Knobs) if option.name == name)


def _keeps(config: ModelConfig, name: str, value: Any) -> bool:
    """Whether setting a knob to a value leaves the configuration as it is, so that this is its present value."""
    try:
        return vary(config, **{name: value}) == config
    except ConfigError:
        return False


def _parts(part: Any) -> Iterator[Any]:
    """Yield a configuration and all configurations in it."""
    if isinstance(part, tuple):
        for item in part:
            yield from _parts(item)
    elif dataclasses.is_dataclass(part):
        yield part
        for field in dataclasses.fields(part):
            yield from _parts(getattr(part, field.name))


def _unique(values: list[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _read_positions(config: ModelConfig) -> list[Any]:
    inputs = [part.positions for part in _parts(config) if isinstance(part, (EmbeddingConfig, PatchConfig))]
    blocks = [part.attention.positions for part in _parts(config) if isinstance(part, BlockConfig)]
    return _unique([scheme.kind for scheme in inputs + blocks if scheme is not None]) or ["none"]


def _read_head(config: ModelConfig) -> list[Any]:
    return [config.head.kind if config.head else "none"]


READERS: dict[str, Callable[[ModelConfig], list[Any]]] = {"positions": _read_positions, "head": _read_head}

# A configuration whose parts have only the fields that are required.
PLAIN_BLOCK = BlockConfig(width=1, attention=AttentionConfig(heads=1), feedforward=FeedForwardConfig(hidden=1))
PLAIN_CONFIG = ModelConfig(
    input=EmbeddingConfig(vocab=1), decoder=StackConfig(pattern=(Repeat(blocks=(PLAIN_BLOCK,)),))
)
