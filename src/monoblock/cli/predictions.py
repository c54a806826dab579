"""Print the predictions for a line, as text or as one JSON object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from monoblock.cli.output import dump_json, echo

Line = str | tuple[str, ...]  # a line of text, or the texts in the columns of a row
DECIMALS = 4  # of a probability: the digits that do not depend on the batch size


class OutputFormat(NamedTuple):
    as_json: bool
    columns: bool


def show_line(line: Line) -> str:
    return line if isinstance(line, str) else "\t".join(line)


def is_empty(line: Line) -> bool:
    return not show_line(line).strip()


def _split_pair(line: Line) -> tuple[str, str | None]:
    """Return the text of a line, and its second text if there is one."""
    if isinstance(line, tuple):
        return line[0], line[1] if len(line) > 1 else None
    text, tab, text_pair = line.partition("\t")
    return text, text_pair if tab else None


def _print_json(value: dict[str, Any]) -> None:
    echo(dump_json(value))


def _choices_json(choices: Sequence[Any], name: str = "label") -> list[dict[str, Any]]:
    return [{name: choice.label, "probability": round(choice.probability, DECIMALS)} for choice in choices]


def print_classes(output_format: OutputFormat, line: Line, result: Any) -> None:
    choices = result or []
    if output_format.as_json:
        text, text_pair = _split_pair(line)
        _print_json(
            {"text": text, **({} if text_pair is None else {"text_pair": text_pair}), "labels": _choices_json(choices)}
        )
        return
    echo("\t".join(f"{choice.label}\t{choice.probability:.{DECIMALS}f}" for choice in choices))


def print_tags(output_format: OutputFormat, line: Line, result: Any) -> None:
    """Print the tags of a line: the text with punctuation restored, else with entities in brackets, else word/LABEL.

    With --columns, print `word<TAB>label` on a line for each word instead.
    """
    words, entities, restored = result if result is not None else ([], [], None)
    if output_format.as_json:
        rounded = [
            [item._asdict() | {"probability": round(item.probability, DECIMALS)} for item in items]
            for items in (words, entities)
        ]
        restored_json = {"restored": restored} if restored else {}
        _print_json({"text": show_line(line), "words": rounded[0], "entities": rounded[1], **restored_json})
    elif output_format.columns:
        echo("".join(f"{word.word}\t{word.label}\n" for word in words))
    elif restored is not None:
        echo(restored)
    elif entities:
        echo(bracket_entities([word.word for word in words], entities))
    else:
        echo(" ".join(word.word if word.label == "O" else f"{word.word}/{word.label}" for word in words))


def bracket_entities(words: Sequence[str], entities: Sequence[Any]) -> str:
    """Return the text with its entities marked: [PER Peter Blackburn] writes from [LOC Brussels]."""
    marked = list(words)
    for entity in reversed(entities):
        marked[entity.start : entity.end] = [f"[{entity.label} {entity.text}]"]
    return " ".join(marked)


def print_fills(output_format: OutputFormat, line: Line, result: Any) -> None:
    text, masks = result if result is not None else ("", [])
    if output_format.as_json:
        _print_json(
            {"text": show_line(line), "filled": text, "masks": [_choices_json(choices, "token") for choices in masks]}
        )
        return
    cells = [" ".join(f"{choice.label} {choice.probability:.{DECIMALS}f}" for choice in choices) for choices in masks]
    echo("\t".join([text, *cells]))


def print_answers(output_format: OutputFormat, line: Line, result: Any) -> None:
    """Print the answers to one question on one line as `answer<TAB>probability`, best first; "" means no answer."""
    answers = result or []
    if output_format.as_json:
        question, context = _split_pair(line)
        rows = [
            {
                "text": answer.text,
                "start": answer.start,
                "end": answer.end,
                "probability": round(answer.probability, DECIMALS),
            }
            for answer in answers
        ]
        _print_json({"question": question, "context": context or "", "answers": rows})
        return
    echo("\t".join(f"{answer.text}\t{answer.probability:.{DECIMALS}f}" for answer in answers))


def print_embedding(output_format: OutputFormat, line: Line, result: Any) -> None:
    vector = [] if result is None else [round(value, 6) for value in result.tolist()]
    if output_format.as_json:
        _print_json({"text": show_line(line), "embedding": vector})
    else:
        echo(dump_json(vector))


def print_neighbours(output_format: OutputFormat, line: str, neighbours: Sequence[tuple[str, int, float]]) -> None:
    """Print the neighbours (text, line index, cosine) of a line as `cosine<TAB>text`, nearest first."""
    if output_format.as_json:
        rows = [
            {"line": number + 1, "text": text, "cosine": round(cosine, DECIMALS)} for text, number, cosine in neighbours
        ]
        _print_json({"text": line, "nearest": rows})
        return
    for text, _, cosine in neighbours:
        echo(f"{cosine:.{DECIMALS}f}\t{text}")


# Method of Pipeline -> function that prints its result.
PRINTERS: dict[str, Callable[[OutputFormat, Line, Any], None]] = {
    "classify": print_classes,
    "tag": print_tags,
    "fill": print_fills,
    "embed": print_embedding,
    "answer": print_answers,
}
