"""One query of each of many rows on a CPU: the beams of a batch, a token further."""

from __future__ import annotations

import torch
from torch import Tensor

from monoblock.attention import Attention, View
from monoblock.cache import CrossSlot, KeyValues, Slot
from monoblock.places import Entry
from monoblock.positions import rotate


def alike(attention: Attention, x: Tensor, view: View, slot: Slot | CrossSlot | None, entry: Entry | None) -> bool:
    """Whether the kernel says all that this attention does with x (B, 1, D)."""
    if x.shape[1] != 1 or x.dtype != torch.float32 or slot is None or (entry is not None and entry.appended):
        return False
    if torch.is_grad_enabled() or attention.training or torch.compiler.is_compiling():
        return False
    if isinstance(slot, CrossSlot) and (slot.keys is None or view.turn is not None):
        return False
    config, biased = attention.config, view.bias is not None or attention.position_bias is not None
    return not biased and config.softcap is None and attention.sinks is None


def looked(attention: Attention, queries: Tensor, held: KeyValues, view: View) -> Tensor:
    """softmax(q k' scale) v of every row (B, 1, H K), the heads side by side as the last product reads them."""
    config = attention.config
    q = attention._heads(queries, config.heads, attention.query_norm)
    if view.turn is not None:
        q = rotate(q, view.turn)
    seen = view.dense() if view.sight.kind == "dense" else None
    scale = config.scale if config.scale is not None else q.shape[-1] ** -0.5
    return torch.ops.monoblock.attend(q, held.keys, held.values, seen, scale)
