"""A recipe for going on from a model with weights: what is asked of it follows from the data, the rest is usual.

The rates are those of BERT's and LoRA's authors for models of their width, and grow as models get narrower.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from monoblock.config import ModelConfig
from monoblock.data import corpora
from monoblock.data.corpora import Corpus
from monoblock.errors import ConfigError, did_you_mean
from monoblock.tasks.lay import KINDS
from monoblock.tasks.recipe import OBJECTIVES, Recipe, resolve
from monoblock.tasks.starting import stored_config

# Kind of data -> what is learnt from it; text is continued, filled in or restored, by the kind of model.
BY_KIND = {
    "labelled": "classify",
    "images": "classify",
    "tagged": "label",
    "pairs": "pairs",
    "questions": "answers",
    "chat": "chat",
}
BY_FAMILY = {"decoder-only": "causal", "encoder-only": "masked", "encoder-decoder": "spans"}
# Objective -> passes over the data, samples in an update, the most tokens in a sample (or the model's context).
USUAL: dict[str, tuple[float, int, int]] = {
    "classify": (3, 32, 512),
    "label": (3, 32, 512),
    "answers": (2, 16, 384),
    "pairs": (3, 16, 512),
    "chat": (3, 8, 1024),
    "causal": (1, 8, 512),
    "masked": (3, 32, 128),
    "spans": (1, 16, 512),
}
WIDTH = 768  # for which the rates are meant
RATE, LORA_RATE = 5e-5, 2e-4
HELD = 1000  # the most rows kept back for validation where the data have no split of their own


def recipe_for(
    model: str,
    data: str,
    *,
    objective: str | None = None,
    folder: Path | None = None,
    overrides: Iterable[str] = (),
) -> Recipe:
    """The recipe of `monoblock finetune`; `folder` holds corpora by path."""
    config = stored_config(model)
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"{model} is an LSTM; go on with it by monoblock train RECIPE model.folder={model}")
    overrides = list(overrides)
    if objective is not None and objective not in OBJECTIVES:
        raise ConfigError(
            f"--objective {objective} is none of {', '.join(OBJECTIVES)}{did_you_mean(objective, OBJECTIVES)}"
        )
    corpus = _read(data, config, objective, folder)
    asked = objective or _asked(corpus, config)
    if corpus.kind not in KINDS[asked]:
        raise ConfigError(f"the objective {asked} needs {' or '.join(KINDS[asked])}, and {data} is {corpus.kind}")
    epochs, batch, longest = USUAL[asked]
    adapts = any(word.startswith("lora.rank=") and word != "lora.rank=0" for word in overrides)
    limit = min(longest, config.context or longest)
    share = min(1 / epochs, 0.5)
    return resolve(
        {
            "name": f"{Path(data).stem}-{Path(model).resolve().stem}",
            "about": f"{Path(model).name} taught {asked} by {data}.",
            "data": {"corpus": data, "longest": limit, "held": _held(data, corpus, folder)},
            "model": {"folder": model},
            "train": {
                "objective": asked,
                "epochs": epochs,
                "batch": batch,
                "lr": float(f"{(LORA_RATE if adapts else RATE) * WIDTH / config.width:.2g}"),
                "schedule": "linear",
                "floor": 0.0,
                "warmup": 0.06,
                "weight_decay": 0.01,
                "beta2": 0.999,
                "eval_every": share,
                "save_every": share,
                "keep": 1,
                "best": True,
            },
        },
        overrides,
    )


def _read(data: str, config: ModelConfig, objective: str | None, folder: Path | None) -> Corpus:
    """The training rows; a file of two columns is labels and texts to an encoder, sources and targets to others."""
    if objective is not None and data not in corpora.CORPORA:
        return corpora.load(data, "train", folder=folder, kind=corpora.kind_of(data, KINDS[objective], folder=folder))
    corpus = corpora.load(data, "train", folder=folder)
    two = corpus.kind == "pairs" and config.family == "encoder-only" and data not in corpora.CORPORA
    return corpora.load(data, "train", folder=folder, kind="labelled") if two else corpus


def _asked(corpus: Corpus, config: ModelConfig) -> str:
    if corpus.kind == "text":
        if config.family not in BY_FAMILY:
            raise ConfigError(f"{corpus.name} is text, and a {config.family} model reads none; give it labelled images")
        return BY_FAMILY[config.family]
    return BY_KIND[corpus.kind]


def _held(data: str, corpus: Corpus, folder: Path | None) -> int:
    """How many training rows validate: none where there is a split for it."""
    if corpus.kind == "text":
        return 0
    kind = None if data in corpora.CORPORA else corpus.kind
    found = corpora.load_if_any(data, "valid", folder=folder, kind=kind)
    return min(HELD, len(corpus) // 10) if found is None else 0
