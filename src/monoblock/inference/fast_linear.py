"""Products of the fast copy of a model: a linear layer, a quantized one, or several with the same input as one.

A fast layer also adds a residual to its output, in one kernel (see `multiply`).

`arrange_weights` places the weights of a model so that the fast copy shares them on a GPU instead of copying them:
those that one product reads lie next to each other, and an output table (V, D) has room for rows of zeros up to a
multiple of 8, since tensor cores write eight 16-bit results at a time.  With GPT-2's V = 50,257 they write one by one,
and the product that computes the logits takes six times as long.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.kernels import gpu as kernels
from monoblock.kernels.cpu.library import can_multiply_many_rows, has_matrix_tiles, load_kernels
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
from monoblock.nn.attention import Attention
from monoblock.nn.feedforward import FeedForward
from monoblock.nn.linear import can_join
from monoblock.nn.norm import HALF_DTYPES
from monoblock.nn.transformer import Transformer
from monoblock.quantization.modules import QuantizedEmbedding, QuantizedLinear, QuantizedMatrix
from monoblock.quantization.packing import group_size

# On a CPU: numbers of rows of x for which the C++ kernel is faster, by storage (measured with benchmarks/matvec.py
# --rows N); for more quantized rows it is faster to dequantize the matrix once.  The kernel computes the same for a row
# alone and among others.
KERNEL_ROWS = {"dense": range(1, 9), "quantized": range(1, 33)}
COLUMN_MULTIPLE = 32  # of a row of an fp32 weight that the kernel multiplies by a few rows
MAX_PANEL_ROWS, MIN_PANEL_OUTPUTS = 128, 8000  # where fp32 products in panels are faster than torch's
MIN_TILE_ROWS = 64  # rows from which fp32 products in matrix tiles are faster than torch's
TABLE_MULTIPLE = 8  # of the rows of an output table


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
        if layer.has_kernel(values):
            return layer.multiply(Activations(values), layer.bias, residual)
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
        if rows in kernel_rows and x.shape[-1] % COLUMN_MULTIPLE == 0:
            return torch.ops.monoblock.linear(x, weight, bias=bias)
        if rows >= MIN_TILE_ROWS and has_matrix_tiles():
            return torch.ops.monoblock.linear_tiles(x, weight, bias)
        if rows <= MAX_PANEL_ROWS and len(weight) >= MIN_PANEL_OUTPUTS:
            return exact_linear(x, weight, bias)  # a table of logits
    return F.linear(x, weight, bias)


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear(x, weight, bias), every sum in one order, however many rows x has."""
    if x.is_cuda:
        return kernels.linear(x.contiguous(), weight, bias, exact=True)
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

    def has_kernel(self, x: Tensor) -> bool:
        """Return whether `multiply` can be used for x."""
        return (self.is_exact and x.is_cuda) or kernels.supports_linear(x, self.weight)

    def multiply(
        self, x: Activations, bias: Tensor | None, residual: Tensor | None = None, activation: str | None = None
    ) -> Activations:
        """Compute activation(x W^T + bias) + residual in one kernel of a GPU."""
        values = x.values.contiguous()
        return Activations(kernels.linear(values, self.weight, bias, residual, activation, exact=self.is_exact))


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
    """Kernels multiply by the stored 8- or 4-bit weight: one vector on a GPU, on a CPU as many rows as pay.

    Elsewhere the weight is dequantized, on a GPU by a kernel; so it is there with activations of 8 bits, since the
    kernel rounds a vector in blocks of its own.
    """

    def __init__(self, plain: QuantizedMatrix, choices: Choices) -> None:
        take_over(self, plain)
        self.is_exact = choices.exact
        self.matrix = join_matrices([plain]) if choices.quantized else None
        self.kernel_rows = range(0)  # that the C++ kernel multiplies
        if self.matrix is None and plain.packed.device.type == "cpu" and load_kernels().is_ready:
            has_kernel = can_multiply_many_rows(group_size(plain.packed_matrix))
            self.kernel_rows = range(1, sys.maxsize) if has_kernel else KERNEL_ROWS["quantized"]

    def has_kernel(self, x: Tensor) -> bool:
        """Return whether there is a kernel of a GPU for x."""
        is_wide = self.activation_bits == 16 and self.matrix is not None
        return is_wide and supports_quantized_linear(x, cast(GpuQuantizedMatrix, self.matrix))

    def multiply(
        self,
        x: Activations,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        activation: str | None = None,
        next_norm: NextNorm | None = None,
    ) -> Activations:
        values, matrix = x.values, self.matrix
        if matrix is not None and self.has_kernel(values):
            return quantized_linear(x, matrix, bias, residual, activation, next_norm)
        if self.is_exact or self._has_cpu_kernel(values):
            out = torch.ops.monoblock.linear(values, *self.packed_matrix, bias, self.activation_bits, self.is_exact)
        elif matrix is not None and values.is_cuda and can_dequantize(matrix, self.in_features):
            out = F.linear(self.round_input(values), dequantize(matrix, values.dtype), bias)
        else:
            out = super().linear(values, bias)
        return Activations(out if residual is None else residual + out)

    def _has_cpu_kernel(self, x: Tensor) -> bool:
        if x.dtype != torch.float32 or x.device.type != "cpu" or (x.requires_grad and torch.is_grad_enabled()):
            return False
        return x.numel() // self.in_features in self.kernel_rows

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


