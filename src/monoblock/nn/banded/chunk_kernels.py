"""Attention of one chunk of tiles, forward and backward: with torch's flash kernel for CPUs, or with matrix products.

U tiles of queries are q (U, G, R, K), where R counts the queries of all heads that share a key head; each tile has its
own keys k (U, G, S, K) and values v (U, G, S, *).  Both kernels return the logarithm of the softmax denominators, from
which the backward pass computes the weights again (Dao et al. 2022).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.nn.banded.tile_plan import TileChunk
from monoblock.nn.norm import HALF_DTYPES


class ChunkOptions(NamedTuple):
    scale: float
    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0  # of the dropout, which the backward pass draws again

    def make_generator(self, device: torch.device) -> torch.Generator | None:
        """Return a generator for the dropout of all chunks in succession, None without dropout."""
        return torch.Generator(device).manual_seed(self.seed) if self.dropout > 0 else None


class ChunkGradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None  # (H,)


def attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk: TileChunk,
    sinks: Tensor | None,
    options: ChunkOptions,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Return the output (U, G, R, *) and the logarithms of the softmax denominators (U, G, R, 1)."""
    if _has_flash_kernel(q, v, options):
        bias = _flash_bias(chunk, q)
        out, logs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=bias, scale=options.scale
        )
        logs = logs.unsqueeze(-1)
        if sinks is not None:
            without, logs = logs, torch.logaddexp(logs, _sink_column(sinks, q))
            out = out * (without - logs).exp().to(out.dtype)
    else:
        scores, _ = _masked_scores(q, k, chunk, options)
        logs = scores.logsumexp(-1, keepdim=True)
        if sinks is not None:
            logs = torch.logaddexp(logs, _sink_column(sinks, q))
        weights = scores.sub_(logs).exp_()
        if generator is not None:
            weights.mul_(_draw_dropout(weights, options, generator))
        out = weights.to(v.dtype) @ v
    return out.masked_fill(_repeat_queries(chunk.blind, q), 0), logs


def attend_chunk_backward(
    grad: Tensor,
    out: Tensor,
    logs: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk: TileChunk,
    sinks: Tensor | None,
    options: ChunkOptions,
    generator: torch.Generator | None,
) -> ChunkGradients:
    """Return the gradients of a chunk from that of its output, and from what the forward pass returned."""
    grad = grad.masked_fill(_repeat_queries(chunk.blind, q), 0)
    sinks_grad = None
    wide_grad, wide_out = _widen(grad), _widen(out)
    row_sum = (wide_grad * wide_out).sum(-1, keepdim=True)  # the sum over keys of weight times its gradient
    if sinks is not None:
        per_query = -(_sink_column(sinks, q) - logs).exp() * row_sum  # (U, G, R, 1)
        sinks_grad = per_query.unflatten(2, (sinks.numel() // q.shape[1], -1)).sum((0, 3, 4)).flatten()
    if _has_flash_kernel(q, v, options):
        bias = _flash_bias(chunk, q)
        q_grad, k_grad, v_grad = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, logs.squeeze(-1), 0.0, False, attn_mask=bias, scale=options.scale
        )
        return ChunkGradients(q_grad, k_grad, v_grad, sinks_grad)
    scores, slope = _masked_scores(q, k, chunk, options)
    weights = scores.sub_(logs).exp_()
    weights_grad = wide_grad @ _widen(v).mT
    if generator is None:
        v_grad = weights.mT @ wide_grad
    else:
        dropout = _draw_dropout(weights, options, generator)
        v_grad = (weights * dropout).mT @ wide_grad
        weights_grad.mul_(dropout)
    scores_grad = weights_grad.sub_(row_sum).mul_(weights).mul_(options.scale)
    if slope is not None:
        scores_grad.mul_(slope)
    q_grad, k_grad = scores_grad @ _widen(k), scores_grad.mT @ _widen(q)
    return ChunkGradients(q_grad.to(q.dtype), k_grad, v_grad, sinks_grad)


def _has_flash_kernel(q: Tensor, v: Tensor, options: ChunkOptions) -> bool:
    is_plain = options.softcap is None and options.dropout == 0.0
    return q.device.type == "cpu" and is_plain and q.shape[-1] == v.shape[-1]


def _flash_bias(chunk: TileChunk, q: Tensor) -> Tensor:
    """Return the mask as 0 and -inf (U, 1, R, S)."""
    return _repeat_queries(torch.where(chunk.visible, 0.0, -math.inf).to(q.dtype), q)


def _masked_scores(q: Tensor, k: Tensor, chunk: TileChunk, options: ChunkOptions) -> tuple[Tensor, Tensor | None]:
    """Return the scores (U, G, R, S), -inf where masked, and with a softcap its slope at every score."""
    scores = (_widen(q) * options.scale) @ _widen(k).mT
    slope = None
    if options.softcap is not None:
        capped = torch.tanh(scores / options.softcap)
        scores, slope = options.softcap * capped, 1 - capped.square()
    return scores.masked_fill_(~_repeat_queries(chunk.visible, q), -math.inf), slope


def _repeat_queries(x: Tensor, q: Tensor) -> Tensor:
    """Repeat x (U, 1, tile, *) for all heads that share a key head: (U, 1, R, *)."""
    times = q.shape[2] // x.shape[2]
    return x if times == 1 else x.repeat(1, 1, times, 1)


def _sink_column(sinks: Tensor, q: Tensor) -> Tensor:
    """Return the sinks (H,) as a column (1, G, R, 1) beside the scores."""
    per_group = _widen(sinks.detach()).view(q.shape[1], -1, 1)  # (G, H / G, 1)
    return per_group.expand(-1, -1, q.shape[2] // per_group.shape[1]).reshape(1, q.shape[1], -1, 1)


def _draw_dropout(weights: Tensor, options: ChunkOptions, generator: torch.Generator) -> Tensor:
    """Return a factor for every weight: 0 with the probability of dropout, else 1 / (1 - dropout)."""
    if options.dropout == 1.0:
        return torch.zeros_like(weights)
    draws = torch.rand(weights.shape, generator=generator, dtype=torch.float32, device=weights.device)
    return (draws >= options.dropout).to(weights.dtype).div_(1 - options.dropout)


def _widen(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF_DTYPES else x
