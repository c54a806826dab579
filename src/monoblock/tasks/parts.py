"""What an engine says, as text: bit by bit, in whole characters, each with the prompt it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from monoblock.decoding.engine import Engine
from monoblock.decoding.text import Text


class Part(NamedTuple):
    """A bit of one of the texts: which prompt, which of its texts, and how it ended where it did."""

    prompt: int
    number: int
    text: str
    tokens: int
    finished: str | None = None  # "stop": an end token or a stop string; "length": no more room
    score: float | None = None  # beams: sum of log-probabilities over length to the length penalty
    ids: tuple[int, ...] = ()


def parts_of(
    engine: Engine, order: dict[int, int], texts: dict[tuple[int, int], Text], ends: Sequence[int]
) -> Iterator[Part]:
    """What the engine says as text; a request all of whose texts are over is let go."""
    running = set(texts)
    while engine.busy:
        for event in engine.step():
            key = (event.id, event.number)
            if key not in running:
                continue
            text, last = texts[key], event.tokens[-1] if event.tokens else None
            shown = event.tokens[:-1] if event.finished == "stop" and last in ends else event.tokens
            said = text.add(*shown) + (text.end() if event.finished else "")
            finished = "stop" if text.stopped is not None else event.finished
            yield Part(order[event.id], event.number, said, len(event.tokens), finished, event.score, event.tokens)
            if finished:
                running.discard(key)
            if text.stopped is not None and not any(request == event.id for request, _ in running):
                engine.cancel(event.id)


def texts_of(parts: Iterator[Part]) -> Iterator[str]:
    return (part.text for part in parts if part.text)
