"""What an LSTM keeps between decoding steps (its recurrent state, the encoded source) and between training batches."""

from __future__ import annotations

from typing import NamedTuple

import torch
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


class CarriedState:
    """The states of an LSTM language model between batches, whose rows continue those of the batch before.

    Rows are numbered by `lanes` (B,), and the batches of an epoch by `blocks` (B,), the same number in every row.  The
    state is zero before block 0.  The state before the last block is kept too: a batch that is run again, as after an
    error for lack of memory, starts from the same state.  Gradients do not go back beyond a batch (truncated
    backpropagation through time).

    num_lanes: how many lanes there are; if it is 0, they are counted in every batch, for which a GPU has to wait.
    """

    def __init__(self, num_lanes: int = 0) -> None:
        self.num_lanes = num_lanes
        self.tensors: dict[str, Tensor] = {}  # before and after the last block (N, 2, L, D), and its number (N,)

    def start(self, lanes: Tensor, blocks: Tensor, depth: int, width: int, dtype: torch.dtype) -> LSTMState:
        """Return the state before a block of each row."""
        self._make_room(self.num_lanes or int(lanes.max()) + 1, (2, depth, width), dtype, lanes.device)
        is_repeated = (self.tensors["block"][lanes] == blocks).view(-1, 1, 1, 1)
        before = torch.where(is_repeated, self.tensors["before"][lanes], self.tensors["after"][lanes])
        before = before.masked_fill((blocks == 0).view(-1, 1, 1, 1), 0)
        self.tensors["before"] = self.tensors["before"].index_copy(0, lanes, before)
        hidden, cell = before.permute(1, 2, 0, 3).contiguous()  # (L, B, D) each
        return LSTMState(hidden, cell)

    def finish(self, lanes: Tensor, blocks: Tensor, state: LSTMState) -> None:
        """Store the state after a block of each row."""
        after = torch.stack(state).detach().permute(2, 0, 1, 3).to(self.tensors["after"].dtype)
        self.tensors["after"] = self.tensors["after"].index_copy(0, lanes, after)
        self.tensors["block"] = self.tensors["block"].index_copy(0, lanes, blocks)

    def _make_room(self, lanes: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Add lanes until there are `lanes` of them, on a device."""
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        missing = lanes - len(self.tensors.get("block", ()))
        if missing > 0:
            new = dict.fromkeys(("before", "after"), torch.zeros(missing, *shape, dtype=dtype, device=device))
            new["block"] = torch.full((missing,), -1, device=device)
            self.tensors = {n: torch.cat((self.tensors[n], t)) if n in self.tensors else t for n, t in new.items()}
