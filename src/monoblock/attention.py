"""Equation 1, and the heads around it: MHA, GQA and MQA, self and cross.

`attend` is the formula in plain steps; `attend_fused` is the same through one kernel.  `View` is what all blocks of one
kind share in a pass: who may see whom, the bias on the scores, the angles of the positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.cache import CrossSlot, KeyValues, Slot
from monoblock.config import AttentionConfig, Buckets
from monoblock.linear import joined, worth_joining
from monoblock.masks import Sight
from monoblock.native import gradients
from monoblock.norm import HALF, Norm
from monoblock.places import Entry
from monoblock.positions import Turn, bucket_bias, rotate
from monoblock.tap import Tap, tapped, wants


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    tap: Tap | None = None,
) -> Tensor:
    """softmax(q k' / sqrt(K) + bias) v, over the keys the mask lets through (Vaswani et al. 2017, eq. 1).

    q (B, H, T, K), k (B, G, S, K), v (B, G, S, *) with G dividing H; mask (B, 1, T, S) True where q may see k.
    A row that may see nothing gives zeros.  16-bit scores are made in fp32.
    """
    H, K = q.shape[1], q.shape[3]
    k, v = (t.repeat_interleave(H // t.shape[1], dim=1) if t.shape[1] != H else t for t in (k, v))
    wide_q, wide_k = (t.float() if t.dtype in HALF else t for t in (q, k))
    scores = wide_q @ wide_k.mT * (K**-0.5 if scale is None else scale)  # (B, H, T, S)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    scores = tapped(tap, "scores", scores)
    weights = _softmax(scores, sinks)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0)  # only what may be seen, so a true NaN still shows
    weights = F.dropout(tapped(tap, "weights", weights), dropout)
    return weights.to(v.dtype) @ v


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys; a sink (H,) takes part in the sum and is then dropped."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


FLEX_FROM = 128  # queries: below, building a block mask costs more than it saves


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, view: View, *, scale: float | None) -> Tensor:
    """The same by FlexAttention (Dong et al. 2024), which skips the blocks a mask rules out and writes no matrix."""
    from torch.nn.attention.flex_attention import flex_attention

    run: Any = flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention)
    return run(q, k, v, block_mask=view.block_mask(), scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def attend_fused(
    q: Tensor, k: Tensor, v: Tensor, view: View, *, scale: float | None, dropout: float, bias: Tensor | None
) -> Tensor:
    """The same by one kernel.  Rows that see nothing are let see all and then zeroed: kernels give garbage there."""
    if bias is None and dropout == 0.0 and 16 <= q.shape[-1] == v.shape[-1] and view.flexible(q):
        return attend_flex(q, k, v, view, scale=scale)
    mask, blind = view.fused(bias, q.dtype)
    causal = mask is None and view.sight.kind == "causal"
    if causal and dropout == 0.0 and gradients.fits(q, k, v):
        return gradients.attend_causal(q, k, v, scale)
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=gqa
    )
    return out if blind is None else out.masked_fill(blind, 0)


def beside(q: Tensor, sources: int) -> Tensor:
    """Queries (n·B, H, T, K) of which n rows look at one source, side by side: (B, H, n·T, K)."""
    if q.shape[0] == sources:
        return q
    return q.unflatten(0, (sources, -1)).transpose(1, 2).flatten(2, 3)


def apart(heads: Tensor, rows: int) -> Tensor:
    """The reverse, on what came out."""
    if heads.shape[0] == rows:
        return heads
    return heads.unflatten(2, (rows // heads.shape[0], -1)).transpose(1, 2).flatten(0, 1)


def kept(bias: Tensor, config: AttentionConfig) -> Tensor:
    """Of a bias (B, H, T, S) for all heads, that of the heads pruning has left."""
    return bias[:, list(config.kept_heads)] if config.kept_heads else bias


class View:
    """What the blocks of one kind share in one pass; whatever several of them need is made once, by `prepare`."""

    def __init__(self, sight: Sight, bias: Tensor | None = None, turn: Turn | None = None) -> None:
        self.sight = sight
        self.bias = bias  # (B, H, T, S)
        self.turn = turn
        self.lengths: Tensor | None = None  # one new token a row, after so many cached ones, all of them seen
        self._dense: Tensor | None = None
        self._opened: tuple[Tensor, Tensor] | None = None
        self._biased: tuple[Tensor, Tensor | None] | None = None
        self._block_mask: Any = None

    def prepare(self, x: Tensor) -> View:
        """Make now what the fused path will ask for, so that a block that is run twice finds the same."""
        if self.bias is not None:
            self._biased = self._masked(self.bias, x.dtype)
        elif self.flexible(x):
            self._block_mask = self._blocks()
        elif self.sight.kind == "dense":
            self.opened()
        return self

    def flexible(self, x: Tensor) -> bool:
        """Whether FlexAttention is worth it: a real mask, many queries, a GPU."""
        return x.is_cuda and self.sight.kind == "dense" and self.bias is None and self.sight.q.length >= FLEX_FROM

    def dense(self) -> Tensor | None:
        """The mask as booleans, None where everything is seen."""
        if self._dense is None and self.sight.kind != "all":
            self._dense = self.sight.dense()
        return self._dense

    def opened(self) -> tuple[Tensor, Tensor] | None:
        """The mask with blind rows opened, and which rows are blind (B, 1, T, 1)."""
        dense = self.dense()
        if self._opened is None and dense is not None:
            blind = ~dense.any(-1, keepdim=True)
            self._opened = dense | blind, blind
        return self._opened

    def block_mask(self) -> Any:
        """The mask for FlexAttention: which blocks of queries and keys are worth a look."""
        if self._block_mask is None:
            self._block_mask = self._blocks()
        return self._block_mask

    def _blocks(self) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        q, k = self.sight.q, self.sight.k
        build: Any = create_block_mask if torch.compiler.is_compiling() else _compiled(create_block_mask)
        batch = max(q.at.shape[0], k.at.shape[0])
        mask = self.sight.mask.flex(q, k)
        return build(mask, batch if batch > 1 else None, None, q.length, k.length, device=q.at.device)

    def fused(self, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """The mask a kernel takes (boolean, or the bias with -inf) and the blind rows."""
        if bias is None:
            return (self.opened() or (None, None)) if self.sight.kind == "dense" else (None, None)
        if bias is self.bias and self._biased is not None:
            return self._biased
        return self._masked(bias, dtype)

    def _masked(self, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        opened = self.opened()
        if opened is None:
            return bias.to(dtype), None
        allowed, blind = opened
        return bias.to(dtype).masked_fill(~allowed, -math.inf), blind


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, 3.2.2); with fewer key than query heads, grouped (Ainslie 2023)."""

    def __init__(self, width: int, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        H, G, K, size = config.heads, config.groups, config.key_size(width), config.value_size(width)
        self.query = nn.Linear(width, H * K, bias="q" in config.bias)
        self.key = nn.Linear(width, G * K, bias="k" in config.bias)
        self.value = nn.Linear(width, G * size, bias="v" in config.bias)
        self.output = nn.Linear(H * size, width, bias="o" in config.bias)
        self.query_norm, self.key_norm = self._qk_norm(H, K), self._qk_norm(G, K)
        self.sinks = nn.Parameter(torch.zeros(H)) if config.sinks else None
        owns = isinstance(config.positions, Buckets) and not config.positions.shared
        self.position_bias = nn.Embedding(config.positions.count, config.all_heads) if owns else None  # type: ignore[union-attr]

    def _qk_norm(self, heads: int, size: int) -> Norm | None:
        if self.config.qk_norm is None:
            return None
        shapes: dict[str, int | tuple[int, ...]] = {"head": size, "each_head": (heads, size), "width": heads * size}
        return Norm(shapes[self.config.qk_norm_over], self.config.qk_norm)

    def forward(
        self,
        x: Tensor,
        view: View,
        *,
        memory: Tensor | None = None,
        slot: Slot | CrossSlot | None = None,
        entry: Entry | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """x (B, T, D) looks at itself, or at memory (B, S, D)."""
        known = isinstance(slot, CrossSlot) and slot.keys is not None
        queries, new_keys, new_values = self.projected(x, x if memory is None else memory, known)
        q = self._heads(queries, self.config.heads, self.query_norm)
        if view.turn is not None:
            q = rotate(q, view.turn)
        keys, values = self._keys_values(new_keys, new_values, view, slot, entry)
        q, keys, values = tapped(tap, "query", q), tapped(tap, "key", keys), tapped(tap, "value", values)
        rows, q = q.shape[0], beside(q, keys.shape[0])
        out = apart(self._attend(q, keys, values, view, tap), rows)  # (B, H, T, value size)
        out = tapped(tap, "heads", out).transpose(1, 2).flatten(2)
        return self.output(out)

    def _heads(self, x: Tensor, heads: int, norm: Norm | None = None) -> Tensor:
        """(B, T, heads * size) -> (B, heads, T, size), clamped and normed where the configuration says so."""
        if self.config.clip is not None:
            x = x.clamp(-self.config.clip, self.config.clip)
        if norm is not None and self.config.qk_norm_over == "width":
            x = norm(x)
        x = x.unflatten(-1, (heads, x.shape[-1] // heads))
        if norm is not None and self.config.qk_norm_over != "width":
            x = norm(x)
        return x.transpose(1, 2)

    def projected(self, x: Tensor, source: Tensor, known: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries of x, and keys and values of the source unless they are known already."""
        if source is x and worth_joining(x, three := (self.query, self.key, self.value)):
            q, k, v = joined(x, three)
            return q, k, v
        return self.query(x), None if known else self.key(source), None if known else self.value(source)

    def _keys_values(
        self,
        new_keys: Tensor | None,
        new_values: Tensor | None,
        view: View,
        slot: Slot | CrossSlot | None,
        entry: Entry | None,
    ) -> KeyValues:
        if isinstance(slot, CrossSlot) and slot.keys is not None and slot.values is not None:
            return KeyValues(slot.keys, slot.values)
        assert new_keys is not None
        assert new_values is not None
        keys = self._heads(new_keys, self.config.groups, self.key_norm)
        values = self._heads(new_values, self.config.groups)
        if view.turn is not None:
            keys = rotate(keys, view.turn)
        if isinstance(slot, CrossSlot):
            return slot.fill(keys, values)
        if isinstance(slot, Slot):
            assert entry is not None
            return slot.store(keys, values, entry)
        return KeyValues(keys, values)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, view: View, tap: Tap | None) -> Tensor:
        config = self.config
        bias = view.bias if self.position_bias is None else self._own_bias(view)
        dropout = config.dropout if self.training else 0.0
        plain = config.softcap is not None or self.sinks is not None or wants(tap, "weights") or wants(tap, "scores")
        if not plain:
            return attend_fused(q, k, v, view, scale=config.scale, dropout=dropout, bias=bias)
        return attend(
            q,
            k,
            v,
            view.dense(),
            bias,
            scale=config.scale,
            softcap=config.softcap,
            sinks=self.sinks,
            dropout=dropout,
            tap=tap,
        )

    def _own_bias(self, view: View) -> Tensor:
        """The bias from this block's own table of distances."""
        assert isinstance(self.config.positions, Buckets)
        assert self.position_bias is not None
        sight, both = view.sight, self.config.mask == "full"
        table = self.position_bias.weight
        bias = bucket_bias(self.config.positions, table, sight.q.at, sight.k.at, both_sides=both)
        return kept(bias, self.config)
