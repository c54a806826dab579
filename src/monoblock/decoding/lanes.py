"""A lane is one request on its way: its settings, what it has said so far in each of its rows, and why it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from monoblock.decoding.beam import Beams, Hypothesis
from monoblock.decoding.rows import Prompt
from monoblock.decoding.sample import Noise, fresh_seed
from monoblock.decoding.settings import Settings


class Event(NamedTuple):
    """What one step brought for one sequence of one request."""

    id: int
    number: int  # which of the sequences to return
    tokens: tuple[int, ...]  # new since the last event; beams speak only when all is over
    finished: str | None = None  # "stop": an end token, "length": the count or the context is reached, "cancelled"
    score: float | None = None  # beams: the hypothesis' score


@dataclass
class Row:
    """One sequence: the tokens so far, and the noise that chooses the next one."""

    noise: Noise | None = None
    new: list[int] = field(default_factory=list)
    finished: str | None = None


class Lane:
    def __init__(self, number: int, prompt: Prompt, settings: Settings, room: int) -> None:
        self.id, self.prompt, self.settings = number, prompt, settings
        self.room = room  # new tokens the context leaves room for
        self.beams = Beams(settings) if settings.num_beams > 1 else None
        seed = fresh_seed() if settings.seed is None and settings.temperature > 0 else settings.seed or 0
        drawn = settings.temperature > 0
        self.rows = [Row(Noise(seed, row) if drawn else None) for row in range(settings.rows)]

    @property
    def done(self) -> bool:
        return self.beams.done if self.beams is not None else all(row.finished for row in self.rows)

    def over(self, row: int) -> bool:
        """Whether a row has nothing more to say, though others of the request may."""
        return self.done or (self.beams is None and self.rows[row].finished is not None)

    @property
    def count(self) -> int:
        """New tokens so far in the longest row."""
        return self.beams.length if self.beams is not None else max(len(row.new) for row in self.rows)

    def text(self, row: int) -> list[int]:
        """All tokens of one row, the prompt's too."""
        new = self.beams.running_tokens(row) if self.beams is not None else self.rows[row].new
        return [*self.prompt.ids, *new]

    def newest(self, row: int) -> int:
        """What the model is to read next; a finished row reads anything."""
        if self.beams is not None:
            return self.beams.tokens[row]
        return self.rows[row].new[-1] if self.rows[row].new else 0

    @property
    def newest_tokens(self) -> list[int]:
        """What the model is to read next in every row."""
        return self.beams.tokens if self.beams is not None else [self.newest(row) for row in range(len(self.rows))]

    def say(self, row: int, tokens: Sequence[int]) -> Event | None:
        """Tokens chosen for a row, heard up to its end; None where the row was over before."""
        mine = self.rows[row]
        if mine.finished:
            return None
        heard = tokens[: self.room - len(mine.new)]
        ends = [place for place, token in enumerate(heard) if token in self.settings.eos_token_id]
        if ends:
            heard, mine.finished = heard[: ends[0] + 1], "stop"
        mine.new.extend(heard)
        if not mine.finished and len(mine.new) >= self.room:
            mine.finished = "length"
        return Event(self.id, row, tuple(heard), mine.finished)

    def verdicts(self) -> list[Event]:
        """The best texts of a finished beam search."""
        assert self.beams is not None
        return [self._verdict(number, text) for number, text in enumerate(self.beams.best())]

    def _verdict(self, number: int, text: Hypothesis) -> Event:
        ended = bool(text.tokens) and text.tokens[-1] in self.settings.eos_token_id
        return Event(self.id, number, text.tokens, "stop" if ended else "length", text.score)
