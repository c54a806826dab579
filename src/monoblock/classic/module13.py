"""The course module that ends in a GPT: causal mask, layer norm, MLP, pre-norm block, and GPT with `generate`.

    block = TransformerBlock(embed_dim=512, num_heads=8)
    output = block.forward(x, create_causal_mask(x.shape[1]))
    model = GPT(vocab_size=50000, embed_dim=768, num_layers=12, num_heads=12)
    tokens = model.generate(prompt, max_new_tokens=50, temperature=0.8)

`parameters()` is a list, as in the course.  In every mask 1.0 means that a position may be seen, and 0.0 that it is
blocked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.classic.shared import Listing, ListingModel, block_config, fused_attention, gpt_config
from monoblock.config.model import AttentionConfig, FeedForwardConfig, ModelConfig, NormConfig
from monoblock.nn.attention import Attention
from monoblock.nn.feedforward import FeedForward
from monoblock.nn.initialize import initialize
from monoblock.nn.norm import Norm, layer_norm


def create_causal_mask(seq_len: int) -> Tensor:
    """Return the causal mask (1, seq_len, seq_len): 1.0 where position i may see position j ≤ i, 0.0 elsewhere."""
    return torch.ones(1, seq_len, seq_len).tril()


class ListOfParameters(nn.Module):
    """A module whose `parameters()` is a list."""

    def parameters(self, recurse: bool = True) -> list[nn.Parameter]:  # type: ignore[override]
        """Return all parameters as a list."""
        return list(super().parameters(recurse))


class Linear(ListOfParameters, nn.Linear):
    """The course's linear layer: that of PyTorch."""


class Embedding(ListOfParameters, nn.Embedding):
    """The course's embedding: that of PyTorch."""


class LayerNorm(ListOfParameters, Listing):
    """Layer norm over the last axis, with a learned scale `gamma` and shift `beta`.

    Args:
        normalized_shape: size of the last axis.
        eps: added to the variance.
    """

    NAMES: ClassVar = {"gamma": "weight", "beta": "bias"}

    def __init__(self, normalized_shape: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.normalized_shape, self.eps = normalized_shape, eps
        self.gamma = nn.Parameter(torch.ones(normalized_shape))
        self.beta = nn.Parameter(torch.zeros(normalized_shape))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (…, normalized_shape) over its last axis."""
        return layer_norm(x, self.gamma, self.beta, self.eps)

    def counterpart(self) -> Norm:
        return Norm(self.normalized_shape, NormConfig(eps=self.eps))


class MultiHeadAttention(ListOfParameters, Listing):
    """Multi-head self-attention without biases.

    Args:
        embed_dim: size of the hidden states.
        num_heads: number of heads; it divides `embed_dim`.
    """

    NAMES: ClassVar = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "output"}

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.config = AttentionConfig(heads=num_heads, bias="", mask="full")
        self.config.check_width(embed_dim)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.q_proj = Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = Linear(embed_dim, embed_dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within x (batch, seq, embed_dim); `mask` is (1 or batch, seq, seq), and without it all is seen."""
        if mask is not None and mask.dim() == 3:
            mask = mask[:, None]  # the same for every head
        layers = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for layer in layers)
        return self.out_proj(fused_attention(q, k, v, mask).transpose(1, 2).flatten(2))

    def counterpart(self) -> Attention:
        return Attention(self.embed_dim, self.config)


