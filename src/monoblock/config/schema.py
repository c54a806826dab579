"""Validate frozen dataclasses against their annotations, and convert them to and from plain dicts.

Every configuration class calls `check_types(self)` when it is built, so that a wrong type is reported where it was
written. `from_dict` rejects unknown keys: a typo never becomes a silent default.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from sys import float_info
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from monoblock.errors import ConfigError, did_you_mean, shorten_message

T = TypeVar("T")


class FieldError(ConfigError):
    """An error about an invalid field. The message begins with ClassName.field, or the path that the user wrote."""

    def __init__(self, path: str, field: str, problem: str) -> None:
        super().__init__(path, field, problem)
        self.path, self.field, self.problem = path, field, problem

    def __str__(self) -> str:
        return shorten_message(
            f"{self.path}.{self.field}{self.problem}" if self.path else f"{self.field}{self.problem}"
        )

    def with_path(self, path: str) -> FieldError:
        """Return the same error under another path."""
        return FieldError(path, self.field, self.problem)


_type_hints_cache: dict[tuple[type, bool], dict[str, Any]] = {}


def _type_hints(cls: type, *, with_checks: bool = False) -> dict[str, Any]:
    """Return the resolved annotations of a class, cached; `with_checks` leaves them Annotated."""
    key = cls, with_checks
    if key not in _type_hints_cache:
        _type_hints_cache[key] = get_type_hints(cls, include_extras=with_checks)
    return _type_hints_cache[key]


def union_members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the hint alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _matches_hint(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if origin is tuple:
        return isinstance(value, tuple) and all(_matches_hint(item, get_args(hint)[0]) for item in value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and abs(value) <= float_info.max  # neither infinite nor NaN, nor an int beyond any float
    return isinstance(value, hint)


def _describe_hint(hint: Any) -> str:
    """Describe a type annotation in words, such as "a whole number or none" or "one of 'pre', 'post'"."""
    names: dict[Any, str] = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
    names |= {dict: "a table", type(None): "none"}
    words = []
    for member in union_members(hint):
        if get_origin(member) is Literal:
            choices = [repr(choice) for choice in get_args(member)]
            words.append(choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}")
        elif get_origin(member) is tuple:
            words.append(f"a tuple of {_describe_hint(get_args(member)[0])}")
        else:
            words.append(names.get(member, f"a {getattr(member, '__name__', member)}"))
    return " or ".join(words)


def check_types(config: Any) -> None:
    """Raise ConfigError unless every field of this dataclass matches its annotation, and passes the checks in it.

    `Annotated[float, check_fraction]` has a check, which is called with the dataclass and the name of the field.
    """
    for name, hint in _type_hints(type(config)).items():
        value = getattr(config, name)
        members = union_members(hint)
        if not any(_matches_hint(value, member) for member in members):
            suggestion = ""
            if isinstance(value, str):
                literals = [member for member in members if get_origin(member) is Literal]
                suggestion = did_you_mean(value, [choice for literal in literals for choice in get_args(literal)])
            raise _field_error(config, name, f"={value!r} is not {_describe_hint(hint)}{suggestion}")
    for name, hint in _type_hints(type(config), with_checks=True).items():
        for check in getattr(hint, "__metadata__", ()):
            check(config, name)


def _field_error(config: Any, name: str, problem: str) -> FieldError:
    return FieldError(type(config).__name__, name, problem)


def check_at_least(config: Any, minimum: float, *names: str) -> None:
    """Raise ConfigError if one of the named numbers is below `minimum`; None is allowed."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < minimum:
            raise _field_error(config, name, f"={value} is too small; write {minimum} or more")


