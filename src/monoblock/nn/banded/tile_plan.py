"""Find the tiles of a mask that are not empty, and group them into chunks for `attend_banded`.

Queries and keys are cut into tiles of successive tokens.  Which pairs of tiles may contain a visible pair of tokens
follows from the ranges of their positions (`Mask.may_allow`), without writing out the mask.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.nn.masks import Mask, ResolvedMask
from monoblock.nn.token_positions import TokenPositions, TokenRanges

TILE_SIZES = (64, 256)  # small tiles waste less on the edges of a narrow window, large ones copy fewer keys
COPY_COST = 16  # copying a key costs as much as computing with this many queries
MAX_DENSITY = 0.5  # with a larger share of tiles to compute, a fused kernel over all of them is as fast
CHUNK_KEYS = 4096  # keys that a chunk copies on a CPU, where they should stay in a core's cache
MAX_ENTRIES = 1 << 20  # pairs of tiles that are examined at a time
EMPTY = 1 << 40  # the ranges of a tile of padding only are from EMPTY to -EMPTY


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

    @property
    def num_pairs(self) -> int:
        """The number of (query, key) pairs that are computed in all rows."""
        return sum(chunk.visible.numel() for chunks in self.rows for chunk in chunks)


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
        _find_pairs(mask, _reorder(q, q_order), _reorder(k, k_order), q_order, k_order, tile)
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


def find_tile_pairs(mask: Mask, q: TokenPositions, k: TokenPositions, tile: int) -> _TilePairs:
    """Return the pairs of tiles in which the mask may allow a pair of tokens, sorted by row and query tile."""
    return _find_pairs(mask, q, k, None, None, tile)


def _find_pairs(
    mask: Mask, q: TokenPositions, k: TokenPositions, q_order: Tensor | None, k_order: Tensor | None, tile: int
) -> _TilePairs:
    """Return the pairs of tiles in which the mask may allow a pair of tokens."""
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
