"""What a model that labels words is worth on a corpus: accuracy, and F1 of entities, of marks or of labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from monoblock.data.corpora import Corpus
from monoblock.data.punctuation import MARKS
from monoblock.data.readers import Tagged
from monoblock.errors import FileError
from monoblock.tasks import classes
from monoblock.tasks.classifying import SHOWN, unseen
from monoblock.tasks.drawn import Mistake, save_confusion
from monoblock.tasks.entities import OUTSIDE, Counts, as_bio, count, is_iob1, speaks_of_runs, total
from monoblock.tasks.measured import Asked, Measured, Table, read
from monoblock.tasks.pipeline import Pipeline
from monoblock.tasks.tagging import best_labels, restores, word_shares

MORE = 20  # rows of words for every row that a model card asks for
PARTS = ([mark for mark in MARKS.values() if mark != OUTSIDE], ["CAP", "UPPER"])  # of a label such as COMMA+CAP


def tagger(pipe: Pipeline, asked: Asked) -> Measured:
    """Accuracy over words, loss, and F1 by what the labels are: of whole entities, of marks, of labels."""
    corpus = read(asked, "tagged")
    notes = []
    if is_iob1(corpus.rows, {*pipe.labels, *corpus.labels()}):
        corpus = Corpus(corpus.name, corpus.kind, corpus.split, [as_bio(row) for row in corpus.rows])
        notes.append("the labels of the data were turned from IOB1 into BIO")
    place = {label: number for number, label in enumerate(pipe.labels)}
    for number, row in enumerate(corpus.rows, 1):
        strange = next((label for label in row.labels if label not in place), None)
        if strange is not None:
            raise unseen(corpus, f"row {number}", strange, pipe.labels)
    join = pipe.part.join if pipe.part is not None else 1
    every = word_shares(pipe, [row.words for row in corpus.rows], batch=asked.batch, long="split", join=join)
    found = _labels(pipe, every)
    flat = np.concatenate([shares.double().numpy() for shares in every])
    there = [place[label] for row in corpus.rows for label in row.labels]
    said = [place[label] for labels in found for label in labels]
    counts = classes.confusion(said, there, len(pipe.labels))
    figures: dict[str, Any] = {
        "accuracy": classes.accuracy(counts),
        **_f1(pipe.labels, found, corpus.rows, _trained_on(pipe, asked), notes),
        "loss": float(classes.surprise(flat, there).mean()),
        "ece": classes.calibration_error(flat, there),
        "majority": 100 * int(np.bincount(there).max()) / len(there),
        "words": len(there),
        "sources": len(corpus),
        "split": corpus.split,
    }
    rows = figures.pop("rows")
    columns = list(next(iter(rows.values()), {}))
    mistakes = _mistakes(corpus.rows, flat, said, there, pipe.labels, max(SHOWN, asked.samples))
    told = [mistake.told() for mistake in mistakes]
    return Measured(
        figures | classes.described(counts, pipe.labels) | {"kinds": rows, "worst": told[:SHOWN]},
        told[: asked.samples],
        notes,
        tables=[Table(["kind", *columns], [[kind, *one.values()] for kind, one in rows.items()])],
        picture=lambda path: save_confusion(counts, pipe.labels, mistakes[:SHOWN], path),
    )


def _trained_on(pipe: Pipeline, asked: Asked) -> Asked:
    """Where to learn guesses from: beside a whole file to be measured on, the data the model was trained on."""
    if asked.split != "all" or pipe.part is None:
        return asked
    return replace(asked, data=pipe.part.corpus)


def held_out(pipe: Pipeline, rows: Sequence[Tagged], count: int) -> dict[str, float]:
    """For a model card: F1 over the first validation rows, many of which are short."""
    some = rows[: MORE * count]
    join = pipe.part.join if pipe.part is not None else 1
    found = _labels(pipe, word_shares(pipe, [row.words for row in some], long="split", join=join))
    return {"val_f1": _f1(pipe.labels, found, some, None, [])["f1"]}


def _labels(pipe: Pipeline, every: Sequence[Tensor]) -> list[list[str]]:
    return [[pipe.labels[number] for number in best_labels(pipe.labels, shares)] for shares in every]


def _f1(
    labels: Sequence[str], found: list[list[str]], rows: Sequence[Tagged], asked: Asked | None, notes: list[str]
) -> dict[str, Any]:
    """The figure `f1` with what belongs to it, and a row a kind."""
    truth = [row.labels for row in rows]
    if speaks_of_runs(labels):
        notes.append("f1 is that of whole entities, all kinds together, as conlleval counts them")
        counted = count(found, truth)
        whole = total(counted)
        kinds = {kind: _row(one) for kind, one in counted.items()}
        return {"f1": whole.f1, "precision": whole.precision, "recall": whole.recall, "rows": kinds}
    if restores(labels):
        return _marks(found, rows, _guessed(asked, rows), notes)
    notes.append("f1 is the mean over labels")
    place = {label: number for number, label in enumerate(labels)}
    said, there = ([place[label] for row in some for label in row] for some in (found, truth))
    counts = classes.confusion(said, there, len(labels))
    scores = zip(labels, classes.scores(counts), strict=True)
    return {"f1": classes.macro_f1(counts), "rows": {label: score._asdict() for label, score in scores if score.there}}


def _row(one: Counts) -> dict[str, Any]:
    return {"precision": one.precision, "recall": one.recall, "f1": one.f1, "there": one.there}


def _marks(
    found: list[list[str]], rows: Sequence[Tagged], guessed: list[list[str]], notes: list[str]
) -> dict[str, Any]:
    """F1 of every mark and of capitals with their mean, each beside that of a guess."""
    kinds: dict[str, Any] = {}
    for number, names in enumerate(PARTS):
        said, guess, there = (
            np.array([_part(label, number) for row in some for label in row])
            for some in (found, guessed, [row.labels for row in rows])
        )
        for name in names:
            if not (there == name).any():
                continue
            mine, theirs = (_score(one == name, there == name) for one in (said, guess))
            kinds[name] = _row(mine) | {"baseline": theirs.f1, "margin": mine.f1 - theirs.f1}
    mean, base = (float(np.mean([row[key] for row in kinds.values()] or [0.0])) for key in ("f1", "baseline"))
    notes.append(
        "f1 is the mean over marks and capitals; the baseline gives a word its most frequent label in training"
    )
    return {"f1": mean, "baseline": base, "margin": mean - base, "rows": kinds}


def _score(said: Any, there: Any) -> Counts:
    return Counts(int((said & there).sum()), int(said.sum()), int(there.sum()))


def _guessed(asked: Asked | None, rows: Sequence[Tagged]) -> list[list[str]]:
    """For each word the label it has most often in the training split; O for a word that is not there."""
    seen: dict[str, Counter[str]] = {}
    try:
        for row in read(asked, "tagged", "train").rows if asked is not None else ():
            for word, label in zip(row.words, row.labels, strict=True):
                seen.setdefault(word, Counter())[label] += 1
    except FileError:  # only a file to be measured on
        pass
    best = {word: counts.most_common(1)[0][0] for word, counts in seen.items()}
    return [[best.get(word, OUTSIDE) for word in row.words] for row in rows]


def _part(label: str, number: int) -> str:
    return label.partition("+")[2 * number]


def _mistakes(
    rows: Sequence[Tagged], shares: Any, said: list[int], there: list[int], labels: Sequence[str], most: int
) -> list[Mistake]:
    """The words whose true label was given the least, each with its neighbours."""
    places = [(row, word) for row in rows for word in range(len(row.words))]
    wrong = np.flatnonzero(np.array(said) != np.array(there))
    order = wrong[np.argsort(-classes.surprise(shares, there)[wrong], kind="stable")]
    picked = []
    for flat in order[:most].tolist():
        row, word = places[flat]
        near = [f"[{one}]" if n == word else one for n, one in enumerate(row.words)][max(0, word - 5) : word + 6]
        share = float(shares[flat, said[flat]])
        picked.append(Mistake(" ".join(near), labels[there[flat]], labels[said[flat]], share))
    return picked
