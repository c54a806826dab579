"""List the sections of a recipe and their keys, with type, default and meaning, from their dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, get_args, get_origin

from monoblock.config.field_description import REQUIRED, FieldDescription, describe_fields
from monoblock.config.schema import union_members
from monoblock.recipes.schema import MODEL_SOURCES, Recipe, TaskKeys


class SectionDescription(NamedTuple):
    name: str  # such as "train" or "classification.augment"; "" for the keys before the first section
    about: str
    keys: list[FieldDescription]
    is_list: bool = False  # the section may be repeated: [[text_to_text.tasks]]
    task: str = ""  # the objective that has the section; "" if all have it


def list_sections(tasks: Iterable[TaskKeys]) -> list[SectionDescription]:
    """Describe all sections: those that every recipe has, then those of the tasks."""
    sections = list(_describe_section("", Recipe, "", is_list=False))
    for task in tasks:
        if task.section is not None:
            own = _describe_section(task.name, task.section, _docstring(task.section), is_list=False)
            sections += [section._replace(task=task.name) for section in own]
    return sections


def _describe_section(name: str, cls: type, about: str, *, is_list: bool) -> Iterator[SectionDescription]:
    """Describe the section of a dataclass, and then one section for each dataclass in it."""
    keys, inner = [], []
    for field in describe_fields(cls):
        path = f"{name}.{field.name}" if name else field.name
        if path == "model":
            inner.append(_describe_model_section(field))
        elif part := _inner_dataclass(field.hint):
            about_part = _docstring(part) or field.meaning
            inner += _describe_section(path, part, about_part, is_list=get_origin(field.hint) is tuple)
        elif path != "task":  # in TOML, the keys of the task are in a section with its name
            keys.append(field)
    yield SectionDescription(name, about, keys, is_list)
    yield from inner


def _describe_model_section(field: FieldDescription) -> SectionDescription:
    return SectionDescription(
        field.name,
        "The model: exactly one of these keys, and the knobs to set in it.",
        [FieldDescription(name, str, REQUIRED, meaning) for name, meaning in MODEL_SOURCES.items()],
    )


def _inner_dataclass(hint: Any) -> type | None:
    members = [get_args(member)[0] if get_origin(member) is tuple else member for member in union_members(hint)]
    return next((member for member in members if isinstance(member, type) and dataclasses.is_dataclass(member)), None)


def _docstring(cls: type) -> str:
    """Return the docstring of a section; that which dataclasses write themselves, with the signature, is none."""
    text = inspect.getdoc(cls) or ""
    return "" if text.startswith(f"{cls.__name__}(") else text
