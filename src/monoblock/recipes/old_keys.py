"""Accept keys and objectives under the names they had in earlier versions.

Keys that belong to one task were moved into the section of that task (`Task.old_keys`). Some of the keys that all tasks
share were renamed (RENAMED_KEYS).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from monoblock.config.schema import to_dict
from monoblock.errors import ConfigError, did_you_mean
from monoblock.recipes.schema import Recipe, TaskKeys

# Maps former keys to their present names.
RENAMED_KEYS = {
    "data.held": "data.validation_rows",
    "data.longest": "data.max_length",
    "train.tokens": "train.batch_tokens",
    "train.floor": "train.min_lr_ratio",
    "train.table_decay": "train.embedding_weight_decay",
    "train.adam_factor": "train.adam_lr_factor",
    "train.freeze": "train.freeze_layers",
    "train.balance": "train.load_balancing",
    "train.checkpointing": "train.activation_checkpointing",
    "train.keep": "train.keep_checkpoints",
    "train.average": "train.average_checkpoints",
    "train.best": "train.load_best",
    "train.spike": "train.spike_threshold",
    "train.patience": "train.max_skipped_updates",
    "generate.measure": "generate.scored_rows",
}
# Keys that recipes stored by earlier versions lack, and the value that their runs behaved by.
FORMER_DEFAULTS = {"data.split": "last", "data.padding": "longest"}
_MISSING = object()


def select_task(data: Mapping[str, Any], tasks: Iterable[TaskKeys]) -> TaskKeys:
    """Return the task that train.objective names in the tables of a recipe; raise ConfigError if there is none.

    If train.objective is a former name of several tasks, return the first of them that has all the former task keys
    that the recipe sets.
    """
    tasks = list(tasks)
    section = data.get("train")
    name = section.get("objective", "causal_lm") if isinstance(section, Mapping) else "causal_lm"
    by_name = [task for task in tasks if name == task.name]
    candidates = by_name or [task for task in tasks if name in task.old_names]
    if not candidates:
        names = [task.name for task in tasks]
        raise ConfigError(
            f"train.objective={name!r} is not one of {', '.join(names)}{did_you_mean(str(name), names)}; "
            "a task of your own is given in Python, as task=…"
        )
    used = [key for key in _all_old_keys(tasks) if not _is_default(_get(data, key), key, _owner(key, tasks))]
    return next((task for task in candidates if all(key in task.old_keys for key in used)), candidates[0])


def translate_key(old: str, value: Any, task: TaskKeys, tasks: Sequence[TaskKeys]) -> str | None:
    """Return the present name of a key, which may be a former name.

    For a former key of another task than `task`, return None if its value is the default, else raise ConfigError.
    """
    if old in RENAMED_KEYS:
        return RENAMED_KEYS[old]
    if old in task.old_keys:
        return f"{task.name}.{task.old_keys[old]}"
    owners = [other for other in tasks if old in other.old_keys]
    if not owners:
        return old
    if _is_default(value, old, owners[0]):
        return None
    names = " or ".join(f"{other.name}.{other.old_keys[old]}" for other in owners)
    raise ConfigError(f"{old} is now called {names}, but train.objective={task.name!r} has no such key; leave it out")


def rename_old_keys(data: dict[str, Any], task: TaskKeys, tasks: Sequence[TaskKeys]) -> list[str]:
    """Rename former keys and a former objective in the tables of a recipe, in place; return a message for each."""
    messages = []
    for old in [*RENAMED_KEYS, *reversed(_all_old_keys(tasks))]:  # keys in a table come before the table itself
        value = _pop(data, old)
        if value is _MISSING:
            continue
        new = translate_key(old, value, task, tasks)
        if new is not None:
            current = _get(data, new)
            both_tables = isinstance(value, Mapping) and isinstance(current, Mapping)
            set_key(data, new, {**current, **value} if both_tables else value)
            messages.append(f"{old} is now called {new}")
    section = data.setdefault("train", {})
    if isinstance(section, dict) and section.get("objective", task.name) != task.name:
        messages.append(f"train.objective={section['objective']!r} is now called {task.name!r}")
        section["objective"] = task.name
    return messages


def set_former_defaults(data: dict[str, Any], stored: Mapping[str, Any]) -> None:
    """Set keys of `data` that a stored recipe lacks to the defaults of the version that wrote it."""
    for key, value in FORMER_DEFAULTS.items():
        if _get(stored, key) is _MISSING:
            set_key(data, key, value)


def to_old_tables(recipe: Recipe, task: TaskKeys, tasks: Sequence[TaskKeys]) -> dict[str, Any]:
    """Return the tables of a recipe as earlier versions had them: with former keys, and with the keys of all tasks.

    The keys of other tasks have their defaults. Checkpoints of earlier versions store digests of these tables.
    """
    tables = recipe.to_tables()
    own = tables.pop(task.name, {}) if task.section is not None else {}
    for old in _all_old_keys(tasks):
        owner = task if old in task.old_keys else _owner(old, tasks)
        values = own if owner is task else _section_defaults(owner)
        set_key(tables, old, _get(values, owner.old_keys[old]))
        if "." in old.partition(".")[2]:  # a key in a table of a section: drop its present name
            table, _, _ = old.rpartition(".")
            _pop(tables, f"{table}.{owner.old_keys[old].rpartition('.')[2]}")
    for old, new in RENAMED_KEYS.items():
        set_key(tables, old, _pop(tables, new))
    for key in FORMER_DEFAULTS:
        _pop(tables, key)
    if task.old_names:
        tables["train"]["objective"] = task.old_names[0]
    return tables


def _all_old_keys(tasks: Iterable[TaskKeys]) -> list[str]:
    """Return the former keys of all tasks; a table comes before the keys within it."""
    return sorted({old for task in tasks for old in task.old_keys}, key=lambda key: (key.count("."), key))


def _section_defaults(task: TaskKeys) -> dict[str, Any]:
    """Return the default of every key in the section of a task."""
    assert task.section is not None
    return {
        field.name: to_dict(field.default)
        for field in dataclasses.fields(task.section)
        if field.default is not dataclasses.MISSING
    }


def _owner(old: str, tasks: Iterable[TaskKeys]) -> TaskKeys:
    return next(task for task in tasks if old in task.old_keys)


def _is_default(value: Any, old: str, owner: TaskKeys) -> bool:
    """Return whether a former key of a task is missing or has its default value."""
    default = _get(_section_defaults(owner), owner.old_keys[old])
    if isinstance(value, Mapping) and isinstance(default, Mapping):
        return all(default.get(key) == item for key, item in value.items())
    return value is _MISSING or value == default or (not value and not default)


def _get(tables: Any, key: str) -> Any:
    for name in key.split("."):
        if not isinstance(tables, Mapping) or name not in tables:
            return _MISSING
        tables = tables[name]
    return tables


def set_key(tables: dict[str, Any], key: str, value: Any) -> None:
    """Set a key such as "classification.augment.shift" in nested tables."""
    *path, last = key.split(".")
    for name in path:
        tables = tables.setdefault(name, {})
    tables[last] = value


def _pop(tables: Any, key: str) -> Any:
    *path, last = key.split(".")
    for name in path:
        tables = tables.get(name) if isinstance(tables, Mapping) else None
    return tables.pop(last, _MISSING) if isinstance(tables, dict) else _MISSING
