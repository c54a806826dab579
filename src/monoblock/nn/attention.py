"""Scaled dot-product attention, and multi-head self- and cross-attention built on it (MHA, GQA and MQA).

`attend` computes equation 1 of Vaswani et al. (2017) step by step.  `attend_fused` computes the same with a fused
kernel, `attend_banded` (nn/banded) only over the tiles of a sparse mask that are not empty, and `attend_varlen`
(nn/packed) only within packed documents.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.config.model import AttentionConfig, Buckets
from monoblock.kernels.cpu.autograd import attend_causal, supports_causal_attention
from monoblock.nn.attention_context import AttentionContext, compile_once
from monoblock.nn.banded.attend_banded import attend_banded
from monoblock.nn.kv_cache.cache_index import CacheWrite
from monoblock.nn.kv_cache.layer_cache import CrossAttentionCache, KeyValues, LayerCache
from monoblock.nn.linear import Linear, autocast_dtype
from monoblock.nn.norm import HALF_DTYPES, Norm
from monoblock.nn.packed.attend_packed import attend_varlen, supports_head_sizes
from monoblock.nn.positions import apply_rotary, bucket_bias
from monoblock.nn.tap import Tap, apply_tap, tap_changes, tap_wants


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
    """Compute softmax(q k^T / sqrt(K) + bias) v over the keys that the mask allows (Vaswani et al. 2017, eq. 1).

    The shapes are q (B, H, T, K), k (B, G, S, K) and v (B, G, S, *), where the number of key heads G divides H.
    `mask` (B, 1, T, S) is True where a query may see a key; a query that may see no key gives zeros.  `sinks` (H,) are
    extra scores that only add to the denominator of the softmax.  Scores of 16-bit inputs are computed in fp32.
    """
    H, K = q.shape[1], q.shape[3]
    k, v = (t.repeat_interleave(H // t.shape[1], dim=1) if t.shape[1] != H else t for t in (k, v))
    wide_q, wide_k = (t.float() if t.dtype in HALF_DTYPES else t for t in (q, k))
    scores = wide_q @ wide_k.mT * (K**-0.5 if scale is None else scale)  # (B, H, T, S)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    scores = apply_tap(tap, "scores", scores)
    weights = _softmax(scores, sinks)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0)  # 0 for a query without visible keys; other NaNs stay
    weights = F.dropout(apply_tap(tap, "weights", weights), dropout)
    return weights.to(v.dtype) @ v


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute the softmax of scores (B, H, T, S) over the keys; sinks (H,) are added to the denominator only."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


def supports_flex(q: Tensor, v: Tensor, context: AttentionContext, *, dropout: float, bias: Tensor | None) -> bool:
    """Return whether `attend_flex` can be used and is worth its setup."""
    return bias is None and dropout == 0.0 and 16 <= q.shape[-1] == v.shape[-1] and context.uses_flex(q)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, *, scale: float | None) -> Tensor:
    """Compute `attend` with FlexAttention (Dong et al. 2024), which skips masked blocks and stores no scores."""
    from torch.nn.attention.flex_attention import flex_attention

    run: Any = flex_attention if torch.compiler.is_compiling() else compile_once(flex_attention)
    return run(q, k, v, block_mask=context.block_mask(), scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: AttentionContext,
    *,
    scale: float | None,
    dropout: float,
    bias: Tensor | None,
) -> Tensor:
    """Compute `attend` with one fused kernel.

    The result of a fused kernel is undefined for a query that sees no key.  Such a query is shown every key, and its
    output is set to zero afterwards.
    """
    if supports_flex(q, v, context, dropout=dropout, bias=bias):
        return attend_flex(q, k, v, context, scale=scale)
    mask, blind = context.fused_mask(bias, q.dtype)
    causal = mask is None and context.resolved_mask.kind == "causal"
    if causal and dropout == 0.0 and supports_causal_attention(q, k, v):
        return attend_causal(q, k, v, scale)
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=gqa
    )
    return out if blind is None else out.masked_fill(blind, 0)


def fold_beams(q: Tensor, num_sources: int) -> Tensor:
    """Reshape the queries of n beams per source from (B·n, H, T, K) to (B, H, n·T, K), where B is `num_sources`.

    Beams of the same source attend to the same keys, which then need not be repeated for each beam.
    """
    if q.shape[0] == num_sources:
        return q
    return q.unflatten(0, (num_sources, -1)).transpose(1, 2).flatten(2, 3)


def unfold_beams(heads: Tensor, num_rows: int) -> Tensor:
    """Undo `fold_beams`: reshape the output of attention from (B, H, n·T, K) to (B·n, H, T, K); B·n is `num_rows`."""
    if heads.shape[0] == num_rows:
        return heads
    return heads.unflatten(2, (num_rows // heads.shape[0], -1)).transpose(1, 2).flatten(0, 1)


def select_kept_heads(bias: Tensor, config: AttentionConfig) -> Tensor:
    """Select the heads that head pruning has kept from a bias (B, unpruned heads, T, S); the result is (B, H, T, S)."""
    return bias[:, list(config.kept_heads)] if config.kept_heads else bias


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, 3.2.2).

    With fewer key/value heads than query heads it is grouped-query attention (Ainslie et al. 2023).
    """

    def __init__(self, width: int, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        H, G, K, value_size = config.heads, config.num_kv_heads, config.key_size(width), config.value_size(width)
        self.query = Linear(width, H * K, bias="q" in config.bias)
        self.key = Linear(width, G * K, bias="k" in config.bias)
        self.value = Linear(width, G * value_size, bias="v" in config.bias)
        self.output = Linear(H * value_size, width, bias="o" in config.bias)
        self.query_norm, self.key_norm = self._qk_norm(H, K), self._qk_norm(G, K)
        self.sinks = nn.Parameter(torch.zeros(H)) if config.sinks else None
        self.position_bias: nn.Embedding | None = None
        if isinstance(config.positions, Buckets) and not config.positions.shared:
            self.position_bias = nn.Embedding(config.positions.count, config.num_unpruned_heads)

    def _qk_norm(self, heads: int, size: int) -> Norm | None:
        if self.config.qk_norm is None:
            return None
        shapes: dict[str, int | tuple[int, ...]] = {"head": size, "each_head": (heads, size), "width": heads * size}
        return Norm(shapes[self.config.qk_norm_over], self.config.qk_norm)

    def forward(
        self,
        x: Tensor,
        context: AttentionContext,
        *,
        memory: Tensor | None = None,
        layer_cache: LayerCache | CrossAttentionCache | None = None,
        cache_write: CacheWrite | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Attend from x (B, T, D) to x and the cached tokens, or to memory (B, S, D) if it is given.

        The output has the shape of x.
        """
        is_cached = isinstance(layer_cache, CrossAttentionCache) and layer_cache.keys is not None
        projected = self.project_qkv(x, x if memory is None else memory, is_cached)
        heads = self.attend_heads(*projected, context, layer_cache=layer_cache, cache_write=cache_write, tap=tap)
        return self.output(heads)

    def attend_heads(
        self,
        queries: Tensor,
        new_keys: Tensor | None,
        new_values: Tensor | None,
        context: AttentionContext,
        *,
        layer_cache: LayerCache | CrossAttentionCache | None = None,
        cache_write: CacheWrite | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Attend from what `project_qkv` returns; the output (B, T, H * value size) has the heads side by side."""
        q = self._split_heads(queries, self.config.heads, self.query_norm)
        if context.rotary_angles is not None:
            q = apply_rotary(q, context.rotary_angles)
        keys, values = self._update_keys_values(new_keys, new_values, context, layer_cache, cache_write)
        q, keys, values = apply_tap(tap, "query", q), apply_tap(tap, "key", keys), apply_tap(tap, "value", values)
        if context.packed is not None:
            out = self._attend_packed(q, keys, values, context, tap)
        else:
            rows, q = q.shape[0], fold_beams(q, keys.shape[0])
            out = unfold_beams(self._attend(q, keys, values, context, tap), rows)  # (B, H, T, value size)
        return apply_tap(tap, "heads", out).transpose(1, 2).flatten(2)

    def _split_heads(self, x: Tensor, heads: int, norm: Norm | None = None) -> Tensor:
        """Split x (B, T, heads * size) into heads (B, heads, T, size), clamped and normalized if so configured."""
        if self.config.clip is not None:
            x = x.clamp(-self.config.clip, self.config.clip)
        if norm is not None and self.config.qk_norm_over == "width":
            x = norm(x)
        x = x.unflatten(-1, (heads, x.shape[-1] // heads))
        if norm is not None and self.config.qk_norm_over != "width":
            x = norm(x)
        return x.transpose(1, 2)

    def project_qkv(self, x: Tensor, source: Tensor, is_cached: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Project x to queries, and `source` to keys and values, which are None if they are cached already."""
        if is_cached:
            return self.query(x), None, None
        if source is x:
            x = source = x.to(autocast_dtype(x))  # once, else each product would keep a copy
        return self.query(x), self.key(source), self.value(source)

    def _update_keys_values(
        self,
        new_keys: Tensor | None,
        new_values: Tensor | None,
        context: AttentionContext,
        layer_cache: LayerCache | CrossAttentionCache | None,
        cache_write: CacheWrite | None,
    ) -> KeyValues:
        """Split new keys and values into heads, rotate the keys, and write both to the cache.

        Return all keys and values that the queries may see.  If the new ones are None, all of them are cached already.
        """
        if new_keys is None or new_values is None:
            assert isinstance(layer_cache, CrossAttentionCache)
            assert layer_cache.keys is not None
            assert layer_cache.values is not None
            return KeyValues(layer_cache.keys, layer_cache.values)
        keys = self._split_heads(new_keys, self.config.num_kv_heads, self.key_norm)
        values = self._split_heads(new_values, self.config.num_kv_heads)
        if context.rotary_angles is not None:
            keys = apply_rotary(keys, context.rotary_angles)
        if isinstance(layer_cache, CrossAttentionCache):
            return layer_cache.fill(keys, values)
        if isinstance(layer_cache, LayerCache):
            assert cache_write is not None
            return layer_cache.update(keys, values, cache_write)
        return KeyValues(keys, values)

    def _attend_packed(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, tap: Tap | None) -> Tensor:
        """Attend within packed documents: with the kernel for variable lengths or, if it cannot be used, as rows.

        The shapes are q (1, H, T, K), k (1, G, S, K), v (1, G, S, *) and the output (1, H, T, *).
        """
        assert context.packed is not None
        config = self.config
        is_plain = config.softcap is None and self.sinks is None and self.position_bias is None
        is_plain = is_plain and not (config.dropout and self.training)
        is_read = any(tap_wants(tap, name) for name in ("scores", "weights"))
        has_kernel = is_plain and not is_read and supports_head_sizes(q.shape[-1], v.shape[-1])
        if has_kernel and context.uses_varlen(q):
            causal, dtype = len(context.resolved_mask.mask.terms) > 0, autocast_dtype(q)
            return attend_varlen(q, k, v, *context.packed, causal=causal, scale=config.scale, dtype=dtype)
        q_rows, k_rows = context.document_rows()
        q, k, v = (
            rows.to_rows(t.squeeze(0).transpose(0, 1)).transpose(1, 2)
            for rows, t in ((q_rows, q), (k_rows, k), (k_rows, v))
        )
        out = self._attend(q, k, v, context, tap)  # (documents, H, length, value size)
        return q_rows.from_rows(out.transpose(1, 2)).transpose(0, 1)[None]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, tap: Tap | None) -> Tensor:
        config = self.config
        bias = context.bias if self.position_bias is None else self._layer_position_bias(context)
        dropout = config.dropout if self.training else 0.0
        wanted = [name for name in ("scores", "weights") if tap_wants(tap, name)]
        is_plain = config.softcap is None and self.sinks is None
        uses_flex = is_plain and supports_flex(q, v, context, dropout=dropout, bias=bias)
        plan = None if bias is not None or uses_flex else context.tile_plan(q)
        has_kernel = is_plain or plan is not None
        scale, softcap, sinks = config.scale, config.softcap, self.sinks
        if wanted or not has_kernel:
            mask = context.dense_mask()
            out = attend(q, k, v, mask, bias, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout, tap=tap)
            if not has_kernel or dropout > 0 or any(tap_changes(tap, name) for name in wanted):
                return out  # else the tap only reads: the output is that of the kernel, as without a tap
        if plan is not None:
            return attend_banded(q, k, v, plan, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)
        return attend_fused(q, k, v, context, scale=scale, dropout=dropout, bias=bias)

    def _layer_position_bias(self, context: AttentionContext) -> Tensor:
        """Return the relative-position bias (B, H, T, S) from this block's own embedding."""
        assert isinstance(self.config.positions, Buckets)
        assert self.position_bias is not None
        mask = context.resolved_mask
        bias = bucket_bias(
            self.config.positions,
            self.position_bias,
            mask.q.positions,
            mask.k.positions,
            bidirectional=self.config.mask == "full",
        )
        return select_kept_heads(bias, self.config)
