"""The loss of a language model whose rows continue those of the batch before, with its state carried along."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from monoblock.baselines.lstm import LSTMState
from monoblock.training.loss import CrossEntropyLoss


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

    def fits(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether stored tensors can be those of a training of `model`."""
        config: Any = model.config
        lanes, dtype = len(tensors.get("block", ())), next(model.parameters()).dtype
        expected: dict[str, Any] = dict.fromkeys(("before", "after"), ((lanes, 2, config.depth, config.width), dtype))
        expected["block"] = (lanes,), torch.int64
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == expected


@dataclass(frozen=True)
class CarriedLoss(CrossEntropyLoss):
    """The cross-entropy of an LSTM language model, whose rows may continue those of the batch before."""

    carried: CarriedState = field(default_factory=CarriedState, compare=False)

    def __post_init__(self) -> None:
        # Not as a decorator, which imports torch._dynamo, for two seconds, in whatever imports this module.
        object.__setattr__(self, "_continue_rows", torch.compiler.disable(self._continue_rows))

    def evaluation_loss(self) -> CarriedLoss:
        return replace(self, label_smoothing=0.0, balance=0.0, carried=CarriedState(self.carried.num_lanes))

    def compute_logits(
        self, model: Callable[..., Tensor] | nn.Module, inputs: dict[str, Tensor], **options: Any
    ) -> Tensor:
        if "lanes" in inputs:
            return self._continue_rows(model, **inputs, **options)
        return super().compute_logits(model, inputs, **options)

    def _continue_rows(self, model: Any, source: Tensor, lanes: Tensor, blocks: Tensor, **options: Any) -> Tensor:
        """Return the logits of an LSTM language model, run from the state that each row had after the batch before."""
        config, dtype = model.config, next(model.parameters()).dtype
        state = self.carried.start(lanes, blocks, config.depth, config.width, dtype)
        logits, state = model.forward_with_state(source, None, state, **options)
        self.carried.finish(lanes, blocks, state)
        return cast(Tensor, logits)