class MLP(ListOfParameters, Listing):
    """The position-wise network linear2(gelu(linear1(x))).

    Args:
        embed_dim: size of input and output.
        hidden_dim: size in between, by default 4 · embed_dim.
        dropout_prob: dropout probability after the activation.
    """

    NAMES: ClassVar = {"linear1": "up", "linear2": "down"}

    def __init__(self, embed_dim: int, hidden_dim: int | None = None, dropout_prob: float = 0.1) -> None:
        super().__init__()
        hidden = 4 * embed_dim if hidden_dim is None else hidden_dim
        self.config = FeedForwardConfig(hidden=hidden, activation="gelu", dropout=dropout_prob)
        self.linear1, self.gelu = Linear(embed_dim, hidden), nn.GELU()
        self.dropout, self.linear2 = nn.Dropout(dropout_prob), Linear(hidden, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to every position of x (batch, seq, embed_dim)."""
        return self.linear2(self.dropout(self.gelu(self.linear1(x))))

    def counterpart(self) -> FeedForward:
        return FeedForward(self.linear2.out_features, self.config)


class TransformerBlock(ListOfParameters, Listing):
    """A pre-norm block: x + attention(ln1(x)), then x + mlp(ln2(x)); attention has no biases.

    Args:
        embed_dim: size of the hidden states.
        num_heads: number of heads; it divides `embed_dim`.
        mlp_ratio: hidden size of the MLP, as a multiple of `embed_dim`.
        ff_dim: hidden size of the MLP, in place of `mlp_ratio`.
        dropout_prob: dropout probability of the output of each sublayer and inside the MLP.
    """

    NAMES: ClassVar = {"ln1": "attention_norm", "ln2": "feedforward_norm", "mlp": "feedforward"}

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mlp_ratio: int = 4,
        ff_dim: int | None = None,
        dropout_prob: float = 0.1,
    ) -> None:
        super().__init__()
        hidden = int(embed_dim * mlp_ratio) if ff_dim is None else ff_dim
        self.config = block_config(embed_dim, num_heads, hidden, "gelu", dropout=dropout_prob)
        self.attention, self.mlp = MultiHeadAttention(embed_dim, num_heads), MLP(embed_dim, hidden, dropout_prob)
        self.ln1, self.ln2, self.dropout = LayerNorm(embed_dim), LayerNorm(embed_dim), nn.Dropout(dropout_prob)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply the block to x (batch, seq, embed_dim); `mask` is that of `MultiHeadAttention`."""
        x = x + self.dropout(self.attention.forward(self.ln1.forward(x), mask))
        return x + self.dropout(self.mlp.forward(self.ln2.forward(x)))


class GPT(ListOfParameters, ListingModel):
    """A GPT: learned positions, pre-norm blocks with a causal mask, a final norm, an output tied to the embedding.

    Args:
        vocab_size: number of tokens.
        embed_dim: size of the hidden states.
        num_layers: number of blocks.
        num_heads: number of heads.
        max_seq_len: number of positions.
    """

    NAMES: ClassVar = {
        "token_embedding": "input.token",
        "position_embedding": "input.position",
        "blocks": "decoder",
        "ln_f": "decoder.norm",
    }

    def __init__(
        self, vocab_size: int, embed_dim: int, num_layers: int, num_heads: int, max_seq_len: int = 1024
    ) -> None:
        super().__init__()
        block = block_config(embed_dim, num_heads, 4 * embed_dim, "gelu", dropout=0.1)
        self.untied_config = gpt_config(block, num_layers, vocab=vocab_size, context=max_seq_len)
        self.max_seq_len = max_seq_len
        self.token_embedding = Embedding(vocab_size, embed_dim)
        self.position_embedding = Embedding(max_seq_len, embed_dim)
        self.blocks = nn.ModuleList(TransformerBlock(embed_dim, num_heads) for _ in range(num_layers))
        self.ln_f = LayerNorm(embed_dim)
        initialize(Listing.to_monoblock(self), self.model_config())

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (batch, seq, vocab_size) of token ids (batch, seq)."""
        seq_len = tokens.shape[1]
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(seq_len, device=tokens.device))
        mask = self._create_causal_mask(seq_len).to(tokens.device)
        for block in self.blocks:
            x = block(x, mask)
        return F.linear(self.ln_f(x), self.token_embedding.weight)

    def generate(  # type: ignore[override]
        self, prompt_tokens: Tensor, max_new_tokens: int = 50, temperature: float = 1.0, **options: Any
    ) -> Tensor:
        """Continue prompts (batch, seq) by sampling, and return them with `max_new_tokens` new tokens.

        The keys and values of all tokens are cached, so that each new token costs one position.  `options` are those of
        `monoblock.Transformer.generate`, such as seed, top_k or eos_token_id.
        """
        return super().generate(prompt_tokens, max_new_tokens, temperature=temperature, **options)

    def _create_causal_mask(self, seq_len: int) -> Tensor:
        return create_causal_mask(seq_len)

    def model_config(self) -> ModelConfig:
        return replace(self.untied_config, tie="output")
