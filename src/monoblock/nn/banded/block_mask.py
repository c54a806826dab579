"""Build the BlockMask of FlexAttention from the tiles that may not be empty.

`create_block_mask` evaluates the mask for every pair of tokens, which takes far longer than attention itself in a long
text with a narrow window.  Here the tiles follow from the ranges of positions, as in tile_plan.py.
"""

from __future__ import annotations

from typing import Any

import torch

from monoblock.nn.banded.tile_plan import find_tile_pairs
from monoblock.nn.masks import ResolvedMask

BLOCK = 128  # tokens in a block of FlexAttention


def build_block_mask(resolved: ResolvedMask) -> Any:
    """Return the mask as a BlockMask; the values of positions are read, so it cannot be called under torch.compile."""
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
