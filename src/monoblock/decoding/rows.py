"""Rows of text that a model continues together: begin, step, keep some of them.

`Cached` runs each new token once against what is remembered; `Recomputed` runs everything anew at every step, the
plainest way to say what the other must equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.cache import Cache
from monoblock.model import Transformer


class Prompt(NamedTuple):
    """What a text begins with, and the source it answers to where there is an encoder."""

    ids: tuple[int, ...]
    source: tuple[int, ...] | None = None


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Rows filled up on the right (B, T), and which tokens are real, or None where all are."""
    lengths = [len(row) for row in rows]
    longest = max(lengths)
    ids = torch.tensor([[*row, *([0] * (longest - len(row)))] for row in rows], device=device)
    if min(lengths) == longest:
        return ids, None
    return ids, torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]


def encoded(model: Transformer, prompts: Sequence[Prompt], device: torch.device) -> tuple[Tensor, Tensor | None] | None:
    """The sources' memory and its mask, where the model has an encoder beside its decoder."""
    if model.encoder is None:
        return None
    sources, mask = padded([prompt.source or () for prompt in prompts], device)
    return model.encode(sources, mask), mask


class Cached:
    """Rows with a cache; `copies` rows for each prompt look at one source."""

    def __init__(self, model: Transformer, capacity: int, copies: int = 1, chunk: int | None = None) -> None:
        self.model, self.capacity, self.copies = model, capacity, copies
        self.chunk = chunk  # prompts are read so many tokens at a time; None: at once
        self.device = model.device
        self.cache: Cache | None = None

    def begin(self, prompts: Sequence[Prompt]) -> Tensor:
        """Add rows for new prompts below the old ones; the logits (rows, V) after each."""
        cache = self.model.make_cache(len(prompts), self.capacity, chunk=min(self.capacity, self.chunk or 16))
        logits = self._read(cache, prompts)
        cache.repeat(self.copies)
        if self.cache is None:
            self.cache = cache
        else:
            self.cache.join(cache)
        return logits.repeat_interleave(self.copies, 0) if self.copies > 1 else logits

    def _read(self, cache: Cache, prompts: Sequence[Prompt]) -> Tensor:
        ids, mask = padded([prompt.ids for prompt in prompts], self.device)
        source = encoded(self.model, prompts, self.device)
        lengths = torch.tensor([len(prompt.ids) for prompt in prompts], device=self.device)
        size = self.chunk or ids.shape[1]
        found: Tensor | None = None
        for first in range(0, ids.shape[1], size):
            part = ids[:, first : first + size]
            real = None if mask is None else mask[:, first : first + size]
            at = (lengths - 1 - first).clamp(0, part.shape[1] - 1)[:, None]
            logits = self._pass(cache, part, real, source, at)[:, 0]
            cache.advance(part.shape[1] if real is None else real.sum(-1))
            ends = ((lengths > first) & (lengths <= first + size))[:, None]
            found = logits if found is None else torch.where(ends, logits, found)
        assert found is not None
        return found

    def _pass(
        self, cache: Cache, ids: Tensor, real: Tensor | None, source: tuple[Tensor, Tensor | None] | None, at: Tensor
    ) -> Tensor:
        if source is None:
            return self.model(ids, real, cache=cache, logits_at=at)
        memory, mask = source if cache.memory is None else (None, None)
        return self.model.decode(ids, memory, mask, real, cache=cache, logits_at=at)

    def step(self, tokens: Tensor, live: Tensor | None = None) -> Tensor:
        """One token (rows,) further: the logits (rows, V) after it; rows that are not live stay where they are."""
        logits = self.ahead(tokens[:, None], live)[:, -1]
        self.keep(1 if live is None else live.long())
        return logits

    def ahead(self, tokens: Tensor, live: Tensor | None = None) -> Tensor:
        """Logits (rows, T, V) after each of several tokens (rows, T); `keep` says how many of them stay."""
        assert self.cache is not None
        real = None if live is None else live[:, None].expand(tokens.shape)
        if self.model.encoder is None:
            return self.model(tokens, real, cache=self.cache)
        return self.model.decode(tokens, target_mask=real, cache=self.cache)

    def keep(self, counts: int | Tensor) -> None:
        assert self.cache is not None
        self.cache.advance(counts)

    def select(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows in this order; where several look at one source, perhaps only some sources."""
        if self.cache is not None:
            self.cache.select(rows, sources)


class Recomputed:
    """Rows without a memory: every step reads the whole text again."""

    def __init__(self, model: Transformer, capacity: int, copies: int = 1) -> None:
        self.model, self.capacity, self.copies = model, capacity, copies
        self.device = model.device
        self.rows: list[Prompt] = []

    def begin(self, prompts: Sequence[Prompt]) -> Tensor:
        new = [prompt for prompt in prompts for _ in range(self.copies)]
        self.rows += new
        return self._read(new)[:, -1]

    def _read(self, rows: Sequence[Prompt], last: int = 1) -> Tensor:
        ids, mask = padded([prompt.ids for prompt in rows], self.device)
        lengths = torch.tensor([len(prompt.ids) for prompt in rows], device=self.device)
        at = lengths[:, None] + torch.arange(-last, 0, device=self.device)
        source = encoded(self.model, rows, self.device)
        if source is None:
            return self.model(ids, mask, logits_at=at)
        return self.model.decode(ids, source[0], source[1], mask, logits_at=at)

    def step(self, tokens: Tensor, live: Tensor | None = None) -> Tensor:
        going = [True] * len(self.rows) if live is None else live.tolist()
        said = zip(self.rows, tokens.tolist(), going, strict=True)
        self.rows = [Prompt((*row.ids, token), row.source) if goes else row for row, token, goes in said]
        return self._read(self.rows)[:, -1]

    def select(self, rows: Tensor, sources: Tensor | None = None) -> None:
        self.rows = [self.rows[row] for row in rows.tolist()]


Rows = Cached | Recomputed
