"""Build the recipe of `monoblock finetune`: the data decide the objective, and the objective the hyperparameters.

For models of REFERENCE_WIDTH, the learning rates are those of BERT (Devlin et al. 2019) and LoRA (Hu et al. 2021); for
others, they are inversely proportional to the width.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from monoblock.config.model import ModelConfig
from monoblock.data.corpora.load import infer_corpus_kind, load_corpus, load_corpus_if_present
from monoblock.data.corpora.table import CORPORA
from monoblock.errors import ConfigError
from monoblock.recipes.schema import Recipe
from monoblock.runs.recipe import open_stored_model, parse_recipe
from monoblock.tasks.table import find_task, task_of_corpus
from monoblock.tasks.task import Task

REFERENCE_WIDTH = 768
LEARNING_RATE, LORA_LEARNING_RATE = 5e-5, 2e-4
MAX_VALIDATION_ROWS = 1000  # maximum number of training rows held out if there is no validation split


def build_finetuning_recipe(
    model: str,
    data: str,
    *,
    objective: str | None = None,
    folder: Path | None = None,
    overrides: Iterable[str] = (),
) -> Recipe:
    """Build the recipe that fine-tunes a stored model on a corpus.

    model: a run folder, a Hugging Face folder or a GGUF file.
    data: the name of a corpus, or the path of a file or folder.
    objective: the name of a task; None infers it from the data and the model.
    folder: the user's folder of corpora.
    overrides: strings `section.key=value`, as on the command line.
    """
    config = open_stored_model(model).config
    if not isinstance(config, ModelConfig):
        raise ConfigError(
            f"monoblock finetune is for Transformers, but {model} is an LSTM; "
            f"train it with monoblock train RECIPE model.folder={model}"
        )
    task = None if objective is None else find_task(objective)
    is_path = data not in CORPORA
    if task is not None and is_path:
        kind = infer_corpus_kind(data, task.corpus_kinds, folder=folder)
        corpus = load_corpus(data, "train", folder=folder, kind=kind)
    else:
        corpus = load_corpus(data, "train", folder=folder)
        if corpus.kind == "pairs" and config.family == "encoder-only" and is_path:  # two columns are labels and texts
            corpus = load_corpus(data, "train", folder=folder, kind="labelled")
    task = task or task_of_corpus(corpus.kind, config.family)
    if task is None:
        raise ConfigError(f"{corpus.name} is text, but a {config.family} model reads images; give labelled images")
    if corpus.kind not in task.corpus_kinds:
        raise ConfigError(
            f"the objective {task.name} needs {' or '.join(task.corpus_kinds)}, "
            f"but {data} is {corpus.kind}; give other data or another --objective"
        )
    validation_rows = 0
    if corpus.kind != "text":  # a running text has no rows to hold out
        valid = load_corpus_if_present(data, "valid", folder=folder, kind=corpus.kind if is_path else None)
        validation_rows = min(MAX_VALIDATION_ROWS, len(corpus) // 10) if valid is None else 0
    overrides, max_length = list(overrides), task.defaults.max_length
    return parse_recipe(
        {
            "name": f"{Path(data).stem}-{Path(model).resolve().stem}",
            "about": f"{Path(model).name} fine-tuned for {task.name} on {data}.",
            "data": {
                "corpus": data,
                "max_length": min(max_length, config.context or max_length),
                "validation_rows": validation_rows,
            },
            "model": {"folder": model},
            "train": _train_section(task, config.width, overrides),
        },
        overrides,
    )


def _train_section(task: Task, width: int, overrides: list[str]) -> dict[str, Any]:
    epochs, batch, _ = task.defaults
    lora = any(word.startswith("lora.rank=") and word != "lora.rank=0" for word in overrides)
    rate = (LORA_LEARNING_RATE if lora else LEARNING_RATE) * REFERENCE_WIDTH / width
    interval = min(1 / epochs, 0.5)  # between evaluations, as a fraction of all steps
    return {
        "objective": task.name,
        "epochs": epochs,
        "batch": batch,
        "lr": float(f"{rate:.2g}"),
        "schedule": "linear",
        "min_lr_ratio": 0.0,
        "warmup": 0.06,
        "weight_decay": 0.01,
        "beta2": 0.999,
        "eval_every": interval,
        "save_every": interval,
        "keep_checkpoints": 1,
        "load_best": True,
    }
