"""The course module that ends in a GPT: causal mask, layer norm, MLP, pre-norm block, and GPT with `generate`.

    block = TransformerBlock(embed_dim=512, num_heads=8)
    output = block.forward(x, create_causal_mask(x.shape[1]))
    model = GPT(vocab_size=50000, embed_dim=768, num_layers=12, num_heads=12)
    tokens = model.generate(prompt, max_new_tokens=50, temperature=0.8)

`parameters()` is a list, as in the course.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

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
    NormConfig,
)
from monoblock.nn.block import Block
from monoblock.nn.feedforward import FeedForward
from monoblock.nn.norm import Norm

MLP_NAMES = {"linear1": "up", "linear2": "down"}
NORM_NAMES = {"gamma": "weight", "beta": "bias"}
BLOCK_NAMES = {
    **{f"ln1.{name}": f"attention_norm.{ours}" for name, ours in NORM_NAMES.items()},
    **{f"ln2.{name}": f"feedforward_norm.{ours}" for name, ours in NORM_NAMES.items()},
    **{f"mlp.{name}": f"feedforward.{ours}" for name, ours in MLP_NAMES.items()},
    "attention.q_proj": "attention.query",
    "attention.k_proj": "attention.key",
    "attention.v_proj": "attention.value",
    "attention.out_proj": "attention.output",
}


def create_causal_mask(seq_len: int) -> Tensor:
    """Return the causal mask (1, seq_len, seq_len): 1.0 where position i may see position j ≤ i, 0.0 elsewhere."""
    return torch.ones(1, seq_len, seq_len).tril()


class ListOfParameters(nn.Module):
    """A module whose `parameters()` is a list."""

    def parameters(self, recurse: bool = True) -> list[nn.Parameter]:  # type: ignore[override]
        """Return all parameters as a list."""
        return list(super().parameters(recurse))


class LayerNorm(ListOfParameters, Norm):
    """Layer norm over the last axis, with a learned scale `gamma` and shift `beta`.

    Args:
        normalized_shape: size of the last axis.
        eps: added to the variance.
    """

    gamma, beta = alias("weight"), alias("bias")

    def __init__(self, normalized_shape: int, eps: float = 1e-5) -> None:
        super().__init__(normalized_shape, NormConfig(eps=eps))
        accept_listing_names(self, NORM_NAMES)


class MLP(ListOfParameters, FeedForward):
    """The position-wise network linear2(gelu(linear1(x))).

    Args:
        embed_dim: size of input and output.
        hidden_dim: size in between, by default 4 · embed_dim.
        dropout_prob: dropout probability after the activation.
    """

    linear1, linear2 = alias("up"), alias("down")

    def __init__(self, embed_dim: int, hidden_dim: int | None = None, dropout_prob: float = 0.1) -> None:
        hidden = 4 * embed_dim if hidden_dim is None else hidden_dim
        super().__init__(embed_dim, FeedForwardConfig(hidden=hidden, activation="gelu", dropout=dropout_prob))
        accept_listing_names(self, MLP_NAMES)


def _block_config(
    embed_dim: int, num_heads: int, hidden: int, dropout: float, mask: Literal["causal", "full"]
) -> BlockConfig:
    return BlockConfig(
        width=embed_dim,
        attention=AttentionConfig(heads=num_heads, bias="", mask=mask),
        feedforward=FeedForwardConfig(hidden=hidden, activation="gelu", dropout=dropout),
        dropout=dropout,
    )


class TransformerBlock(ListOfParameters, Block):
    """A pre-norm block: x + attention(ln1(x)), then x + mlp(ln2(x)); attention has no biases.

    Args:
        embed_dim: size of the hidden states.
        num_heads: number of heads; it divides `embed_dim`.
        mlp_ratio: hidden size of the MLP, as a multiple of `embed_dim`.
        ff_dim: hidden size of the MLP, in place of `mlp_ratio`.
        dropout_prob: dropout probability of the output of each sublayer and inside the MLP.
    """

    ln1, ln2, mlp = alias("attention_norm"), alias("feedforward_norm"), alias("feedforward")

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mlp_ratio: int = 4,
        ff_dim: int | None = None,
        dropout_prob: float = 0.1,
    ) -> None:
        hidden = int(embed_dim * mlp_ratio) if ff_dim is None else ff_dim
        super().__init__(_block_config(embed_dim, num_heads, hidden, dropout_prob, "full"))
        accept_listing_names(self, BLOCK_NAMES)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Apply the block to x (batch, seq, embed_dim).

        `mask` (1 or batch, seq, seq) is 1.0 where a position may be seen and 0.0 elsewhere (`create_causal_mask`);
        without it, every position is seen.
        """
        if mask is not None and mask.dim() == 3:
            mask = mask[:, None]
        return super().forward(x, attention_context(mask, x, x))


class GPT(ListOfParameters, SizedTransformer):
    """A GPT: learned positions, pre-norm blocks with a causal mask, a final norm, an output tied to the embedding.

    Args:
        vocab_size: number of tokens.
        embed_dim: size of the hidden states.
        num_layers: number of blocks.
        num_heads: number of heads.
        max_seq_len: number of positions.

    It is a `monoblock.Transformer`: it can also stream, be saved, traced and examined.
    """

    blocks = alias("decoder.blocks")

    def __init__(
        self, vocab_size: int, embed_dim: int, num_layers: int, num_heads: int, max_seq_len: int = 1024
    ) -> None:
        block = _block_config(embed_dim, num_heads, 4 * embed_dim, 0.1, "causal")
        config = ModelConfig(
            input=EmbeddingConfig(vocab=vocab_size, context=max_seq_len, positions=Learned()),
            decoder=build_stack(num_layers, block, norm=LAYER_NORM),
            head=HeadConfig(kind="language_model"),
            tie="output",
        )
        super().__init__(config)
        names = layer_names(BLOCK_NAMES, "blocks", "decoder", num_layers)
        names |= {f"ln_f.{name}": f"decoder.norm.{ours}" for name, ours in NORM_NAMES.items()}
        names |= {"token_embedding": "input.token", "position_embedding": "input.position"}
        accept_listing_names(self, names)

    def generate(  # type: ignore[override]
        self, prompt_tokens: Tensor, max_new_tokens: int = 50, temperature: float = 1.0, **options: Any
    ) -> Tensor:
        """Continue prompts (batch, seq) by sampling, and return them with their continuations.

        The prompts are read once and the keys and values of all tokens are cached, so that each new token costs one
        position.  `options` are those of `monoblock.Transformer.generate`, such as seed, top_k or eos_token_id.
        """
        return super().generate(prompt_tokens, max_new_tokens=max_new_tokens, temperature=temperature, **options)

    def _create_causal_mask(self, seq_len: int) -> Tensor:
        return create_causal_mask(seq_len)
