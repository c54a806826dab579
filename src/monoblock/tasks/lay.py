"""From a recipe to its ground: the corpus is read and given to the objective that wants it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from monoblock.data import corpora
from monoblock.data.corpora import Corpus
from monoblock.data.fingerprint import fingerprint
from monoblock.errors import ConfigError, FileError
from monoblock.tasks import pairing, samples, texts
from monoblock.tasks.ground import Ground, find_tokenizer
from monoblock.tasks.recipe import Recipe, is_vision

# Objective -> the kinds of corpus it can use; a path is read as the first, arrays as images.
KINDS = {
    "causal": ("text",),
    "masked": ("text",),
    "spans": ("text",),
    "pairs": ("pairs",),
    "classify": ("labelled", "images"),
    "label": ("tagged",),
}


def lay(recipe: Recipe, context: int | None, *, data: Path | None = None, folder: Path | None = None) -> Ground:
    """Read the corpus and prepare training and evaluation."""
    asked = recipe.train.objective
    load = partial(corpora.load, recipe.data.corpus, folder=data, kind=_kind(recipe, data))
    train = whole = load("train")
    labels = train.labels()  # of all there is: a limit must not lose one
    if recipe.data.limit is not None:
        train = replace(train, rows=train.rows[: recipe.data.limit])
    train = pairing.arranged(train, recipe.data)
    if train.kind not in KINDS[asked]:
        raise ConfigError(
            f"train.objective={asked!r} needs {' or '.join(KINDS[asked])}, but the corpus {train.name} is {train.kind}"
        )
    try:
        valid: Corpus | None = load("valid")
    except FileError:
        valid = None
    content = {corpus.split: fingerprint(corpus) for corpus in (whole, valid) if corpus is not None}
    made = pairing.synthetic(recipe.data, data)
    if made is not None:
        content["synthetic"] = fingerprint(made)
        train = replace(train, rows=pairing.mixed(train.rows, made.rows, recipe.data.ratio))
    valid = None if valid is None else pairing.arranged(valid, recipe.data)
    if (train.kind == "images") != is_vision(recipe):
        reads = "looks at images" if is_vision(recipe) else "reads text; write model.family='vit'"
        raise ConfigError(f"the corpus {train.name} is {train.kind}, and this model {reads}")
    if train.kind == "images":
        return replace(samples.images(recipe, train, valid, labels), content=content)
    tokenizer = find_tokenizer(recipe, train, folder)
    build: dict[str, Callable[..., Ground]] = {
        "causal": texts.causal,
        "masked": texts.hidden,
        "spans": texts.hidden,
        "pairs": samples.pairs,
        "classify": partial(samples.classify, labels=labels),
        "label": partial(samples.label, labels=labels),
    }
    return replace(build[asked](recipe, context, tokenizer, train, valid), content=content)


def _kind(recipe: Recipe, data: Path | None) -> Any:
    """How a path is to be read; a named corpus knows it itself."""
    if recipe.data.corpus in corpora.CORPORA:
        return None
    first, *others = KINDS[recipe.train.objective]
    places = [Path(recipe.data.corpus), *([data / recipe.data.corpus] if data is not None else [])]
    arrays = any(place.suffix == ".npz" or any(place.glob("*.npz")) for place in places)
    return "images" if arrays and "images" in others else first
