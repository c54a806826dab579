"""Rows of text that an LSTM continues: what it remembers is one state a row, and the source it looks at."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.decoding.rows import Prompt, padded
from monoblock.model import Transformer
from monoblock.recurrent import Memory, Recurrent, State


class Remembered:
    """The rows of `Cached`, for a Recurrent; every row has its source beside it."""

    def __init__(self, model: Recurrent, copies: int = 1) -> None:
        self.model, self.copies = model, copies
        self.device = model.device
        self.state: State | None = None
        self.memory: Memory | None = None

    def begin(self, prompts: Sequence[Prompt]) -> Tensor:
        """Add rows for new prompts below the old ones; the logits (rows, V) after each."""
        memory = None
        if self.model.encoder is not None:
            memory = self.model.encode(*padded([prompt.source or () for prompt in prompts], self.device))
        logits, state = self._read(prompts, memory)
        if self.copies > 1:
            rows = torch.arange(len(prompts), device=self.device).repeat_interleave(self.copies)
            logits, state = logits[rows], state.select(rows)
            memory = None if memory is None else memory.select(rows)
        self.state = state if self.state is None else _below(self.state, state)
        self.memory = memory if self.memory is None or memory is None else _beside(self.memory, memory)
        return logits

    def _read(self, prompts: Sequence[Prompt], memory: Memory | None) -> tuple[Tensor, State]:
        """The prompts token by token; a row that has ended keeps its logits and its state."""
        ids, mask = padded([prompt.ids for prompt in prompts], self.device)
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        logits, state = self.model.step(ids[:, 0], None, memory)
        for place in range(1, ids.shape[1]):
            further, after = self.model.step(ids[:, place], state, memory)
            goes = real[:, place, None]
            logits = torch.where(goes, further, logits)
            state = State(torch.where(goes, after.hidden, state.hidden), torch.where(goes, after.cell, state.cell))
        return logits, state

    def step(self, tokens: Tensor, live: Tensor | None = None) -> Tensor:
        """One token (rows,) further: the logits (rows, V) after it; what a row that is over remembers is never read."""
        logits, self.state = self.model.step(tokens, self.state, self.memory)
        return logits

    def select(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows in this order; without `sources`, rows change places only among those of one source."""
        if self.state is not None:
            self.state = self.state.select(rows)
        if self.memory is not None and sources is not None:
            self.memory = self.memory.select(rows)


def _below(old: State, new: State) -> State:
    return State(torch.cat((old.hidden, new.hidden), 1), torch.cat((old.cell, new.cell), 1))


def _beside(old: Memory, new: Memory) -> Memory:
    """Two memories as one, filled up to the longer source."""
    longest = max(old.values.shape[1], new.values.shape[1])
    parts = [_filled(memory, longest) for memory in (old, new)]
    values, keys, real = (torch.cat([part[place] for part in parts]) for place in range(3))
    return Memory(values, keys, real)


def _filled(memory: Memory, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, length = memory.values.shape[:2]
    real = memory.real
    if real is None:
        real = torch.ones(rows, length, dtype=torch.bool, device=memory.values.device)
    extra = longest - length
    return F.pad(memory.values, (0, 0, 0, extra)), F.pad(memory.keys, (0, 0, 0, extra)), F.pad(real, (0, extra))


def vocabulary(model: Transformer | Recurrent) -> int:
    """How many tokens the model can write."""
    if isinstance(model, Recurrent):
        return model.config.target_vocab or model.config.vocab
    return model.config.output_input.vocab  # type: ignore[union-attr]
