"""The textbook chapter with exercises: attention that returns its weights, sinusoids, and a pre-norm block with ReLU.

    output, weights = scaled_dot_product_attention(Q, K, V)     # (B, T, d_v), (B, T, T)
    output, weights = MultiHeadAttention(d_model=16, h=4)(X)    # (B, T, 16), (B, 4, T, T)
    x = TransformerBlock(d_model=32, h=4, d_ff=128)(x)

In every mask of this module 0 or False means blocked; `torch.tril(torch.ones(T, T))` is the causal mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monoblock.classic.shared import (
    WeightsRecorder,
    accept_listing_names,
    alias,
    attention_context,
    scaled_dot_product_attention,
)
from monoblock.config.model import AttentionConfig, BlockConfig, FeedForwardConfig
from monoblock.nn.attention import Attention
from monoblock.nn.block import Block
from monoblock.nn.positions import sinusoid

__all__ = ["MultiHeadAttention", "TransformerBlock", "scaled_dot_product_attention", "sinusoidal_positional_encoding"]

ATTENTION_NAMES = {"W_Q": "query", "W_K": "key", "W_V": "value", "W_O": "output"}


def sinusoidal_positional_encoding(T: int, d_model: int) -> Tensor:
    """Return the sinusoidal encodings (T, d_model) of the positions 0 to T - 1."""
    return sinusoid(torch.arange(T), d_model)


class MultiHeadAttention(Attention):
    """Multi-head self-attention without biases that returns its weights.

    Args:
        d_model: size of the hidden states.
        h: number of heads; it divides `d_model`.
    """

    W_Q, W_K, W_V, W_O = alias("query"), alias("key"), alias("value"), alias("output")
    h = alias("config.heads")

    def __init__(self, d_model: int, h: int) -> None:
        config = AttentionConfig(heads=h, bias="", mask="full")
        config.check_width(d_model)
        super().__init__(d_model, config)
        accept_listing_names(self, ATTENTION_NAMES)

    def forward(self, X: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the output (B, T, d_model) and the attention weights (B, h, T, T) of X (B, T, d_model)."""
        recorder = WeightsRecorder()
        return super().forward(X, attention_context(mask, X, X), tap=recorder), recorder.weights


class TransformerBlock(Block):
    """A pre-norm block: x + attention(norm1(x)), then x + ff2(relu(ff1(norm2(x)))); attention has no biases.

    Args:
        d_model: size of the hidden states.
        h: number of heads.
        d_ff: hidden size of the feed-forward network.
    """

    norm1, norm2, attn = alias("attention_norm"), alias("feedforward_norm"), alias("attention")
    ff1, ff2 = alias("feedforward.up"), alias("feedforward.down")

    def __init__(self, d_model: int, h: int, d_ff: int) -> None:
        config = BlockConfig(
            width=d_model,
            attention=AttentionConfig(heads=h, bias="", mask="full"),
            feedforward=FeedForwardConfig(hidden=d_ff, activation="relu"),
        )
        super().__init__(config)
        names = {"norm1": "attention_norm", "norm2": "feedforward_norm", "ff1": "feedforward.up"}
        names |= {f"attn.{name}": f"attention.{our_name}" for name, our_name in ATTENTION_NAMES.items()}
        accept_listing_names(self, names | {"ff2": "feedforward.down"})

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Apply the block to x (B, T, d_model); the output has the same shape."""
        return super().forward(x, attention_context(mask, x, x))
