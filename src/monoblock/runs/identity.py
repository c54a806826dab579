"""The identity of a run: the recipe, data, weights and tokenizer that must not change when it is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.config.schema import to_dict
from monoblock.recipes.old_keys import RENAMED_KEYS, to_old_tables
from monoblock.recipes.schema import Recipe
from monoblock.runs.recipe import known_tasks
from monoblock.runs.warm_start import WarmStart
from monoblock.tasks.task import Task
from monoblock.tasks.task_data import TaskData

# The keys of [train] that may be changed when a run is resumed.
CHANGEABLE_ON_RESUME = (
    "steps",
    "epochs",
    "save_every",
    "save_async",
    "eval_every",
    "sample_every",
    "keep_checkpoints",
    "workers",
    "device",
    "compile",
    "parallel",
    "eval_batches",
    "load_best",
)

# Fields of configurations that were added after runs had been stored, with their defaults.
LATER_FIELDS: dict[str, Any] = {"multi_label": False, "attention": True, "kind": "softmax"}
LATER_LSTM_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("embedding_dropout", "head_dropout")),
    **dict.fromkeys(("word_dropout", "recurrent_dropout"), 0.0),
    "variational_dropout": False,
}


def run_identity(
    recipe: Recipe, task: Task, config: ModelConfig | RecurrentConfig, task_data: TaskData, start: WarmStart | None
) -> dict[str, Any]:
    """Return what must not change when a run is resumed.

    It has the keys of the recipe with their values, and digests of the configuration, the data, the initial weights and
    the tokenizer.
    """
    tables = recipe.to_tables()
    sections = ("train", "data", "model", task.name, *(["lora"] if recipe.lora.rank else []))
    values = {key: value for name in sections for key, value in _flatten(tables.get(name, {}), name)}
    for key in CHANGEABLE_ON_RESUME:
        values.pop(f"train.{key}", None)
    # Of the tokenizer, the digest says everything but how training texts are sampled.
    values |= {"tokenizer.dropout": recipe.tokenizer.dropout, "tokenizer.alpha": recipe.tokenizer.alpha}
    return values | {"model configuration": json_digest(_config_dict(config))} | _data_digests(task_data, start)


def old_run_identity(
    recipe: Recipe, task: Task, config: ModelConfig | RecurrentConfig, task_data: TaskData, start: WarmStart | None
) -> dict[str, Any]:
    """Return the identity in the form that monoblock 0.1 stored: a digest of each section, with its former keys."""
    tables = to_old_tables(recipe, task, known_tasks(task))
    old_names = {new: old for old, new in RENAMED_KEYS.items()}
    changeable = {old_names.get(f"train.{key}", f"train.{key}").removeprefix("train.") for key in CHANGEABLE_ON_RESUME}
    training = {key: value for key, value in tables["train"].items() if key not in changeable}
    parts = {"model": _config_dict(config), "training recipe": training, "corpus": tables["data"]}
    parts |= {"adapter": to_dict(recipe.lora)} if recipe.lora.rank else {}
    return {key: json_digest(value) for key, value in parts.items()} | _data_digests(task_data, start)


def _config_dict(config: ModelConfig | RecurrentConfig) -> Any:
    """Return a configuration as nested dicts, without later fields at their defaults: their digest stays the same."""

    def strip(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [strip(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {key: strip(item) for key, item in value.items() if not is_later_default(key, item)}

    later = LATER_FIELDS | (LATER_LSTM_FIELDS if isinstance(config, RecurrentConfig) else {})

    def is_later_default(key: str, item: Any) -> bool:
        return key in later and type(item) is type(later[key]) and item == later[key]

    return strip(to_dict(config))


def _data_digests(task_data: TaskData, start: WarmStart | None) -> dict[str, Any]:
    digests: dict[str, Any] = {
        f"content of data.corpus, split {split}": digest for split, digest in task_data.content_digests.items()
    }
    if start is not None:
        digests["set of weights in model.folder"] = start.digest
    return digests | {"tokenizer": task_data.tokenizer.fingerprint if task_data.tokenizer is not None else None}


def _flatten(table: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) for all keys of nested tables; the name of a key begins with `path`, as in "train.lr"."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{path}.{key}")
        else:
            yield f"{path}.{key}", value


def json_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
