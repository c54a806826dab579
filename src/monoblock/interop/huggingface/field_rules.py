"""Reversible rules between the fields of a Hugging Face config.json and our configuration.

    Field("n_embd", "decoder.*.width", 768)          one field; `*` is every layer, `**.eps` every eps
    Constant("decoder.*.attention.bias", "qkv")      a property of the family that no field states
    FixedField("qk_ln", False)                       a field that must have this value
    FieldGroup({…}, read, write)                     fields that have a meaning only together

A template (a preset) is converted to a tree (config_tree.py); reading sets values in this tree, writing gets them from
it.  A field without a rule is refused by name, unless it is known to change nothing (ignored_fields.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monoblock.config.model import InitConfig, ModelConfig
from monoblock.config.schema import to_dict
from monoblock.errors import ConfigError, FileError, MonoblockError
from monoblock.interop.huggingface.config_tree import MISSING, ConfigTree, config_to_tree, get_value, set_value
from monoblock.interop.huggingface.ignored_fields import IGNORED_FIELDS, NEUTRAL_VALUES
from monoblock.untrusted_files import short_repr


def identity(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Field:
    """A Hugging Face field, named `theirs`, that sets one value of our configuration, at the path `ours`."""

    theirs: str
    ours: str  # paths separated by spaces; writing reads the first
    default: Any = MISSING  # of the class in transformers; MISSING: the field is required
    to_ours: Callable[[Any], Any] = identity
    to_theirs: Callable[[Any], Any] = identity

    @property
    def defaults(self) -> dict[str, Any]:
        return {self.theirs: self.default}

    def apply(self, fields: Mapping[str, Any], tree: ConfigTree) -> None:
        set_value(tree, self.ours, self.to_ours(fields[self.theirs]))

    def export(self, tree: ConfigTree) -> dict[str, Any]:
        value = get_value(tree, self.ours)
        return {self.theirs: self.default if value is MISSING else self.to_theirs(value)}


@dataclass(frozen=True)
class Constant:
    """A value of our configuration, at the path `ours`, that is the same for the whole family."""

    ours: str
    value: Any

    @property
    def defaults(self) -> dict[str, Any]:
        return {}

    def apply(self, fields: Mapping[str, Any], tree: ConfigTree) -> None:
        set_value(tree, self.ours, self.value)

    def export(self, tree: ConfigTree) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class FixedField:
    """A Hugging Face field, named `theirs`, that must have one value, or an equivalent of it."""

    theirs: str
    value: Any
    equivalents: tuple[Any, ...] = ()

    @property
    def defaults(self) -> dict[str, Any]:
        return {self.theirs: self.value}

    def apply(self, fields: Mapping[str, Any], tree: ConfigTree) -> None:
        if fields[self.theirs] not in (self.value, *self.equivalents):
            value = short_repr(fields[self.theirs])
            raise ConfigError(f"{self.theirs}={value} is not supported: only {short_repr(self.value)} is")

    def export(self, tree: ConfigTree) -> dict[str, Any]:
        return {self.theirs: self.value}


@dataclass(frozen=True)
class FieldGroup:
    """Hugging Face fields, with their defaults, that two functions read and write together."""

    defaults: Mapping[str, Any]
    read: Callable[[Mapping[str, Any], ConfigTree], None]
    write: Callable[[ConfigTree], dict[str, Any]]

    def apply(self, fields: Mapping[str, Any], tree: ConfigTree) -> None:
        self.read(fields, tree)

    def export(self, tree: ConfigTree) -> dict[str, Any]:
        return self.write(tree)


FieldRule = Field | Constant | FixedField | FieldGroup


def check_fields(
    rules: Sequence[FieldRule], fields: Mapping[str, Any], ignored: frozenset[str] = IGNORED_FIELDS
) -> dict[str, Any]:
    """Return the fields with defaults filled in; raise for an unknown field, unless it is known to change nothing."""
    known = {name: default for rule in rules for name, default in rule.defaults.items()}
    for name, value in fields.items():
        if name not in known and name not in ignored and value not in NEUTRAL_VALUES.get(name, ()):
            raise FileError(
                f"its field {short_repr(name)} ({short_repr(value)}) is not known here "
                f"and may change what the model computes; remove it if it does not"
            )
    for name, default in known.items():
        if default is MISSING and name not in fields:
            raise FileError(f"it lacks the field {name!r}")
    return known | {name: value for name, value in fields.items() if name in known}


def read_fields(
    rules: Sequence[FieldRule], fields: Mapping[str, Any], template: ModelConfig, head: ConfigTree | None
) -> ConfigTree:
    """Return the configuration tree of a template with this head and with the fields of a config.json applied."""
    tree = config_to_tree(template)
    tree["head"], tree["tie"], tree["init"] = copy.deepcopy(head), "none", to_dict(InitConfig())
    for rule in rules:
        try:
            rule.apply(fields, tree)
        except MonoblockError:
            raise
        except (TypeError, AttributeError, LookupError, ArithmeticError, ValueError) as error:
            values = ", ".join(f"{name}={short_repr(fields[name])}" for name in rule.defaults)
            raise ConfigError(f"{values} is not valid: {' '.join(str(error).split())[:80]}") from None
    return tree


def write_fields(rules: Sequence[FieldRule], config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a config.json for our configuration."""
    tree, fields = config_to_tree(config), dict[str, Any]()
    for rule in rules:
        fields.update(rule.export(tree))
    return fields
