"""Count the tiles of a sparse mask that banded attention computes (nn/banded), for a text without padding.

A tile is a square of the matrix of queries and keys.  The sizes and limits are those of nn/banded/tile_plan.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from monoblock.config.model import AttentionConfig

BANDED_FROM = 512  # banded attention is used from this many queries on, as in nn/banded/attend_banded.py
TILE_SIZES = (64, 256)
COPY_COST = 16
MAX_DENSITY = 0.5


class TileCount(NamedTuple):
    tile: int  # the number of queries, and of keys, in a tile
    pairs: int  # the number of pairs of a query tile and a key tile

    @property
    def query_key_pairs(self) -> int:
        return self.pairs * self.tile**2


@lru_cache(maxsize=256)
def count_tiles(attention: AttentionConfig, length: int) -> TileCount | None:
    """Return the tiles that are computed, or None if there are so many, or the text is so short, that all are."""
    if attention.window is None or length < BANDED_FROM:
        return None
    counts = [TileCount(tile, _count_pairs(attention, length, tile)) for tile in TILE_SIZES]
    best = min(counts, key=lambda count: count.pairs * count.tile * (count.tile + COPY_COST))
    return best if best.query_key_pairs <= MAX_DENSITY * length**2 else None


def _count_pairs(attention: AttentionConfig, length: int, tile: int) -> int:
    """Count the pairs of tiles in which a query may see a key."""
    assert attention.window is not None
    tiles = -(-length // tile)
    links = _linked_tiles(attention, length, tile)
    pairs = 0
    for q in range(tiles):
        first, last = q * tile, min((q + 1) * tile, length) - 1  # positions
        near = range(
            max(first - attention.window + 1, 0) // tile, min(last + attention.window - 1, length - 1) // tile + 1
        )
        seen = set(near) | links.get(q, set())
        if attention.global_tokens:
            seen = set(range(tiles)) if q == 0 else seen | {0}
        pairs += sum(k <= q for k in seen) if attention.mask == "causal" else len(seen)
    return pairs


def _linked_tiles(attention: AttentionConfig, length: int, tile: int) -> dict[int, set[int]]:
    """Return for each tile the tiles that random blocks link to it, drawn as by `random_blocks` in nn/masks.py."""
    links: dict[int, set[int]] = {}
    size = attention.block_size
    for block in range(-(-length // size) if attention.random_blocks else 0):
        drawn = {_draw_block(block, draw, attention.random_seed) for draw in range(attention.random_blocks)}
        for other in drawn | {block}:
            for a in _tiles_of_block(block, size, length, tile):
                for b in _tiles_of_block(other, size, length, tile):
                    links.setdefault(a, set()).add(b)
                    links.setdefault(b, set()).add(a)
    return links


def _draw_block(block: int, draw: int, seed: int) -> int:
    hashed = block * 1_000_003 + (seed * 31 + draw + 1) * 777_767_777
    hashed = ((hashed ^ (hashed >> 15)) * 2_654_435) & 0x7FFFFFFF
    return (hashed ^ (hashed >> 13)) % (block + 1)


def _tiles_of_block(block: int, size: int, length: int, tile: int) -> range:
    return range(block * size // tile, (min((block + 1) * size, length) - 1) // tile + 1)
