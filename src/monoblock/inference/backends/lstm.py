"""The backend of LSTM models: each row has a recurrent state and, with an encoder, the source it attends to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.inference.prompt import Prompt, pad_right
from monoblock.nn.kv_cache.lstm_state import EncoderMemory, LSTMState
from monoblock.nn.recurrent.lstm import Recurrent
from monoblock.nn.tap import Tap


class LSTMDecoderState:
    """A decoder state of an LSTM; every row has its own copy of the encoded source."""

    capabilities: frozenset[str] = frozenset()

    def __init__(self, model: Recurrent, rows_per_prompt: int = 1, tap: Tap | None = None) -> None:
        self.model, self.rows_per_prompt, self.tap = model, rows_per_prompt, tap
        self.device = model.device
        self.state: LSTMState | None = None
        self.memory: EncoderMemory | None = None

    def prefill(self, prompts: Sequence[Prompt]) -> Tensor:
        memory = None
        if self.model.encoder is not None:
            sources = pad_right([prompt.source or () for prompt in prompts], self.device)
            memory = self.model.encode(*sources, tap=self.tap)
        logits, state = self._run_prompts(prompts, memory)
        if self.rows_per_prompt > 1:
            rows = torch.arange(len(prompts), device=self.device).repeat_interleave(self.rows_per_prompt)
            logits, state = logits[rows], state.select(rows)
            memory = None if memory is None else memory.select(rows)
        self.state = state if self.state is None else _join_states(self.state, state)
        self.memory = memory if self.memory is None or memory is None else _join_memories(self.memory, memory)
        return logits

    def _run_prompts(self, prompts: Sequence[Prompt], memory: EncoderMemory | None) -> tuple[Tensor, LSTMState]:
        """Run the prompts token by token; return the logits (B, V) and the state after the last token of each."""
        ids, mask = pad_right([prompt.ids for prompt in prompts], self.device)
        valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        logits, state = self.model.step(ids[:, 0], None, memory, tap=self.tap)
        for position in range(1, ids.shape[1]):
            new_logits, new_state = self.model.step(ids[:, position], state, memory, tap=self.tap)
            keep = valid[:, position, None]
            logits = torch.where(keep, new_logits, logits)
            state = LSTMState(
                torch.where(keep, new_state.hidden, state.hidden), torch.where(keep, new_state.cell, state.cell)
            )
        return logits, state

    def step(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        logits, state = self.model.step(tokens, self.state, self.memory, tap=self.tap)
        if active is not None and self.state is not None:
            keep = active[:, None]
            state = LSTMState(*(torch.where(keep, new, old) for new, old in zip(state, self.state, strict=True)))
        self.state = state
        return logits

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        if self.state is not None:
            self.state = self.state.select(rows)
        if self.memory is not None and sources is not None:  # otherwise rows move only among rows with the same source
            self.memory = self.memory.select(rows)

    def release(self) -> None:
        self.state = self.memory = None


def _join_states(old: LSTMState, new: LSTMState) -> LSTMState:
    return LSTMState(torch.cat((old.hidden, new.hidden), 1), torch.cat((old.cell, new.cell), 1))


def _join_memories(old: EncoderMemory, new: EncoderMemory) -> EncoderMemory:
    """Concatenate two encoder memories along the batch, padded to the longer source."""
    length = max(old.values.shape[1], new.values.shape[1])
    padded = [_pad_memory(memory, length) for memory in (old, new)]
    values, keys, valid = (torch.cat(parts) for parts in zip(*padded, strict=True))
    return EncoderMemory(values, keys, valid)


def _pad_memory(memory: EncoderMemory, length: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, current = memory.values.shape[:2]
    valid = memory.valid
    if valid is None:
        valid = torch.ones(rows, current, dtype=torch.bool, device=memory.values.device)
    extra = length - current
    return F.pad(memory.values, (0, 0, 0, extra)), F.pad(memory.keys, (0, 0, 0, extra)), F.pad(valid, (0, extra))
