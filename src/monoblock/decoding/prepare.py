"""A model made ready for steps of one token: the same weights behind modules that do less for each.

    query, key and value of one input are one product, gate and up too; on a GPU one vector at a time goes through
    kernels of our own.

The twin shares its weights with the model: they are laid side by side once, and the model's own become views of that,
so nothing is held twice and what training changes is changed here too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock import kernels
from monoblock.attention import Attention, View
from monoblock.block import Block
from monoblock.cache import CrossSlot, Slot
from monoblock.decoding.aligned import align, roomy
from monoblock.decoding.looking import alike, looked
from monoblock.decoding.step_cpu import StepStack, whole
from monoblock.experts import Experts
from monoblock.feedforward import FeedForward
from monoblock.heads import Head
from monoblock.model import Transformer
from monoblock.native.library import load
from monoblock.norm import HALF, Norm
from monoblock.places import Entry
from monoblock.quantize.fast import CHUNK, FEW, Fast, joined, prepared as with_kernels
from monoblock.stack import Stack
from monoblock.tap import Tap

M = TypeVar("M", bound=nn.Module)


LARGE = 2_000_000  # weights from which kernels for the CPU are worth compiling


# The twin of a model, for the next call; it goes when the model goes, and another is made when a weight has moved.
TWINS_MADE: WeakKeyDictionary[Transformer, tuple[tuple[int, ...], Transformer]] = WeakKeyDictionary()


def prepared(model: Transformer) -> Transformer:
    """A twin of the model for fast steps; the model itself where its number format is not that of its weights."""
    if torch.is_autocast_enabled("cpu") and _on_cpu(model):
        return model
    made = TWINS_MADE.get(model)
    if made is None or made[0] != places(model):
        with torch.inference_mode(False), torch.no_grad():
            twin = _made(model).eval()
        made = TWINS_MADE[model] = places(model), twin  # joining has moved some
    return made[1]


def places(model: Transformer) -> tuple[int, ...]:
    """Where the weights lie: a recording or a twin is good as long as they do."""
    return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))


def _made(model: Transformer) -> Transformer:
    if model.config.quantize is not None:
        return _at_once(_twin(with_kernels(model)))
    align(model)
    twin = _twin(model)
    if _on_cpu(model) and sum(weight.numel() for weight in model.parameters()) >= LARGE and load().ready:
        for module in twin.modules():
            for part in (module, getattr(module, "joined", None)):
                if isinstance(part, (StepLinear, StepHead, Joined)):
                    part.few = FEW["dense"]
                elif isinstance(part, StepAttention):
                    part.rowwise = True
        _at_once(twin)
    return twin


def _at_once(twin: Transformer) -> Transformer:
    """Steps of the decoder by one operator, where there is a compiler and the operator says all that its blocks do."""
    if isinstance(twin.decoder, StepStack) and _on_cpu(twin) and load().ready:
        twin.decoder.whole = whole(twin.decoder)
    return twin


def _on_cpu(model: Transformer) -> bool:
    weight = next(model.parameters())
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _twin(module: M) -> M:
    """The module with other classes in the places of some, and the same weights."""
    twin = copy.copy(module)
    twin._modules = {name: None if child is None else _twin(child) for name, child in module._modules.items()}
    kind: Any = TWINS.get(type(module))
    if kind is not None and not isinstance(module, Experts):
        twin.__class__ = kind
        join = getattr(twin, "join", None)
        if join is not None:
            join()
    return twin


def together(layers: list[Any]) -> Joined | JoinedFast | None:
    """Projections of one input as one, where they are of one kind."""
    if all(type(layer) is Fast for layer in layers):
        fast = joined(layers)
        return None if fast is None else JoinedFast(fast, [layer.parts[0].shape[0] for layer in layers])
    return Joined(layers) if Joined.fits(layers) else None


class JoinedFast:
    """The same of weights that CPU kernels read, which are copied: they are small."""

    def __init__(self, run: Fast, sizes: list[int]) -> None:
        self.run, self.sizes = run, sizes

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x)


class Joined:
    """Several projections of one input as one: the weights (ΣN, K) and the biases, side by side."""

    few = range(0)

    def __init__(self, linears: list[nn.Linear]) -> None:
        self.sizes = [linear.out_features for linear in linears]
        self.weight = _side_by_side([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = _side_by_side(biases) if len(biases) == len(linears) else None

    @staticmethod
    def fits(linears: list[Any]) -> bool:
        """Plain layers of one input, all with a bias or none."""
        plain = all(type(linear) in (nn.Linear, StepLinear) for linear in linears)
        return plain and len({linear.bias is None for linear in linears}) == 1

    def __call__(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias, self.few)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """The weights in one piece of memory; they are moved into one unless they lie there already."""
    first, size = parts[0], sum(part.shape[0] for part in parts)
    ends = [part.data_ptr() + part.numel() * part.element_size() for part in parts]
    storage = first.untyped_storage()
    adjacent = all(
        end == part.data_ptr() and part.untyped_storage().data_ptr() == storage.data_ptr() and part.is_contiguous()
        for end, part in zip(ends[:-1], parts[1:], strict=True)
    )
    if not adjacent:
        whole = torch.cat([part.detach() for part in parts])
        for part, piece in zip(parts, whole.split([part.shape[0] for part in parts]), strict=True):
            part.data = piece
        return whole
    whole = torch.empty(0, dtype=first.dtype, device=first.device)
    return whole.set_(storage, first.storage_offset(), (size, *first.shape[1:]), first.stride())


def alone(x: Tensor, weight: Tensor) -> bool:
    """Whether x is one vector on a GPU, for which there is a kernel."""
    one = x.is_cuda and x.numel() == x.shape[-1] and x.dtype in HALF and x.dtype == weight.dtype
    return one and weight.is_contiguous() and kernels.available()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, few: range = range(0)) -> Tensor:
    """x times the rows of the weight; one vector on a GPU or a few rows on a CPU go through kernels for that."""
    if alone(x, weight):
        return kernels.matvec(x, weight, bias)
    if few and x.numel() // x.shape[-1] in few and x.shape[-1] % CHUNK == 0 and weight.is_contiguous():
        return torch.ops.monoblock.dense(x, weight, bias)
    return F.linear(x, weight, bias)


class StepLinear(nn.Linear):
    beside: Tensor | None = None  # what the next product is added to, said by the block just before
    few = range(0)  # so many rows at once have a kernel of their own

    def forward(self, x: Tensor) -> Tensor:
        beside, self.beside = self.beside, None
        if beside is None:
            return product(x, self.weight, self.bias, self.few)
        return kernels.matvec(x, self.weight, self.bias, beside)


class StepBlock(Block):
    """The residual connection of a plain pre-norm block is made where the sublayer's last product is written."""

    def _add(self, x: Tensor, name: str, sublayer: Callable[[Tensor], Tensor], tap: Tap | None) -> Tensor:
        last = {"attention": self.attention.output, "feedforward": getattr(self.feedforward, "down", None)}.get(name)
        norm, config = getattr(self, f"{name}_norm"), self.config
        plain = config.norm_place == "pre" and config.residual_scale == 1.0 and config.layer_scale is None
        if (
            tap is not None
            or not plain
            or norm is None
            or not isinstance(last, StepLinear)
            or not alone(x, last.weight)
        ):
            return super()._add(x, name, sublayer, tap)
        last.beside = x
        return sublayer(norm(x))


