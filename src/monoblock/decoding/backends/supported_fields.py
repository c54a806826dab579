"""Allow-lists of configuration fields and values that a backend supports.

    SUPPORTED = {**allow("norm_place residual"), "attention.mask": one_of("causal"), …}
    unsupported_field(block, SUPPORTED)     # None, or the first field that the table does not allow

A field that is missing from the table is not supported, whatever its value.  So no backend runs a configuration with a
new field until the field is added to that backend's table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

Rule = Callable[[Any], bool]
AllowList = Mapping[str, Rule]


def anything(value: object) -> bool:
    """Allow every value."""
    return True


def one_of(*values: object) -> Rule:
    """Allow these values only."""
    return lambda value: value in values


def allow(names: str, prefix: str = "") -> dict[str, Rule]:
    """Allow every value of the fields in `names`, separated by spaces, each with `prefix` before its name."""
    return {f"{prefix}{name}": anything for name in names.split()}


def unsupported_field(config: object, allowed: AllowList) -> str | None:
    """Return the first field that is not allowed, as `attention.window=128`, or None if all are."""
    for path, value in flatten(config):
        rule = allowed.get(path)
        if rule is None or not rule(value):
            return f"{path}={value!r}"
    return None


def flatten(config: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted path, value) of each field of a configuration and of the configurations inside it."""
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from flatten(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value
