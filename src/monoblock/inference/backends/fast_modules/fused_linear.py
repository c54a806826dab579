"""Compute several linear layers with the same input, such as query, key and value, in one matrix product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.kernels import gpu as kernels
from monoblock.kernels.cpu.library import has_matrix_tiles
from monoblock.nn.linear import join_weights
from monoblock.quantization.cpu_linear import ROW_MULTIPLE

MIN_TILE_ROWS = 64  # rows from which fp32 products in matrix tiles are faster than torch's


class FusedLinear:
    """Several linear layers with the same input, computed as one.

    `weight` (ΣN, K) and `bias` (ΣN,) are the layers' weights (N, K) and biases (N,), concatenated.  They are views of
    the layers' parameters if those are adjacent in memory (see `join_storage`), otherwise copies, which `refresh`
    updates.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = linears
        self.sizes = [linear.out_features for linear in linears]
        weight = adjacent_view([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        bias = adjacent_view(biases) if biases else None
        self.is_copy = weight is None or (bool(biases) and bias is None)
        self.weight, self.bias = join_weights(linears) if weight is None or self.is_copy else (weight, bias)

    def refresh(self) -> None:
        """Copy the layers' current parameters again; do nothing if `weight` and `bias` are views of them."""
        if self.is_copy:
            weight, bias = join_weights(self.linears)
            self.weight.copy_(weight)
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)

    def __call__(self, x: Tensor) -> Tensor:
        return fast_linear(x, self.weight, self.bias)

    def supports_gated(self, x: Tensor) -> bool:
        """Return whether `run_gated` can be used for x (…, K)."""
        return self.bias is None and kernels.supports_gated_linear(x, self.weight)

    def run_gated(self, x: Tensor, activation: str) -> Tensor:
        """Compute activation(gate) * up for a vector x; gate and up are the two layers."""
        return kernels.gated_linear(x, self.weight, activation)


def adjacent_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a view of several tensors as one tensor, concatenated along dimension 0.

    Return None if they do not follow each other in one storage.
    """
    first = tensors[0]
    storage = first.untyped_storage()
    ends = [tensor.data_ptr() + tensor.numel() * tensor.element_size() for tensor in tensors]
    adjacent = all(
        end == tensor.data_ptr() and tensor.untyped_storage().data_ptr() == storage.data_ptr()
        for end, tensor in zip(ends[:-1], tensors[1:], strict=True)
    )
    if not adjacent or not all(tensor.is_contiguous() for tensor in tensors):
        return None
    rows = sum(tensor.shape[0] for tensor in tensors)
    view = torch.empty(0, dtype=first.dtype, device=first.device)
    return view.set_(storage, first.storage_offset(), (rows, *first.shape[1:]), first.stride())


def join_storage(tensors: Sequence[Tensor]) -> None:
    """Move tensors into one storage, one after the other, so that `adjacent_view` can view them as one tensor."""
    if adjacent_view(tensors) is None:
        joined = torch.cat([tensor.detach() for tensor in tensors])
        for tensor, part in zip(tensors, joined.split([tensor.shape[0] for tensor in tensors]), strict=True):
            tensor.data = part


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, kernel_rows: range = range(0)) -> Tensor:
    """Compute F.linear(x, weight, bias), with a kernel of this package where that is faster.

    This is so for a few vectors on a GPU and, on a CPU, if the number of rows of x is in `kernel_rows`, or if there
    are more rows and the processor has matrix tiles.
    """
    if kernels.supports_linear(x, weight):
        return kernels.linear(x, weight, bias)
    rows = x.numel() // x.shape[-1]
    if kernel_rows and rows in kernel_rows and x.shape[-1] % ROW_MULTIPLE == 0 and weight.is_contiguous():
        return torch.ops.monoblock.linear_dense(x, weight, bias)
    if kernel_rows and rows >= MIN_TILE_ROWS and weight.is_contiguous() and has_matrix_tiles():
        return torch.ops.monoblock.linear_tiles(x, weight, bias)
    return F.linear(x, weight, bias)
