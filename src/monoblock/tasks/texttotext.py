"""Every task as text (Raffel et al. 2020): a prefix says what is wanted, and what is wanted is written out.

    classify: In the beginning was the Word.        ->  gospels
    translate to modern English: Ye know not.       ->  You don't know.
    question: Who wept? context: Jesus wept.        ->  Jesus

A recipe names a prefix for its corpus and further tasks with theirs (`[data] prefix`, `[[data.tasks]]`); one model
learns them all.  Labels become words, answers become text.  What is measured goes by the first word of the prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from monoblock.data import corpora
from monoblock.data.corpora import Corpus, Split
from monoblock.data.readers import Kind, Labelled, Pair
from monoblock.data.squad import Question
from monoblock.errors import ConfigError, did_you_mean
from monoblock.tasks.sections import DataPart, TaskPart

NO_ANSWER = "no answer"


def _labelled(row: Labelled) -> Pair:
    return Pair(row.text if row.pair is None else f"{row.text} and: {row.pair}", row.label)


def _asked(row: Question) -> Pair:
    return Pair(f"{row.question} context: {row.context}", row.answers[0] if row.answers else NO_ANSWER)


# The kind of a corpus -> what a row of it is as a pair of texts.
AS_TEXT: dict[str, Callable[[Any], Pair]] = {"pairs": lambda row: row, "labelled": _labelled, "questions": _asked}


def with_every_answer(corpus: Corpus) -> Corpus:
    """A corpus of questions with a row for each gold answer, all of which are right; others as they are."""
    if corpus.kind != "questions":
        return corpus
    each = [row._replace(answers=row.answers[n : n + 1]) for row in corpus.rows for n in range(len(row.answers) or 1)]
    return replace(corpus, rows=each)


def as_pairs(corpus: Corpus) -> Corpus:
    """A corpus as pairs of texts, where its rows can be that; others as they are."""
    if corpus.kind not in AS_TEXT:
        return corpus
    return replace(corpus, kind="pairs", rows=[AS_TEXT[corpus.kind](row) for row in corpus.rows])


def prefixed(rows: Iterable[Pair], prefix: str) -> list[Pair]:
    return [row._replace(source=f"{prefix} {row.source}") for row in rows] if prefix else list(rows)


def kind_of_task(corpus: str, prefix: str, data: Path | None) -> Kind | None:
    """How the corpus of a task is read: questions from .json; where labels are asked for, two columns by what they are.

    A label comes back oftener than a text: the first column is that of the labels unless it has more different cells.
    """
    if first_word(prefix) != "classify":
        return corpora.kind_of(corpus, ("pairs", "questions", "labelled"), folder=data)
    found = corpora.kind_of(corpus, ("labelled", "questions", "pairs"), folder=data)
    read = None if found is None else corpora.load(corpus, "all", folder=data, kind=found)
    if read is None or read.kind != "labelled":
        return found
    turned = len(read.labels()) > len({(row.text, row.pair) for row in read.rows})
    return "pairs" if turned else found


def first_word(prefix: str) -> str:
    return prefix.split()[0].rstrip(":").lower() if prefix.strip() else ""


def further(part: DataPart, split: Split, data: Path | None) -> list[Pair]:
    """The rows of the tasks beside the corpus of a recipe; of a split that a task does not have, none."""
    found: list[Pair] = []
    for task in part.tasks:
        kind = kind_of_task(task.corpus, task.prefix, data)
        load = corpora.load if split == "train" else corpora.load_if_any
        corpus = load(task.corpus, split, folder=data, kind=kind)
        if corpus is None:
            continue
        pairs = as_pairs(corpus)
        if pairs.kind != "pairs":
            raise ConfigError(f"data.tasks: the corpus {task.corpus} is {corpus.kind}, which is no text to text")
        found += prefixed(pairs.rows[: task.limit if split == "train" else None], task.prefix)
    return found


# -- which task a text belongs to -------------------------------------------------------------------------------------


def prefix_for(part: DataPart, corpus: str) -> str:
    """What to put before the sources of a corpus: the prefix it was trained with, or the only one there is."""
    known = {task.corpus: task.prefix for task in _tasks(part)}
    if corpus in known:
        return known[corpus]
    return part.prefix if not part.tasks else ""


def by_task(rows: Sequence[Pair], part: DataPart) -> dict[str, list[Pair]]:
    """Prefix -> the rows that begin with it; a row without any belongs to no task."""
    prefixes = sorted({task.prefix for task in _tasks(part)} - {""}, key=len, reverse=True)
    found: dict[str, list[Pair]] = {}
    for row in rows:
        prefix = next((one for one in prefixes if row.source.startswith(one)), None)
        if prefix is None:
            first = row.source.split(" ")[0]
            raise ConfigError(
                f"the source {row.source[:40]!r} has no prefix; "
                f"begin it with {' or '.join(map(repr, prefixes))}{did_you_mean(first, prefixes)}"
            )
        found.setdefault(prefix, []).append(row)
    return found


def _tasks(part: DataPart) -> list[TaskPart]:
    return [TaskPart(corpus=part.corpus, prefix=part.prefix), *part.tasks]
