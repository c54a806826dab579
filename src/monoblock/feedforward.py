"""The position-wise feed-forward network: down(act(up(x))), or gated: down(act(gate(x)) * up(x)) (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.config import FeedForwardConfig
from monoblock.linear import joined, worth_joining
from monoblock.native.gradients import gelu_tanh
from monoblock.tap import Tap, tapped


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": relu2,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": identity,
}


def inner(
    activation: Callable[[Tensor], Tensor], up: Tensor, gate: Tensor | None, clamp: float | None = None
) -> Tensor:
    """What goes down again: act(up), or act(gate) * up; clamped, one is added to up (gpt-oss)."""
    if gate is None:
        return activation(up)
    if clamp is None:
        return activation(gate) * up
    return activation(gate.clamp(max=clamp)) * (up.clamp(-clamp, clamp) + 1)


class FeedForward(nn.Module):
    def __init__(self, width: int, config: FeedForwardConfig) -> None:
        super().__init__()
        self.config = config
        self.up = nn.Linear(width, config.hidden, bias=config.bias)
        self.gate = nn.Linear(width, config.hidden, bias=config.bias) if config.gated else None
        self.down = nn.Linear(config.hidden, width, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        hidden = inner(self.activation, *self._up_and_gate(x), self.config.clamp)  # (B, T, F)
        hidden = F.dropout(tapped(tap, "hidden", hidden), self.config.dropout, self.training)
        return self.down(hidden)

    def _up_and_gate(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.gate is None:
            return self.up(x), None
        if worth_joining(x, pair := (self.up, self.gate)):
            up, gate = joined(x, pair)
            return up, gate
        return self.up(x), self.gate(x)