class StepHead(Head):
    few = range(0)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None and not alone(x, weight) and (room := roomy(weight)) is not None:
            return F.linear(x, room)[..., : weight.shape[0]]
        return product(x, weight, bias, self.few)


class StepNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        config, weight = self.config, self.weight
        plain = not config.unit_offset and (weight is None or weight.dim() == 1)
        if plain and x.is_cuda and x.dtype in HALF and x.is_contiguous() and kernels.available():
            centered = config.kind == "layer"
            after = centered or config.cast == "after_scale"
            return kernels.norm(x, weight, self.bias, config.eps, centered=centered, cast_after_scale=after)
        return super().forward(x)


class StepFeedForward(FeedForward):
    joined: Joined | JoinedFast | None

    def join(self) -> None:
        can = self.gate is not None and self.config.clamp is None
        self.joined = together([self.gate, self.up]) if can else None

    def forward(self, x: Tensor, tap: Tap | None = None) -> Tensor:
        if self.joined is None or tap is not None:
            return super().forward(x, tap)
        both = self.joined(x)
        if x.is_cuda and self.config.activation in kernels.GATES and kernels.available():
            return self.down(kernels.gated(both, self.config.activation))
        gate, up = both.chunk(2, -1)
        return self.down(self.activation(gate) * up)


class StepAttention(Attention):
    joined: Joined | JoinedFast | None
    rowwise = False  # one query a row has a kernel of its own

    def join(self) -> None:
        self.joined = together([self.query, self.key, self.value])

    def projected(self, x: Tensor, source: Tensor, known: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self.joined is None or source is not x or known:
            return super().projected(x, source, known)
        q, k, v = self.joined(x).split(self.joined.sizes, -1)
        return q, k, v

    def forward(
        self,
        x: Tensor,
        view: View,
        *,
        memory: Tensor | None = None,
        slot: Slot | CrossSlot | None = None,
        entry: Entry | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        if self.rowwise and tap is None and alike(self, x, view, slot, entry):
            q, k, v = self.projected(x, x, isinstance(slot, CrossSlot))
            return self.output(looked(self, q, self._keys_values(k, v, view, slot, entry), view))
        if view.lengths is None or tap is not None or not isinstance(slot, Slot) or not self._quick(x, view, slot):
            return super().forward(x, view, memory=memory, slot=slot, entry=entry, tap=tap)
        q, k, v = self.projected(x, x, False)
        heads = self._heads(q, self.config.heads, self.query_norm)
        assert k is not None
        assert v is not None
        assert slot.keys is not None
        assert slot.values is not None
        turn = view.turn
        out = kernels.attend_step(
            heads,
            self._heads(k, self.config.groups, self.key_norm),
            self._heads(v, self.config.groups),
            slot.keys,
            slot.values,
            view.lengths,
            scale=self.config.scale,
            cos=None if turn is None else turn.cos.contiguous(),
            sin=None if turn is None else turn.sin.contiguous(),
            layout=None if turn is None else "interleaved" if turn.interleaved else "halves",
        )
        return self.output(out.transpose(1, 2).flatten(2))

    def _quick(self, x: Tensor, view: View, slot: Slot) -> bool:
        """Whether the kernel says all that this attention does."""
        config, keys, values = self.config, slot.keys, slot.values
        if keys is None or values is None or not (x.is_cuda and x.dtype in HALF and kernels.available()):
            return False
        size = keys.shape[-1]
        unusual = config.softcap is not None or self.sinks is not None or self.position_bias is not None
        return (
            not unusual
            and view.bias is None
            and size == values.shape[-1]
            and 16 <= size <= 256
            and size & (size - 1) == 0
        )


TWINS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: StepLinear,
    Attention: StepAttention,
    Block: StepBlock,
    FeedForward: StepFeedForward,
    Norm: StepNorm,
    Head: StepHead,
    Stack: StepStack,
}
