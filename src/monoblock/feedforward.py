"""The position-wise feed-forward network: down(act(up(x))), or gated: down(act(gate(x)) * up(x)) (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.config import FeedForwardConfig
from monoblock.tap import Tap, tapped

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}


class FeedForward(nn.Module):
    def __init__(self, width: int, config: FeedForwardConfig) -> None:
        super().__init__()
        self.config = config
        self.up = nn.Linear(width, config.hidden, bias=config.bias)
        self.gate = nn.Linear(width, config.hidden, bias=config.bias) if config.gated else None
        self.down = nn.Linear(config.hidden, width, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        if self.gate is None:
            hidden = self.activation(self.up(x))  # (B, T, F)
        else:
            hidden = self.activation(self.gate(x)) * self.up(x)
        hidden = F.dropout(tapped(tap, "hidden", hidden), self.config.dropout, self.training)
        return self.down(hidden)
