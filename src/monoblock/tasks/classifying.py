"""What a classifier of texts, of pairs of texts or of images is worth on a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from monoblock.data.corpora import Corpus
from monoblock.data.readers import Labelled
from monoblock.errors import InputError, did_you_mean
from monoblock.tasks import classes, predicting
from monoblock.tasks.drawn import Mistake, save_confusion
from monoblock.tasks.measured import Asked, Measured, Table, read
from monoblock.tasks.passing import frame_of
from monoblock.tasks.pictures import fits, numbered, stacked
from monoblock.tasks.pipeline import Pipeline

SHOWN = 12  # mistakes in a picture, and in the figures


def classifier(pipe: Pipeline, asked: Asked) -> Measured:
    """Accuracy, macro F1, loss and calibration; for --json the confusion matrix and a row a class."""
    corpus = read(asked, "images" if pipe.tokenizer is None else "labelled")
    there = wanted(corpus, pipe.labels)
    shares = _shares(pipe, corpus, asked)
    counts = classes.confusion(shares.argmax(-1).tolist(), there, len(pipe.labels))
    counted = len(corpus)
    common = int(np.bincount(there, minlength=1).max())
    figures: dict[str, Any] = {
        "accuracy": classes.accuracy(counts),
        "f1": classes.macro_f1(counts),
        "loss": float(classes.surprise(shares, there).mean()),
        "ece": classes.calibration_error(shares, there),
        "majority": 100 * common / counted,  # the accuracy of always saying the most frequent
        "sources": counted,
        "split": corpus.split,
    }
    mistakes = [
        _mistake(pipe, corpus, shares, there, n) for n in classes.worst(shares, there, max(SHOWN, asked.samples))
    ]
    told = [mistake.told() for mistake in mistakes]
    rows = [[label, *score] for label, score in zip(pipe.labels, classes.scores(counts), strict=True) if score.there]
    return Measured(
        figures | classes.described(counts, pipe.labels) | {"worst": told[:SHOWN]},
        told[: asked.samples],
        ["f1 is the mean over classes; ece is the calibration error over 15 bins, in percent", *_cut(pipe, corpus)],
        tables=[Table(["class", "precision", "recall", "f1", "there"], rows)],
        picture=partial(_draw, counts=counts, labels=pipe.labels, mistakes=mistakes[:SHOWN]),
    )


def _draw(path: Path, **what: Any) -> Path:
    return save_confusion(path=path, **what)


def wanted(corpus: Corpus, labels: Sequence[str]) -> list[int]:
    """The number of each row's label; one that training did not see is refused."""
    if corpus.kind == "images":
        return [int(number) for number in numbered(corpus, labels)]
    place = {label: number for number, label in enumerate(labels)}
    for line, row in enumerate(corpus.rows, 1):
        if row.label not in place:
            raise unseen(corpus, f"row {line}", row.label, labels)
    return [place[row.label] for row in corpus.rows]


def unseen(corpus: Corpus, where: str, label: str, labels: Sequence[str]) -> InputError:
    """A label of the data that the model cannot give."""
    known = f"{', '.join(list(labels)[:8])}{' …' * (len(labels) > 8)}"
    return InputError(
        f"{corpus.name}, split {corpus.split}, {where}: the label {label!r} was not seen in training"
        f"{did_you_mean(label, labels)}; known are {known}"
    )


def _shares(pipe: Pipeline, corpus: Corpus, asked: Asked) -> Any:
    if corpus.kind == "images":
        pixels = stacked(corpus.rows, corpus.name)
        fits(pipe.model, tuple(pixels.shape[1:]), corpus.name)
        return predicting.image_probabilities(pipe, list(pixels), batch=asked.batch).double().numpy()
    texts = [_text(row) for row in corpus.rows]
    return predicting.probabilities(pipe, texts, batch=asked.batch, long="cut").double().numpy()


def _cut(pipe: Pipeline, corpus: Corpus) -> list[str]:
    """A word about texts of which the end was not read."""
    limit = pipe.model.config.context
    if corpus.kind == "images" or limit is None:
        return []
    encode, frame = pipe.tokenizer.encode, frame_of(pipe, limit)
    made = (frame(encode(row.text), None if row.pair is None else encode(row.pair)) for row in corpus.rows)
    count = sum(one.cut > 0 for one in made)
    return [f"{count:,} of {len(corpus):,} texts were cut to {limit} tokens"] if count else []


def _text(row: Labelled) -> predicting.Text:
    return row.text if row.pair is None else (row.text, row.pair)


def _mistake(pipe: Pipeline, corpus: Corpus, shares: Any, there: Sequence[int], number: int) -> Mistake:
    row, found = corpus.rows[number], int(shares[number].argmax())
    image = corpus.kind == "images"
    text = f"image {number}" if image else row.text if row.pair is None else f"{row.text} | {row.pair}"
    share = float(shares[number, found])
    return Mistake(text, pipe.labels[there[number]], pipe.labels[found], share, row.pixels if image else None)
