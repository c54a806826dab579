"""A few tokens through a whole stack by one operator: on a CPU the rest is many small calls.

They are one of each row, or several that follow each other, as when proposals are checked.

What the operator does not say (experts, prefixes, documents, many rows, gradients, …) runs as the stack does.  It reads
and writes the same cache, so any step may go either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.attention import Attention, kept
from monoblock.block import Block
from monoblock.cache import Cache
from monoblock.config import Alibi, AttentionConfig, Buckets, NormConfig, Rotary
from monoblock.experts import Experts
from monoblock.feedforward import ACTIVATIONS
from monoblock.masks import Where
from monoblock.norm import Norm
from monoblock.positions import alibi, bucket, turn
from monoblock.quantize.fast import Fast
from monoblock.stack import Stack
from monoblock.tap import Tap

MOST = 8  # tokens at once
NORMS = {"layer": 1, "rms": 2}
PLACES = {"pre": 0, "post": 1, "output": 2, "sandwich": 3}
RESIDUALS = {"sequential": 0, "parallel": 1, "parallel_shared": 2}
OVER = {"head": 1, "each_head": 2, "width": 3}
BY_LENGTH = ("dynamic", "longrope")  # angles that depend on how long a text is
# The matrices that the operator reads, in its order; what a source gives lies in the cache.
READ = {
    "attention": ("query", "key", "value", "output"),
    "cross": ("query", "output"),
    "feedforward": ("gate", "up", "down"),
}


class StepStack(Stack):
    """A stack that takes a few tokens by the operator where that says all it does."""

    whole: Whole | None = None

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
        if self.whole is not None and cache is not None and tap is None and self.whole.takes(x, where, cache):
            found = self.whole(x, where, memory_where, cache)
            if found is not None:
                return found
        return super().forward(x, where, memory=memory, memory_where=memory_where, cache=cache, tap=tap)


def whole(stack: Stack) -> Whole | None:
    """What runs a few tokens through this stack, None where the operator does not say all that its blocks do."""
    return Whole(stack) if all(plain(block) for block in stack.blocks) else None


def plain(block: Block) -> bool:
    """Whether the operator says all that a block does."""
    own, cross = block.config.attention, block.config.cross
    if isinstance(block.feedforward, Experts) or own.mask != "causal" or own.global_tokens or own.random_blocks:
        return False
    if isinstance(own.positions, Alibi) and own.positions.form == "falcon":
        return False
    scaling = own.positions.scaling if isinstance(own.positions, Rotary) else None
    if scaling is not None and scaling.kind in BY_LENGTH:
        return False
    if cross is not None and (cross.qk_norm or cross.softcap or cross.sinks or cross.clip or cross.positions):
        return False
    return legible(block) and all(_fits(module) for module in block.modules())


def legible(block: Block) -> bool:
    """Whether every matrix that the operator reads is one, and nothing beside it, such as an adapter."""
    layers = (getattr(getattr(block, part), name, None) for part, names in READ.items() for name in names)
    return all(layer is None or isinstance(layer, (nn.Linear, Fast)) for layer in layers)


def _fits(module: nn.Module) -> bool:
    """Whether the operator can read the weights that a module owns."""
    if isinstance(module, Fast):
        return module.parts[0].dtype != torch.bfloat16
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in own)


class Whole:
    """The weights of a stack as the operator reads them, and the tables of its positions."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.depth = stack, len(stack.order)
        self.crossed = stack.blocks[0].cross is not None
        self.empty = torch.empty(0)
        self.kinds: list[AttentionConfig] = []  # those that turn, then their number is their table's
        self.biased: list[tuple[AttentionConfig, nn.Embedding | None]] = []
        self.reach = 0  # places that the tables cover
        rows = [self._numbers(block) for block in stack.blocks]
        rows.append(_final(stack.norm))
        tensors = [t for block in stack.blocks for t in self._tensors(block)] + self._norm(stack.norm)
        held = [self.empty if t is None else t.detach() for t in tensors]
        numbers = torch.tensor([integers for integers, _ in rows])
        reals = torch.tensor([reals for _, reals in rows], dtype=torch.double)
        self.plan = torch.classes.monoblock.Plan(held, numbers, reals, stack.config.width)

    # -- what the blocks are ------------------------------------------------------------------------------------------

    def _numbers(self, block: Block) -> tuple[list[int], list[float]]:
        config = block.config
        own, cross, feedforward = config.attention, config.cross, config.feedforward
        qk, norm = own.qk_norm or NormConfig(), config.norm
        integers = [
            PLACES[config.norm_place],
            RESIDUALS[config.residual],
            own.heads,
            own.groups,
            own.window or 0,
            self._turns(own),
            int(isinstance(own.positions, Rotary) and own.positions.layout == "interleaved"),
            self._biases(block.attention),
            0 if own.qk_norm is None else OVER[own.qk_norm_over],
            list(ACTIVATIONS).index(feedforward.activation),
            0 if cross is None else cross.heads,
            0 if cross is None else cross.groups,
            NORMS[norm.kind],
            int(norm.unit_offset),
            NORMS[qk.kind],
            int(qk.unit_offset),
            int(config.attention_norm),
            int(config.residual != "parallel_shared"),
        ]
        reals = [
            norm.eps,
            _scale(own, config.width),
            0.0 if cross is None else _scale(cross, config.width),
            qk.eps,
            own.softcap or 0.0,
            own.clip or 0.0,
            config.residual_scale,
            feedforward.clamp or 0.0,
        ]
        return integers, reals

    def _turns(self, config: AttentionConfig) -> int:
        if not isinstance(config.positions, Rotary):
            return -1
        if config not in self.kinds:
            self.kinds.append(config)
        return self.kinds.index(config)

    def _biases(self, attention: Attention) -> int:
        config = attention.config
        if not isinstance(config.positions, (Alibi, Buckets)):
            return -1
        table = attention.position_bias if attention.position_bias is not None else self.stack.position_bias
        if (config, table) not in self.biased:
            self.biased.append((config, table))
        return self.biased.index((config, table))

    def _tensors(self, block: Block) -> Iterator[Tensor | None]:
        """In the order the operator reads them."""
        attention, cross, feedforward = block.attention, block.cross, block.feedforward
        for name in ("attention", "cross", "feedforward"):
            for norm in (f"{name}_norm", f"{name}_output_norm"):
                yield from self._norm(getattr(block, norm, None))
            yield getattr(block, f"{name}_gain", None)
        for name in READ["attention"]:
            yield from _matrix(getattr(attention, name))
        yield from self._norm(attention.query_norm) + self._norm(attention.key_norm)
        yield attention.sinks
        for name in READ["cross"]:
            yield from _matrix(getattr(cross, name, None))
        for name in READ["feedforward"]:
            yield from _matrix(getattr(feedforward, name))

    @staticmethod
    def _norm(norm: Norm | None) -> list[Tensor | None]:
        return [None, None] if norm is None else [norm.weight, norm.bias]

    # -- a step -------------------------------------------------------------------------------------------------------

    def takes(self, x: Tensor, where: Where, cache: Cache) -> bool:
        """Whether this pass is a few tokens onto a cache that has begun."""
        few = x.shape[0] * x.shape[1] <= MOST and x.dtype == torch.float32 and x.device.type == "cpu"
        if not few or self.stack.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        if cache.fixed or cache.longest + x.shape[1] > cache.capacity:
            return False
        if where.document is not None or where.flags is not None:
            return False
        if any(places.document is not None or places.flags is not None for places in cache.places.values()):
            return False
        begun: list[Any] = [*cache.slots, *(cache.cross if self.crossed else ())]
        return all(slot.keys is not None for slot in begun)

    def __call__(self, x: Tensor, where: Where, memory: Where | None, cache: Cache) -> Tensor | None:
        places, real = cache.places.values(), where.real
        if real is not None and not torch.equal(real, real[:, :1].expand_as(real)):
            return None  # the operator knows rows that rest, and no padding within one
        sources: list[Any] = cache.cross if self.crossed else []
        self._cover(cache.capacity)
        found = self.plan.step(
            x,
            where.at,
            cache.lengths,
            None if real is None else real[:, 0].expand(x.shape[0]).contiguous(),
            cache.written,
            [slot.keys for slot in cache.slots],
            [slot.values for slot in cache.slots],
            [slot.keys for slot in sources],
            [slot.values for slot in sources],
            None if memory is None or memory.real is None else memory.real.contiguous(),
            [one.at for one in places],
            [one.index for one in places],
            [one.window or 0 for one in places],
            self.angles,
            [self._bias(number) for number in range(len(self.biased))],
        )
        return found if found.numel() else None

    def _cover(self, length: int) -> None:
        """Angles and distances of so many places, made once for many steps."""
        if length <= self.reach:
            return
        with torch.inference_mode(False), torch.no_grad():
            self.reach = 1 << (length - 1).bit_length()
            at, width = torch.arange(self.reach)[None], self.stack.config.width
            self.angles: list[Tensor] = []
            for config in self.kinds:
                assert isinstance(config.positions, Rotary)
                found = turn(config.positions, config.key_size(width), at, torch.float32)
                self.angles += [found.cos[0, 0].contiguous(), found.sin[0, 0].contiguous()]
            self.distances = [self._distance(config, at, width) for config, _ in self.biased]

    def _distance(self, config: AttentionConfig, at: Tensor, width: int) -> Tensor:
        """The bias (H, places) by distance, or the bucket (places,) of each."""
        if isinstance(config.positions, Alibi):
            made = alibi(config.positions, config.all_heads, config.key_size(width), torch.zeros_like(at[:, :1]), at)
            return kept(made, config)[0, :, 0].contiguous()
        assert isinstance(config.positions, Buckets)
        return bucket(config.positions, -at[0], both_sides=False)

    def _bias(self, number: int) -> Tensor:
        (config, table), distance = self.biased[number], self.distances[number]
        if table is None:
            return distance
        return kept(table.weight[distance].T[None], config)[0].contiguous()


def _scale(config: AttentionConfig, width: int) -> float:
    return config.scale if config.scale is not None else config.key_size(width) ** -0.5


def _final(norm: Norm | None) -> tuple[list[int], list[float]]:
    kind, offset, eps = (
        (0, 0, 0.0) if norm is None else (NORMS[norm.config.kind], norm.config.unit_offset, norm.config.eps)
    )
    return [*([0] * 12), kind, int(offset), *([0] * 4)], [eps, *([0.0] * 7)]


def _matrix(layer: Any) -> tuple[Tensor | None, ...]:
    """Weight, scale, least value and bias."""
    if layer is None:
        return (None,) * 4
    parts = layer.parts if isinstance(layer, Fast) else (layer.weight,)
    return (*parts, *([None] * (3 - len(parts))), layer.bias)
