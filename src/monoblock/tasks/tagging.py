"""A label for every word of a text: words to first pieces, the best row of labels, entities, restored text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from monoblock.data.punctuation import LABELS, restore, strip
from monoblock.errors import InputError
from monoblock.tasks.entities import best_row, entities, grammar
from monoblock.tasks.framing import Framed, Words
from monoblock.tasks.passing import Tell, check_long, frame_of, nobody, numbered, passed, too_long
from monoblock.tasks.predicting import check_head
from monoblock.tasks.varied import groups

if TYPE_CHECKING:
    from monoblock.tasks.pipeline import Pipeline

WORD = re.compile(r"\w+(?:[.,]\d+|[-'’]\w+)*|[^\w\s]")  # signs stand apart, but 1,000.5 and well-known are one


class Word(NamedTuple):
    word: str
    label: str
    probability: float


class Named(NamedTuple):
    """An entity: the words [start, end), and how probable the least certain of its labels is."""

    text: str
    label: str
    start: int
    end: int
    probability: float


class Tagging(NamedTuple):
    words: list[Word]
    entities: list[Named]  # where labels speak of runs of words
    restored: str | None = None  # where labels are capitals and punctuation


def restores(labels: Sequence[str]) -> bool:
    """Whether labels are those of capitals and punctuation, so that a text can be put together by them."""
    return set(labels) <= set(LABELS) and len(labels) > 1


def words_of(pipe: Pipeline, text: str | Sequence[str], apart: bool = True) -> list[str]:
    """The words of a text as the model knows them: small and without signs, signs apart, or what spaces part."""
    if not isinstance(text, str):
        empty = next((word for word in text if not word.strip()), None)
        if empty is not None:
            raise InputError(f"{empty!r} is no word; leave it out")
        return list(text)
    if restores(pipe.labels):
        return list(strip(text).words)
    return WORD.findall(text) if apart else text.split()


def tagged(
    pipe: Pipeline,
    rows: Sequence[Sequence[str]],
    *,
    batch: int = 64,
    long: str = "refuse",
    lines: Sequence[int] | None = None,
    tell: Tell = nobody,
) -> list[Tagging]:
    """Words with labels; a row without words has none."""
    found = []
    for words, shares in zip(
        rows, word_shares(pipe, rows, batch=batch, long=long, lines=lines, tell=tell), strict=True
    ):
        chosen = best_labels(pipe.labels, shares)
        likely = [shares[place, number].item() for place, number in enumerate(chosen)]
        labels = [pipe.labels[number] for number in chosen]
        known = list(words[: len(labels)])
        named = [
            Named(" ".join(known[start:end]), kind, start, end, min(likely[start:end]))
            for kind, start, end in entities(labels)
        ]
        made = [Word(*each) for each in zip(known, labels, likely, strict=True)]
        found.append(Tagging(made, named, restore(known, labels) if restores(pipe.labels) else None))
    return found


def best_labels(labels: Sequence[str], shares: Tensor) -> list[int]:
    """The most probable row of labels that their form allows, from probabilities (words, classes)."""
    return best_row(np.log(np.maximum(shares.double().numpy(), 1e-300)), grammar(labels))


def word_shares(
    pipe: Pipeline,
    rows: Sequence[Sequence[str]],
    *,
    batch: int = 64,
    long: str = "refuse",
    lines: Sequence[int] | None = None,
    join: int = 1,
    tell: Tell = nobody,
) -> list[Tensor]:
    """For each row the probabilities (words, classes) at the first piece of each word.

    A row beyond the context is refused, cut, or split between words; up to `join` neighbours are read together.
    """
    check_head(pipe, "tagger")
    check_long(long)
    words = Words(pipe.tokenizer, frame_of(pipe, pipe.model.config.context))
    parts = [
        (place, part)
        for place, (line, row) in enumerate(numbered(rows, lines))
        for part in _parts(words, line, row, long)
    ]
    together = groups([row for _, row in parts], join, words)
    framed = [words.among([row for _, row in parts[some.start : some.stop]]) for some in together]
    asked = [Framed(one.ids, [0] * len(one.ids)) for one in framed]
    answers = passed(pipe, asked, batch, pipe.model, tell=tell)
    found: list[list[Tensor]] = [[] for _ in rows]
    for some, one, answer in zip(together, framed, answers, strict=True):
        begins = 0
        for place, row in parts[some.start : some.stop]:
            places = one.places[begins : begins + len(row)]
            found[place].append(answer[places].softmax(-1))
            begins += len(row)
    return [torch.cat(some) if some else torch.empty(0, len(pipe.labels)) for some in found]


def _parts(words: Words, line: int, row: Sequence[str], long: str) -> list[Sequence[str]]:
    if not row:
        return []
    limit, length = words.frame.longest, words.length(row)
    if limit is None or length <= limit:
        return [row]
    if long == "refuse":
        raise too_long(line, length, limit)
    parts: list[Sequence[str]] = [
        row[some.start : some.stop] for some in groups([[one] for one in row], len(row), words, 0)
    ]
    return parts[:1] if long == "cut" else parts
