"""Attention over those tiles of the mask that are not empty, for windows, global tokens, random blocks and documents.

Queries and keys are cut into tiles of successive tokens.  Which pairs of tiles may contain a visible pair of tokens
follows from the ranges of their positions (`Mask.may_allow`), without writing out the mask.  Time and memory grow with
the number of these tiles, not with the square of the length.  There are two ways to compute them:

    attend_banded   on a CPU: chunks of tiles with torch's flash kernel, or with matrix products; the backward pass
                    computes the weights of a chunk again, from the logarithms of their denominators (Dao et al. 2022)
    attend_flex     on a GPU: FlexAttention (Dong et al. 2024), which skips masked blocks and stores no scores
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from monoblock.nn.masks import Mask, ResolvedMask, TokenPositions, TokenRanges
from monoblock.nn.norm import HALF_DTYPES

TILE_SIZES = (64, 256)  # small tiles waste less on the edges of a narrow window, large ones copy fewer keys
COPY_COST = 16  # copying a key costs as much as computing with this many queries
MAX_DENSITY = 0.5  # with a larger share of tiles to compute, a fused kernel over all of them is as fast
CHUNK_KEYS = 4096  # keys that a chunk copies on a CPU, where they should stay in a core's cache
MAX_ENTRIES = 1 << 20  # pairs of tiles that are examined at a time
EMPTY = 1 << 40  # the ranges of a tile of padding only are from EMPTY to -EMPTY
BANDED_MIN_QUERIES = 512  # with fewer queries, a dense mask is as fast
FLEX_MIN_QUERIES = 128  # with fewer queries, building a block mask costs more than it saves
MIN_TILED_PAIRS = 1 << 26  # with fewer pairs of tokens, `create_block_mask` is as fast
RECOMPILE_LIMIT = 64
BLOCK = 128  # tokens in a block


def attend_banded(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S Kv"],
    plan: TilePlan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H T Kv"]:
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
                    new_q, new_k, new_v, new_sinks = attend_chunk_backward(
                        chunk_grad, chunk_out, chunk_logs, *inputs, chunk, sinks, options, generator
                    )
                    q_grad[row].index_copy_(0, chunk.q_tiles, unfold_groups(new_q, plan.tile))
                    for total, new in ((k_grad, new_k), (v_grad, new_v)):
                        new_tiles = new.transpose(1, 2).reshape(-1, *total.shape[2:])
                        total[row].index_add_(0, chunk.k_tiles.flatten(), new_tiles.to(wide))
                    if sinks_grad is not None and new_sinks is not None:
                        sinks_grad += new_sinks.to(sinks_grad.dtype)
        return (
            join_tiles(q_grad, q.shape[2], plan.q_order),
            join_tiles(k_grad, k.shape[2], plan.k_order).to(k.dtype),
            join_tiles(v_grad, v.shape[2], plan.k_order).to(v.dtype),
            sinks_grad,
            None,
            None,
        )


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


def split_tiles(x: Shaped[Tensor, "B H T K"], tile: int, order: Tensor | None) -> Shaped[Tensor, "B tiles {tile} H K"]:
    """Cut the tokens into tiles, after reordering them; the last tile is padded."""
    x = x.transpose(1, 2)
    if order is not None:
        x = x.gather(1, order[:, :, None, None].expand(x.shape))
    missing = -x.shape[1] % tile
    return (F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x).unflatten(1, (-1, tile))


def join_tiles(
    x: Shaped[Tensor, "B tiles tile H K"], length: int, order: Tensor | None
) -> Shaped[Tensor, "B H {length} K"]:
    """Undo `split_tiles`."""
    x = x.flatten(1, 2)[:, :length]
    if order is not None:
        x = x.gather(1, order.argsort(dim=-1)[:, :, None, None].expand(x.shape))
    return x.transpose(1, 2)


def fold_groups(x: Shaped[Tensor, "U tile H K"], groups: int) -> Shaped[Tensor, "U {groups} R K"]:
    """Put the query heads that share a key head side by side, R = H / G * tile rows for each key head."""
    return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def unfold_groups(x: Shaped[Tensor, "U G R K"], tile: int) -> Shaped[Tensor, "U {tile} H K"]:
    """Undo `fold_groups`."""
    return x.unflatten(2, (-1, tile)).permute(0, 3, 1, 2, 4).flatten(2, 3)


# -- attention of a chunk of tiles ------------------------------------------------------------------------------------
#
# U tiles of queries are q (U, G, R, K), where R counts the queries of all heads that share a key head; each tile has
# its own keys k (U, G, S, K) and values v (U, G, S, *).


class ChunkOptions(NamedTuple):
    scale: float
    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0  # of the dropout, which the backward pass draws again

    def make_generator(self, device: torch.device) -> torch.Generator | None:
        """Return a generator for the dropout of all chunks in succession, None without dropout."""
        return torch.Generator(device).manual_seed(self.seed) if self.dropout > 0 else None


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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and sinks from that of the output, and from what the forward pass returned."""
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
        return q_grad, k_grad, v_grad, sinks_grad
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
    return q_grad.to(q.dtype), k_grad, v_grad, sinks_grad


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


