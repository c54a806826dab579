"""Evaluate each task of a text-to-text model: by BLEU, ROUGE, accuracy or F1, depending on its prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from monoblock.data.readers.records import Pair
from monoblock.errors import ConfigError
from monoblock.metrics.rouge import rouge
from monoblock.metrics.squad import score_answers
from monoblock.metrics.text import accuracy
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest, read_corpus
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.seq2seq.evaluate import score_translations
from monoblock.tasks.seq2seq.pairs import collect_references, prepare_pairs
from monoblock.tasks.seq2seq.predict import best_translations, fits_context
from monoblock.tasks.text_splitting import split_sentences
from monoblock.tasks.text_to_text.data import (
    convert_to_pairs,
    expand_answers,
    first_word,
    group_by_task,
    prefix_for,
    task_corpus_kind,
)
from monoblock.tasks.text_to_text.section import TEXT_CORPUS_KINDS, TextToTextSection

MetricFunction = Callable[[list[str], list[list[str]]], dict[str, Any]]
SUMMARIZATION = ("summarize", "summarise")


def _exact_accuracy(texts: list[str], references: list[list[str]]) -> dict[str, Any]:
    return {"accuracy": accuracy([[text.strip()] for text in texts], references)}


# Maps the first word of a prefix to the metrics of the task; any other word means the metrics of translation.
METRICS_BY_TASK: dict[str, MetricFunction] = {
    **dict.fromkeys(SUMMARIZATION, rouge),
    "classify": _exact_accuracy,
    "question": lambda texts, references: dict(score_answers(texts, references)),
}


def evaluate_text_to_text(loaded: LoadedModel, request: EvaluationRequest) -> Evaluation:
    """Compute the metrics of each task; with several tasks, metric names begin with the task, as classify_accuracy."""
    section = loaded.section(TextToTextSection)
    translation_metrics = partial(score_translations, lowercase=request.lowercase)
    prefix = prefix_for(section, request.data, loaded.data_section)
    corpus = read_corpus(request, TEXT_CORPUS_KINDS, kind=task_corpus_kind(request.data, prefix, request.folder))
    pairs = prepare_pairs(convert_to_pairs(expand_answers(corpus)), section, prefix).rows
    all_references = collect_references(pairs)
    is_question = corpus.kind == "questions"
    tasks = group_by_task(_first_targets(pairs) if is_question else pairs, section)
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


def score_lead(sources: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the ROUGE of the first sentence of each source, as lead_rouge1, lead_rouge2 and lead_rougeL."""
    leads = [split_sentences(source)[0] if source else "" for source in sources]
    return {f"lead_{name}": value for name, value in rouge(leads, references).items()}


def _first_targets(rows: Sequence[Pair]) -> list[Pair]:
    """Return the rows without those that repeat the source of an earlier row."""
    return list({row.source: row for row in reversed(rows)}.values())[::-1]


def score_validation_texts(loaded: LoadedModel, rows: Sequence[Pair], count: int) -> dict[str, float]:
    """Return metrics on the first `count` validation sources of each task, for the model card.

    Sources that do not fit into the context are left out.
    """
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
