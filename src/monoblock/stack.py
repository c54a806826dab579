"""A pattern of blocks, and the one loop over layers.

What blocks of one kind share in a pass (who sees whom, angles, biases) is prepared once, before the loop.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from monoblock.attention import View, kept
from monoblock.block import Block
from monoblock.cache import Cache, CrossSlot
from monoblock.config import Alibi, AttentionConfig, Buckets, Rotary, StackConfig
from monoblock.masks import Mask, Where, everything, statement
from monoblock.norm import Norm
from monoblock.places import Entry
from monoblock.positions import alibi, bucket_bias, turn
from monoblock.tap import Tap, tapped, under


class Stack(nn.Module):
    """Blocks named 0, 1, …; a tied repetition runs an earlier one's weights again and has no name of its own."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        self.order = _order(config)
        self.recompute = False  # a mode like training: keep no activations inside blocks, make them again in backward
        for number in sorted(set(self.order)):
            self.add_module(str(number), Block(list(config.layers())[number]))
        self.norm = Norm(config.width, config.norm) if config.norm is not None else None
        self.kinds = list(dict.fromkeys(block.attention for block in config.layers()))
        self.kind_of = [self.kinds.index(block.attention) for block in config.layers()]
        self.masks: list[Mask] = [statement(kind) for kind in self.kinds]
        shared = [a for a in self.kinds if isinstance(a.positions, Buckets) and a.positions.shared]
        self.position_bias = nn.Embedding(shared[0].positions.count, shared[0].all_heads) if shared else None  # type: ignore[union-attr]

    @property
    def blocks(self) -> list[Block]:
        """The blocks in the order they run."""
        return [cast(Block, self._modules[str(number)]) for number in self.order]

    def __getstate__(self) -> dict[str, Any]:
        """Statements are functions and cannot be pickled; they follow from the configuration."""
        return {key: value for key, value in self.__dict__.items() if key != "masks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.masks = [statement(kind) for kind in self.kinds]

    def forward(
        self,
        x: Tensor,
        where: Where,
        *,
        memory: Tensor | None = None,
        memory_where: Where | None = None,
        cache: Cache | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """x (B, T, D) at the given places, perhaps looking at memory (B, S, D) -> (B, T, D)."""
        entries: list[Entry | None] = [None] * len(self.order) if cache is None else list(cache.enter(where))
        views: list[View | None] = [None] * len(self.kinds)
        asking = where if cache is None or cache.copies == 1 else Where(where.at[:, :1])  # beside others, any number
        memory_view = None if memory_where is None else View(everything.between(asking, memory_where)).prepare(x)
        for layer, block in enumerate(self.blocks):
            kind, entry = self.kind_of[layer], entries[layer]
            view = views[kind] or self._view(kind, where, entry, x)
            views[kind] = view
            x = self._run(
                block,
                x,
                view,
                memory=memory,
                memory_view=memory_view,
                slot=None if cache is None else cache.slots[layer],
                entry=entry,
                cross_slot=self._cross_slot(cache, layer),
                tap=under(tap, str(layer)),
            )
        return x if self.norm is None else tapped(tap, "norm", self.norm(x))

    def _run(self, block: Block, *inputs: Any, **options: Any) -> Tensor:
        if not (self.recompute and self.training and torch.is_grad_enabled()):
            return block(*inputs, **options)
        return checkpoint(block, *inputs, use_reentrant=False, **options)

    @staticmethod
    def _cross_slot(cache: Cache | None, layer: int) -> CrossSlot | None:
        return None if cache is None else cache.cross[layer]

    def _view(self, kind: int, q: Where, entry: Entry | None, x: Tensor) -> View:
        config: AttentionConfig = self.kinds[kind]
        k = q if entry is None else entry.where
        size, positions = config.key_size(x.shape[-1]), config.positions
        view = View(self.masks[kind].between(q, k))
        view.lengths = None if entry is None else entry.lengths
        if isinstance(positions, Rotary):
            view.turn = turn(positions, size, q.at, x.dtype)
        elif isinstance(positions, Alibi):
            view.bias = kept(alibi(positions, config.all_heads, size, q.at, k.at), config)
        elif isinstance(positions, Buckets) and positions.shared:
            assert self.position_bias is not None
            table = self.position_bias.weight
            view.bias = kept(bucket_bias(positions, table, q.at, k.at, both_sides=config.mask == "full"), config)
        later = config.softcap is not None or config.sinks or view.lengths is not None  # perhaps nobody asks
        return view if later else view.prepare(x)


def _order(config: StackConfig) -> list[int]:
    """For each layer the number of the block whose weights it runs."""
    order: list[int] = []
    for run in config.pattern:
        first = len(order)
        for time in range(run.times):
            for place in range(len(run.blocks)):
                order.append(first + place if run.tied else first + time * len(run.blocks) + place)
    return order