# -- which tiles are computed -----------------------------------------------------------------------------------------


class TileChunk(NamedTuple):
    """U tiles of queries in one row, each with the same number M of key tiles."""

    q_tiles: Tensor  # (U,) indices of tiles
    k_tiles: Tensor  # (U, M)
    visible: Tensor  # (U, 1, tile, M * tile) True where a query sees a key; blind queries see every key
    blind: Tensor  # (U, 1, tile, 1) True for queries that see no key, whose output is zero


@dataclass(frozen=True)
class TilePlan:
    """The tiles to compute, the same for all blocks with the same mask."""

    tile: int
    q_tiles: int  # the number of query tiles in a row
    rows: list[list[TileChunk]]  # the chunks of each row, or of all rows if there is only one element
    q_order: Tensor | None = None  # (B or 1, T): the order in which tokens are cut into tiles; None: as they come
    k_order: Tensor | None = None  # (B or 1, S)

    def chunks(self, row: int) -> list[TileChunk]:
        return self.rows[row if len(self.rows) > 1 else 0]

    @functools.cached_property
    def has_all_queries(self) -> bool:
        """Whether every tile of queries is in a chunk; the output of the others is zero."""
        return all(sum(chunk.q_tiles.numel() for chunk in chunks) == self.q_tiles for chunks in self.rows)


class _TilePairs(NamedTuple):
    """The pairs of tiles to compute: all (P,), sorted by row and query tile."""

    tile: int
    q: TokenPositions
    k: TokenPositions
    q_order: Tensor | None
    k_order: Tensor | None
    row: Tensor
    q_tile: Tensor
    k_tile: Tensor

    @property
    def cost(self) -> int:
        return self.row.numel() * self.tile * (self.tile + COPY_COST)


