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

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from monoblock.classic.shared import accept_listing_names, alias, attention_context, scaled_dot_product_attention
from monoblock.config.families import build_encoder_decoder
from monoblock.config.model import (
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    HeadConfig,
    ModelConfig,
    Sinusoid,
)
from monoblock.nn.attention import Attention
from monoblock.nn.block import Block
from monoblock.nn.positions import sinusoid
from monoblock.nn.transformer import Transformer as MonoblockTransformer
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

ATTENTION_NAMES = {"W_q": "query", "W_k": "key", "W_v": "value", "W_o": "output"}
FFN_NAMES = {"ffn.0": "feedforward.up", "ffn.3": "feedforward.down"}  # 1 and 2 are the ReLU and dropout


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
        return self.dropout(x + self.pe[:, : x.shape[1]].to(x.dtype))


class MultiHeadAttention(Attention):
    """Multi-head attention without biases; queries, keys and values may come from different tensors.

    Args:
        d_model: size of the hidden states.
        num_heads: number of heads; it divides `d_model`.
    """

    W_q, W_k, W_v, W_o = alias("query"), alias("key"), alias("value"), alias("output")
    d_model, num_heads = alias("query.in_features"), alias("config.heads")

    def __init__(self, d_model: int, num_heads: int) -> None:
        config = AttentionConfig(heads=num_heads, bias="", mask="full")
        config.check_width(d_model)
        super().__init__(d_model, config)
        accept_listing_names(self, ATTENTION_NAMES)

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Attend from Q (batch, T, d_model) to K and V (batch, S, d_model); the output has the shape of Q."""
        projected = self.query(Q), self.key(K), self.value(V)
        q, k, v = (self._split_heads(x, self.config.heads) for x in projected)
        out = self._attend(q, k, v, attention_context(mask, Q, K), tap=None)
        return self.output(out.transpose(1, 2).flatten(2))


def _block_config(d_model: int, num_heads: int, d_ff: int, dropout: float) -> BlockConfig:
    return BlockConfig(
        width=d_model,
        attention=AttentionConfig(heads=num_heads, bias="", mask="full"),
        feedforward=FeedForwardConfig(hidden=d_ff, activation="relu", dropout=dropout),
        norm_place="post",
        dropout=dropout,
    )


def _attention_names(theirs: str, ours: str) -> dict[str, str]:
    return {f"{theirs}.{name}": f"{ours}.{our_name}" for name, our_name in ATTENTION_NAMES.items()}


class EncoderBlock(Block):
    """A post-norm block: self-attention, then a feed-forward network with ReLU, each with residual sum and norm.

    Args:
        d_model: size of the hidden states.
        num_heads: number of heads.
        d_ff: hidden size of the feed-forward network.
        dropout: dropout probability of the output of each sublayer and inside the feed-forward network.
    """

    norm1, norm2 = alias("attention_norm"), alias("feedforward_norm")
    self_attn, ffn = alias("attention"), alias("feedforward")

    def __init__(self, d_model: int, num_heads: int, d_ff: int, dropout: float = 0.1) -> None:
        super().__init__(_block_config(d_model, num_heads, d_ff, dropout))
        names = {"norm1": "attention_norm", "norm2": "feedforward_norm"}
        accept_listing_names(self, names | FFN_NAMES | _attention_names("self_attn", "attention"))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Apply the block to x (batch, seq, d_model); the output has the same shape."""
        return super().forward(x, attention_context(mask, x, x))


