"""The tutorial on encoder and decoder blocks: the Transformer of Vaswani et al. (2017), part by part.

    model = Transformer(src_vocab=37000, tgt_vocab=37000)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    scheduler = WarmupScheduler(optimizer, d_model=512, warmup_steps=4000)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=0)
    loss = train_step(src, tgt, model, optimizer, scheduler, criterion)

In every mask of this module 0 or False means blocked, and a mask broadcasts to (batch, heads, queries, keys).  As in
the tutorial, no mask means that everything is seen: a decoder needs a causal mask, which `train_step` builds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from monoblock.classic.shared import Listing, ListingModel, block_config, fused_attention, scaled_dot_product_attention
from monoblock.config.families import build_encoder_decoder
from monoblock.config.model import (
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    HeadConfig,
    ModelConfig,
    Sinusoid,
)
from monoblock.errors import InputError
from monoblock.nn.attention import Attention
from monoblock.nn.positions import sinusoid
from monoblock.training.schedule import noam

__all__ = [
    "DecoderBlock",
    "Encoder",
    "EncoderBlock",
    "MultiHeadAttention",
    "PositionalEncoding",
    "Transformer",
    "WarmupScheduler",
    "make_masks",
    "scaled_dot_product_attention",
    "train_step",
]


class PositionalEncoding(nn.Module):
    """Add sinusoidal positions to x (batch, seq, d_model), then apply dropout.

    Args:
        d_model: size of the hidden states.
        max_len: number of positions in the table.
        dropout: dropout probability of the sum.
    """

    pe: Tensor  # (1, max_len, d_model)

    def __init__(self, d_model: int, max_len: int = 5000, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pe", sinusoid(torch.arange(max_len), d_model)[None])

    def forward(self, x: Tensor) -> Tensor:
        """Return x + positions, of the shape of x."""
        return self.dropout(x + self.pe[:, : x.size(1)].to(x.dtype))


class MultiHeadAttention(Listing):
    """Multi-head attention without biases; queries, keys and values may come from different tensors.

    Args:
        d_model: size of the hidden states.
        num_heads: number of heads; it divides `d_model`.
    """

    NAMES: ClassVar = {"W_q": "query", "W_k": "key", "W_v": "value", "W_o": "output"}

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.config = AttentionConfig(heads=num_heads, bias="", mask="full")
        self.config.check_width(d_model)
        self.d_model, self.num_heads, self.d_k = d_model, num_heads, d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model, bias=False)
        self.W_k = nn.Linear(d_model, d_model, bias=False)
        self.W_v = nn.Linear(d_model, d_model, bias=False)
        self.W_o = nn.Linear(d_model, d_model, bias=False)

    def split_heads(self, x: Tensor, batch_size: int) -> Tensor:
        """Reshape x (batch, seq, d_model) to heads (batch, num_heads, seq, d_k)."""
        return x.view(batch_size, -1, self.num_heads, self.d_k).transpose(1, 2)

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from Q (batch, T, d_model) to K and V (batch, S, d_model); the output has the shape of Q."""
        q, k, v = (self.split_heads(W(x), x.size(0)) for W, x in ((self.W_q, Q), (self.W_k, K), (self.W_v, V)))
        return self.W_o(fused_attention(q, k, v, mask).transpose(1, 2).flatten(2))

    def counterpart(self) -> Attention:
        return Attention(self.d_model, self.config)


def _block_config(d_model: int, num_heads: int, d_ff: int, dropout: float) -> BlockConfig:
    return block_config(d_model, num_heads, d_ff, "relu", dropout=dropout, norm_place="post")


def _ffn(d_model: int, d_ff: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Dropout(dropout), nn.Linear(d_ff, d_model))