def plan_tiles(
    resolved: ResolvedMask, *, sizes: tuple[int, ...] = TILE_SIZES, max_density: float = MAX_DENSITY
) -> TilePlan | None:
    """Return the tiles that the mask may need, or None if they are too many for `attend_banded` to be faster."""
    mask, q, k = resolved.mask, resolved.q, resolved.k
    rows = max(q.batch, k.batch)
    orders: list[tuple[Tensor | None, Tensor | None]] = [(None, None)]
    if k.prefix_or_global is not None:  # flagged tokens see, or are seen by, all: together they fill the fewest tiles
        orders.append((_flagged_first(q), _flagged_first(k)))
    candidates = [
        find_tile_pairs(mask, _reorder(q, q_order), _reorder(k, k_order), tile, q_order, k_order)
        for tile in sizes
        for q_order, k_order in orders
    ]
    best = min(candidates, key=lambda pairs: pairs.cost)
    if best.row.numel() * best.tile**2 > max_density * rows * q.length * k.length:
        return None
    chunks: list[list[TileChunk]] = [_build_chunks(mask, best, row) for row in range(rows)]
    return TilePlan(best.tile, -(-q.length // best.tile), chunks, best.q_order, best.k_order)


def _flagged_first(tokens: TokenPositions) -> Tensor | None:
    """Return the order of tokens (B, T) in which those with a flag come first, each part in its old order."""
    if tokens.prefix_or_global is None:
        return None
    return (~tokens.prefix_or_global).long().argsort(dim=-1, stable=True)


def _reorder(tokens: TokenPositions, order: Tensor | None) -> TokenPositions:
    if order is None:
        return tokens

    def reorder(t: Tensor) -> Tensor:
        rows = max(t.shape[0], order.shape[0])  # positions that all rows share, or an order, have one row
        return t.expand(rows, -1).gather(1, order.expand(rows, -1))

    return replace(tokens.map_tensors(reorder), start=None)


def find_tile_pairs(
    mask: Mask,
    q: TokenPositions,
    k: TokenPositions,
    tile: int,
    q_order: Tensor | None = None,
    k_order: Tensor | None = None,
) -> _TilePairs:
    """Return the pairs of tiles in which the mask may allow a pair of tokens, sorted by row and query tile."""
    q_ranges = _tile_ranges(replace(q, valid=None), tile).map_tensors(lambda t: t[:, :, None])
    k_ranges = _tile_ranges(k, tile).map_tensors(lambda t: t[:, None, :])
    rows = max(q.batch, k.batch)
    q_tiles, k_tiles = q_ranges.low.positions.shape[1], k_ranges.low.positions.shape[2]
    step = max(1, MAX_ENTRIES // (rows * k_tiles))
    found = []
    for first in range(0, q_tiles, step):
        some = q_ranges.map_tensors(lambda t, first=first: t[:, first : first + step])  # type: ignore[misc]
        possible = mask.may_allow(some, k_ranges)
        if k_ranges.high.valid is not None:
            possible = possible & k_ranges.high.valid
        shape = (rows, min(step, q_tiles - first), k_tiles)
        possible = torch.as_tensor(possible, device=q.positions.device).expand(shape)
        found.append(possible.nonzero() + torch.tensor([0, first, 0], device=q.positions.device))
    pairs = torch.cat(found)
    if len(found) > 1 and rows > 1:
        pairs = pairs[pairs[:, 0].argsort(stable=True)]
    return _TilePairs(tile, q, k, q_order, k_order, *pairs.unbind(1))


def _tile_ranges(tokens: TokenPositions, tile: int) -> TokenRanges:
    """Return the range of each field in every tile; padding is left out."""
    valid = None if tokens.valid is None else _cut(tokens.valid, tile, False)

    def reduce(t: Tensor, largest: bool) -> Tensor:
        if t.dtype == torch.bool:
            cut = _cut(t, tile, not largest)
            return cut.any(-1) if largest else cut.all(-1)
        padding = -EMPTY if largest else EMPTY
        cut = _cut(t, tile, padding)
        cut = cut if valid is None else cut.masked_fill(~valid, padding)
        return cut.amax(-1) if largest else cut.amin(-1)

    tokens = replace(tokens, start=None)
    return TokenRanges(tokens.map_tensors(lambda t: reduce(t, False)), tokens.map_tensors(lambda t: reduce(t, True)))


def _cut(t: Tensor, tile: int, padding: float) -> Tensor:
    """Cut a field (B, T) into tiles (B, tiles, tile); the last one is filled with `padding`."""
    missing = -t.shape[1] % tile
    return (F.pad(t, (0, missing), value=padding) if missing else t).unflatten(1, (-1, tile))


def _build_chunks(mask: Mask, pairs: _TilePairs, row: int) -> list[TileChunk]:
    """Group the query tiles of a row by their number of key tiles, and write out the mask of each group."""
    tile, device = pairs.tile, pairs.row.device
    of_row = pairs.row == row
    q_tile, k_tile = pairs.q_tile[of_row], pairs.k_tile[of_row]
    counts = torch.bincount(q_tile, minlength=-(-pairs.q.length // tile))
    starts = counts.cumsum(0) - counts
    q_fields = pairs.q.map_tensors(lambda t: _cut(t[row if t.shape[0] > 1 else 0][None], tile, 0)[0])
    valid = torch.ones_like(pairs.k.positions, dtype=torch.bool) if pairs.k.valid is None else pairs.k.valid
    k = replace(pairs.k, valid=valid)
    k_fields = k.map_tensors(lambda t: _cut(t[row if t.shape[0] > 1 else 0][None], tile, 0)[0])
    order = counts.argsort(stable=True)
    chunks = []
    for first, last, M in _group(counts[order].tolist(), tile, CHUNK_KEYS):
        q_tiles = order[first:last]
        slots = torch.arange(M, device=device)
        in_use = slots < counts[q_tiles, None]  # (U, M)
        k_tiles = k_tile[(starts[q_tiles, None] + slots).clamp(max=k_tile.numel() - 1)]
        queries = q_fields.map_tensors(lambda t, q_tiles=q_tiles: t[q_tiles])  # type: ignore[misc]
        keys = k_fields.map_tensors(lambda t, k_tiles=k_tiles: t[k_tiles].flatten(1))  # type: ignore[misc]
        assert keys.valid is not None
        keys = replace(keys, valid=keys.valid & in_use.repeat_interleave(tile, dim=1))
        visible = mask.dense(replace(queries, valid=None, start=None), replace(keys, start=None))
        blind = ~visible.any(-1, keepdim=True)
        chunks.append(TileChunk(q_tiles, k_tiles, visible | blind, blind))
    return chunks


def _group(counts: list[int], tile: int, max_keys: int) -> list[tuple[int, int, int]]:
    """Split ascending numbers of key tiles into groups (first, last, largest number) of about `max_keys` keys.

    Tiles of queries that see no key tile are left out.
    """
    groups, first = [], sum(count == 0 for count in counts)
    for last in range(first + 1, len(counts) + 1):
        if last == len(counts) or (last + 1 - first) * counts[last] * tile > max_keys:
            groups.append((first, last, counts[last - 1]))
            first = last
    return groups


# -- FlexAttention ----------------------------------------------------------------------------------------------------


def attend_flex(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, scale: float | None) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    run: Any = flex_attention if torch.compiler.is_compiling() else compile_once(flex_attention)
    return run(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


@functools.cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of FlexAttention.

    It is compiled again for every kind of mask, and with and without gradients. After `recompile_limit` times (8 unless
    it is set) torch would run it uncompiled, which takes quadratic memory.
    """
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
    return torch.compile(function)


def build_block_mask(resolved: ResolvedMask) -> Any:
    """Return the mask as a BlockMask."""
    from torch.nn.attention.flex_attention import create_block_mask

    q, k = resolved.q, resolved.k
    if q.length * k.length >= MIN_TILED_PAIRS and not torch.compiler.is_compiling():
        return build_from_tiles(resolved)
    build: Any = create_block_mask if torch.compiler.is_compiling() else compile_once(create_block_mask)
    batch = max(q.batch, k.batch)
    mask = resolved.mask.to_mask_mod(q, k)
    return build(mask, batch if batch > 1 else None, None, q.length, k.length, device=q.positions.device)


def build_from_tiles(resolved: ResolvedMask) -> Any:
    """Return the mask as a BlockMask from the tiles that may not be empty.

    `create_block_mask` evaluates the mask for every pair of tokens, which takes far longer than attention itself in a
    long text with a narrow window.  Here the tiles follow from the ranges of positions, as in tile_plan.py.  The values
    of positions are read, so it cannot be called under torch.compile.
    """
    from torch.nn.attention.flex_attention import BlockMask

    q, k = resolved.q, resolved.k
    pairs = find_tile_pairs(resolved.mask, q, k, BLOCK)
    rows = max(q.batch, k.batch)
    q_blocks, k_blocks = -(-q.length // BLOCK), -(-k.length // BLOCK)
    query = pairs.row * q_blocks + pairs.q_tile  # a number for each row and query block, ascending
    counts = torch.bincount(query, minlength=rows * q_blocks)
    slot = torch.arange(query.numel(), device=query.device) - (counts.cumsum(0) - counts)[query]
    indices = torch.zeros(rows * q_blocks, k_blocks, dtype=torch.int32, device=query.device)
    indices[query, slot] = pairs.k_tile.to(torch.int32)
    return BlockMask.from_kv_blocks(
        counts.to(torch.int32).view(rows, 1, q_blocks),
        indices.view(rows, 1, q_blocks, k_blocks),
        BLOCK_SIZE=BLOCK,
        mask_mod=resolved.mask.to_mask_mod(q, k),
        seq_lengths=(q.length, k.length),
    )
