"""Write the types and default values of fields for people, in listings and in the reference pages."""

from __future__ import annotations

import dataclasses
from typing import Any

from monoblock.config.field_description import REQUIRED, allows_none, list_choices, type_words

NO_DEFAULT = "—"


def format_toml(value: Any) -> str:
    """Write a default value as in TOML, which has no None: a key that is none is left out."""
    match value:
        case _ if value is REQUIRED:
            return NO_DEFAULT
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case str():
            return f'"{value}"'
        case tuple() | list():
            return f"[{', '.join(format_toml(item) for item in value)}]"
        case _:
            return str(value)


def format_python(value: Any) -> str:
    """Write a default value as in Python, without the fields of a configuration that have their default."""
    if value is REQUIRED:
        return NO_DEFAULT
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = [field for field in dataclasses.fields(value) if getattr(value, field.name) != field.default]
        fields = (f"{field.name}={format_python(getattr(value, field.name))}" for field in changed)
        return f"{type(value).__name__}({', '.join(fields)})"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def plain(text: str) -> str:
    """Return a value without its quotes, for a terminal; an empty string keeps them."""
    return text.replace('"', "") or '""' if text != '""' else text


def type_text(hint: Any, *, with_none: bool = False) -> str:
    """Describe a type in plain text: "integer", "rms or layer", "true or false"; `with_none` adds "or none"."""
    words = [*type_words(hint), *(plain(format_toml(choice)) for choice in list_choices(hint))]
    words += ["none"] if with_none and allows_none(hint) else []
    return ", ".join(words)
