"""Attention on a CPU for one query per row, as in a step of a beam search."""

from __future__ import annotations

import torch
from torch import Tensor

from monoblock.nn.attention import Attention
from monoblock.nn.attention_context import AttentionContext
from monoblock.nn.kv_cache.cache_index import CacheWrite
from monoblock.nn.kv_cache.layer_cache import CrossAttentionCache, LayerCache


def supports_row_kernel(
    attention: Attention,
    x: Tensor,
    context: AttentionContext,
    layer_cache: LayerCache | CrossAttentionCache | None,
    cache_write: CacheWrite | None,
) -> bool:
    """Return whether `attend_one_query` supports this attention layer and this input.

    It supports x (B, 1, D) in fp32 with a key/value cache, without position bias, softcap, sinks and gradients.
    """
    if (
        x.shape[1] != 1
        or x.dtype != torch.float32
        or layer_cache is None
        or (cache_write is not None and cache_write.is_concatenated)
    ):
        return False
    if torch.is_grad_enabled() or attention.training or torch.compiler.is_compiling():
        return False
    if isinstance(layer_cache, CrossAttentionCache) and (layer_cache.keys is None or context.rotary_angles is not None):
        return False
    has_bias = context.bias is not None or attention.position_bias is not None
    return not has_bias and attention.config.softcap is None and attention.sinks is None


def attend_one_query(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, scale: float | None) -> Tensor:
    """Return softmax(scale · q kᵀ) v for one query per row, q (B, H, 1, K), with the heads concatenated: (B, 1, H · K).

    It has fewer rows of keys than of queries if those in succession read the same keys.
    """
    mask = context.dense_mask() if context.resolved_mask.kind == "dense" else None
    scale = scale if scale is not None else q.shape[-1] ** -0.5
    return torch.ops.monoblock.attend_one_query(q, k, v, mask=mask, scale=scale)