def check_at_most(config: Any, maximum: int, *names: str) -> None:
    """Raise ConfigError if one of the named numbers is above `maximum`; None is allowed."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value > maximum:
            raise _field_error(config, name, f"={shorten_int(value)} is too large; write {maximum} or less")


def within(low: float | None = None, high: int | None = None) -> Callable[[Any, str], None]:
    """Return the check of bounds for the annotation of a field: `Annotated[int, within(1, MAX_HEADS)]`."""

    def check(config: Any, name: str) -> None:
        if low is not None:
            check_at_least(config, low, name)
        if high is not None:
            check_at_most(config, high, name)

    return check


def shorten_int(value: int) -> str:
    """Return a number for an error message, where thousands of digits would help nobody."""
    return str(value) if value < 2**63 else f"2**{value.bit_length() - 1} or more"


def check_positive(config: Any, *names: str) -> None:
    """Raise ConfigError unless the named numbers are above zero; None is allowed."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            can_be_none = type(None) in union_members(_type_hints(type(config))[name])
            raise _field_error(config, name, f"={value} must be positive{', or None' if can_be_none else ''}")


def check_fraction(config: Any, *names: str) -> None:
    """Raise ConfigError unless the named numbers are in [0, 1), as dropout rates are; None is allowed."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 <= value < 1:
            raise _field_error(config, name, f"={value} is not a rate; write 0 or more and less than 1")


MAX_DIVISOR_DISTANCE = 100_000  # how far to search before falling back to 1


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of `number` closest to `wanted`, as a suggestion in an error message."""
    if wanted >= number:
        return number
    for step in range(min(wanted, MAX_DIVISOR_DISTANCE)):
        for divisor in (wanted - step, wanted + step):
            if number % divisor == 0:
                return divisor
    return 1


def to_dict(value: Any) -> Any:
    """Convert a configuration to dicts, lists, strings and numbers, including fields with their default value."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_dict(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_dict(item) for item in value]
    return value


def from_dict(cls: type[T], data: Any, path: str = "") -> T:
    """Build `cls` from the output of `to_dict`; unknown and missing keys raise ConfigError."""
    location = path or cls.__name__
    if not isinstance(data, Mapping):
        raise ConfigError(f"{location} must be an object with named fields, not {data!r:.60}")
    hints = _type_hints(cls)
    for key in data:
        if key not in hints:
            raise ConfigError(f"{location} has no field {key!r}{did_you_mean(str(key), list(hints))}")
    required = {field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING}  # type: ignore[arg-type]
    missing = sorted(required - set(data))
    if missing:
        raise ConfigError(f"{location} lacks the field {missing[0]!r}, which has no default; add it")
    values = {key: _parse_value(hints[key], value, f"{path}.{key}" if path else key) for key, value in data.items()}
    try:
        return cls(**values)
    except FieldError as problem:  # the user knows the path, not the name of the class
        raise (problem.with_path(path) if path and problem.path == cls.__name__ else problem) from None


def _parse_value(hint: Any, data: Any, path: str) -> Any:
    """Convert JSON to the annotated dataclass or tuple; numbers, strings and booleans are left to `check_types`."""
    alternatives = union_members(hint)
    for member in alternatives:
        if get_origin(member) is tuple and isinstance(data, Sequence) and not isinstance(data, str):
            return tuple(_parse_value(get_args(member)[0], item, f"{path}.{i}") for i, item in enumerate(data))
    classes = [member for member in alternatives if dataclasses.is_dataclass(member)]
    if not classes or data is None:
        return data
    if len(classes) == 1:
        return from_dict(classes[0], data, path)  # type: ignore[arg-type]
    return from_dict(_class_by_kind(classes, data, path), data, path)


def _class_by_kind(classes: Sequence[Any], data: Any, path: str) -> type:
    """Return the dataclass whose `kind` is data["kind"]."""
    kinds = {get_args(_type_hints(cls)["kind"])[0]: cls for cls in classes}
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if not isinstance(kind, str) or kind not in kinds:
        listed = ", ".join(repr(name) for name in kinds)
        raise ConfigError(f"{path}.kind={kind!r} is not one of {listed}{did_you_mean(str(kind), list(kinds))}")
    return kinds[kind]
