"""Text-to-text tasks (Raffel et al. 2020): a prefix of the source names the task, and the target is text, as in

    classify: In the beginning was the Word.        ->  gospels
    translate to modern English: Ye know not.       ->  You don't know.
    question: Who wept? context: Jesus wept.        ->  Jesus

The section [text_to_text] of a recipe has the prefix for data.corpus (`prefix`), and may have further tasks (`tasks`)
that the same model learns. The first word of a prefix decides which metrics are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monoblock.config.schema import check_at_least, check_types
from monoblock.data.corpora.load import Corpus, Split, infer_corpus_kind, load_corpus, load_corpus_if_present
from monoblock.data.readers.by_path import Holdout, SplitMethod
from monoblock.data.readers.records import CorpusKind, Pair
from monoblock.errors import ConfigError, did_you_mean
from monoblock.metrics.squad import score_answers
from monoblock.metrics.text import accuracy, rouge
from monoblock.recipes.schema import DataSection, Recipe
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest, read_corpus
from monoblock.tasks.input_template import split_sentences
from monoblock.tasks.seq2seq import Seq2Seq, Seq2SeqSection, collect_references, prepare_pairs, score_translations
from monoblock.tasks.task import CorpusSplits, load_splits

if TYPE_CHECKING:
    from monoblock.tasks.loaded_model import LoadedModel

MetricFunction = Callable[[list[str], list[list[str]]], dict[str, Any]]
NO_ANSWER = "no answer"
SUMMARIZATION = ("summarize", "summarise")


@dataclass(frozen=True, kw_only=True)
class ExtraTask:
    """A task that a text-to-text model learns in addition to the task of data.corpus."""

    corpus: str  # a named corpus or a path, with pairs, labelled texts or questions
    prefix: str  # the text before each source that names the task, such as "classify:"
    limit: int | None = None  # train on at most this many rows of the corpus

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "limit")


@dataclass(frozen=True, kw_only=True)
class TextToTextSection(Seq2SeqSection):
    """The keys of [seq2seq], the prefix of the task, and further tasks."""

    prefix: str = ""  # the text before each source that names the task, such as "summarize:"
    tasks: tuple[ExtraTask, ...] = ()  # further tasks that the model learns, each with its own corpus and prefix


class TextToText(Seq2Seq):
    name = "text_to_text"
    about = "learn several tasks with one model, each named by a prefix of the source"
    corpus_kinds = ("pairs", "questions", "labelled")  # these convert to pairs
    section = TextToTextSection
    metrics = ("bleu", "rougeL", "accuracy", "f1")

    def load_data(self, recipe: Recipe, folder: Path | None, /) -> tuple[Corpus, Corpus | None]:
        """Read the training and the validation rows of a recipe as pairs: labels and answers become target texts."""
        prefix = _recipe_section(recipe).prefix
        kind = task_corpus_kind(recipe.data.corpus, prefix, folder) if prefix else None
        train, valid = load_splits(recipe, self.corpus_kinds, folder, kind=kind)
        if not prefix:
            return train, valid
        return convert_to_pairs(train), None if valid is None else convert_to_pairs(valid)

    def prepare_data(self, splits: CorpusSplits, recipe: Recipe, folder: Path | None, /) -> CorpusSplits:
        from monoblock.data.corpora.load import fingerprint_rows

        section, method = _recipe_section(recipe), recipe.data.split
        splits = super().prepare_data(splits, recipe, folder)
        if not section.tasks:
            return splits
        train = replace(splits.train, rows=[*splits.train.rows, *load_extra_tasks(section, "train", folder, method)])
        valid = splits.valid
        if valid is not None:
            valid = replace(valid, rows=[*valid.rows, *load_extra_tasks(section, "valid", folder, method)])
        return replace(splits, train=train, valid=valid, digests={**splits.digests, "tasks": fingerprint_rows(train)})

    def evaluate(self, loaded: LoadedModel, request: EvaluationRequest, /) -> Evaluation:
        """Compute the metrics of each task; with several, the names of metrics begin with the task's."""
        from monoblock.tasks.translate import best_translations

        section = loaded.section(TextToTextSection)
        translation_metrics = partial(score_translations, lowercase=request.lowercase)
        prefix = prefix_for(section, request.data, loaded.data_section)
        corpus = read_corpus(request, self.corpus_kinds, kind=task_corpus_kind(request.data, prefix, request.folder))
        is_question = corpus.kind == "questions"
        if is_question:  # one row for each gold answer, of which all are references
            answers = [
                row._replace(answers=row.answers[n : n + 1])
                for row in corpus.rows
                for n in range(len(row.answers) or 1)
            ]
            corpus = replace(corpus, rows=answers)
        pairs = prepare_pairs(convert_to_pairs(corpus), section, prefix).rows
        all_references = collect_references(pairs)
        first = list({row.source: row for row in reversed(pairs)}.values())[::-1]  # the first row of every source
        tasks = group_by_task(first if is_question else pairs, section)
        metrics: dict[str, Any] = {}
        samples: list[dict[str, Any]] = []
        notes: list[str] = []
        for prefix, rows in tasks.items():
            texts = best_translations(loaded, [row.source for row in rows], batch=request.batch, **request.options)
            references = [all_references[row.source] if is_question else [row.target] for row in rows]
            scores = METRICS_BY_TASK.get(first_word(prefix), translation_metrics)(texts, references)
            if first_word(prefix) in SUMMARIZATION:
                scores |= score_lead([row.source.removeprefix(prefix).strip() for row in rows], references)
                notes.append("lead: the scores of the first sentence of each source, a summary that needs no model")
            metrics |= _prefix_metric_names(scores | {"sources": len(rows)}, prefix, tasks)
            sampled = zip(rows[: request.samples], texts, strict=False)
            samples += [{"source": row.source, "reference": row.target, "hypothesis": text} for row, text in sampled]
        return Evaluation(metrics | {"split": corpus.split}, samples, notes)

    def score_validation(self, loaded: LoadedModel, rows: Sequence[Pair], count: int, /) -> dict[str, float]:
        """Return metrics on the first `count` validation sources of each task that fit into the context."""
        from monoblock.tasks.translate import best_translations, fits_context

        tasks = group_by_task(rows, loaded.section(TextToTextSection))
        metrics: dict[str, float] = {}
        for prefix, task_rows in tasks.items():
            measured = [row for row in task_rows[: 2 * count] if fits_context(loaded, row.source)][:count]
            if not measured:
                continue
            texts = best_translations(loaded, [row.source for row in measured])
            references = [[row.target] for row in measured]
            try:
                scores = METRICS_BY_TASK.get(first_word(prefix), score_translations)(texts, references)
            except ConfigError:  # sacreBLEU is not installed
                continue
            numbers = {name: value for name, value in scores.items() if isinstance(value, float)}
            metrics |= {f"val_{name}": value for name, value in _prefix_metric_names(numbers, prefix, tasks).items()}
        return metrics


