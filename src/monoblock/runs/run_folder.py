"""Check the folder of a run, and write the files that it has before the first training step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.config.schema import to_dict
from monoblock.errors import ConfigError, FileError
from monoblock.interop.model_folder import CONFIG_FILE, GENERATION_CONFIG_FILE, LABELS_FILE, format_config
from monoblock.parallel.faults import LOGS_FOLDER
from monoblock.recipes.parse import RECIPE_FILE
from monoblock.recipes.schema import Recipe
from monoblock.runs.generation_config import build_generation_config
from monoblock.runs.trainable import ADAPTER_FOLDER
from monoblock.runs.warm_start import WarmStart
from monoblock.tasks.task import Task
from monoblock.tasks.task_data import TaskData
from monoblock.training.events import TENSORBOARD_FOLDER
from monoblock.training.run_lock import LOCK_FILE
from monoblock.untrusted_files import has_file, safe_folder, write_atomically

CHECKPOINTS_FOLDER = "checkpoints"
SUBFOLDERS = (CHECKPOINTS_FOLDER, LOGS_FOLDER, TENSORBOARD_FOLDER, ADAPTER_FOLDER)
# What a run that was killed before it stored its recipe may leave; a run can start in a folder that has nothing else.
BEFORE_THE_RUN = (LOCK_FILE, LOGS_FOLDER, f"{RECIPE_FILE}.tmp")


def has_run(folder: Path) -> bool:
    """Return whether a run was started in this folder."""
    return (folder / RECIPE_FILE).is_file()


def check_run_folder(folder: Path, resume: bool) -> None:
    """Raise an error unless a run can start in this folder or, with `resume`, be resumed."""
    for name in filter(lambda name: has_file(folder, name), SUBFOLDERS):
        safe_folder(folder, name)  # else what is written and deleted there would be elsewhere
    if resume and not has_run(folder):
        raise FileError(f"there is nothing to resume in {folder}; leave out --resume to start a run there")
    if not resume and folder.exists() and any(path.name not in BEFORE_THE_RUN for path in folder.iterdir()):
        raise ConfigError(
            f"{folder} is not empty; continue its run with --resume (in Python, resume=True), "
            "or choose another folder with --out (out=…)"
        )


def write_initial_files(
    folder: Path,
    recipe: Recipe,
    task: Task,
    config: ModelConfig | RecurrentConfig,
    task_data: TaskData,
    start: WarmStart | None = None,
) -> None:
    """Write the recipe, the configuration, the tokenizer, the labels and generation_config.json.

    start: the stored model that training starts from; its token ids and settings of generation are kept.
    """
    tokenizer, labels = task_data.tokenizer, task_data.labels
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise FileError(f"{folder} cannot be created: {problem.strerror}") from None
    write_atomically(folder / RECIPE_FILE, recipe.to_toml())
    fingerprint = None if tokenizer is None else tokenizer.fingerprint
    write_atomically(folder / CONFIG_FILE, format_config(config, fingerprint, start.published if start else None))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    stored = start.generation if start is not None and task.decoding != "none" else {}
    tokens = start.special_tokens if start is not None else {}
    defaults = build_generation_config(recipe.generate, task, tokenizer, config.context, stored) | dict(tokens)
    write_atomically(folder / GENERATION_CONFIG_FILE, json.dumps(defaults, indent=2) + "\n")
    for name, fields in task_data.model_files.items():
        write_atomically(folder / name, json.dumps(fields, indent=2) + "\n")
    if labels:
        write_atomically(folder / LABELS_FILE, json.dumps(labels, indent=2, ensure_ascii=False) + "\n")


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
