"""Products of the fast copy of a model: a linear layer, a quantized one, or several with the same input as one.

A fast layer also adds a residual to its output, in one kernel (see `multiply`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.inference.arrange_weights import adjacent_view, can_join_quantized
from monoblock.kernels import gpu as kernels
from monoblock.kernels.cpu.library import has_matrix_tiles
from monoblock.kernels.gpu import Activations
from monoblock.kernels.gpu_quantized import (
    GpuQuantizedMatrix,
    NextNorm,
    can_dequantize,
    dequantize,
    prepare_matrix,
    quantized_linear,
    supports_quantized_linear,
)
from monoblock.nn.linear import can_join
from monoblock.quantization.cpu_linear import KERNEL_ROWS, ROW_MULTIPLE
from monoblock.quantization.modules import QuantizedEmbedding, QuantizedLinear, QuantizedMatrix

MAX_PANEL_ROWS, MIN_PANEL_OUTPUTS = 128, 8000  # where fp32 products in panels are faster than torch's
MIN_TILE_ROWS = 64  # rows from which fp32 products in matrix tiles are faster than torch's


class Choices(NamedTuple):
    """Which kernels the modules of a fast model use."""

    fuse: bool  # join projections of one input and pad the output table: faster on a GPU
    quantized: bool  # products read vectors of 8 bits: a quantized model on a GPU
    native: bool  # C++ products for a few rows: fp32 on a CPU
    exact: bool = False  # products of which a row has the same bits alone and in any company


def take_over(fast: nn.Module, plain: nn.Module) -> None:
    """Give a new module the parameters, buffers, children and settings of the plain one that it stands for."""
    nn.Module.__init__(fast)
    vars(fast).update(vars(plain))


def multiply(
    layer: nn.Module, x: Activations, residual: Tensor | None = None, next_norm: NextNorm | None = None
) -> Activations:
    """Return layer(x) + residual, in one kernel if there is one; it may also begin the norm that comes next."""
    if isinstance(layer, FastQuantizedLinear):
        return layer.multiply(x, layer.bias, residual, next_norm=None if residual is None else next_norm)
    if isinstance(layer, FastLinear) and residual is not None:
        values = x.values.contiguous()
        if (layer.is_exact and values.is_cuda) or kernels.supports_linear(values, layer.weight):
            return Activations(kernels.linear(values, layer.weight, layer.bias, residual, exact=layer.is_exact))
    out = layer(x.values)
    return Activations(out if residual is None else residual + out)


def reads_rounded(layer: nn.Module) -> bool:
    """Return whether a layer multiplies vectors of 8 bits."""
    return isinstance(layer, FastQuantizedLinear) and layer.activation_bits == 16


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, kernel_rows: range = range(0)) -> Tensor:
    """Compute F.linear(x, weight, bias), with a kernel of this package where that is faster.

    On a CPU it has them if there are `kernel_rows`, the numbers of rows of x for which the first one is the fastest.
    """
    if kernels.supports_linear(x, weight):
        return kernels.linear(x, weight, bias)
    if kernel_rows and weight.is_contiguous():
        rows = x.numel() // x.shape[-1]
        if rows in kernel_rows and x.shape[-1] % ROW_MULTIPLE == 0:
            return torch.ops.monoblock.linear(x, weight, bias=bias)
        if rows >= MIN_TILE_ROWS and has_matrix_tiles():
            return torch.ops.monoblock.linear_tiles(x, weight, bias)
        if rows <= MAX_PANEL_ROWS and len(weight) >= MIN_PANEL_OUTPUTS:
            return exact_linear(x, weight, bias)  # a table of logits
    return F.linear(x, weight, bias)


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """Compute activation(F.linear(x, weight, bias)), every sum in one order, however many rows x has.

    The activation is for a GPU.
    """
    if x.is_cuda:
        return kernels.linear(x.contiguous(), weight, bias, activation=activation, exact=True)
    out: Tensor = torch.ops.monoblock.linear(x, weight, bias=bias, exact=True)
    return out


class FastLinear(nn.Linear):
    def __init__(self, plain: nn.Linear, choices: Choices) -> None:
        take_over(self, plain)
        self.kernel_rows = KERNEL_ROWS["dense"] if choices.native else range(0)
        self.is_exact = choices.exact

    def forward(self, x: Tensor) -> Tensor:
        if self.is_exact:
            return exact_linear(x, self.weight, self.bias)
        return fast_linear(x, self.weight, self.bias, self.kernel_rows)


class FusedLinear:
    """Several linear layers with the same input, computed as one.

    `weight` (ΣN, K) and `bias` (ΣN,) are views of those of the layers if these lie next to each other in memory,
    otherwise copies.
    """

    def __init__(self, layers: Sequence[nn.Linear], *, exact: bool = False) -> None:
        self.sizes, self.is_exact = [layer.out_features for layer in layers], exact
        self.weight = _join([layer.weight.detach() for layer in layers])
        self.bias = None if layers[0].bias is None else _join([layer.bias.detach() for layer in layers])

    def __call__(self, x: Activations) -> Tensor:
        return (exact_linear if self.is_exact else fast_linear)(x.values, self.weight, self.bias)

    def supports_gated(self, x: Tensor) -> bool:
        """Return whether `gated_linear` can be used for x (…, K); the two layers are gate and up."""
        return not self.is_exact and self.bias is None and kernels.supports_gated_linear(x, self.weight)


class FastQuantizedMatrix(QuantizedMatrix):
    """A kernel multiplies one vector by the stored 8- or 4-bit weight; for several it is dequantized by a kernel.

    So it always is with activations of 8 bits: the kernel rounds a vector in blocks of its own.
    """

    def __init__(self, plain: QuantizedMatrix, choices: Choices) -> None:
        take_over(self, plain)
        self.matrix = join_matrices([plain])

    def has_kernel(self, x: Tensor) -> bool:
        return self.activation_bits == 16 and supports_quantized_linear(x, self.matrix)

    def multiply(
        self,
        x: Activations,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        activation: str | None = None,
        next_norm: NextNorm | None = None,
    ) -> Activations:
        values = x.values
        if self.has_kernel(values):
            return quantized_linear(x, self.matrix, bias, residual, activation, next_norm)
        if values.is_cuda and can_dequantize(self.matrix, self.in_features):
            out = F.linear(self.round_input(values), dequantize(self.matrix, values.dtype), bias)
        else:
            out = super().linear(values, bias)
        return Activations(out if residual is None else residual + out)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.multiply(Activations(x), bias).values


class FastQuantizedLinear(FastQuantizedMatrix, QuantizedLinear):
    pass


class FastQuantizedEmbedding(FastQuantizedMatrix, QuantizedEmbedding):
    pass


class FusedQuantizedLinear:
    """Several quantized layers with the same input, computed as one for a single vector."""

    def __init__(self, layers: Sequence[QuantizedLinear]) -> None:
        self.layers, self.matrix = layers, join_matrices(layers)
        self.sizes = [layer.packed.shape[0] for layer in layers]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = _join(biases) if biases else None

    def __call__(self, x: Activations) -> Tensor:
        if supports_quantized_linear(x.values, self.matrix):
            return quantized_linear(x, self.matrix, self.bias).values
        return torch.cat([layer(x.values) for layer in self.layers], -1)


def join_matrices(layers: Sequence[QuantizedMatrix]) -> GpuQuantizedMatrix:
    """Return the matrices (N, K) of layers with the same input as one (ΣN, K), as the kernels read it.

    Packed weights are copied if there are several layers whose tensors do not lie next to each other in memory.
    """
    least = [layer.least for layer in layers if layer.least is not None]
    with torch.inference_mode(False), torch.no_grad():
        packed, scale = _join([layer.packed for layer in layers]), _join([layer.scale for layer in layers])
        return prepare_matrix(packed, scale, _join(least) if least else None)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    view = tensors[0] if len(tensors) == 1 else adjacent_view(tensors)
    return torch.cat(list(tensors)) if view is None else view


def fuse_layers(layers: Sequence[nn.Module], *, exact: bool = False) -> FusedLinear | FusedQuantizedLinear | None:
    """Join layers with the same input, so that they are computed as one; return None if they cannot be joined."""
    if can_join(layers):
        return FusedLinear(cast(Sequence[nn.Linear], layers), exact=exact)
    if all(isinstance(layer, FastQuantizedLinear) for layer in layers) and can_join_quantized(layers):
        return FusedQuantizedLinear(cast(Sequence[QuantizedLinear], layers))
    return None
