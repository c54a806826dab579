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

from monoblock.data.corpora import load as corpora
from monoblock.data.corpora.load import Corpus, Split
from monoblock.data.readers.records import CorpusKind, LabelledText, Pair, Question
from monoblock.errors import ConfigError, did_you_mean
from monoblock.recipes.schema import DataSection, TaskSection

NO_ANSWER = "no answer"


def _labelled_to_pair(row: LabelledText) -> Pair:
    return Pair(row.text if row.text_pair is None else f"{row.text} and: {row.text_pair}", row.label)


def _question_to_pair(row: Question) -> Pair:
    return Pair(f"{row.question} context: {row.context}", row.answers[0] if row.answers else NO_ANSWER)


# The kind of a corpus -> what a row of it is as a pair of texts.
PAIR_CONVERTERS: dict[str, Callable[[Any], Pair]] = {
    "pairs": lambda row: row,
    "labelled": _labelled_to_pair,
    "questions": _question_to_pair,
}


def expand_answers(corpus: Corpus) -> Corpus:
    """A corpus of questions with a row for each gold answer, all of which are right; others as they are."""
    if corpus.kind != "questions":
        return corpus
    each = [row._replace(answers=row.answers[n : n + 1]) for row in corpus.rows for n in range(len(row.answers) or 1)]
    return replace(corpus, rows=each)


def convert_to_pairs(corpus: Corpus) -> Corpus:
    """A corpus as pairs of texts, where its rows can be that; others as they are."""
    if corpus.kind not in PAIR_CONVERTERS:
        return corpus
    return replace(corpus, kind="pairs", rows=[PAIR_CONVERTERS[corpus.kind](row) for row in corpus.rows])


def add_prefix(rows: Iterable[Pair], prefix: str) -> list[Pair]:
    return [row._replace(source=f"{prefix} {row.source}") for row in rows] if prefix else list(rows)


def task_corpus_kind(corpus: str, prefix: str, data: Path | None) -> CorpusKind | None:
    """How the corpus of a task is read: questions from .json; where labels are asked for, two columns by what they are.

    A label comes back oftener than a text: the first column is that of the labels unless it has more different cells.
    """
    if first_word(prefix) != "classify":
        return corpora.infer_corpus_kind(corpus, ("pairs", "questions", "labelled"), folder=data)
    found = corpora.infer_corpus_kind(corpus, ("labelled", "questions", "pairs"), folder=data)
    read = None if found is None else corpora.load_corpus(corpus, "all", folder=data, kind=found)
    if read is None or read.kind != "labelled":
        return found
    turned = len(read.labels()) > len({(row.text, row.text_pair) for row in read.rows})
    return "pairs" if turned else found


def first_word(prefix: str) -> str:
    return prefix.split()[0].rstrip(":").lower() if prefix.strip() else ""


def load_extra_tasks(section: DataSection, split: Split, data: Path | None) -> list[Pair]:
    """The rows of the tasks beside the corpus of a recipe; of a split that a task does not have, none."""
    found: list[Pair] = []
    for task in section.tasks:
        kind = task_corpus_kind(task.corpus, task.prefix, data)
        load = corpora.load_corpus if split == "train" else corpora.load_corpus_if_present
        corpus = load(task.corpus, split, folder=data, kind=kind)
        if corpus is None:
            continue
        pairs = convert_to_pairs(corpus)
        if pairs.kind != "pairs":
            raise ConfigError(f"data.tasks: the corpus {task.corpus} is {corpus.kind}, which is no text to text")
        found += add_prefix(pairs.rows[: task.limit if split == "train" else None], task.prefix)
    return found


# -- which task a text belongs to -------------------------------------------------------------------------------------


def prefix_for(section: DataSection, corpus: str) -> str:
    """What to put before the sources of a corpus: the prefix it was trained with, or the only one there is."""
    known = {task.corpus: task.prefix for task in _all_tasks(section)}
    if corpus in known:
        return known[corpus]
    return section.prefix if not section.tasks else ""


def group_by_task(rows: Sequence[Pair], section: DataSection) -> dict[str, list[Pair]]:
    """Prefix -> the rows that begin with it; a row without any belongs to no task."""
    prefixes = sorted({task.prefix for task in _all_tasks(section)} - {""}, key=len, reverse=True)
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


def _all_tasks(section: DataSection) -> list[TaskSection]:
    return [TaskSection(corpus=section.corpus, prefix=section.prefix), *section.tasks]
