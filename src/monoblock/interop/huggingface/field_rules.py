"""Reversible rules between the fields of a Hugging Face config.json and our configuration.

    Field("n_embd", "decoder.*.width", 768)          a field that sets one of our values (default 768)
    Constant("decoder.*.attention.bias", "qkv")      one of our values that the family fixes without a field
    FixedField("qk_ln", False)                       a field that must have this value
    FieldGroup({…}, read, write)                     fields that are read and written together

Our values are given by paths in a configuration tree (config_tree.py), in which `*` is every layer and `**.eps` every
field named eps.  Reading a config.json sets values in the tree of the family's template; writing gets them from the
tree of a model.  A field without a rule is an error, unless it is harmless (ignored_fields.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monoblock.config.model import InitConfig, ModelConfig
from monoblock.config.schema import to_dict
from monoblock.errors import ConfigError, FileError, InputError, MonoblockError, did_you_mean
from monoblock.interop.huggingface.config_tree import MISSING, ConfigTree, config_to_tree, get_value, set_value
from monoblock.interop.huggingface.ignored_fields import is_harmless
from monoblock.untrusted_files import short_repr


def identity(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Field:
    """A rule for the Hugging Face field `theirs`, which sets one value of our configuration, at the path `ours`."""

    theirs: str
    ours: str  # one path or several, separated by spaces; writing takes the value at the first
    default: Any = MISSING  # the default in transformers; MISSING if the field is required
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
    """A rule for a value of our configuration, at the path `ours`, that is the same in the whole family."""

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
    """A rule for the Hugging Face field `theirs`, which must have this value or one of its `equivalents`."""

    theirs: str
    value: Any
    equivalents: tuple[Any, ...] = ()

    @property
    def defaults(self) -> dict[str, Any]:
        return {self.theirs: self.value}

    def apply(self, fields: Mapping[str, Any], tree: ConfigTree) -> None:
        if fields[self.theirs] not in (self.value, *self.equivalents):
            value = short_repr(fields[self.theirs])
            raise ConfigError(f"{self.theirs}={value} is not supported; only {short_repr(self.value)} is")

    def export(self, tree: ConfigTree) -> dict[str, Any]:
        return {self.theirs: self.value}


@dataclass(frozen=True)
class FieldGroup:
    """A rule for several Hugging Face fields, given with their defaults, that are read and written together."""

    defaults: Mapping[str, Any]
    read: Callable[[Mapping[str, Any], ConfigTree], None]
    write: Callable[[ConfigTree], dict[str, Any]]

    def apply(self, fields: Mapping[str, Any], tree: ConfigTree) -> None:
        self.read(fields, tree)

    def export(self, tree: ConfigTree) -> dict[str, Any]:
        return self.write(tree)


FieldRule = Field | Constant | FixedField | FieldGroup


def without_fields(fields: Mapping[str, Any], ignored: Sequence[str]) -> Mapping[str, Any]:
    """Return the fields without the `ignored` ones, which the user says have no effect."""
    missing = next((name for name in ignored if name not in fields), None)
    if missing is not None:
        raise InputError(f"ignore_fields: the model's file has no field {missing!r}{did_you_mean(missing, fields)}")
    return {name: value for name, value in fields.items() if name not in ignored}


def check_fields(
    rules: Sequence[FieldRule], fields: Mapping[str, Any], harmless: Callable[[str, Any], bool] = is_harmless
) -> dict[str, Any]:
    """Return the fields of a config.json that have rules, with defaults filled in.

    `harmless` is a function of a name and a value: whether a field without a rule cannot change what is computed.
    Raise FileError if a required field is missing, or for a field without a rule that may change what is computed.
    """
    known = {name: default for rule in rules for name, default in rule.defaults.items()}
    unknown = {name: value for name, value in fields.items() if name not in known and not harmless(name, value)}
    if unknown:
        raise FileError(_describe_unknown(unknown))
    for name, default in known.items():
        if default is MISSING and name not in fields:
            raise FileError(f"it lacks the field {name!r}")
    return known | {name: value for name, value in fields.items() if name in known}


def _describe_unknown(fields: Mapping[str, Any], at_most: int = 6) -> str:
    """Return the error message for fields that have no rule and may matter."""
    names = [short_repr(name) for name in fields]
    named = ", ".join(f"{short_repr(name)} ({short_repr(value)})" for name, value in list(fields.items())[:at_most])
    named += f" and {len(names) - at_most} more" if len(names) > at_most else ""
    one = len(names) == 1
    return (
        f"its field{'' if one else 's'} {named} {'is' if one else 'are'} not known here and may change what the model "
        f"computes; if {'it has' if one else 'they have'} no effect, write ignore_fields=[{', '.join(names)}], or "
        f"monoblock convert … --ignore-field {'NAME' if len(names) > 1 else names[0]}"
    )


def read_fields(
    rules: Sequence[FieldRule], fields: Mapping[str, Any], template: ModelConfig, head: ConfigTree | None
) -> ConfigTree:
    """Return the configuration tree of a template, with this head and with the values from a config.json."""
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
    """Convert our configuration to the fields of a config.json."""
    tree, fields = config_to_tree(config), dict[str, Any]()
    for rule in rules:
        fields.update(rule.export(tree))
    return fields
