"""How good a text-to-text model is, by task: BLEU for translations, ROUGE for summaries, accuracy for labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from monoblock.data.readers import Pair
from monoblock.errors import ConfigError
from monoblock.tasks import scores, spanscores
from monoblock.tasks.measured import Asked, Measured, read
from monoblock.tasks.pairing import arranged
from monoblock.tasks.rouge import rouge
from monoblock.tasks.sections import DataPart
from monoblock.tasks.texttotext import AS_TEXT, as_pairs, by_task, prefix_for
from monoblock.tasks.translating import readable

if TYPE_CHECKING:
    from monoblock.tasks.pipeline import Pipeline

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


def first_word(prefix: str) -> str:
    return prefix.split()[0].rstrip(":").lower() if prefix.strip() else ""


def measure(pipe: Pipeline, asked: Asked, part: DataPart, translation: Scored) -> Measured:
    """The figures of each task by itself; where there are several, each goes by its prefix: classify_accuracy."""
    corpus = read(asked, AS_TEXT)
    own = replace(part, prefix=prefix_for(part, asked.data))
    rows = arranged(as_pairs(corpus), own).rows
    tasks = by_task(rows, part)
    figures: dict[str, Any] = {}
    samples: list[dict[str, Any]] = []
    for prefix, some in tasks.items():
        texts: list[str] = pipe.translate([row.source for row in some], batch=asked.batch, **asked.options)
        found = MEASURES.get(first_word(prefix), translation)(texts, [[row.target] for row in some])
        figures |= _named(found | {"sources": len(some)}, prefix, tasks)
        shown = zip(some[: asked.samples], texts, strict=False)
        samples += [{"source": row.source, "reference": row.target, "hypothesis": text} for row, text in shown]
    return Measured(figures | {"split": corpus.split}, samples)


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
