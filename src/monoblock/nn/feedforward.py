"""The position-wise feed-forward network down(act(up(x))), or down(act(gate(x)) * up(x)) if gated (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.config.model import FeedForwardConfig
from monoblock.kernels.cpu.autograd import gelu_tanh
from monoblock.nn.linear import apply_linear, fused_linear, should_fuse
from monoblock.nn.tap import Tap, apply_tap


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


def apply_activation(
    activation: Callable[[Tensor], Tensor], up: Tensor, gate: Tensor | None, clamp: float | None = None
) -> Tensor:
    """Return activation(up), or activation(gate) * up if there is a gate.

    With a `clamp`, a gated network computes activation(gate) * (up + 1) instead (gpt-oss).  Before that, `gate` is
    clamped to at most `clamp`, and `up` is clamped to the range ±`clamp`.
    """
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
        """Apply the network to every position of x (B, T, D); the output has the same shape."""
        hidden = apply_activation(self.activation, *self._up_and_gate(x), self.config.clamp)  # (B, T, F)
        hidden = F.dropout(apply_tap(tap, "hidden", hidden), self.config.dropout, self.training)
        return apply_linear(self.down, hidden)

    def _up_and_gate(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.gate is None:
            return apply_linear(self.up, x), None
        layers = (self.up, self.gate)
        if should_fuse(x, layers):
            up, gate = fused_linear(x, layers)
            return up, gate
        return apply_linear(self.up, x), apply_linear(self.gate, x)
