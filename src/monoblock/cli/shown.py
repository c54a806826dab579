"""What `monoblock predict` prints for a line, by what was asked: plain text, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import click

DECIMALS = 4  # of a probability: what batches of other sizes agree on


class Shown(NamedTuple):
    as_json: bool
    columns: bool


def _print(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))


def _listed(choices: Sequence[Any], name: str = "label") -> list[dict[str, Any]]:
    return [{name: one.label, "probability": round(one.probability, DECIMALS)} for one in choices]


def show_classes(how: Shown, line: str, found: Any) -> None:
    choices = found or []
    if how.as_json:
        one, tab, other = line.partition("\t")
        _print({"text": one, **({"text_pair": other} if tab else {}), "labels": _listed(choices)})
        return
    click.echo("\t".join(f"{one.label}\t{one.probability:.{DECIMALS}f}" for one in choices))


def show_labels(how: Shown, line: str, found: Any) -> None:
    """Restored text, entities in brackets, or word/LABEL; by columns a word a line."""
    words, entities, restored = found if found is not None else ([], [], None)
    if how.as_json:
        told = [one._asdict() | {"probability": round(one.probability, DECIMALS)} for one in words]
        named = [one._asdict() | {"probability": round(one.probability, DECIMALS)} for one in entities]
        _print({"text": line, "words": told, "entities": named, **({"restored": restored} if restored else {})})
    elif how.columns:
        click.echo("".join(f"{one.word}\t{one.label}\n" for one in words))
    elif restored is not None:
        click.echo(restored)
    elif entities:
        click.echo(bracketed([one.word for one in words], entities))
    else:
        click.echo(" ".join(one.word if one.label == "O" else f"{one.word}/{one.label}" for one in words))


def bracketed(words: Sequence[str], entities: Sequence[Any]) -> str:
    """[PER Peter Blackburn] writes from [LOC Brussels]."""
    said = list(words)
    for one in reversed(entities):
        said[one.start : one.end] = [f"[{one.label} {one.text}]"]
    return " ".join(said)


def show_filled(how: Shown, line: str, found: Any) -> None:
    text, masks = found if found is not None else ("", [])
    if how.as_json:
        _print({"text": line, "filled": text, "masks": [_listed(choices, "token") for choices in masks]})
        return
    cells = [" ".join(f"{one.label} {one.probability:.{DECIMALS}f}" for one in choices) for choices in masks]
    click.echo("\t".join([text, *cells]))


def show_answers(how: Shown, line: str, found: Any) -> None:
    """`answer<TAB>probability`, best first; no answer is empty."""
    answers = found or []
    if how.as_json:
        question, _, context = line.partition("\t")
        told = [
            {"text": one.text, "start": one.start, "end": one.end, "probability": round(one.probability, DECIMALS)}
            for one in answers
        ]
        _print({"question": question, "context": context, "answers": told})
        return
    click.echo("\t".join(f"{one.text}\t{one.probability:.{DECIMALS}f}" for one in answers))


def show_vector(how: Shown, line: str, found: Any) -> None:
    vector = [] if found is None else [round(number, 6) for number in found.tolist()]
    if how.as_json:
        _print({"text": line, "embedding": vector})
    else:
        click.echo(json.dumps(vector))


def show_nearest(how: Shown, line: str, found: Sequence[tuple[str, int, float]]) -> None:
    """`cosine<TAB>line`, nearest first."""
    if how.as_json:
        rows = [{"line": number + 1, "text": text, "cosine": round(cosine, DECIMALS)} for text, number, cosine in found]
        _print({"text": line, "nearest": rows})
        return
    for text, _, cosine in found:
        click.echo(f"{cosine:.{DECIMALS}f}\t{text}")


# Method of the pipeline -> how its result is shown.
SHOW: dict[str, Callable[[Shown, str, Any], None]] = {
    "classify": show_classes,
    "tag": show_labels,
    "fill": show_filled,
    "embed": show_vector,
    "answer": show_answers,
}
