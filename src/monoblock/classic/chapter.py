"""The textbook chapter with exercises: attention that returns its weights, sinusoids, and a pre-norm block with ReLU.

    output, weights = scaled_dot_product_attention(Q, K, V)     # (B, T, d_v), (B, T, T)
    output, weights = MultiHeadAttention(d_model=16, h=4)(X)    # (B, T, 16), (B, 4, T, T)
    x = TransformerBlock(d_model=32, h=4, d_ff=128)(x)

In every mask of this module 0 or False means blocked; `torch.tril(torch.ones(T, T))` is the causal mask.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.classic.shared import Listing, block_config, scaled_dot_product_attention
from monoblock.config.model import AttentionConfig
from monoblock.nn.attention import Attention
from monoblock.nn.positions import sinusoid

__all__ = ["MultiHeadAttention", "TransformerBlock", "scaled_dot_product_attention", "sinusoidal_positional_encoding"]


def sinusoidal_positional_encoding(T: int, d_model: int) -> Tensor:
    """Return the sinusoidal encodings (T, d_model) of the positions 0 to T - 1."""
    return sinusoid(torch.arange(T), d_model)


class MultiHeadAttention(Listing):
    """Multi-head self-attention without biases that returns its weights.

    Args:
        d_model: size of the hidden states.
        h: number of heads; it divides `d_model`.
    """

    NAMES: ClassVar = {"W_Q": "query", "W_K": "key", "W_V": "value", "W_O": "output"}

    def __init__(self, d_model: int, h: int) -> None:
        super().__init__()
        self.config = AttentionConfig(heads=h, bias="", mask="full")
        self.config.check_width(d_model)
        self.h, self.d_k = h, d_model // h
        self.W_Q = nn.Linear(d_model, d_model, bias=False)
        self.W_K = nn.Linear(d_model, d_model, bias=False)
        self.W_V = nn.Linear(d_model, d_model, bias=False)
        self.W_O = nn.Linear(d_model, d_model, bias=False)

    def forward(self, X: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the output (B, T, d_model) and the attention weights (B, h, T, T) of X (B, T, d_model)."""
        B, T, _ = X.shape
        Q, K, V = (W(X).view(B, T, self.h, self.d_k).transpose(1, 2) for W in (self.W_Q, self.W_K, self.W_V))
        out, weights = scaled_dot_product_attention(Q, K, V, mask)
        return self.W_O(out.transpose(1, 2).flatten(2)), weights

    def counterpart(self) -> Attention:
        return Attention(self.W_O.out_features, self.config)


class TransformerBlock(Listing):
    """A pre-norm block: x + attention(norm1(x)), then x + ff2(relu(ff1(norm2(x)))); attention has no biases.

    Args:
        d_model: size of the hidden states.
        h: number of heads.
        d_ff: hidden size of the feed-forward network.
    """

    NAMES: ClassVar = {
        "norm1": "attention_norm",
        "attn": "attention",
        "norm2": "feedforward_norm",
        "ff1": "feedforward.up",
        "ff2": "feedforward.down",
    }

    def __init__(self, d_model: int, h: int, d_ff: int) -> None:
        super().__init__()
        self.config = block_config(d_model, h, d_ff, "relu")
        self.norm1, self.attn = nn.LayerNorm(d_model), MultiHeadAttention(d_model, h)
        self.norm2, self.ff1, self.ff2 = nn.LayerNorm(d_model), nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply the block to x (B, T, d_model); the output has the same shape."""
        x = x + self.attn(self.norm1(x), mask=mask)[0]
        return x + self.ff2(F.relu(self.ff1(self.norm2(x))))
