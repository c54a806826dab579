"""Build the recipe of `monoblock finetune`: the data decide the objective, and the objective the hyperparameters.

Learning rates are those of BERT (Devlin et al. 2019) and LoRA (Hu et al. 2021) for models of REFERENCE_WIDTH, scaled
inversely with the width.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from monoblock.config.model import ModelConfig
from monoblock.data.corpora.load import Corpus, infer_corpus_kind, load_corpus, load_corpus_if_present
from monoblock.data.corpora.table import CORPORA
from monoblock.errors import ConfigError, did_you_mean
from monoblock.recipes.parse import parse_recipe
from monoblock.recipes.schema import OBJECTIVES, Recipe
from monoblock.recipes.stored_config import read_stored_config
from monoblock.tasks.table import CORPUS_KINDS

# Kind of corpus -> objective; for text it depends on the family of the model.
OBJECTIVE_BY_KIND = {
    "labelled": "classify",
    "images": "classify",
    "tagged": "label",
    "pairs": "pairs",
    "questions": "answers",
    "chat": "chat",
}
TEXT_OBJECTIVE_BY_FAMILY = {"decoder-only": "causal", "encoder-only": "masked", "encoder-decoder": "spans"}


class TrainingDefaults(NamedTuple):
    epochs: float
    batch: int
    max_length: int  # tokens in a sample, if the context of the model allows


TRAINING_DEFAULTS = {
    "classify": TrainingDefaults(3, 32, 512),
    "label": TrainingDefaults(3, 32, 512),
    "answers": TrainingDefaults(2, 16, 384),
    "pairs": TrainingDefaults(3, 16, 512),
    "chat": TrainingDefaults(3, 8, 1024),
    "causal": TrainingDefaults(1, 8, 512),
    "masked": TrainingDefaults(3, 32, 128),
    "spans": TrainingDefaults(1, 16, 512),
}
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
    if objective is not None and objective not in OBJECTIVES:
        raise ConfigError(
            f"--objective {objective} is not one of {', '.join(OBJECTIVES)}{did_you_mean(objective, OBJECTIVES)}"
        )
    corpus = _load_training_corpus(data, config, objective, folder)
    objective = objective or _infer_objective(corpus, config)
    if corpus.kind not in CORPUS_KINDS[objective]:
        raise ConfigError(
            f"the objective {objective} needs {' or '.join(CORPUS_KINDS[objective])}, "
            f"and {data} is {corpus.kind}; give other data or another --objective"
        )
    overrides = list(overrides)
    max_length = TRAINING_DEFAULTS[objective].max_length
    return parse_recipe(
        {
            "name": f"{Path(data).stem}-{Path(model).resolve().stem}",
            "about": f"{Path(model).name} taught {objective} by {data}.",
            "data": {
                "corpus": data,
                "longest": min(max_length, config.context or max_length),
                "held": _validation_count(data, corpus, folder),
            },
            "model": {"folder": model},
            "train": _train_section(objective, config.width, overrides),
        },
        overrides,
    )


def _train_section(objective: str, width: int, overrides: list[str]) -> dict[str, Any]:
    epochs, batch, _ = TRAINING_DEFAULTS[objective]
    lora = any(word.startswith("lora.rank=") and word != "lora.rank=0" for word in overrides)
    rate = (LORA_LEARNING_RATE if lora else LEARNING_RATE) * REFERENCE_WIDTH / width
    interval = min(1 / epochs, 0.5)  # of evaluations, as a fraction of all steps
    return {
        "objective": objective,
        "epochs": epochs,
        "batch": batch,
        "lr": float(f"{rate:.2g}"),
        "schedule": "linear",
        "floor": 0.0,
        "warmup": 0.06,
        "weight_decay": 0.01,
        "beta2": 0.999,
        "eval_every": interval,
        "save_every": interval,
        "keep": 1,
        "best": True,
    }


def _load_training_corpus(data: str, config: ModelConfig, objective: str | None, folder: Path | None) -> Corpus:
    """Load the training rows; two columns are labelled texts for an encoder-only model, pairs for others."""
    if objective is not None and data not in CORPORA:
        kind = infer_corpus_kind(data, CORPUS_KINDS[objective], folder=folder)
        return load_corpus(data, "train", folder=folder, kind=kind)
    corpus = load_corpus(data, "train", folder=folder)
    labelled = corpus.kind == "pairs" and config.family == "encoder-only" and data not in CORPORA
    return load_corpus(data, "train", folder=folder, kind="labelled") if labelled else corpus


def _infer_objective(corpus: Corpus, config: ModelConfig) -> str:
    if corpus.kind == "text":
        if config.family not in TEXT_OBJECTIVE_BY_FAMILY:
            raise ConfigError(f"{corpus.name} is text, and a {config.family} model reads none; give it labelled images")
        return TEXT_OBJECTIVE_BY_FAMILY[config.family]
    return OBJECTIVE_BY_KIND[corpus.kind]


def _validation_count(data: str, corpus: Corpus, folder: Path | None) -> int:
    """Return how many training rows to hold out for validation; 0 for text, and if there is a validation split."""
    if corpus.kind == "text":
        return 0
    kind = None if data in CORPORA else corpus.kind
    valid = load_corpus_if_present(data, "valid", folder=folder, kind=kind)
    return min(MAX_VALIDATION_ROWS, len(corpus) // 10) if valid is None else 0
