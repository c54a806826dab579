"""Many sources to their targets: sorted by length, a batch at a time, and back in the order they came in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from monoblock.decoding.rows import Prompt, padded
from monoblock.decoding.settings import Settings
from monoblock.errors import InputError, did_you_mean
from monoblock.tasks.lines import cut

if TYPE_CHECKING:
    from monoblock.tasks.pipeline import Pipeline

LONG = ("refuse", "split")  # what is done with a source beyond the context


@dataclass
class Answer:
    """One whole text."""

    text: str = ""
    tokens: int = 0
    finished: str | None = None  # "stop": an end token or a stop string; "length": no more room
    score: float | None = None  # sum of log-probabilities over length to the length penalty
    ids: tuple[int, ...] = ()  # the tokens, an end token last where there is one


class Piece(NamedTuple):
    line: int
    prompt: Prompt
    settings: Settings


def translated(
    pipe: Pipeline,
    texts: Sequence[str],
    chosen: Settings,
    batch: int = 64,
    to: str | None = None,
    long: str = "refuse",
    first: int = 0,
    scores: bool = False,
) -> list[list[Answer]]:
    """For each text its hypotheses, best first; an empty text has empty ones.  `first` is the number of the first.

    A search scores what it finds; with `scores` other texts are read once more for it.
    """
    if long not in LONG:
        raise InputError(f"long={long!r} is none of {', '.join(LONG)}{did_you_mean(long, LONG)}")
    lines = list(enumerate(texts, first))
    pieces = [piece for line, text in lines for piece in _pieces(pipe, line, text, chosen, to, long)]
    order = sorted(range(len(pieces)), key=lambda number: -len(pieces[number].prompt.source or ()))
    found: list[list[Answer]] = [[] for _ in pieces]
    for start in range(0, len(order), batch):
        some = order[start : start + batch]
        answers = pipe.collect([pieces[n].prompt for n in some], [pieces[n].settings for n in some])
        if scores and chosen.num_beams == 1:
            _score(pipe, [pieces[n].prompt for n in some], [answer[0] for answer in answers], chosen.length_penalty)
        for number, answer in zip(some, answers, strict=True):
            found[number] = answer
    parts: list[list[list[Answer]]] = [[] for _ in texts]
    for piece, answer in zip(pieces, found, strict=True):
        parts[piece.line - first].append(answer)
    return [_joined(some, chosen.num_return_sequences) for some in parts]


@torch.inference_mode()
def _score(pipe: Pipeline, prompts: list[Prompt], answers: list[Answer], penalty: float) -> None:
    """Give each answer the score a beam search would have given it."""
    device = pipe.model.device
    source, mask = padded([prompt.source or () for prompt in prompts], device)
    said = [(*prompt.ids, *answer.ids) for prompt, answer in zip(prompts, answers, strict=True)]
    target, _ = padded([ids[:-1] for ids in said], device)  # filled up on the right, which no earlier place sees
    shares = pipe.model(source, target, mask).float().log_softmax(-1)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        places = torch.arange(len(prompt.ids) - 1, len(said[row]) - 1, device=device)
        total = shares[row, places, torch.tensor(answer.ids, device=device)].sum().item()
        answer.score = total / max(1, len(answer.ids)) ** penalty


def _pieces(pipe: Pipeline, line: int, text: str, chosen: Settings, to: str | None, long: str) -> list[Piece]:
    """What is translated for a line: itself, or the parts it is cut into."""
    if not text.strip():
        return []
    limit = pipe.model.config.context
    tag = tag_for(pipe, text, to)

    def prompt(part: str) -> Prompt:
        return pipe.prompt(f"{tag} {part}" if tag else part)

    def fits(part: str) -> bool:
        return limit is None or len(prompt(part).source or ()) <= limit

    if long == "refuse" and not fits(text):
        length = len(prompt(text).source or ())
        raise InputError(
            f"line {line + 1} has {length} tokens, and the model reads {limit}; "
            f"shorten it, or split it with long='split'"
        )
    own = chosen if chosen.seed is None else replace(chosen, seed=chosen.seed + line)
    # Models of sentences say but one of several: each is translated by itself.
    try:
        return [Piece(line, prompt(part), own) for part in cut(text, fits, together=False)]
    except InputError as problem:
        raise InputError(f"line {line + 1}: {problem}") from None


def readable(pipe: Pipeline, text: str) -> bool:
    """Whether a source fits into the model's context."""
    limit = pipe.model.config.context
    return limit is None or len(pipe.prompt(text).source or ()) <= limit


def tag_for(pipe: Pipeline, text: str, to: str | None) -> str:
    """The script to be asked for, unless the text itself does."""
    if not pipe.defaults.here or (to is None and pipe.plain(text)[1]):
        if to is not None:
            raise InputError(f"this model has no script {to!r} to ask for; leave it out")
        return ""
    return pipe.read.script(to)


def _joined(parts: list[list[Answer]], count: int) -> list[Answer]:
    """The hypotheses of a line from those of its parts, the first with the first; scores weighed by length."""
    if not parts:
        return [Answer("", 0, "stop", 0.0) for _ in range(count)]
    if len(parts) == 1:
        return parts[0]
    return [_together([part[rank] for part in parts]) for rank in range(count)]


def _together(answers: list[Answer]) -> Answer:
    tokens = sum(answer.tokens for answer in answers)
    scores: list[Any] = [answer.score for answer in answers]
    score = None
    if None not in scores:
        score = sum(one * answer.tokens for one, answer in zip(scores, answers, strict=True)) / max(1, tokens)
    finished = "length" if any(answer.finished == "length" for answer in answers) else "stop"
    return Answer(" ".join(answer.text.strip() for answer in answers), tokens, finished, score)