# -- weights in memory ----------------------------------------------------------------------------------------------


@torch.no_grad()
def arrange_weights(model: Transformer) -> None:
    """Place what one product reads in one storage, on every device, and make room after the output table on a GPU.

    Parameters keep their names, shapes and values.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            layers = [module.query, module.key, module.value]
        elif isinstance(module, FeedForward) and module.gate is not None and module.config.clamp is None:
            layers = [module.gate, module.up]
        else:
            continue
        stored: list[Any]
        if can_join(layers):
            stored = [[layer.weight for layer in layers], [layer.bias for layer in layers]]
        elif can_join_quantized(layers):
            stored = [list(buffers) for buffers in zip(*(layer.packed_matrix for layer in layers), strict=True)]
        else:
            continue
        for tensors in stored:
            if tensors[0] is not None:
                join_storage(tensors)
    head = model.head
    table = model.output_embedding if head is None or head.output is None else getattr(head.output, "weight", None)
    if isinstance(table, Tensor) and needs_padding(table):
        make_room(table)


def can_join_quantized(layers: Sequence[nn.Module]) -> bool:
    """Return whether all layers are quantized alike for the kernel, and either all of them or none have a bias."""
    quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    kinds = {
        (layer.packed.dtype, layer.packed.shape[-1], layer.scale.shape[-1], layer.bias is None) for layer in quantized
    }
    return len(quantized) == len(layers) and len(kinds) == 1 and all(layer.activation_bits == 16 for layer in quantized)


def join_storage(tensors: Sequence[Tensor]) -> None:
    """Move tensors into one storage, one after the other, so that `adjacent_view` can view them as one tensor."""
    if adjacent_view(tensors) is None:
        joined = torch.cat([tensor.detach() for tensor in tensors])
        for tensor, part in zip(tensors, joined.split([tensor.shape[0] for tensor in tensors]), strict=True):
            tensor.data = part


def adjacent_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a view of several tensors as one tensor, concatenated along dimension 0.

    Return None if they do not follow each other in one storage.
    """
    first = tensors[0]
    storage = first.untyped_storage()
    end = first.data_ptr()
    for tensor in tensors:
        is_here = tensor.data_ptr() == end and tensor.untyped_storage().data_ptr() == storage.data_ptr()
        if not is_here or not tensor.is_contiguous():
            return None
        end += tensor.nbytes
    rows = sum(tensor.shape[0] for tensor in tensors)
    view = torch.empty(0, dtype=first.dtype, device=first.device)
    return view.set_(storage, first.storage_offset(), (rows, *first.shape[1:]), first.stride())


def needs_padding(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype in HALF_DTYPES and weight.shape[0] % TABLE_MULTIPLE != 0


def make_room(weight: Tensor) -> None:
    """Move a weight into a larger storage with rows of zeros after it; the shape and values of the weight stay."""
    if _padded_view(weight) is None:
        weight.data = padded_table(weight)[: len(weight)]


def padded_table(weight: Tensor) -> Tensor:
    """Return a weight with rows of zeros after it: a view if they are stored there (see `make_room`), else a copy."""
    view, missing = _padded_view(weight), -len(weight) % TABLE_MULTIPLE
    return torch.cat((weight.detach(), weight.new_zeros(missing, weight.shape[1]))) if view is None else view


def _padded_view(weight: Tensor) -> Tensor | None:
    rows, width = weight.shape
    size = -(-rows // TABLE_MULTIPLE) * TABLE_MULTIPLE
    nbytes = size * width * weight.element_size()
    has_room = weight.is_contiguous() and weight.storage_offset() == 0 and weight.untyped_storage().nbytes() == nbytes
    return weight.detach().as_strided((size, width), (width, 1)) if has_room and rows < size else None
