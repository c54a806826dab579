"""Quantized layers of an inference copy on a GPU: a kernel multiplies one vector by the stored 8- or 4-bit weight.

For several vectors, as in a prompt, the layers dequantize the weight and multiply with torch.  So they always do with
activations of 8 bits: the kernel rounds a vector in blocks of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.inference.backends.fast_modules.fused_linear import adjacent_view
from monoblock.inference.backends.fast_modules.pending_residual import take_residual
from monoblock.kernels.gpu_quantized import (
    GpuQuantizedMatrix,
    NextNorm,
    can_dequantize,
    dequantize,
    has_kernel,
    is_gpu_vector,
    prepare_matrix,
    quantized_linear,
    supports_quantized_linear,
)
from monoblock.quantization.modules import QuantizedEmbedding, QuantizedLinear, QuantizedMatrix


class JoinedMatrix:
    """The quantized matrices (N, K) of layers with the same input as one matrix (ΣN, K), as the kernels read it.

    When a layer's tensors were written in place, it is made again and copied into the same tensors, which recorded
    CUDA graphs read.  Packed weights are copied if there are several layers whose tensors are not next to each other in
    memory (see `mb.optimize`).
    """

    def __init__(self, layers: Sequence[QuantizedMatrix]) -> None:
        self.layers = layers
        self._matrix: GpuQuantizedMatrix | None = None
        self._versions: list[int] = []

    def get(self) -> GpuQuantizedMatrix:
        tensors = [t for layer in self.layers for t in layer.packed_matrix if t is not None]
        versions = [0 if t.is_inference() else t._version for t in tensors]
        if self._matrix is None:
            self._matrix = self._build()
        elif versions != self._versions:
            with torch.no_grad():
                for old, new in zip(self._matrix[:2], self._build()[:2], strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)
        self._versions = versions
        return self._matrix

    def _build(self) -> GpuQuantizedMatrix:
        with torch.inference_mode(False), torch.no_grad():
            columns = zip(*(layer.packed_matrix for layer in self.layers), strict=True)
            packed, scale, least = (_join([t for t in column if t is not None]) for column in columns)
            assert packed is not None
            assert scale is not None
            return prepare_matrix(packed, scale, least)


def _join(tensors: Sequence[Tensor]) -> Tensor | None:
    if len(tensors) <= 1:
        return tensors[0] if tensors else None
    view = adjacent_view(tensors)
    return torch.cat(list(tensors)) if view is None else view


class _WithKernel(QuantizedMatrix):
    _joined: JoinedMatrix | None = None

    @property
    def joined(self) -> JoinedMatrix:
        if self._joined is None:
            self._joined = JoinedMatrix([self])
        return self._joined

    def refresh(self) -> None:
        """Read the weights again if they were written, so that recorded CUDA graphs have the new ones."""
        if self._joined is not None:
            self._joined.get()

    def supports_kernel(self, x: Tensor) -> bool:
        """Return whether the kernel can multiply the last vectors of x (…, in_features)."""
        is_vector = x.is_cuda and x.numel() == x.shape[-1] and self.activation_bits == 16
        return is_vector and supports_quantized_linear(x, self.joined.get())

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.supports_kernel(x):
            return quantized_linear(x, self.joined.get(), bias)
        if x.is_cuda and can_dequantize(self.joined.get(), self.in_features):
            return F.linear(self.round_input(x), dequantize(self.joined.get(), x.dtype), bias)
        return super().linear(x, bias)


class InferenceQuantizedLinear(_WithKernel, QuantizedLinear):
    next_norm: NextNorm | None = None  # the norm of the output with its residual, if quantized layers alone read it

    def run_kernel(self, x: Tensor, residual: Tensor | None = None, activation: str | None = None) -> Tensor:
        next_norm = None if residual is None else self.next_norm
        return quantized_linear(x, self.joined.get(), self.bias, residual, activation, next_norm)

    def can_add_residual(self, x: Tensor) -> bool:
        """Return whether `forward` can add a residual x to its output."""
        is_vector = is_gpu_vector(x) and x.dtype == self.dtype and x.is_contiguous()
        return is_vector and self.activation_bits == 16 and has_kernel(self.joined.get(), self.in_features)

    @property
    def reads_rounded_input(self) -> bool:
        """Whether the kernel reads its input rounded to 8 bits by the kernel before (see `get_quantized`)."""
        return self.activation_bits == 16

    def forward(self, x: Tensor) -> Tensor:
        residual = take_residual(self)
        return self.linear(x, self.bias) if residual is None else self.run_kernel(x, residual)


class InferenceQuantizedEmbedding(_WithKernel, QuantizedEmbedding):
    pass


def can_join_quantized(layers: Sequence[object]) -> bool:
    """Return whether all layers are quantized alike for the kernel, and either all of them or none have a bias."""
    quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    kinds = {
        (layer.packed.dtype, layer.packed.shape[-1], layer.scale.shape[-1], layer.bias is None) for layer in quantized
    }
    has_kernel = all(layer.activation_bits == 16 for layer in quantized)
    return len(quantized) == len(layers) and len(kinds) == 1 and has_kernel


class FusedQuantizedLinear:
    """Several quantized layers with the same input, computed as one for a single vector."""

    def __init__(self, layers: Sequence[InferenceQuantizedLinear]) -> None:
        self.layers, self.joined = layers, JoinedMatrix(layers)
        self.sizes = [layer.packed.shape[0] for layer in layers]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = torch.cat(biases) if biases else None

    def refresh(self) -> None:
        """Copy the layers' current weights and biases again, where they are copies."""
        self.joined.get()
        if self.bias is not None:
            self.bias.copy_(torch.cat([layer.bias.detach() for layer in self.layers if layer.bias is not None]))

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.numel() == x.shape[-1] and supports_quantized_linear(x, self.joined.get()):
            return quantized_linear(x, self.joined.get(), self.bias)
        return torch.cat([layer(x) for layer in self.layers], -1)