class DecoderBlock(Block):
    """A post-norm block with three sublayers: self-attention, cross-attention to the encoder, feed-forward network.

    The arguments are those of `EncoderBlock`.
    """

    norm1, norm2, norm3 = alias("attention_norm"), alias("cross_norm"), alias("feedforward_norm")
    self_attn, cross_attn, ffn = alias("attention"), alias("cross"), alias("feedforward")

    def __init__(self, d_model: int, num_heads: int, d_ff: int, dropout: float = 0.1) -> None:
        config = _block_config(d_model, num_heads, d_ff, dropout)
        super().__init__(BlockConfig(**{**vars(config), "cross": config.attention}))
        names = {"norm1": "attention_norm", "norm2": "cross_norm", "norm3": "feedforward_norm"}
        names |= _attention_names("self_attn", "attention") | _attention_names("cross_attn", "cross")
        accept_listing_names(self, names | FFN_NAMES)

    def forward(  # type: ignore[override]
        self, tgt: Tensor, enc_output: Tensor, tgt_mask: Tensor | None = None, src_mask: Tensor | None = None
    ) -> Tensor:
        """Apply the block to tgt (batch, T, d_model), with cross-attention to enc_output (batch, S, d_model)."""
        context = attention_context(tgt_mask, tgt, tgt)
        memory_context = attention_context(src_mask, tgt, enc_output)
        return super().forward(tgt, context, memory=enc_output, memory_context=memory_context)


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


class Transformer(nn.Module):
    """The encoder-decoder of Vaswani et al. (2017), with separate embeddings and a biased output.

    Args:
        src_vocab, tgt_vocab: number of source and target tokens.
        d_model, num_heads, d_ff: sizes of every block.
        num_blocks: number of encoder blocks, and of decoder blocks.
        max_len: number of positions.
        dropout: dropout probability everywhere, also in the encoder (which the tutorial's class leaves at 0.1).
    """

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
        self.src_embed = nn.Embedding(src_vocab, d_model)
        self.tgt_embed = nn.Embedding(tgt_vocab, d_model)
        self.pos_enc = PositionalEncoding(d_model, max_len, dropout)
        self.encoder = Encoder(num_blocks, d_model, num_heads, d_ff, dropout)
        self.decoder = nn.ModuleList(DecoderBlock(d_model, num_heads, d_ff, dropout) for _ in range(num_blocks))
        self.out_proj = nn.Linear(d_model, tgt_vocab)

    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """Return the hidden states (batch, S, d_model) of source tokens (batch, S)."""
        return self.encoder(self._embed(self.src_embed, src), src_mask)

    def decode(
        self, tgt: Tensor, enc_out: Tensor, tgt_mask: Tensor | None = None, src_mask: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states (batch, T, d_model) of target tokens (batch, T); `out_proj` makes them logits."""
        x = self._embed(self.tgt_embed, tgt)
        for block in self.decoder:
            x = block(x, enc_out, tgt_mask, src_mask)
        return x

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None
    ) -> Tensor:
        """Return the logits (batch, T, tgt_vocab)."""
        return self.out_proj(self.decode(tgt, self.encode(src, src_mask), tgt_mask, src_mask))

    def _embed(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        return self.pos_enc(embedding(ids) * embedding.embedding_dim**0.5)

    def to_monoblock(self) -> MonoblockTransformer:
        """Return a `monoblock.Transformer` that shares these weights, to generate, inspect, save or examine it.

        Its decoder is always causal, so `model(src, tgt)` of the result needs no mask.
        """
        with torch.device("meta"):
            model = MonoblockTransformer(self._config())
        state = {_monoblock_name(name): tensor for name, tensor in self.state_dict().items() if name != "pos_enc.pe"}
        model.load_state_dict(state, assign=True)
        return model.train(self.training)

    def _config(self) -> ModelConfig:
        block = cast(Block, self.encoder.blocks[0]).config
        vocabularies = self.src_embed.num_embeddings, self.tgt_embed.num_embeddings
        source, target = (
            EmbeddingConfig(vocab=vocab, scale="sqrt_width", positions=Sinusoid(), dropout=self.pos_enc.dropout.p)
            for vocab in vocabularies
        )
        head = HeadConfig(kind="language_model", bias="none" if self.out_proj.bias is None else "learned")
        depth = len(self.decoder)
        return build_encoder_decoder(block, depth=depth, source=source, target=target, norm=None, head=head, tie="none")


def _monoblock_name(name: str) -> str:
    """Return the name of a weight of `Transformer` in a `monoblock.Transformer`."""
    renamed = {
        "src_embed.weight": "input.token.weight",
        "tgt_embed.weight": "target.token.weight",
        "out_proj.weight": "head.output.weight",
        "out_proj.bias": "head.bias",
    }
    return renamed.get(name, name.replace("encoder.blocks.", "encoder."))


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
