"""The filters of a batch whose rows have settings of their own, run in one fixed order: rules first, then chances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from monoblock.decoding import logits as shape
from monoblock.decoding.logits import Past
from monoblock.decoding.sample import choose
from monoblock.decoding.settings import Settings

# name in Settings -> filter; a row whose value is the neutral one is left as it is.
BY_PAST: dict[str, tuple[Callable[..., Tensor], float]] = {
    "repetition_penalty": (shape.repetition_penalty, 1.0),
    "no_repeat_ngram_size": (shape.no_repeat_ngram_size, 0),
}
BY_CHANCE: dict[str, tuple[Callable[..., Tensor], float]] = {
    "temperature": (shape.temperature, 1.0),
    "top_k": (shape.top_k, 0),
    "top_p": (shape.top_p, 1.0),
    "min_p": (shape.min_p, 0.0),
    "typical_p": (shape.typical_p, 1.0),
}


class Filters:
    """Made once for the settings of the rows, then called every step."""

    def __init__(self, rows: Sequence[Settings], device: torch.device) -> None:
        self.rows, self.device = tuple(rows), device
        self.alike = len(set(self.rows)) <= 1
        self.by_past = self._chosen(BY_PAST)
        self.by_chance = self._chosen(BY_CHANCE)
        self.drawn = torch.tensor([row.temperature > 0 for row in self.rows], device=device)
        self.draws = any(row.temperature > 0 for row in self.rows)
        self.ruled = any(
            row.bad_words_ids
            or row.suppress_tokens
            or row.begin_suppress_tokens
            or row.min_new_tokens
            or row.forced_bos_token_id is not None
            or row.forced_eos_token_id is not None
            for row in self.rows
        )

    @property
    def looks_back(self) -> bool:
        return bool(self.by_past) or any(row.bad_words_ids for row in self.rows)

    @property
    def by_itself(self) -> bool:
        """Whether a token follows from the logits and a chance alone, whatever was said before."""
        return not (self.by_past or self.ruled)

    @property
    def key(self) -> object:
        """All that the choice of a token depends on."""
        return tuple(tuple(getattr(row, name) for name in BY_CHANCE) for row in self.rows)

    def choose(self, logits: Tensor, chances: Tensor) -> Tensor:
        """A token a row (B,): the best, or the one its chance (B,) points at."""
        best = logits.argmax(-1)
        if not self.draws:
            return best
        return torch.where(self.drawn, choose(self.chances(logits.float()), chances), best)

    def _chosen(self, table: dict[str, tuple[Callable[..., Tensor], float]]) -> list[tuple[Callable[..., Tensor], Any]]:
        found: list[tuple[Callable[..., Tensor], Any]] = []
        for name, (function, neutral) in table.items():
            values = [getattr(row, name) for row in self.rows]
            if table is BY_CHANCE:  # a greedy row is not drawn, and a temperature of 0 divides nothing
                values = [neutral if row.temperature == 0 else v for row, v in zip(self.rows, values, strict=True)]
            if all(value == neutral for value in values):
                continue
            same = len(set(values)) == 1
            found.append((function, values[0] if same else torch.tensor(values, device=self.device)[:, None]))
        return found

    def rules(self, logits: Tensor, past: Past | None, new: Sequence[int]) -> Tensor:
        """What holds for greedy, beams and sampling alike; `new` counts each row's new tokens so far."""
        for function, value in self.by_past:
            logits = function(logits, value, past)
        return self._ruled(logits, past, new) if self.ruled else logits

    def ruled_out(self, new: Sequence[int]) -> tuple[int, ...] | None:
        """The tokens that no row may say, where the rules come to no more than that; None where they do."""
        if self.by_past or not self.alike or (self.ruled and len(set(new)) > 1):
            return None
        row = self.rows[0]
        forced = row.forced_bos_token_id is not None or row.forced_eos_token_id is not None
        if row.bad_words_ids or forced:
            return None
        early = row.eos_token_id if new[0] < row.min_new_tokens else ()
        return (*row.suppress_tokens, *early, *(row.begin_suppress_tokens if new[0] == 0 else ()))

    def chances(self, logits: Tensor) -> Tensor:
        """What shapes a distribution before a token is drawn from it."""
        for function, value in self.by_chance:
            logits = function(logits, value)
        return logits

    def _ruled(self, logits: Tensor, past: Past | None, new: Sequence[int]) -> Tensor:
        if self.alike and len(set(new)) == 1:
            return _by_rule(logits, self.rows[0], past, new[0])
        parts = []
        for row, settings in enumerate(self.rows):
            own = None if past is None else Past(past.tokens[row : row + 1], past.lengths[row : row + 1])
            parts.append(_by_rule(logits[row : row + 1], settings, own, new[row]))
        return torch.cat(parts)


def _by_rule(logits: Tensor, settings: Settings, past: Past | None, new: int) -> Tensor:
    """Tokens ruled out or forced, in rows that share their settings and their count."""
    if settings.bad_words_ids:
        assert past is not None
        logits = shape.bad_words(logits, settings.bad_words_ids, past)
    if settings.eos_token_id and new < settings.min_new_tokens:
        logits = shape.without(logits, settings.eos_token_id)
    if settings.forced_bos_token_id is not None and new == 0:
        logits = shape.only(logits, settings.forced_bos_token_id)
    if settings.forced_eos_token_id is not None and new == settings.max_new_tokens - 1:
        logits = shape.only(logits, settings.forced_eos_token_id)
    if settings.suppress_tokens:
        logits = shape.without(logits, settings.suppress_tokens)
    if settings.begin_suppress_tokens and new == 0:
        logits = shape.without(logits, settings.begin_suppress_tokens)
    return logits
