"""Modules whose matrix is stored as small whole numbers.  The plain way to run them: widen it again, then multiply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.quantize.packing import Packed, empty, pack, unpack

STORED = ("packed", "scale", "least")


class Quantized(nn.Module):
    """A matrix (…, outputs, inputs) as buffers; `weight` is it, widened to the model's dtype.

    Of a stack of experts' matrices, `self[expert]` is one, as it is of the tensor it stands for.
    """

    packed: Tensor
    scale: Tensor
    least: Tensor | None

    def __init__(self, stored: Packed, inputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.inputs, self.dtype = inputs, dtype
        for name, tensor in zip(STORED, stored, strict=True):
            self.register_buffer(name, tensor)

    @classmethod
    def of(cls, weight: Tensor, bits: int, group: int) -> Self:
        """From the numbers of a weight; on the meta device, only the room for them."""
        shape = tuple(weight.shape)
        stored = empty(shape, bits, group, weight.device) if weight.is_meta else pack(weight, bits, group)
        return cls(stored, weight.shape[-1], weight.dtype)

    @property
    def stored(self) -> Packed:
        return Packed(self.packed, self.scale, self.least)

    @property
    def weight(self) -> Tensor:
        return unpack(self.stored, self.inputs, self.dtype)

    def __getitem__(self, place: int | Tensor) -> Tensor:
        part = Packed(*(None if one is None else one[place] for one in self.stored))  # type: ignore[arg-type]
        return unpack(part, self.inputs, self.dtype)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (…, inputs) -> (…, outputs)."""
        return F.linear(x, unpack(self.stored, self.inputs, x.dtype), bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moved with the model; scales keep their format, for q was chosen for them."""
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.packed.device)).dtype
        for name, before in kept.items():
            setattr(
                self,
                name,
                before.to(self.packed.device) if getattr(self, name).dtype != before.dtype else getattr(self, name),
            )
        return self


class QuantizedLinear(Quantized):
    """nn.Linear, stored small."""

    bias: nn.Parameter | None

    @classmethod
    def of_linear(cls, linear: nn.Linear, bits: int, group: int) -> QuantizedLinear:
        made = cls.of(linear.weight, bits, group)
        made.register_parameter("bias", linear.bias)
        return made

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)


class QuantizedEmbedding(Quantized):
    """A table of tokens, stored small: rows are looked up, and logits are its product with a hidden state."""

    def forward(self, ids: Tensor) -> Tensor:
        return self[ids]
