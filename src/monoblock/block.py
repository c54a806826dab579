"""THE block.  Attention, perhaps a look at the encoder, feed-forward; each normed and added as the configuration says.

pre        x + f(norm(x))             post     norm(x + f(x))
output     x + norm(f(x))             sandwich x + norm'(f(norm(x)))
parallel   x + attention(norm(x)) + feedforward(norm'(x)), with norm' = norm when shared
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.attention import Attention, View
from monoblock.cache import CrossSlot, Slot
from monoblock.config import BlockConfig
from monoblock.experts import Experts
from monoblock.feedforward import FeedForward
from monoblock.norm import Norm
from monoblock.places import Entry
from monoblock.tap import Tap, tapped, under


class Block(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        self.attention = Attention(config.width, config.attention)
        self.cross = Attention(config.width, config.cross) if config.cross is not None else None
        kind = FeedForward if config.feedforward.experts is None else Experts
        self.feedforward = kind(config.width, config.feedforward)
        shared = config.residual == "parallel_shared"
        self._add_parts("attention", normed=config.attention_norm)
        if config.cross is not None:
            self._add_parts("cross", normed=True)
        self._add_parts("feedforward", normed=not shared)

    def _add_parts(self, name: str, *, normed: bool) -> None:
        """The norms and the gain of one sublayer, named after it."""
        config = self.config
        after = normed and config.norm_place == "sandwich"
        self.register_module(f"{name}_norm", Norm(config.width, config.norm) if normed else None)
        self.register_module(f"{name}_output_norm", Norm(config.width, config.norm) if after else None)
        gain = None if config.layer_scale is None else nn.Parameter(torch.full((config.width,), config.layer_scale))
        self.register_parameter(f"{name}_gain", gain)

    def forward(
        self,
        x: Tensor,
        view: View,
        *,
        memory: Tensor | None = None,
        memory_view: View | None = None,
        slot: Slot | None = None,
        entry: Entry | None = None,
        cross_slot: CrossSlot | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        x = tapped(tap, "input", x)

        def attention(h: Tensor) -> Tensor:
            return self.attention(h, view, slot=slot, entry=entry, tap=under(tap, "attention"))

        def cross(h: Tensor) -> Tensor:
            assert self.cross is not None
            assert memory_view is not None
            return self.cross(h, memory_view, memory=memory, slot=cross_slot, tap=under(tap, "cross"))

        def feedforward(h: Tensor) -> Tensor:
            return self.feedforward(h, tap=under(tap, "feedforward"))

        if self.config.residual != "sequential":
            return tapped(tap, "output", self._parallel(x, attention, feedforward, tap))
        x = self._add(x, "attention", attention, tap)
        if self.cross is not None:
            x = self._add(x, "cross", cross, tap)
        return tapped(tap, "output", self._add(x, "feedforward", feedforward, tap))

    def _add(self, x: Tensor, name: str, sublayer: Callable[[Tensor], Tensor], tap: Tap | None) -> Tensor:
        """One sublayer with its norm and its residual connection."""
        place, norm = self.config.norm_place, getattr(self, f"{name}_norm")
        added = sublayer(norm(x) if place in ("pre", "sandwich") and norm is not None else x)
        if place == "output":
            added = norm(added)
        elif place == "sandwich":
            added = getattr(self, f"{name}_output_norm")(added)
        x = x + self._weighed(name, added, tap)
        return norm(x) if place == "post" else x

    def _parallel(
        self, x: Tensor, attention: Callable[[Tensor], Tensor], feedforward: Callable[[Tensor], Tensor], tap: Tap | None
    ) -> Tensor:
        """Both sublayers read the same x."""
        one, other = getattr(self, "attention_norm"), getattr(self, "feedforward_norm")  # noqa: B009 (registered by name)
        first = x if one is None else one(x)
        second = first if other is None else other(x)
        added = self._weighed("attention", attention(first), tap) + self._weighed(
            "feedforward", feedforward(second), tap
        )
        return x + added

    def _weighed(self, name: str, added: Tensor, tap: Tap | None) -> Tensor:
        """What is added to the residual stream: dropped out, gained, scaled."""
        added = F.dropout(tapped(tap, f"{name}.output", added), self.config.dropout, self.training)
        gain = getattr(self, f"{name}_gain")
        if gain is not None:
            added = added * gain
        return added if self.config.residual_scale == 1.0 else added * self.config.residual_scale
