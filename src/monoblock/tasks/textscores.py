"""How good a text-to-text model is, by task: BLEU for translations, ROUGE for summaries, accuracy for labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from monoblock.data.readers import Kind, Pair
from monoblock.errors import ConfigError
from monoblock.tasks import scores, spanscores
from monoblock.tasks.measured import Asked, Measured, read
from monoblock.tasks.pairing import arranged, references
from monoblock.tasks.rouge import rouge
from monoblock.tasks.sections import DataPart
from monoblock.tasks.texttotext import (
    as_pairs,
    by_task,
    first_word,
    kind_of_task,
    prefix_for,
    with_every_answer,
)
from monoblock.tasks.translating import readable

if TYPE_CHECKING:
    from monoblock.tasks.pipeline import Pipeline

TEXTS: tuple[Kind, ...] = ("pairs", "questions", "labelled")  # kinds of corpora whose rows can be pairs of texts
Scored = Callable[[list[str], list[list[str]]], dict[str, Any]]


def _accuracy(texts: list[str], accepted: list[list[str]]) -> dict[str, Any]:
    return {"accuracy": scores.accuracy([[text.strip()] for text in texts], accepted)}


# The first word of a prefix -> what is measured; anything else is measured as a translation.
MEASURES: dict[str, Scored] = {
    "summarize": rouge,
    "summarise": rouge,
    "classify": _accuracy,
    "question": lambda texts, accepted: dict(spanscores.scored(texts, accepted)),
}


def measure(pipe: Pipeline, asked: Asked, part: DataPart, translation: Scored) -> Measured:
    """The figures of each task by itself; where there are several, each goes by its prefix: classify_accuracy."""
    own = replace(part, prefix=prefix_for(part, asked.data))
    corpus = read(asked, TEXTS, kind=kind_of_task(asked.data, own.prefix, asked.folder))
    every = arranged(as_pairs(with_every_answer(corpus)), own).rows
    accepted = references(every)
    tasks = by_task(_once(every) if corpus.kind == "questions" else every, part)
    figures: dict[str, Any] = {}
    samples: list[dict[str, Any]] = []
    for prefix, some in tasks.items():
        texts: list[str] = pipe.translate([row.source for row in some], batch=asked.batch, **asked.options)
        golds = [accepted[row.source] if corpus.kind == "questions" else [row.target] for row in some]
        found = MEASURES.get(first_word(prefix), translation)(texts, golds)
        figures |= _named(found | {"sources": len(some)}, prefix, tasks)
        shown = zip(some[: asked.samples], texts, strict=False)
        samples += [{"source": row.source, "reference": row.target, "hypothesis": text} for row, text in shown]
    return Measured(figures | {"split": corpus.split}, samples)


def _once(rows: Sequence[Pair]) -> list[Pair]:
    """Each source with the first of its targets."""
    return list({row.source: row for row in reversed(rows)}.values())[::-1]


def held_out(pipe: Pipeline, rows: Sequence[Pair], count: int, part: DataPart, translation: Scored) -> dict[str, float]:
    """For a model card: the first validation sources of each task."""
    tasks = by_task(rows, part)
    figures: dict[str, float] = {}
    for prefix, every in tasks.items():
        some = [row for row in every[: 2 * count] if readable(pipe, row.source)][:count]
        if not some:
            continue
        texts = pipe.translate([row.source for row in some])
        try:
            found = MEASURES.get(first_word(prefix), translation)(texts, [[row.target] for row in some])
        except ConfigError:  # a package that measures is not here
            continue
        numbers = {name: value for name, value in found.items() if isinstance(value, float)}
        figures |= {f"val_{name}": value for name, value in _named(numbers, prefix, tasks).items()}
    return figures


def _named(figures: dict[str, Any], prefix: str, tasks: Sequence[str] | dict[str, Any]) -> dict[str, Any]:
    """Figures by task where there are several: by the first word of the prefix, or all of it where two begin alike."""
    if len(tasks) == 1:
        return figures
    word = first_word(prefix)
    alike = sum(first_word(other) == word for other in tasks) > 1
    name = "_".join(prefix.rstrip(":").lower().split()) if alike else word
    return {f"{name}_{figure}": value for figure, value in figures.items()}
