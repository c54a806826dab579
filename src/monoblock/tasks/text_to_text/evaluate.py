"""How good a text-to-text model is, by task: BLEU for translations, ROUGE for summaries, accuracy for labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from monoblock.data.readers.records import CorpusKind, Pair
from monoblock.errors import ConfigError
from monoblock.metrics import squad as spanscores, text as scores
from monoblock.metrics.rouge import rouge
from monoblock.recipes.schema import DataSection
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest, read_corpus
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.seq2seq.pairs import collect_references, prepare_pairs
from monoblock.tasks.seq2seq.predict import best_translations, fits_context
from monoblock.tasks.text_to_text.data import (
    convert_to_pairs,
    expand_answers,
    first_word,
    group_by_task,
    prefix_for,
    task_corpus_kind,
)

TEXT_CORPUS_KINDS: tuple[CorpusKind, ...] = (
    "pairs",
    "questions",
    "labelled",
)  # kinds of corpora whose rows can be pairs of texts
MetricFunction = Callable[[list[str], list[list[str]]], dict[str, Any]]


def _exact_accuracy(texts: list[str], accepted: list[list[str]]) -> dict[str, Any]:
    return {"accuracy": scores.accuracy([[text.strip()] for text in texts], accepted)}


# The first word of a prefix -> what is measured; anything else is measured as a translation.
METRICS_BY_TASK: dict[str, MetricFunction] = {
    "summarize": rouge,
    "summarise": rouge,
    "classify": _exact_accuracy,
    "question": lambda texts, accepted: dict(spanscores.score_answers(texts, accepted)),
}


def evaluate_text_to_text(
    loaded: LoadedModel, request: EvaluationRequest, section: DataSection, translation_metrics: MetricFunction
) -> Evaluation:
    """The figures of each task by itself; where there are several, each goes by its prefix: classify_accuracy."""
    own = replace(section, prefix=prefix_for(section, request.data))
    corpus = read_corpus(request, TEXT_CORPUS_KINDS, kind=task_corpus_kind(request.data, own.prefix, request.folder))
    every = prepare_pairs(convert_to_pairs(expand_answers(corpus)), own).rows
    accepted = collect_references(every)
    tasks = group_by_task(_first_targets(every) if corpus.kind == "questions" else every, section)
    figures: dict[str, Any] = {}
    samples: list[dict[str, Any]] = []
    for prefix, some in tasks.items():
        texts = best_translations(loaded, [row.source for row in some], batch=request.batch, **request.options)
        golds = [accepted[row.source] if corpus.kind == "questions" else [row.target] for row in some]
        found = METRICS_BY_TASK.get(first_word(prefix), translation_metrics)(texts, golds)
        figures |= _prefix_metric_names(found | {"sources": len(some)}, prefix, tasks)
        shown = zip(some[: request.samples], texts, strict=False)
        samples += [{"source": row.source, "reference": row.target, "hypothesis": text} for row, text in shown]
    return Evaluation(figures | {"split": corpus.split}, samples)


def _first_targets(rows: Sequence[Pair]) -> list[Pair]:
    """Each source with the first of its targets."""
    return list({row.source: row for row in reversed(rows)}.values())[::-1]


def score_validation_rows(
    loaded: LoadedModel, rows: Sequence[Pair], count: int, section: DataSection, translation_metrics: MetricFunction
) -> dict[str, float]:
    """For a model card: the first validation sources of each task."""
    tasks = group_by_task(rows, section)
    figures: dict[str, float] = {}
    for prefix, every in tasks.items():
        some = [row for row in every[: 2 * count] if fits_context(loaded, row.source)][:count]
        if not some:
            continue
        texts = best_translations(loaded, [row.source for row in some])
        try:
            found = METRICS_BY_TASK.get(first_word(prefix), translation_metrics)(texts, [[row.target] for row in some])
        except ConfigError:  # a package that measures is not here
            continue
        numbers = {name: value for name, value in found.items() if isinstance(value, float)}
        figures |= {f"val_{name}": value for name, value in _prefix_metric_names(numbers, prefix, tasks).items()}
    return figures


def _prefix_metric_names(metrics: dict[str, Any], prefix: str, tasks: Sequence[str] | dict[str, Any]) -> dict[str, Any]:
    """Figures by task where there are several: by the first word of the prefix, or all of it where two begin alike."""
    if len(tasks) == 1:
        return metrics
    word = first_word(prefix)
    alike = sum(first_word(other) == word for other in tasks) > 1
    name = "_".join(prefix.rstrip(":").lower().split()) if alike else word
    return {f"{name}_{figure}": value for figure, value in metrics.items()}
