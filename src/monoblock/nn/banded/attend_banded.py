"""Attention over those tiles of the mask that are not empty, for windows, global tokens, random blocks and documents.

Time and memory grow with the number of these tiles, not with the square of the length.  Tiles are computed in chunks;
the backward pass computes the attention weights of a chunk again, from the logarithms of their denominators.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from monoblock.nn.banded.chunk_kernels import ChunkOptions, attend_chunk, attend_chunk_backward
from monoblock.nn.banded.tile_plan import TileChunk, TilePlan
from monoblock.nn.norm import HALF_DTYPES

BANDED_MIN_QUERIES = 512  # with fewer queries, a dense mask is as fast


def attend_banded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: TilePlan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute `attend` with the mask from which the plan was made."""
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        q, k, v = (t.to(torch.get_autocast_dtype(kind)) for t in (q, k, v))
    seed = int(torch.randint(1 << 62, ())) if dropout > 0 else 0
    options = ChunkOptions(q.shape[-1] ** -0.5 if scale is None else scale, softcap, dropout, seed)
    return _BandedFunction.apply(q, k, v, sinks, plan, options)


class _BandedFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: TilePlan, options: ChunkOptions
    ) -> Tensor:
        tiles = _Tiles(q, k, v, plan)
        allocate = torch.empty if plan.has_all_queries else torch.zeros
        out = allocate(*tiles.q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        wide = torch.float32 if q.dtype in HALF_DTYPES else q.dtype
        logs = allocate(tiles.q.shape[:-1], dtype=wide, device=q.device)  # (B, tiles, tile, H)
        generator = options.make_generator(q.device)
        with torch.autocast(q.device.type, enabled=False):
            for row in range(q.shape[0]):
                for chunk in plan.chunks(row):
                    heads, chunk_logs = attend_chunk(*tiles.gather(row, chunk), chunk, sinks, options, generator)
                    out[row].index_copy_(0, chunk.q_tiles, unfold_groups(heads, plan.tile))
                    logs[row].index_copy_(0, chunk.q_tiles, unfold_groups(chunk_logs, plan.tile)[..., 0])
        result = join_tiles(out, q.shape[2], plan.q_order)
        ctx.save_for_backward(q, k, v, sinks, result, logs)
        ctx.plan, ctx.options = plan, options
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, logs = ctx.saved_tensors
        plan, options = ctx.plan, ctx.options
        tiles = _Tiles(q, k, v, plan)
        grad_tiles, out_tiles = (split_tiles(t, plan.tile, plan.q_order) for t in (grad, out))
        wide = torch.float32 if q.dtype in HALF_DTYPES else q.dtype
        allocate = torch.empty if plan.has_all_queries else torch.zeros
        q_grad = allocate(tiles.q.shape, dtype=q.dtype, device=q.device)
        k_grad, v_grad = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (tiles.k, tiles.v))
        sinks_grad = None if sinks is None else torch.zeros_like(sinks)
        generator = options.make_generator(q.device)
        groups = k.shape[1]
        with torch.autocast(q.device.type, enabled=False):
            for row in range(q.shape[0]):
                for chunk in plan.chunks(row):
                    inputs = tiles.gather(row, chunk)
                    chunk_grad, chunk_out, chunk_logs = (
                        fold_groups(t[row].index_select(0, chunk.q_tiles), groups)
                        for t in (grad_tiles, out_tiles, logs[..., None])
                    )
                    grads = attend_chunk_backward(
                        chunk_grad, chunk_out, chunk_logs, *inputs, chunk, sinks, options, generator
                    )
                    q_grad[row].index_copy_(0, chunk.q_tiles, unfold_groups(grads.q, plan.tile))
                    for total, new in ((k_grad, grads.k), (v_grad, grads.v)):
                        new_tiles = new.transpose(1, 2).reshape(-1, *total.shape[2:])
                        total[row].index_add_(0, chunk.k_tiles.flatten(), new_tiles.to(wide))
                    if sinks_grad is not None and grads.sinks is not None:
                        sinks_grad += grads.sinks.to(sinks_grad.dtype)
        return (
            join_tiles(q_grad, q.shape[2], plan.q_order),
            join_tiles(k_grad, k.shape[2], plan.k_order).to(k.dtype),
            join_tiles(v_grad, v.shape[2], plan.k_order).to(v.dtype),
            sinks_grad,
            None,
            None,
        )


# -- tiles -------------------------------------------------------------------------------------------------------------


class _Tiles:
    """Queries, keys and values cut into tiles, each (B, tiles, tile, heads, size)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, plan: TilePlan) -> None:
        self.q = split_tiles(q, plan.tile, plan.q_order)
        self.k, self.v = (split_tiles(t, plan.tile, plan.k_order) for t in (k, v))

    def gather(self, row: int, chunk: TileChunk) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries (U, G, H / G * tile, K), keys and values (U, G, M * tile, *) of a chunk."""
        q = fold_groups(self.q[row].index_select(0, chunk.q_tiles), self.k.shape[3])
        U, M = chunk.k_tiles.shape
        k, v = (
            t[row].index_select(0, chunk.k_tiles.flatten()).reshape(U, M * t.shape[2], *t.shape[3:]).transpose(1, 2)
            for t in (self.k, self.v)
        )
        return q, k, v


def split_tiles(x: Tensor, tile: int, order: Tensor | None) -> Tensor:
    """Cut x (B, H, T, K) into tiles (B, tiles, tile, H, K), after reordering the tokens; the last tile is padded."""
    x = x.transpose(1, 2)
    if order is not None:
        x = x.gather(1, order[:, :, None, None].expand(x.shape))
    missing = -x.shape[1] % tile
    return (F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x).unflatten(1, (-1, tile))


def join_tiles(x: Tensor, length: int, order: Tensor | None) -> Tensor:
    """Undo `split_tiles`: return (B, H, T, K) for tiles (B, tiles, tile, H, K)."""
    x = x.flatten(1, 2)[:, :length]
    if order is not None:
        x = x.gather(1, order.argsort(dim=-1)[:, :, None, None].expand(x.shape))
    return x.transpose(1, 2)


def fold_groups(x: Tensor, groups: int) -> Tensor:
    """Put the query heads that share a key head side by side: (U, tile, H, K) becomes (U, G, H / G * tile, K)."""
    return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def unfold_groups(x: Tensor, tile: int) -> Tensor:
    """Undo `fold_groups`: (U, G, H / G * tile, K) becomes (U, tile, H, K)."""
    return x.unflatten(2, (-1, tile)).permute(0, 3, 1, 2, 4).flatten(2, 3)
