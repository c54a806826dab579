"""Describe the fields of dataclasses and typed dicts: type, default, and the comment that states the meaning.

The comment stands behind the field or, if it is long, above it. Listings and reference pages are built from this.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from monoblock.config.schema import union_members

REQUIRED = dataclasses.MISSING  # the default of a field that has none


class FieldDescription(NamedTuple):
    name: str
    hint: Any  # the type annotation, resolved
    default: Any  # REQUIRED if there is none
    meaning: str  # "" if the field has no comment


def describe_fields(cls: type) -> list[FieldDescription]:
    """Describe the fields of a dataclass or TypedDict, with those of its base classes, in the order of the source."""
    meanings = _all_comments(cls)
    defaults = (
        {field.name: _default(field) for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    )
    return [
        FieldDescription(name, hint, defaults.get(name, REQUIRED), meanings.get(name, ""))
        for name, hint in get_type_hints(cls).items()
    ]


def _all_comments(cls: type) -> dict[str, str]:
    """Return the comments of the fields of a class and of its base classes, which it names in its source.

    At run time, a TypedDict does not know its base classes.
    """
    source = textwrap.dedent(inspect.getsource(cls))
    comments: dict[str, str] = {}
    for base in _class_node(source).bases:
        found = getattr(inspect.getmodule(cls), base.id, None) if isinstance(base, ast.Name) else None
        if isinstance(found, type):
            comments |= _all_comments(found)
    return comments | field_comments(source)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def field_comments(source: str) -> dict[str, str]:
    """Return the comment of each annotated field in the source of a class."""
    comments: dict[int, str] = {}  # line -> comment
    whole_lines: set[int] = set()  # lines that contain only a comment
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.removeprefix("#").strip()
            if token.line.strip().startswith("#"):
                whole_lines.add(token.start[0])
    found = {}
    for node in _class_node(source).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while first - 1 in whole_lines:
                first -= 1
            lines = range(first, (node.end_lineno or node.lineno) + 1)
            found[node.target.id] = " ".join(comments[line] for line in lines if line in comments)
    return found


def _class_node(source: str) -> ast.ClassDef:
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.ClassDef)
    return node


def list_choices(hint: Any) -> list[Any]:
    """Return the values that a type allows by name: those of Literal and bool."""
    choices: list[Any] = []
    for member in union_members(hint):
        if get_origin(member) is Literal:
            choices += get_args(member)
        elif member is bool:
            choices += [True, False]
    return choices


def type_words(hint: Any) -> list[str]:
    """Return the types in a hint by name, without choices (`list_choices`) and None: "integer", "list of strings"."""
    names = {int: "integer", float: "number", str: "string", dict: "table"}
    words = []
    for member in union_members(hint):
        if get_origin(member) is tuple:
            words += [f"list of {_plural(word)}" for word in type_words(get_args(member)[0])]
        elif get_origin(member) is not Literal and member not in (bool, type(None)):
            words.append(names.get(member) or member.__name__)
    return words


def _plural(word: str) -> str:
    return word if word[0].isupper() else f"{word}s"


def allows_none(hint: Any) -> bool:
    return type(None) in union_members(hint)
