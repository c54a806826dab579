"""The lecture "The Transformer — Built Live": multi-head attention by hand, a pre-norm block, and a small GPT.

mask = torch.triu(torch.ones(N, N), 1).bool()      # True: blocked
x = TransformerBlock(d_model=192, n_heads=6, d_ff=768)(x, mask)
logits = GPT(vocab=65)(idx)                        # (B, N, 65)
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from monoblock.classic.shared import Listing, ListingModel, block_config, gpt_config
from monoblock.config.model import ModelConfig
from monoblock.nn.attention import attend
from monoblock.nn.initialize import initialize


def multi_head_attention(x: Tensor, Wq: Tensor, Wk: Tensor, Wv: Tensor, Wo: Tensor, n_heads: int) -> Tensor:
    """Compute multi-head self-attention of x (B, N, d) from four matrices (d, d), which multiply from the right."""
    q, k, v = ((x @ W).unflatten(-1, (n_heads, -1)).transpose(1, 2) for W in (Wq, Wk, Wv))
    return attend(q, k, v).transpose(1, 2).flatten(2) @ Wo


class TransformerBlock(Listing):
    """A pre-norm block: x + attention(norm1(x)), then x + ffn(norm2(x)), with biases and GELU.

    Args:
        d_model: size of the hidden states.
        n_heads: number of heads; it divides `d_model`.
        d_ff: hidden size of the feed-forward network.
    """

    NAMES: ClassVar = {
        "norm1": "attention_norm",
        "attn.in_proj_weight": "attention.query.weight attention.key.weight attention.value.weight",
        "attn.in_proj_bias": "attention.query.bias attention.key.bias attention.value.bias",
        "attn.out_proj": "attention.output",
        "norm2": "feedforward_norm",
        "ffn.0": "feedforward.up",
        "ffn.2": "feedforward.down",
    }

    def __init__(self, d_model: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.config = block_config(d_model, n_heads, d_ff, "gelu", bias="qkvo")
        self.norm1 = nn.LayerNorm(d_model)
        self.attn = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.norm2 = nn.LayerNorm(d_model)
        self.ffn = nn.Sequential(nn.Linear(d_model, d_ff), nn.GELU(), nn.Linear(d_ff, d_model))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply the block to x (B, N, d_model).

        `mask` is the `attn_mask` of `nn.MultiheadAttention`: booleans (N, N) or (B * n_heads, N, N) that are True where
        attention is blocked, or numbers that are added to the scores.
        """
        h = self.norm1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.ffn(self.norm2(x))


class GPT(ListingModel):
    """A decoder-only language model: learned positions, pre-norm blocks, an output that is not tied.

    Args:
        vocab: number of tokens.
        d_model: size of the hidden states; the feed-forward networks are four times as wide.
        n_heads: number of heads.
        n_layers: number of blocks.
        max_len: number of positions.

    The output is tied to the embedding by `model.head.weight = model.tok_emb.weight`.
    """

    NAMES: ClassVar = {
        "tok_emb": "input.token",
        "pos_emb": "input.position",
        "blocks": "decoder",
        "norm_f": "decoder.norm",
        "head": "head.output",
    }

    def __init__(self, vocab: int, d_model: int = 192, n_heads: int = 6, n_layers: int = 6, max_len: int = 256) -> None:
        super().__init__()
        block = block_config(d_model, n_heads, 4 * d_model, "gelu", bias="qkvo")
        self.untied_config = gpt_config(block, n_layers, vocab=vocab, context=max_len)
        self.max_len = max_len
        self.tok_emb = nn.Embedding(vocab, d_model)
        self.pos_emb = nn.Embedding(max_len, d_model)
        self.blocks = nn.ModuleList(TransformerBlock(d_model, n_heads, 4 * d_model) for _ in range(n_layers))
        self.norm_f = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab, bias=False)
        initialize(Listing.to_monoblock(self), self.untied_config)

    def forward(self, idx: Tensor) -> Tensor:
        """Return the logits (B, N, vocab) of token ids (B, N)."""
        N = idx.size(1)
        x = self.tok_emb(idx) + self.pos_emb(torch.arange(N, device=idx.device))
        mask = torch.ones(N, N, device=idx.device).triu(1).bool()
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(self.norm_f(x))

    def model_config(self) -> ModelConfig:
        return replace(self.untied_config, tie="output" if self.head.weight is self.tok_emb.weight else "none")
