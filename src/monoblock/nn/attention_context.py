"""Mask, bias and rotary angles of a forward pass, shared by all blocks with the same attention configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from monoblock.nn.kv_cache.cache_index import BeamSlots
from monoblock.nn.masks import ResolvedMask
from monoblock.nn.packed.documents import PackedDocuments
from monoblock.nn.positions import RotaryAngles, apply_rotary


@dataclass(eq=False)
class AttentionContext:
    resolved_mask: ResolvedMask
    bias: Tensor | None = None  # (B, H, T, S)
    rotary_angles: RotaryAngles | None = None
    beams: BeamSlots | None = None  # if the queries of a row are beams of one search
    # of queries and keys, if tokens are packed; mask and bias are then those of the documents as rows
    packed: tuple[PackedDocuments, PackedDocuments] | None = None
    computed: dict[Callable[..., Any], Any] = field(default_factory=dict, repr=False)  # by `once`

    def once(self, build: Callable[..., Any], *inputs: Any) -> Any:
        """Return build(*inputs), which is the same in all blocks and computed by the first that needs it."""
        if build not in self.computed:
            self.computed[build] = build(*inputs)
        return self.computed[build]

    def rotate(self, heads: Tensor) -> Tensor:
        """Rotate queries or keys (B, heads, T, K) by their positions if these are rotary."""
        return heads if self.rotary_angles is None else apply_rotary(heads, self.rotary_angles)

    def dense_mask(self) -> Tensor | None:
        """Return the mask as booleans (B, 1, T, S), or None if every key is visible."""
        return None if self.resolved_mask.kind == "all" else self.once(ResolvedMask.dense, self.resolved_mask)

    def fused_mask(self, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return the mask argument for a fused kernel, and a mask (B, 1, T, 1) of the queries without a visible key.

        The mask argument is boolean or, if there is a bias, the bias with -inf where the mask is False.  The result of
        a fused kernel is undefined for a query that sees no key, so such a query is shown every key, and its output
        must be set to zero.  Either result is None if it is not needed.
        """
        if bias is None:
            return self.once(_show_blind, self.dense_mask()) if self.resolved_mask.kind == "dense" else (None, None)
        if bias is self.bias:
            return self.once(_mask_bias, self, bias, dtype)
        return _mask_bias(self, bias, dtype)


def _show_blind(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mask with every key visible to queries that see none, and which queries these are."""
    blind = ~mask.any(-1, keepdim=True)
    return mask | blind, blind


def _mask_bias(context: AttentionContext, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    bias, mask = bias.to(dtype).contiguous(), context.dense_mask()  # the fused kernels refuse other strides
    if mask is None:
        return bias, None
    allowed, blind = context.once(_show_blind, mask)
    return bias.masked_fill(~allowed, -math.inf), blind
