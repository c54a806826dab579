"""Modules with a quantized matrix, which they dequantize to multiply by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.quantization.packing import PackedMatrix, empty_packed, group_size, pack, round_activations, unpack


class QuantizedMatrix(nn.Module):
    """A quantized matrix (…, out_features, in_features) in buffers; `weight` dequantizes it to the model's dtype.

    It can be indexed like the tensor it replaces, as in `matrix[expert]` for stacked experts or `matrix[ids]` for an
    embedding; the result is dequantized.
    """

    packed: Tensor
    scale: Tensor
    least: Tensor | None
    activation_bits: int = 16  # 8: the inputs of a product are rounded, see `round_input`

    def __init__(self, matrix: PackedMatrix, in_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.dtype = in_features, dtype
        for name, tensor in matrix._asdict().items():
            self.register_buffer(name, tensor)

    @classmethod
    def from_weight(cls, weight: Tensor, bits: int, group: int) -> Self:
        """Quantize a weight; for a weight on the meta device, only allocate the buffers."""
        shape = tuple(weight.shape)
        matrix = empty_packed(shape, bits, group, weight.device) if weight.is_meta else pack(weight, bits, group)
        return cls(matrix, weight.shape[-1], weight.dtype)

    @property
    def packed_matrix(self) -> PackedMatrix:
        return PackedMatrix(self.packed, self.scale, self.least)

    @property
    def weight(self) -> Tensor:
        return unpack(self.packed_matrix, self.in_features, self.dtype)

    def __getitem__(self, index: int | Tensor) -> Tensor:
        selected = (None if tensor is None else tensor[index] for tensor in self.packed_matrix)
        return unpack(PackedMatrix(*selected), self.in_features, self.dtype)  # type: ignore[arg-type]

    def round_input(self, x: Tensor) -> Tensor:
        """Return what the matrix is multiplied by for an input x (…, in_features)."""
        return x if self.activation_bits == 16 else round_activations(x, group_size(self.packed_matrix))

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x (…, in_features) by the dequantized matrix; the output is (…, out_features)."""
        x = self.round_input(x)
        return F.linear(x, unpack(self.packed_matrix, self.in_features, x.dtype), bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the buffers with the model, but do not cast the scales: the integers were chosen for their values."""
        originals = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.packed.device)).dtype
        for name, original in originals.items():
            if getattr(self, name).dtype != original.dtype:
                setattr(self, name, original.to(self.packed.device))
        return self


class QuantizedLinear(QuantizedMatrix):
    """nn.Linear with a quantized weight."""

    bias: nn.Parameter | None

    @classmethod
    def from_linear(cls, linear: nn.Linear, bits: int, group: int) -> QuantizedLinear:
        module = cls.from_weight(linear.weight, bits, group)
        module.register_parameter("bias", linear.bias)
        return module

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.bias)


class QuantizedEmbedding(QuantizedMatrix):
    """A quantized token embedding: `forward` looks up rows by id, and `linear` computes the logits of a tied output."""

    def forward(self, ids: Tensor) -> Tensor:
        return self[ids]
