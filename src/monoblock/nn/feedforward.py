"""The position-wise feed-forward network down(act(up(x))), or down(act(gate(x)) * up(x)) if gated (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from monoblock.config.model import FeedForwardConfig
from monoblock.kernels.cpu.autograd import gelu_tanh
from monoblock.nn.linear import Linear, autocast_dtype
from monoblock.nn.tap import Tap, apply_tap


def relu2(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return F.relu(x).square()


def quick_gelu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return x * torch.sigmoid(1.702 * x)


def identity(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
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
    activation: Callable[[Tensor], Tensor],
    up: Float[Tensor, "*places F"],
    gate: Float[Tensor, "*places F"] | None,
    clamp: float | None = None,
) -> Float[Tensor, "*places F"]:
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
        self.up = Linear(width, config.hidden, bias=config.bias)
        self.gate = Linear(width, config.hidden, bias=config.bias) if config.gated else None
        self.down = Linear(config.hidden, width, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Float[Tensor, "B T D"], tap: Tap | None = None) -> Float[Tensor, "B T D"]:
        """Apply the network to every position of x."""
        x = x.to(autocast_dtype(x))  # once, else each product would keep a copy
        gate = None if self.gate is None else self.gate(x)
        hidden = apply_activation(self.activation, self.up(x), gate, self.config.clamp)  # (B, T, F)
        hidden = F.dropout(apply_tap(tap, "hidden", hidden), self.config.dropout, self.training)
        out: Tensor = self.down(hidden)
        return out
