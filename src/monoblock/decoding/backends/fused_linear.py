"""Several linear layers of one input as one product: query, key and value, or gate and up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.kernels import gpu as kernels
from monoblock.nn.norm import HALF_DTYPES
from monoblock.quantization.cpu_linear import ROW_MULTIPLE


class FusedLinear:
    """The weights (ΣN, K) and biases of several layers, one below the other.

    They are views of the layers' own weights where those lie side by side (`join_storage`), else a second copy, which
    `refresh` brings up to date.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = linears
        self.sizes = [linear.out_features for linear in linears]
        weights, biases = self._parts()
        weight = adjacent_view(weights)
        bias = adjacent_view(biases) if biases else None
        self.is_copy = weight is None or (bool(biases) and bias is None)
        self.weight = torch.cat(weights) if weight is None or self.is_copy else weight
        self.bias = None if not biases else torch.cat(biases) if bias is None or self.is_copy else bias

    def _parts(self) -> tuple[list[Tensor], list[Tensor]]:
        weights = [linear.weight.detach() for linear in self.linears]
        return weights, [linear.bias.detach() for linear in self.linears if linear.bias is not None]

    def refresh(self) -> None:
        """Copy the layers' weights anew."""
        if self.is_copy:
            weights, biases = self._parts()
            torch.cat(weights, out=self.weight)
            if self.bias is not None:
                torch.cat(biases, out=self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return fast_linear(x, self.weight, self.bias)


def can_fuse(linears: Sequence[nn.Module | None]) -> bool:
    """Whether these are ordinary layers, all with a bias or none."""
    if not all(isinstance(linear, nn.Linear) for linear in linears):
        return False
    return len({linear.bias is None for linear in linears if isinstance(linear, nn.Linear)}) == 1


def adjacent_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """View tensors that lie one behind the other in one storage as one; None if they do not."""
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
    """Move tensors into one storage, one behind the other; each becomes a view of it."""
    if adjacent_view(tensors) is None:
        joined = torch.cat([tensor.detach() for tensor in tensors])
        for tensor, part in zip(tensors, joined.split([tensor.shape[0] for tensor in tensors]), strict=True):
            tensor.data = part


def is_single_gpu_vector(x: Tensor, weight: Tensor) -> bool:
    """Whether x is one 16-bit vector on a GPU, for which there is a matrix-vector kernel."""
    single = x.is_cuda and x.numel() == x.shape[-1] and x.dtype in HALF_DTYPES and x.dtype == weight.dtype
    return single and weight.is_contiguous() and kernels.is_available()


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, kernel_rows: range = range(0)) -> Tensor:
    """F.linear, by a kernel of our own for one vector on a GPU and for `kernel_rows` rows on a CPU."""
    if is_single_gpu_vector(x, weight):
        return kernels.matvec(x, weight, bias)
    rows = x.numel() // x.shape[-1]
    if kernel_rows and rows in kernel_rows and x.shape[-1] % ROW_MULTIPLE == 0 and weight.is_contiguous():
        return torch.ops.monoblock.linear_dense(x, weight, bias)
    return F.linear(x, weight, bias)
