"""Questions about a text whose answers are spans of it, in the JSON of SQuAD (Rajpurkar et al. 2016, 2018).

    {"data": [{"paragraphs": [{"context": "…", "qas": [{"id": "…", "question": "…",
                                                        "answers": [{"text": "…", "answer_start": 17}]}]}]}]}

In the second version a question may have no answer: `"is_impossible": true` and no answers.  A fault is a FileError of
one line that says where in the file it stands: data[0].paragraphs[2].qas[1].
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from monoblock.errors import FileError

SHOWN = 40  # characters of a text that an error quotes


class Question(NamedTuple):
    """A question and its context; answers that are accepted, and at which character each begins (none: no answer)."""

    question: str
    context: str
    answers: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()
    id: str = ""


def read_questions(path: str | Path) -> Iterator[Question]:
    """Every question of a SQuAD-style file, in its order."""
    found = False
    for place, paragraph in _paragraphs(path, _json(path)):
        context = _text(path, place, paragraph, "context")
        for number, asked in enumerate(_list(path, place, paragraph, "qas")):
            found = True
            yield _question(path, f"{place}.qas[{number}]", asked, context)
    if not found:
        raise FileError(f'{path} asks nothing; give it one question or more under "qas"')


def _json(path: str | Path) -> Any:
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
        return json.loads(text)
    except OSError as problem:
        raise FileError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except UnicodeDecodeError:
        raise FileError(f"{path}: a byte is not UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as problem:
        raise FileError(f"{path}, line {problem.lineno}: not JSON ({problem.msg}); give a SQuAD-style file") from None
    except (ValueError, RecursionError) as problem:
        raise FileError(f"{path}: not JSON ({str(problem)[:80]}); give a SQuAD-style file") from None


def _paragraphs(path: str | Path, data: Any) -> Iterator[tuple[str, Any]]:
    for number, article in enumerate(_list(path, "", data, "data")):
        place = f"data[{number}]"
        for inner, paragraph in enumerate(_list(path, place, article, "paragraphs")):
            yield f"{place}.paragraphs[{inner}]", paragraph


def _question(path: str | Path, place: str, asked: Any, context: str) -> Question:
    question = _text(path, place, asked, "question")
    name = asked.get("id", place)
    if not question.strip():
        raise _wrong(path, place, '"question" is empty; write one or leave it out')
    impossible = asked.get("is_impossible", False)
    if not isinstance(impossible, bool):
        raise _wrong(path, place, '"is_impossible" is neither true nor false')
    answers = _list(path, place, asked, "answers")
    if impossible or not answers:
        if bool(answers) == impossible:
            why = "is impossible and has answers" if answers else 'has no answers; write "is_impossible": true'
            raise _wrong(path, place, why)
        return Question(question, context, id=str(name))
    found = dict.fromkeys(_answer(path, f"{place}.answers[{n}]", one, context) for n, one in enumerate(answers))
    return Question(question, context, tuple(text for text, _ in found), tuple(start for _, start in found), str(name))


def _answer(path: str | Path, place: str, answer: Any, context: str) -> tuple[str, int]:
    text = _text(path, place, answer, "text")
    start = answer.get("answer_start")
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise _wrong(path, place, '"answer_start" is missing or no whole number')
    if not text.strip():
        raise _wrong(path, place, '"text" is empty; a question without an answer is "is_impossible": true')
    if context[start : start + len(text)] != text:
        stands = context.find(text)
        where = f"it stands at {stands}" if stands >= 0 else "it stands nowhere in it"
        raise _wrong(path, place, f"the answer {text[:SHOWN]!r} is not at {start} of the context; {where}")
    return text, start


def _list(path: str | Path, place: str, holder: Any, name: str) -> list[Any]:
    found = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(found, list):
        raise _wrong(path, place, f'"{name}" is missing or no list')
    return found


def _text(path: str | Path, place: str, holder: Any, name: str) -> str:
    found = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(found, str):
        raise _wrong(path, place, f'"{name}" is missing or no text')
    return found


def _wrong(path: str | Path, place: str, why: str) -> FileError:
    return FileError(f"{path}, {place}: {why}" if place else f"{path}: {why}")


def to_squad(rows: Iterable[Question], title: str = "") -> dict[str, Any]:
    """Rows as the content of such a file: neighbours with one context are a paragraph."""
    paragraphs: list[dict[str, Any]] = []
    for row in rows:
        if not paragraphs or paragraphs[-1]["context"] != row.context:
            paragraphs.append({"context": row.context, "qas": []})
        both = zip(row.answers, row.starts, strict=True)
        answers = [{"text": text, "answer_start": start} for text, start in both]
        asked = {"id": row.id, "question": row.question, "answers": answers, "is_impossible": not answers}
        paragraphs[-1]["qas"].append(asked)
    return {"version": "v2.0", "data": [{"title": title, "paragraphs": paragraphs}]}