class EncoderBlock(Listing):
    """A post-norm block: self-attention, then a feed-forward network with ReLU, each with residual sum and norm.

    Args:
        d_model: size of the hidden states.
        num_heads: number of heads.
        d_ff: hidden size of the feed-forward network.
        dropout: dropout probability of the output of each sublayer and inside the feed-forward network.
    """

    NAMES: ClassVar = {
        "self_attn": "attention",
        "norm1": "attention_norm",
        "ffn.0": "feedforward.up",
        "ffn.3": "feedforward.down",
        "norm2": "feedforward_norm",
    }

    def __init__(self, d_model: int, num_heads: int, d_ff: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.config = _block_config(d_model, num_heads, d_ff, dropout)
        self.self_attn = MultiHeadAttention(d_model, num_heads)
        self.norm1, self.dropout1 = nn.LayerNorm(d_model), nn.Dropout(dropout)
        self.ffn = _ffn(d_model, d_ff, dropout)
        self.norm2, self.dropout2 = nn.LayerNorm(d_model), nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply the block to x (batch, seq, d_model); the output has the same shape."""
        x = self.norm1(x + self.dropout1(self.self_attn(x, x, x, mask)))
        return self.norm2(x + self.dropout2(self.ffn(x)))


class DecoderBlock(Listing):
    """A post-norm block with three sublayers: self-attention, cross-attention to the encoder, feed-forward network.

    The arguments are those of `EncoderBlock`.
    """

    NAMES: ClassVar = {
        "self_attn": "attention",
        "norm1": "attention_norm",
        "cross_attn": "cross",
        "norm2": "cross_norm",
        "ffn.0": "feedforward.up",
        "ffn.3": "feedforward.down",
        "norm3": "feedforward_norm",
    }

    def __init__(self, d_model: int, num_heads: int, d_ff: int, dropout: float = 0.1) -> None:
        super().__init__()
        config = _block_config(d_model, num_heads, d_ff, dropout)
        self.config = replace(config, cross=config.attention)
        self.self_attn, self.norm1 = MultiHeadAttention(d_model, num_heads), nn.LayerNorm(d_model)
        self.cross_attn, self.norm2 = MultiHeadAttention(d_model, num_heads), nn.LayerNorm(d_model)
        self.ffn, self.norm3 = _ffn(d_model, d_ff, dropout), nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, tgt: Tensor, enc_output: Tensor, tgt_mask: Tensor | None = None, src_mask: Tensor | None = None
    ) -> Tensor:
        """Apply the block to tgt (batch, T, d_model), with cross-attention to enc_output (batch, S, d_model)."""
        tgt = self.norm1(tgt + self.dropout(self.self_attn(tgt, tgt, tgt, tgt_mask)))
        tgt = self.norm2(tgt + self.dropout(self.cross_attn(tgt, enc_output, enc_output, src_mask)))
        return self.norm3(tgt + self.dropout(self.ffn(tgt)))


class Encoder(nn.Module):
    """A stack of encoder blocks.  The tutorial's encoder has no argument `dropout` and always uses 0.1."""

    def __init__(self, num_blocks: int, d_model: int, num_heads: int, d_ff: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EncoderBlock(d_model, num_heads, d_ff, dropout) for _ in range(num_blocks))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run the blocks on x (batch, seq, d_model); the output has the same shape."""
        for block in self.blocks:
            x = block(x, mask)
        return x


class Transformer(ListingModel):
    """The encoder-decoder of Vaswani et al. (2017), with separate embeddings and a biased output.

    Args:
        src_vocab, tgt_vocab: number of source and target tokens.
        d_model, num_heads, d_ff: sizes of every block.
        num_blocks: number of encoder blocks, and of decoder blocks.
        max_len: number of positions.
        dropout: dropout probability everywhere, also in the encoder (which the tutorial's class leaves at 0.1).

    Weights may be tied as in `model.out_proj.weight = model.tgt_embed.weight = model.src_embed.weight`.
    """

    NAMES: ClassVar = {
        "src_embed": "input.token",
        "tgt_embed": "target.token",
        "encoder.blocks": "encoder",
        "out_proj.weight": "head.output.weight",
        "out_proj.bias": "head.bias",
    }

    def __init__(
        self,
        src_vocab: int,
        tgt_vocab: int,
        d_model: int = 512,
        num_heads: int = 8,
        num_blocks: int = 6,
        d_ff: int = 2048,
        max_len: int = 5000,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        source, target = (
            EmbeddingConfig(vocab=vocab, scale="sqrt_width", positions=Sinusoid(), dropout=dropout)
            for vocab in (src_vocab, tgt_vocab)
        )
        self.untied_config = build_encoder_decoder(
            _block_config(d_model, num_heads, d_ff, dropout),
            depth=num_blocks,
            source=source,
            target=target,
            norm=None,
            head=HeadConfig(kind="language_model"),
            tie="none",
        )
        self.src_embed = nn.Embedding(src_vocab, d_model)
        self.tgt_embed = nn.Embedding(tgt_vocab, d_model)
        self.pos_enc = PositionalEncoding(d_model, max_len, dropout)
        self.encoder = Encoder(num_blocks, d_model, num_heads, d_ff, dropout)
        self.decoder = nn.ModuleList(DecoderBlock(d_model, num_heads, d_ff, dropout) for _ in range(num_blocks))
        self.out_proj = nn.Linear(d_model, tgt_vocab)

    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """Return the hidden states (batch, S, d_model) of source tokens (batch, S)."""
        return self.encoder(self.pos_enc(self.src_embed(src) * self.src_embed.embedding_dim**0.5), src_mask)

    def decode(
        self, tgt: Tensor, enc_out: Tensor, tgt_mask: Tensor | None = None, src_mask: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states (batch, T, d_model) of target tokens (batch, T); `out_proj` makes them logits."""
        tgt = self.pos_enc(self.tgt_embed(tgt) * self.tgt_embed.embedding_dim**0.5)
        for block in self.decoder:
            tgt = block(tgt, enc_out, tgt_mask, src_mask)
        return tgt

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None
    ) -> Tensor:
        """Return the logits (batch, T, tgt_vocab)."""
        return self.out_proj(self.decode(tgt, self.encode(src, src_mask), tgt_mask, src_mask))

    def causal_logits(self, ids: Tensor) -> Tensor:
        return self(ids, ids, tgt_mask=make_masks(ids, ids, pad=-1)[1])

    def model_config(self) -> ModelConfig:
        head = HeadConfig(kind="language_model", bias="none" if self.out_proj.bias is None else "learned")
        return replace(self.untied_config, head=head, tie=self._tie())

    def _tie(self) -> Literal["none", "output", "source_target", "three_way"]:
        """Return which of the two embeddings and the output matrix are one."""
        source, target, output = self.src_embed.weight, self.tgt_embed.weight, self.out_proj.weight
        if source is target:
            return "three_way" if output is target else "source_target"
        if output is source:
            raise InputError(
                "the output is tied to src_embed, but tgt_embed is not; write model.tgt_embed.weight = "
                "model.src_embed.weight as well, or tie the output to tgt_embed"
            )
        return "output" if output is target else "none"


# -- training ---------------------------------------------------------------------------------------------------------


class WarmupScheduler(LRScheduler):
    """Set the learning rate to d_model^-0.5 · min(step^-0.5, step · warmup_steps^-1.5); the first step is 1.

    The learning rate that the optimizer was given is not used.
    """

    def __init__(self, optimizer: Optimizer, d_model: int, warmup_steps: int) -> None:
        self.d_model, self.warmup_steps = d_model, warmup_steps
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of the next update for each parameter group."""
        rate = noam(self.last_epoch + 1, self.d_model, self.warmup_steps)
        return [rate for _ in self.base_lrs]


def make_masks(src: Tensor, tgt: Tensor, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Return the masks of a batch: the source's padding (batch, 1, 1, S), and causal and padding (batch, 1, T, T)."""
    causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool, device=tgt.device).tril()
    return (src != pad)[:, None, None], causal & (tgt != pad)[:, None, None]


def train_step(
    src: Tensor,
    tgt: Tensor,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    criterion: nn.CrossEntropyLoss,
) -> float:
    """Train `model` for one step on source and target tokens (batch, S) and (batch, T), and return the loss.

    The model reads the target without its last token and predicts it without its first.  The tutorial's step takes its
    last four arguments from global variables and passes no mask, so that its decoder sees the token to predict; this
    one masks the future and the padding, which is `criterion.ignore_index`.
    """
    model.train()
    tgt_in, tgt_out = tgt[:, :-1], tgt[:, 1:]
    src_mask, tgt_mask = make_masks(src, tgt_in, criterion.ignore_index)
    loss = criterion(model(src, tgt_in, src_mask, tgt_mask).flatten(0, 1), tgt_out.flatten())
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    scheduler.step()
    return loss.item()
