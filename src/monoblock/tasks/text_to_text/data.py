"""Text-to-text tasks (Raffel et al. 2020): a prefix of the source names the task, and the target is text, as in

    classify: In the beginning was the Word.        ->  gospels
    translate to modern English: Ye know not.       ->  You don't know.
    question: Who wept? context: Jesus wept.        ->  Jesus

The section [text_to_text] of a recipe has the prefix for data.corpus (`prefix`), and may have further tasks (`tasks`)
that the same model learns. The first word of a prefix decides which metrics are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from monoblock.data.corpora.load import Corpus, Split, infer_corpus_kind, load_corpus, load_corpus_if_present
from monoblock.data.fingerprint import fingerprint_rows
from monoblock.data.readers.holdout import Holdout, SplitMethod
from monoblock.data.readers.records import CorpusKind, LabelledText, Pair, Question
from monoblock.errors import ConfigError, did_you_mean
from monoblock.recipes.schema import DataSection, Recipe
from monoblock.tasks.seq2seq.pairs import prepare_splits
from monoblock.tasks.splits import CorpusSplits, load_splits
from monoblock.tasks.text_to_text.section import TextToTextSection

NO_ANSWER = "no answer"


def _labelled_to_pair(row: LabelledText) -> Pair:
    return Pair(row.text if row.text_pair is None else f"{row.text} and: {row.text_pair}", row.label)


def _question_to_pair(row: Question) -> Pair:
    return Pair(f"{row.question} context: {row.context}", row.answers[0] if row.answers else NO_ANSWER)


# Maps the kind of a corpus to the function that converts a row to a pair of texts.
PAIR_CONVERTERS: dict[str, Callable[[Any], Pair]] = {
    "pairs": lambda row: row,
    "labelled": _labelled_to_pair,
    "questions": _question_to_pair,
}


def expand_answers(corpus: Corpus) -> Corpus:
    """Return a corpus of questions with one row for each gold answer; return any other corpus unchanged."""
    if corpus.kind != "questions":
        return corpus
    rows = [row._replace(answers=row.answers[n : n + 1]) for row in corpus.rows for n in range(len(row.answers) or 1)]
    return replace(corpus, rows=rows)


def convert_to_pairs(corpus: Corpus) -> Corpus:
    """Convert rows to pairs of texts; a corpus whose kind is not in PAIR_CONVERTERS is returned unchanged."""
    if corpus.kind not in PAIR_CONVERTERS:
        return corpus
    return replace(corpus, kind="pairs", rows=[PAIR_CONVERTERS[corpus.kind](row) for row in corpus.rows])


def add_prefix(rows: Iterable[Pair], prefix: str) -> list[Pair]:
    return [row._replace(source=f"{prefix} {row.source}") for row in rows] if prefix else list(rows)


def task_corpus_kind(corpus: str, prefix: str, data: Path | None) -> CorpusKind | None:
    """Return the kind of corpus that the file of a task is read as; None for a named corpus, whose kind is known.

    In a file for classification, the labels may be the first or the second column; they are the column with fewer
    distinct values. If they are the second column, the file is read as pairs.

    data: the user's folder of corpora.
    """
    if first_word(prefix) != "classify":
        return infer_corpus_kind(corpus, ("pairs", "questions", "labelled"), folder=data)
    kind = infer_corpus_kind(corpus, ("labelled", "questions", "pairs"), folder=data)
    loaded = None if kind is None else load_corpus(corpus, "all", folder=data, kind=kind)
    if loaded is None or loaded.kind != "labelled":
        return kind
    text_comes_first = len(loaded.labels()) > len({(row.text, row.text_pair) for row in loaded.rows})
    return "pairs" if text_comes_first else kind


def first_word(prefix: str) -> str:
    return prefix.split()[0].rstrip(":").lower() if prefix.strip() else ""


def load_text_splits(recipe: Recipe, kinds: Sequence[CorpusKind], folder: Path | None) -> tuple[Corpus, Corpus | None]:
    """Read the training and the validation rows of a recipe as pairs: labels and answers become target texts."""
    section, corpus = _recipe_section(recipe), recipe.data.corpus
    kind = task_corpus_kind(corpus, section.prefix, folder) if section.prefix else None
    train, valid = load_splits(recipe, kinds, folder, kind=kind)
    if not section.prefix:
        return train, valid
    return convert_to_pairs(train), None if valid is None else convert_to_pairs(valid)


def prepare_text_splits(splits: CorpusSplits, recipe: Recipe, folder: Path | None) -> CorpusSplits:
    """Prepare the pairs as for seq2seq, put the prefix before each source, and add the rows of the further tasks."""
    section, method = _recipe_section(recipe), recipe.data.split
    splits = prepare_splits(splits, recipe, folder, section.prefix)
    if not section.tasks:
        return splits
    train = replace(splits.train, rows=[*splits.train.rows, *load_extra_tasks(section, "train", folder, method)])
    valid = splits.valid
    if valid is not None:
        valid = replace(valid, rows=[*valid.rows, *load_extra_tasks(section, "valid", folder, method)])
    return replace(splits, train=train, valid=valid, digests={**splits.digests, "tasks": fingerprint_rows(train)})


def _recipe_section(recipe: Recipe) -> TextToTextSection:
    assert isinstance(recipe.task, TextToTextSection)
    return recipe.task


def load_extra_tasks(
    section: TextToTextSection, split: Split, data: Path | None, method: SplitMethod = "random"
) -> list[Pair]:
    """Load the rows of all `text_to_text.tasks` as pairs with prefixes; a task without this split adds no rows.

    data: the user's folder of corpora.
    method: how validation rows are chosen from a corpus that is a single file, as in `data.split`.
    """
    rows: list[Pair] = []
    for task in section.tasks:
        kind = task_corpus_kind(task.corpus, task.prefix, data)
        load = load_corpus if split == "train" else load_corpus_if_present
        corpus = load(task.corpus, split, folder=data, kind=kind, holdout=Holdout(method))
        if corpus is None:
            continue
        pairs = convert_to_pairs(corpus)
        if pairs.kind != "pairs":
            raise ConfigError(
                f"text_to_text.tasks: the corpus {task.corpus} is of the kind {corpus.kind}; "
                "give pairs, labelled texts or questions"
            )
        rows += add_prefix(pairs.rows[: task.limit if split == "train" else None], task.prefix)
    return rows


# -- the task of a source ---------------------------------------------------------------------------------------------


def prefix_for(section: TextToTextSection, corpus: str, data: DataSection | None) -> str:
    """Return the prefix that the sources of a corpus had in training.

    For a corpus that was not used in training, return the prefix of the recipe if it has only one, else "".

    data: the [data] section that the model was trained with.
    """
    prefixes = {task.corpus: task.prefix for task in section.tasks}
    if (data is not None and corpus == data.corpus) or not section.tasks:
        return section.prefix
    return prefixes.get(corpus, "")


def group_by_task(rows: Sequence[Pair], section: TextToTextSection) -> dict[str, list[Pair]]:
    """Map each prefix to the rows whose source begins with it; raise ConfigError for a source without a prefix."""
    prefixes = sorted({section.prefix, *(task.prefix for task in section.tasks)} - {""}, key=len, reverse=True)
    groups: dict[str, list[Pair]] = {}
    for row in rows:
        prefix = next((prefix for prefix in prefixes if row.source.startswith(prefix)), None)
        if prefix is None:
            word = row.source.split(" ")[0]
            raise ConfigError(
                f"the source {row.source[:40]!r} has no prefix; "
                f"begin it with {' or '.join(map(repr, prefixes))}{did_you_mean(word, prefixes)}"
            )
        groups.setdefault(prefix, []).append(row)
    return groups
