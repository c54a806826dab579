"""Mask, bias and rotary angles of a forward pass, shared by all blocks with the same attention configuration."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from monoblock.nn.banded.attend_banded import supports_banded
from monoblock.nn.banded.block_mask import build_block_mask
from monoblock.nn.banded.tile_plan import TilePlan, plan_tiles
from monoblock.nn.kv_cache.cache_index import BeamSlots
from monoblock.nn.linear import autocast_dtype
from monoblock.nn.masks import ResolvedMask
from monoblock.nn.packed.attend_packed import supports_varlen
from monoblock.nn.packed.documents import DocumentRows, PackedDocuments
from monoblock.nn.positions import RotaryAngles

FLEX_MIN_QUERIES = 128  # with fewer queries, building a block mask costs more than it saves
MIN_TILED_PAIRS = 1 << 26  # with fewer pairs of tokens, FlexAttention builds its block mask as fast
RECOMPILE_LIMIT = 64  # of FlexAttention
BANDED_MIN_QUERIES = 512  # with fewer queries, a dense mask is as fast


@functools.cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of FlexAttention.

    It is compiled again for every kind of mask, and with and without gradients. After `recompile_limit` times (8 unless
    it is set) torch would run it uncompiled, which takes quadratic memory.
    """
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
    return torch.compile(function)


class AttentionContext:
    """The mask, bias and rotary angles of one forward pass; what several blocks need is computed once and kept."""

    def __init__(
        self, resolved_mask: ResolvedMask, bias: Tensor | None = None, rotary_angles: RotaryAngles | None = None
    ) -> None:
        self.resolved_mask = resolved_mask
        self.bias = bias  # (B, H, T, S)
        self.rotary_angles = rotary_angles
        self.cached_lengths: Tensor | None = None  # (B,) if each row has one new token that sees all cached tokens
        self.beams: BeamSlots | None = None  # if the queries of a row are beams of one search
        # of queries and keys, if tokens are packed; mask and bias are then those of the documents as rows
        self.packed: tuple[PackedDocuments, PackedDocuments] | None = None
        self._rows: tuple[DocumentRows, DocumentRows] | None = None
        self._dense_mask: Tensor | None = None
        self._safe_mask: tuple[Tensor, Tensor] | None = None
        self._prepared_bias: tuple[Tensor, Tensor | None] | None = None
        self._block_mask: Any = None
        self._tile_plan: TilePlan | None = None
        self._is_planned = False

    def prepare(self, x: Tensor) -> AttentionContext:
        """Compute the mask or bias that `attend_fused` will need, and return self.

        This is done before the blocks run, so that activation checkpointing does not compute it again in each block.
        """
        if self.uses_varlen(x):
            return self
        if self.bias is not None:
            self._prepared_bias = self._masked_bias(self.bias, autocast_dtype(x))
        elif self.uses_flex(x):
            self._block_mask = self._build_block_mask()
        elif self.resolved_mask.kind == "dense" and self.tile_plan(x) is None:
            self.safe_mask()
        return self

    def uses_varlen(self, x: Tensor) -> bool:
        """Return whether the kernel for packed documents of variable length can apply this mask to x."""
        resolved = self.resolved_mask
        return (
            self.packed is not None
            and self.bias is None
            and resolved.matrix is None
            and all(term.name == "causal" for term in resolved.mask.terms)
            and supports_varlen(x, autocast_dtype(x))
        )

    def document_rows(self) -> tuple[DocumentRows, DocumentRows]:
        """Return how packed queries and keys are written as rows, one for each document."""
        assert self.packed is not None
        if self._rows is None:
            q, k = self.packed
            q_rows = DocumentRows(q)
            self._rows = q_rows, q_rows if k is q else DocumentRows(k)
        return self._rows

    def uses_flex(self, x: Tensor) -> bool:
        """Return whether FlexAttention is worth its setup: on a GPU, with a dense mask, no bias and many queries.

        It computes the mask from positions, so it is of no use for a mask that was given as a matrix.
        """
        return (
            x.is_cuda
            and self.resolved_mask.kind == "dense"
            and self.resolved_mask.matrix is None
            and self.bias is None
            and self.resolved_mask.q.length >= FLEX_MIN_QUERIES
        )

    def tile_plan(self, x: Tensor) -> TilePlan | None:
        """Return the tiles that `attend_banded` computes, or None if it cannot be used or is not faster.

        It is used for a dense mask without bias, many queries, and few tiles that are not empty.
        """
        resolved = self.resolved_mask
        has_positions = resolved.kind == "dense" and resolved.matrix is None and self.bias is None
        if not has_positions or resolved.q.length < BANDED_MIN_QUERIES or not supports_banded(x):
            return None
        if not self._is_planned:
            self._tile_plan, self._is_planned = plan_tiles(resolved), True
        return self._tile_plan

    def dense_mask(self) -> Tensor | None:
        """Return the mask as booleans (B, 1, T, S), or None if every key is visible."""
        if self._dense_mask is None and self.resolved_mask.kind != "all":
            self._dense_mask = self.resolved_mask.dense()
        return self._dense_mask

    def safe_mask(self) -> tuple[Tensor, Tensor] | None:
        """Return a pair of masks for fused kernels, or None if every key is visible.

        The first (B, 1, T, S) is the dense mask, except that queries without a visible key see every key.  The second
        (B, 1, T, 1) is True for these queries, whose output must then be set to zero.
        """
        dense = self.dense_mask()
        if self._safe_mask is None and dense is not None:
            blind = ~dense.any(-1, keepdim=True)
            self._safe_mask = dense | blind, blind
        return self._safe_mask

    def block_mask(self) -> Any:
        """Return the mask as a FlexAttention BlockMask."""
        if self._block_mask is None:
            self._block_mask = self._build_block_mask()
        return self._block_mask

    def _build_block_mask(self) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        q, k = self.resolved_mask.q, self.resolved_mask.k
        if q.length * k.length >= MIN_TILED_PAIRS and not torch.compiler.is_compiling():
            return build_block_mask(self.resolved_mask)
        build: Any = create_block_mask if torch.compiler.is_compiling() else compile_once(create_block_mask)
        batch = max(q.batch, k.batch)
        mask = self.resolved_mask.mask.to_mask_mod(q, k)
        return build(mask, batch if batch > 1 else None, None, q.length, k.length, device=q.positions.device)

    def fused_mask(self, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return the mask argument for a fused kernel, and a mask (B, 1, T, 1) of the queries without a visible key.

        The mask argument is boolean or, if there is a bias, the bias with -inf where the mask is False.  Either result
        is None if it is not needed.
        """
        if bias is None:
            return (self.safe_mask() or (None, None)) if self.resolved_mask.kind == "dense" else (None, None)
        if bias is self.bias and self._prepared_bias is not None:
            return self._prepared_bias
        return self._masked_bias(bias, dtype)

    def _masked_bias(self, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        bias = bias.to(dtype).contiguous()  # the fused kernels refuse other strides
        safe_mask = self.safe_mask()
        if safe_mask is None:
            return bias, None
        allowed, blind = safe_mask
        return bias.masked_fill(~allowed, -math.inf), blind
