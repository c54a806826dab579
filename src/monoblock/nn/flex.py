"""FlexAttention (Dong et al. 2024), which skips masked blocks and stores no scores: the kernel and its block mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from monoblock.nn.banded.tile_plan import find_tile_pairs
from monoblock.nn.masks import ResolvedMask

FLEX_MIN_QUERIES = 128  # with fewer queries, building a block mask costs more than it saves
MIN_TILED_PAIRS = 1 << 26  # with fewer pairs of tokens, `create_block_mask` is as fast
RECOMPILE_LIMIT = 64
BLOCK = 128  # tokens in a block


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
