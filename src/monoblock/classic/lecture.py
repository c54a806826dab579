"""The lecture "The Transformer — Built Live": multi-head attention by hand, a pre-norm block, and a small GPT.

mask = torch.triu(torch.ones(N, N), 1).bool()      # True: blocked
x = TransformerBlock(d_model=192, n_heads=6, d_ff=768)(x, mask)
logits = GPT(vocab=65)(idx)                        # (B, N, 65)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from monoblock.classic.shared import SizedTransformer, accept_listing_names, alias, attention_context, layer_names
from monoblock.config.families import LAYER_NORM, build_stack
from monoblock.config.model import (
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    HeadConfig,
    Learned,
    ModelConfig,
)
from monoblock.nn.attention import attend
from monoblock.nn.attention_context import AttentionContext
from monoblock.nn.block import Block

# The weights of the lecture's block, which contains an nn.MultiheadAttention, and ours.
BLOCK_NAMES = {
    "norm1": "attention_norm",
    "norm2": "feedforward_norm",
    "attn.in_proj_weight": "attention.query.weight attention.key.weight attention.value.weight",
    "attn.in_proj_bias": "attention.query.bias attention.key.bias attention.value.bias",
    "attn.out_proj": "attention.output",
    "ffn.0": "feedforward.up",
    "ffn.2": "feedforward.down",
}


def multi_head_attention(x: Tensor, Wq: Tensor, Wk: Tensor, Wv: Tensor, Wo: Tensor, n_heads: int) -> Tensor:
    """Compute multi-head self-attention of x (B, N, d) from four matrices (d, d), which multiply from the right."""
    q, k, v = ((x @ W).unflatten(-1, (n_heads, -1)).transpose(1, 2) for W in (Wq, Wk, Wv))
    return attend(q, k, v).transpose(1, 2).flatten(2) @ Wo


def _block_config(d_model: int, n_heads: int, d_ff: int, mask: Literal["causal", "full"]) -> BlockConfig:
    return BlockConfig(
        width=d_model,
        attention=AttentionConfig(heads=n_heads, mask=mask),
        feedforward=FeedForwardConfig(hidden=d_ff, activation="gelu"),
    )


class TransformerBlock(Block):
    """A pre-norm block: x + attention(norm1(x)), then x + ffn(norm2(x)), with biases and GELU.

    Args:
        d_model: size of the hidden states.
        n_heads: number of heads; it divides `d_model`.
        d_ff: hidden size of the feed-forward network.

    Weights of the lecture's listing, whose attention is an `nn.MultiheadAttention`, load into it.
    """

    norm1, norm2 = alias("attention_norm"), alias("feedforward_norm")
    attn, ffn = alias("attention"), alias("feedforward")

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__(_block_config(d_model, n_heads, d_ff, "full"))
        accept_listing_names(self, BLOCK_NAMES)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Apply the block to x (B, N, d_model).

        `mask` is the `attn_mask` of `nn.MultiheadAttention`: booleans (N, N) or (B * n_heads, N, N) that are True where
        attention is blocked, or numbers that are added to the scores.
        """
        if mask is not None and mask.dim() == 3:
            mask = mask.unflatten(0, (-1, self.config.attention.heads))
        if mask is None or mask.dtype == torch.bool:
            context = attention_context(None if mask is None else ~mask, x, x)
        else:
            unmasked = attention_context(None, x, x)
            context = AttentionContext(unmasked.resolved_mask, bias=mask[(None,) * (4 - mask.dim())])
        return super().forward(x, context)


class GPT(SizedTransformer):
    """A decoder-only language model: learned positions, pre-norm blocks, an output that is not tied.

    Args:
        vocab: number of tokens.
        d_model: size of the hidden states; the feed-forward networks are four times as wide.
        n_heads: number of heads.
        n_layers: number of blocks.
        max_len: number of positions.

    It is a `monoblock.Transformer`, with `generate`, `stream` and `save_pretrained`.
    """

    tok_emb, pos_emb = alias("input.token"), alias("input.position")
    blocks, norm_f = alias("decoder.blocks"), alias("decoder.norm")

    def __init__(self, vocab: int, d_model: int = 192, n_heads: int = 6, n_layers: int = 6, max_len: int = 256) -> None:
        block = _block_config(d_model, n_heads, 4 * d_model, "causal")
        config = ModelConfig(
            input=EmbeddingConfig(vocab=vocab, context=max_len, positions=Learned()),
            decoder=build_stack(n_layers, block, norm=LAYER_NORM),
            head=HeadConfig(kind="language_model"),
        )
        super().__init__(config)
        names = layer_names(BLOCK_NAMES, "blocks", "decoder", n_layers)
        names |= {"tok_emb": "input.token", "pos_emb": "input.position"}
        accept_listing_names(self, names | {"norm_f": "decoder.norm", "head.weight": "head.output.weight"})
