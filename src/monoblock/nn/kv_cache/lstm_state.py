"""What an LSTM keeps between decoding steps: its recurrent state and the encoded source."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LSTMState(NamedTuple):
    """The state of an LSTM between steps; beam search reorders its rows with `select`."""

    hidden: Tensor  # (L, B, D)
    cell: Tensor  # (L, B, D)

    def select(self, rows: Tensor) -> LSTMState:
        return LSTMState(self.hidden.index_select(1, rows), self.cell.index_select(1, rows))


class EncoderMemory(NamedTuple):
    """The encoded source, which every decoding step attends to; without attention, its summary (S = 1)."""

    values: Tensor  # (B, S, 2D) the annotations h: forward half, backward half
    keys: Tensor  # (B, S, D) W_h h; without attention of size 0, (B, 1, 0)
    valid: Tensor | None  # (B, S) False on padding; None if there is none

    def select(self, rows: Tensor) -> EncoderMemory:
        valid = None if self.valid is None else self.valid.index_select(0, rows)
        return EncoderMemory(self.values.index_select(0, rows), self.keys.index_select(0, rows), valid)