# -- pairs ------------------------------------------------------------------------------------------------------------


# Maps the kind of a corpus to the function that converts a row to a pair of texts.
PAIR_CONVERTERS: dict[str, Callable[[Any], Pair]] = {
    "pairs": lambda row: row,
    "labelled": lambda row: Pair(row.text if row.text_pair is None else f"{row.text} and: {row.text_pair}", row.label),
    "questions": lambda row: Pair(
        f"{row.question} context: {row.context}", row.answers[0] if row.answers else NO_ANSWER
    ),
}


def convert_to_pairs(corpus: Corpus) -> Corpus:
    """Convert rows to pairs of texts; a corpus whose kind is not in PAIR_CONVERTERS is returned unchanged."""
    if corpus.kind not in PAIR_CONVERTERS:
        return corpus
    return replace(corpus, kind="pairs", rows=[PAIR_CONVERTERS[corpus.kind](row) for row in corpus.rows])


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
        for pair in pairs.rows[: task.limit if split == "train" else None]:
            rows.append(pair._replace(source=f"{task.prefix} {pair.source}") if task.prefix else pair)
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


# -- metrics ----------------------------------------------------------------------------------------------------------


# Maps the first word of a prefix to the metrics of the task; any other word means the metrics of translation.
METRICS_BY_TASK: dict[str, MetricFunction] = {
    **dict.fromkeys(SUMMARIZATION, rouge),
    "classify": lambda texts, references: {"accuracy": accuracy([[text.strip()] for text in texts], references)},
    "question": lambda texts, references: dict(score_answers(texts, references)),
}


def score_lead(sources: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the ROUGE of the first sentence of each source, as lead_rouge1, lead_rouge2 and lead_rougeL."""
    leads = [split_sentences(source)[0] if source else "" for source in sources]
    return {f"lead_{name}": value for name, value in rouge(leads, references).items()}


def _prefix_metric_names(metrics: dict[str, Any], prefix: str, tasks: Sequence[str] | dict[str, Any]) -> dict[str, Any]:
    """Return the metrics with the name of the task before each metric name; with a single task, without it.

    The name is the first word of the prefix, or the whole prefix if another task has the same first word.
    """
    if len(tasks) == 1:
        return metrics
    word = first_word(prefix)
    is_shared = sum(first_word(other) == word for other in tasks) > 1
    task = "_".join(prefix.rstrip(":").lower().split()) if is_shared else word
    return {f"{task}_{name}": value for name, value in metrics.items()}
