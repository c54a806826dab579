"""From a recipe to its ground: the corpus is read and given to the objective that wants it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from monoblock.data import corpora
from monoblock.data.corpora import Corpus
from monoblock.errors import ConfigError, FileError
from monoblock.tasks import samples, texts
from monoblock.tasks.ground import Ground, find_tokenizer
from monoblock.tasks.recipe import Recipe

KINDS = {"causal": "text", "masked": "text", "spans": "text", "pairs": "pairs", "label": "tagged"}


def lay(recipe: Recipe, context: int | None, *, data: Path | None = None, folder: Path | None = None) -> Ground:
    """Read the corpus and prepare training and evaluation."""
    kind: Any = KINDS.get(recipe.train.objective)
    load = partial(corpora.load, recipe.data.corpus, folder=data, kind=kind if _is_path(recipe) else None)
    train = load("train")
    if recipe.data.limit is not None:
        train = Corpus(train.name, train.kind, train.split, train.rows[: recipe.data.limit])
    asked = recipe.train.objective
    if train.kind != KINDS.get(asked, train.kind):
        raise ConfigError(f"objective={asked!r} needs {KINDS[asked]}, but {train.name} is {train.kind}")
    try:
        valid: Corpus | None = load("valid")
    except FileError:
        valid = None
    if train.kind == "images":
        return samples.images(recipe, train, valid)
    tokenizer = find_tokenizer(recipe, train, folder)
    build = {
        "causal": texts.causal,
        "masked": texts.hidden,
        "spans": texts.hidden,
        "pairs": samples.pairs,
        "classify": samples.classify,
        "label": samples.label,
    }[recipe.train.objective]
    return build(recipe, context, tokenizer, train, valid)


def _is_path(recipe: Recipe) -> bool:
    return recipe.data.corpus not in corpora.CORPORA
