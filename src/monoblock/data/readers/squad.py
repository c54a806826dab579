"""Read and write questions in the JSON format of SQuAD (Rajpurkar et al. 2016, 2018); answers are spans of the context.

    {"data": [{"paragraphs": [{"context": "…", "qas": [{"id": "…", "question": "…",
                                                        "answers": [{"text": "…", "answer_start": 17}]}]}]}]}

In version 2 of the format a question may be unanswerable: it has `"is_impossible": true` and an empty list of answers.
A malformed file raises FileError, whose message names the location, such as data[0].paragraphs[2].qas[1].
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from monoblock.data.readers.records import Question
from monoblock.errors import FileError
from monoblock.untrusted_files import open_regular

MAX_QUOTED_CHARACTERS = 40  # how much of an answer an error message quotes


def read_questions(path: str | Path) -> Iterator[Question]:
    """Yield the questions of a SQuAD-style file in order."""
    empty = True
    paragraphs = (
        (f"data[{number}].paragraphs[{index}]", paragraph)
        for number, article in enumerate(_list_field(path, "", _load_json(path), "data"))
        for index, paragraph in enumerate(_list_field(path, f"data[{number}]", article, "paragraphs"))
    )
    for location, paragraph in paragraphs:
        context = _string_field(path, location, paragraph, "context")
        for number, question in enumerate(_list_field(path, location, paragraph, "qas")):
            empty = False
            yield _parse_question(path, f"{location}.qas[{number}]", question, context)
    if empty:
        raise FileError(f'{path} has no questions; add at least one under "qas"')


def _load_json(path: str | Path) -> Any:
    try:
        with open_regular(path) as file:
            return json.loads(file.read().decode("utf-8-sig"))
    except FileError:
        raise
    except UnicodeDecodeError:
        raise FileError(f"{path}: a byte is not UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as problem:
        raise FileError(f"{path}, line {problem.lineno}: not JSON ({problem.msg}); give a SQuAD-style file") from None
    except (ValueError, RecursionError) as problem:
        raise FileError(f"{path}: not JSON ({str(problem)[:80]}); give a SQuAD-style file") from None


def _parse_question(path: str | Path, location: str, question_object: Any, context: str) -> Question:
    question = _string_field(path, location, question_object, "question")
    question_id = str(question_object.get("id", location))
    if not question.strip():
        raise _format_error(path, location, '"question" is empty; write a question, or delete this entry of "qas"')
    impossible = question_object.get("is_impossible", False)
    if not isinstance(impossible, bool):
        raise _format_error(path, location, '"is_impossible" is neither true nor false; write one of them')
    answers = _list_field(path, location, question_object, "answers")
    if impossible or not answers:
        if bool(answers) == impossible:
            reason = (
                'has answers, but "is_impossible" is true' if answers else 'has no answers; write "is_impossible": true'
            )
            raise _format_error(path, location, reason)
        return Question(question, context, id=question_id)
    spans = dict.fromkeys(
        _parse_answer(path, f"{location}.answers[{n}]", answer, context) for n, answer in enumerate(answers)
    )
    texts, starts = tuple(text for text, _ in spans), tuple(start for _, start in spans)
    return Question(question, context, texts, starts, question_id)


def _parse_answer(path: str | Path, location: str, answer: Any, context: str) -> tuple[str, int]:
    text = _string_field(path, location, answer, "text")
    start = answer.get("answer_start")
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise _format_error(path, location, '"answer_start" is missing or not an integer of at least 0')
    if not text.strip():
        raise _format_error(path, location, '"text" is empty; if there is no answer, write "is_impossible": true')
    if context[start : start + len(text)] != text:
        found_at = context.find(text)
        where = f"it is at {found_at}" if found_at >= 0 else "the context does not contain it"
        quote = repr(text[:MAX_QUOTED_CHARACTERS])
        raise _format_error(path, location, f"the answer {quote} is not at character {start} of the context; {where}")
    return text, start


def _list_field(path: str | Path, location: str, container: Any, name: str) -> list[Any]:
    value = container.get(name) if isinstance(container, dict) else None
    if not isinstance(value, list):
        raise _format_error(path, location, f'"{name}" is missing or not a list')
    return value


def _string_field(path: str | Path, location: str, container: Any, name: str) -> str:
    value = container.get(name) if isinstance(container, dict) else None
    if not isinstance(value, str):
        raise _format_error(path, location, f'"{name}" is missing or not a string')
    return value


def _format_error(path: str | Path, location: str, reason: str) -> FileError:
    return FileError(f"{path}, {location}: {reason}" if location else f"{path}: {reason}")


def to_squad_json(rows: Iterable[Question], title: str = "") -> dict[str, Any]:
    """Return questions as the JSON object of a SQuAD file; consecutive rows with the same context form a paragraph."""
    paragraphs: list[dict[str, Any]] = []
    for row in rows:
        if not paragraphs or paragraphs[-1]["context"] != row.context:
            paragraphs.append({"context": row.context, "qas": []})
        spans = zip(row.answers, row.answer_starts, strict=True)
        answers = [{"text": text, "answer_start": start} for text, start in spans]
        question = {"id": row.id, "question": row.question, "answers": answers, "is_impossible": not answers}
        paragraphs[-1]["qas"].append(question)
    return {"version": "v2.0", "data": [{"title": title, "paragraphs": paragraphs}]}
