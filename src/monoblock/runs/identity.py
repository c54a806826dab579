"""The identity of a run: the recipe, data, weights and tokenizer that must not change when it is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.config.schema import to_dict
from monoblock.recipes.schema import Recipe
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
    return values | {"model configuration": json_digest(to_dict(config))} | _data_digests(task_data, start)


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
