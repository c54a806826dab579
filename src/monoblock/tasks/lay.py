"""From a recipe to its ground: the corpus is read and given to the objective that wants it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from monoblock.data import corpora
from monoblock.data.corpora import Corpus
from monoblock.data.fingerprint import fingerprint
from monoblock.data.readers import Kind
from monoblock.errors import ConfigError
from monoblock.tasks import asking, chatting, labelled, pairing, pictures, samples, sentences, texts
from monoblock.tasks.defaults import START
from monoblock.tasks.ground import Ground, find_tokenizer
from monoblock.tasks.recipe import TRAINS, Recipe, is_vision
from monoblock.tasks.sections import AugmentPart
from monoblock.tasks.starting import Start
from monoblock.tasks.texttotext import as_pairs, further, kind_of_task

# Objective -> the kinds of corpus it can use; a path is read as its ending says, or as the first.
KINDS: dict[str, tuple[Kind, ...]] = {
    "causal": ("text",),
    "masked": ("text", "labelled", "tagged"),  # of labelled rows the text alone
    "spans": ("text",),
    "pairs": ("pairs",),
    "classify": ("labelled", "images"),
    "label": ("tagged",),
    "answers": ("questions",),
    "chat": ("chat",),
}


def lay(
    recipe: Recipe,
    context: int | None,
    *,
    data: Path | None = None,
    folder: Path | None = None,
    start: Start | None = None,
) -> Ground:
    """Read the corpus and prepare training and evaluation; `start` is where the model has its weights from."""
    asked = recipe.train.objective
    train, valid = _splits(recipe, data)
    if asked == "pairs" and recipe.data.prefix:  # labels and answers are text, too
        train, valid = as_pairs(train), None if valid is None else as_pairs(valid)
    whole = train
    labels = train.labels()  # of all there is: a limit must not lose one
    if start is not None and start.keeps_head(TRAINS[asked][1], recipe.model):
        labels = start.agreed(labels)
    if recipe.data.limit is not None:
        train = replace(train, rows=train.rows[: recipe.data.limit])
    train = pairing.arranged(train, recipe.data)
    if train.kind not in KINDS[asked]:
        raise ConfigError(
            f"train.objective={asked!r} needs {' or '.join(KINDS[asked])}, but the corpus {train.name} is {train.kind}"
        )
    content = {corpus.split: fingerprint(corpus) for corpus in (whole, valid) if corpus is not None}
    made = pairing.synthetic(recipe.data, data)
    if made is not None:
        content["synthetic"] = fingerprint(made)
        train = replace(train, rows=pairing.mixed(train.rows, made.rows, recipe.data.ratio))
    valid = None if valid is None else pairing.arranged(valid, recipe.data)
    if recipe.data.tasks:
        train = replace(train, rows=[*train.rows, *further(recipe.data, "train", data)])
        content["tasks"] = fingerprint(train)
        valid = None if valid is None else replace(valid, rows=[*valid.rows, *further(recipe.data, "valid", data)])
    if (train.kind == "images") != is_vision(recipe):
        reads = "looks at images" if is_vision(recipe) else "reads text; write model.family='vit'"
        raise ConfigError(f"the corpus {train.name} is {train.kind}, and this model {reads}")
    if train.kind != "images" and recipe.data.augment != AugmentPart():
        raise ConfigError(f"data.augment varies images, and the corpus {train.name} is {train.kind}; leave it out")
    if train.kind == "images":
        return replace(pictures.images(recipe, train, valid, labels), content=content)
    tokenizer = find_tokenizer(recipe, train, folder, start.tokenizer if start is not None else None)
    build: dict[str, Callable[..., Ground]] = {
        "causal": texts.causal,
        "masked": sentences.sentences if recipe.data.packing == "documents" else texts.hidden,
        "spans": texts.hidden,
        "pairs": partial(samples.pairs, begins=None if start is None else start.tokens.get(START)),
        "classify": partial(labelled.classify, labels=labels),
        "label": partial(labelled.label, labels=labels),
        "answers": asking.answers,
        "chat": chatting.chat,
    }
    return replace(build[asked](recipe, context, tokenizer, train, valid), content=content)


def _splits(recipe: Recipe, data: Path | None) -> tuple[Corpus, Corpus | None]:
    """The training rows, and those that validate: a split of their own, or the last `held` of the training rows."""
    name, held, kind = recipe.data.corpus, recipe.data.held, _kind(recipe, data)
    train = corpora.load(name, "train", folder=data, kind=kind)
    if held:
        if held >= len(train):
            raise ConfigError(f"data.held={held} leaves nothing of {len(train)} rows to train on; write less")
        return replace(train, rows=train.rows[:-held]), replace(train, split="valid", rows=train.rows[-held:])
    return train, corpora.load_if_any(name, "valid", folder=data, kind=kind)


def _kind(recipe: Recipe, data: Path | None) -> Kind | None:
    """How a path is to be read; a named corpus knows it itself."""
    if recipe.train.objective == "pairs" and recipe.data.prefix:
        return kind_of_task(recipe.data.corpus, recipe.data.prefix, data)
    return corpora.kind_of(recipe.data.corpus, KINDS[recipe.train.objective], folder=data)
