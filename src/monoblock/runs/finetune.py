"""Build the recipe of `monoblock finetune`: the data decide the objective, and the objective the hyperparameters.

Learning rates are those of BERT (Devlin et al. 2019) and LoRA (Hu et al. 2021) for models of REFERENCE_WIDTH, scaled
inversely with the width.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from monoblock.config.model import ModelConfig
from monoblock.data.corpora.load import Corpus, infer_corpus_kind, load_corpus, load_corpus_if_present
from monoblock.data.corpora.table import CORPORA
from monoblock.errors import ConfigError
from monoblock.recipes.schema import Recipe
from monoblock.recipes.stored_config import read_stored_config
from monoblock.runs.recipe import parse_recipe
from monoblock.tasks.table import find_task, task_of_corpus
from monoblock.tasks.task import Task

REFERENCE_WIDTH = 768
LEARNING_RATE, LORA_LEARNING_RATE = 5e-5, 2e-4
MAX_VALIDATION_ROWS = 1000  # held out of the training rows if there is no validation split


def build_finetuning_recipe(
    model: str,
    data: str,
    *,
    objective: str | None = None,
    folder: Path | None = None,
    overrides: Iterable[str] = (),
) -> Recipe:
    """Build the recipe that fine-tunes the model of a folder on a corpus.

    model: a run folder, a Hugging Face folder or a GGUF file.
    data: a named corpus, a file or a folder.
    objective: None infers it from the data and the model.
    folder: folder with corpora.
    overrides: `section.key=value`, as on the command line.
    """
    config = read_stored_config(model)
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"{model} is an LSTM; continue training it with monoblock train RECIPE model.folder={model}")
    task = None if objective is None else find_task(objective)
    corpus = _load_training_corpus(data, config, task, folder)
    task = task or _infer_task(corpus, config)
    if corpus.kind not in task.corpus_kinds:
        raise ConfigError(
            f"the objective {task.name} needs {' or '.join(task.corpus_kinds)}, "
            f"and {data} is {corpus.kind}; give other data or another --objective"
        )
    overrides, max_length = list(overrides), task.defaults.max_length
    return parse_recipe(
        {
            "name": f"{Path(data).stem}-{Path(model).resolve().stem}",
            "about": f"{Path(model).name} taught {task.name} by {data}.",
            "data": {
                "corpus": data,
                "max_length": min(max_length, config.context or max_length),
                "validation_rows": _validation_count(data, corpus, folder),
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
    interval = min(1 / epochs, 0.5)  # of evaluations, as a fraction of all steps
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


def _load_training_corpus(data: str, config: ModelConfig, task: Task | None, folder: Path | None) -> Corpus:
    """Load the training rows; two columns are labelled texts for an encoder-only model, pairs for others."""
    if task is not None and data not in CORPORA:
        kind = infer_corpus_kind(data, task.corpus_kinds, folder=folder)
        return load_corpus(data, "train", folder=folder, kind=kind)
    corpus = load_corpus(data, "train", folder=folder)
    labelled = corpus.kind == "pairs" and config.family == "encoder-only" and data not in CORPORA
    return load_corpus(data, "train", folder=folder, kind="labelled") if labelled else corpus


def _infer_task(corpus: Corpus, config: ModelConfig) -> Task:
    task = task_of_corpus(corpus.kind, config.family)
    if task is None:
        raise ConfigError(f"{corpus.name} is text, and a {config.family} model reads none; give it labelled images")
    return task


def _validation_count(data: str, corpus: Corpus, folder: Path | None) -> int:
    """Return how many training rows to hold out for validation; 0 for text, and if there is a validation split."""
    if corpus.kind == "text":
        return 0
    kind = None if data in CORPORA else corpus.kind
    valid = load_corpus_if_present(data, "valid", folder=folder, kind=kind)
    return min(MAX_VALIDATION_ROWS, len(corpus) // 10) if valid is None else 0
