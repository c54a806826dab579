"""Frozen dataclasses checked against their own annotations, to JSON and back.

Every configuration class calls `check(self)` when it is built, so a wrong type is one sentence at the place
where it was written, and `from_dict` refuses what it does not know: a typo never becomes a silent default.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from monoblock.errors import ConfigError, did_you_mean

T = TypeVar("T")


class FieldError(ConfigError):
    """A field that holds what it cannot: named by its class, and by the user's own key once somebody knows that."""

    def __init__(self, place: str, field: str, problem: str) -> None:
        super().__init__(place, field, problem)
        self.place, self.field, self.problem = place, field, problem

    def __str__(self) -> str:
        return f"{self.place}.{self.field}{self.problem}" if self.place else f"{self.field}{self.problem}"

    def at(self, place: str) -> FieldError:
        """The same of a field that the user knows under another name."""
        return FieldError(place, self.field, self.problem)


_known: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    """The annotations of a class, resolved once."""
    if cls not in _known:
        _known[cls] = get_type_hints(cls)
    return _known[cls]


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the hint alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    return isinstance(value, hint)


def _spoken(hint: Any) -> str:
    """How an annotation is said to a user: "a whole number or none", "one of 'pre', 'post'"."""
    words: dict[Any, str] = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
    words |= {dict: "a table", type(None): "none"}
    spoken = []
    for one in _alternatives(hint):
        if get_origin(one) is Literal:
            spoken.append("one of " + ", ".join(repr(choice) for choice in get_args(one)))
        elif get_origin(one) is tuple:
            spoken.append(f"a tuple of {_spoken(get_args(one)[0])}")
        else:
            spoken.append(words.get(one, f"a {getattr(one, '__name__', one)}"))
    return " or ".join(spoken)


def check(config: Any) -> None:
    """Raise ConfigError unless every field of this dataclass holds what its annotation says."""
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        if not any(_fits(value, one) for one in _alternatives(hint)):
            hint_text = _spoken(hint)
            suggestion = ""
            if isinstance(value, str):
                choices = [c for one in _alternatives(hint) if get_origin(one) is Literal for c in get_args(one)]
                suggestion = did_you_mean(value, choices)
            raise _wrong(config, name, f"={value!r} cannot be: it is {hint_text}{suggestion}")


def _wrong(config: Any, name: str, problem: str) -> FieldError:
    return FieldError(type(config).__name__, name, problem)


def check_at_least(config: Any, least: float, *names: str) -> None:
    """Raise ConfigError when one of the named numbers (none excepted) is below `least`."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise _wrong(config, name, f"={value} is too small; write {least} or more")


def check_positive(config: Any, *names: str) -> None:
    """Raise ConfigError unless the named numbers (none excepted) are above zero."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise _wrong(config, name, f"={value} must be positive; None switches it off")


def check_fraction(config: Any, *names: str) -> None:
    """Raise ConfigError unless the named numbers lie in [0, 1): dropout rates."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise _wrong(config, name, f"={value} is no rate; write a number from 0 to below 1")


LOOKED_AT = 100_000  # numbers to each side, before 1 is good enough


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` closest to `wanted`: what to write instead of one that does not divide."""
    if wanted >= number:
        return number
    for step in range(min(wanted, LOOKED_AT)):
        for divisor in (wanted - step, wanted + step):
            if number % divisor == 0:
                return divisor
    return 1


def to_dict(value: Any) -> Any:
    """A configuration as plain dicts, lists, strings and numbers, every field written out."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_dict(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_dict(item) for item in value]
    return value


def from_dict(cls: type[T], data: Any, path: str = "") -> T:
    """Build `cls` from what `to_dict` wrote; an unknown key is an error that names it and its nearest neighbour."""
    place = path or cls.__name__
    if not isinstance(data, Mapping):
        raise ConfigError(f"{place} must be an object with named fields, not {data!r:.60}")
    hints = _hints(cls)
    for key in data:
        if key not in hints:
            raise ConfigError(f"{place} has no field {key!r}{did_you_mean(str(key), list(hints))}")
    required = {field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING}  # type: ignore[arg-type]
    missing = sorted(required - set(data))
    if missing:
        raise ConfigError(f"{place} lacks the field {missing[0]!r}; write it")
    values = {key: _value(hints[key], value, f"{path}.{key}" if path else key) for key, value in data.items()}
    try:
        return cls(**values)
    except FieldError as problem:  # the class knows its own name, the user the place in what was written
        raise (problem.at(path) if path and problem.place == cls.__name__ else problem) from None


def _value(hint: Any, data: Any, path: str) -> Any:
    """Turn JSON into what the annotation asks for; plain values are left to `check`."""
    alternatives = _alternatives(hint)
    for one in alternatives:
        if get_origin(one) is tuple and isinstance(data, Sequence) and not isinstance(data, str):
            return tuple(_value(get_args(one)[0], item, f"{path}.{i}") for i, item in enumerate(data))
    classes = [one for one in alternatives if dataclasses.is_dataclass(one)]
    if not classes or data is None:
        return data
    if len(classes) == 1:
        return from_dict(classes[0], data, path)  # type: ignore[arg-type]
    return from_dict(_tagged(classes, data, path), data, path)


def _tagged(classes: Sequence[Any], data: Any, path: str) -> type:
    """Which of several dataclasses an object is, told by its field "kind"."""
    kinds = {get_args(_hints(cls)["kind"])[0]: cls for cls in classes}
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if kind not in kinds:
        listed = ", ".join(repr(name) for name in kinds)
        raise ConfigError(f"{path}.kind={kind!r} is none of {listed}{did_you_mean(str(kind), list(kinds))}")
    return kinds[kind]
