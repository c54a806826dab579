"""Speculative decoding (Leviathan et al. 2023): somebody quick proposes some tokens, the model checks them in one pass.

A proposal is kept as long as it is the very token the model would have chosen there: the best one, or, when drawing,
the one its own random number points at.  So the text is the same as without proposals, token by token, for greedy and
for sampling alike; only the number of passes differs.  A draft model draws with the same random numbers, so that it
agrees as often as its distribution does.

    Draft(small_model)   another model of the same vocabulary
    LookUp()             what followed the last time the same few tokens occurred in the text (Saxena 2023)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from monoblock.decoding.filters import Filters
from monoblock.decoding.rows import Cached, Prompt
from monoblock.decoding.sample import choose
from monoblock.errors import InputError
from monoblock.model import Transformer


class Proposer(Protocol):
    def reset(self, capacity: int, copies: int) -> None: ...
    def begin(self, prompts: Sequence[Prompt]) -> None: ...
    def propose(
        self, texts: Sequence[Sequence[int]], lanes: Sequence[Any], room: int, live: Tensor | None
    ) -> Tensor: ...
    def keep(self, counts: Tensor) -> None: ...
    def select(self, rows: Tensor) -> None: ...


class LookUp:
    """Proposes what followed the longest recent repetition: good for texts that quote their prompt."""

    def __init__(self, count: int = 8, longest: int = 3) -> None:
        self.count, self.longest = count, longest

    def reset(self, capacity: int, copies: int) -> None:
        """Nothing is remembered but the text itself."""

    def begin(self, prompts: Sequence[Prompt]) -> None:
        """Nothing to read in advance."""

    def keep(self, counts: Tensor) -> None:
        """Nothing to take back."""

    def select(self, rows: Tensor) -> None:
        """Nothing to reorder."""

    def propose(self, texts: Sequence[Sequence[int]], lanes: Sequence[Any], room: int, live: Tensor | None) -> Tensor:
        count = min(self.count, room)
        found = [self._followed(list(text), count) for text in texts]
        return torch.tensor(found, dtype=torch.long).view(len(texts), count)

    def _followed(self, text: list[int], count: int) -> list[int]:
        for size in range(min(self.longest, len(text) - 1), 0, -1):
            ending = text[-size:]
            for start in range(len(text) - size - 1, -1, -1):
                if text[start : start + size] == ending:
                    after = text[start + size : start + size + count]
                    return (after + [text[-1]] * count)[:count]
        return [text[-1]] * count


class Draft:
    """A small model that runs ahead with the settings and the random numbers of each row."""

    def __init__(self, model: Transformer, count: int = 4) -> None:
        if model.decoder is None:
            raise InputError(f"a {model.config.family} model proposes no text; a draft is a decoder")
        self.model, self.count = model, count
        self.rows: Cached | None = None
        self.before = torch.zeros(1)

    def reset(self, capacity: int, copies: int) -> None:
        limit = self.model.config.context
        if limit is not None and limit < capacity and self.model.config.input.kind == "tokens":
            capacity = min(capacity, limit)
        self.rows = Cached(self.model, capacity, copies, chunk=None)

    def begin(self, prompts: Sequence[Prompt]) -> None:
        assert self.rows is not None
        self.rows.begin(prompts)

    def select(self, rows: Tensor) -> None:
        assert self.rows is not None
        self.rows.select(rows)

    def propose(self, texts: Sequence[Sequence[int]], lanes: Sequence[Any], room: int, live: Tensor | None) -> Tensor:
        """The draft's own continuation; the last token is read too, so that it may stay when all are kept."""
        assert self.rows is not None
        assert self.rows.cache is not None
        left = self.rows.capacity - self.rows.cache.longest - 1
        self.before = self.rows.cache.lengths
        ran = max(0, min(self.count, room, left))
        tokens = torch.tensor([text[-1] for text in texts], device=self.rows.device)
        each = [(lane, row) for lane in lanes for row in range(lane.settings.rows)]
        filters = Filters([lane.settings for lane, _ in each], self.rows.device)
        proposed = []
        for step in range(ran + (left >= 0)):
            logits = self.rows.step(tokens, live).float()
            if step == ran:
                break
            tokens = self._chosen(logits, filters, each, step)
            proposed.append(tokens)
        return torch.stack(proposed, 1) if proposed else tokens.new_zeros(len(texts), 0)

    @staticmethod
    def _chosen(logits: Tensor, filters: Filters, each: list[tuple[Any, int]], step: int) -> Tensor:
        best = logits.argmax(-1)
        if not filters.draws:
            return best
        noises = [lane.rows[row].noise for lane, row in each]
        steps = [len(lane.rows[row].new) + step for lane, row in each]
        chances = [0.0 if noise is None else noise[at] for noise, at in zip(noises, steps, strict=True)]
        drawn = choose(filters.chances(logits), torch.tensor(chances, device=logits.device, dtype=torch.double))
        return torch.where(filters.drawn, drawn, best)

    def keep(self, counts: Tensor) -> None:
        """Of what was run ahead, so many tokens were right."""
        assert self.rows is not None
        assert self.rows.cache is not None
        cache = self.rows.cache
        cache.truncate(self.before + counts.to(cache.lengths.device))
