"""Triton kernels that multiply a weight stored in 8 or 4 bits by one vector on a GPU, without dequantizing the weight.

The vector is rounded to 8 bits, with a scale for each block of 32 elements, so that one instruction adds four products
of integers.  For normally distributed elements the rounding error is about three times that of bfloat16, for small
elements beside a large one more: it is relative to the largest of the block.

An RMS norm between two products is computed by their kernels: the first multiplies its output by the weight of the norm
before it rounds it, and the second multiplies its result by the factor of the norm (see `NormInput`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.kernels.gpu import (
    ACTIVATION_CODES,
    QUANTIZED_BLOCK,
    Activations,
    NormInput,
    QuantizedVector,
    has_kernels,
    is_available,
    launch_options,
    next_power_of_two,
    triton_kernels,
)

BLOCKS_PER_PROGRAM = 8  # in the kernel that quantizes a vector
# A product before a norm: blocks, tiles loaded in advance and warps of a program, and the rows from which it is faster
# than two kernels. With fewer rows most multiprocessors of a GPU would be idle; with 8 bits two kernels are faster.
NORM_TILE, MIN_NORM_ROWS = (64, 1, 16), 4096


class GpuQuantizedMatrix(NamedTuple):
    """A quantized matrix (N, K) as the kernels read it; `scales` has the minima too if `bits` is 4."""

    packed: Tensor  # int8 (N, K), or uint8 (N, K / 2)
    scales: Tensor  # bfloat16 (N, groups), or int32 (N, groups) with a pair of bfloat16
    bits: int

    @property
    def columns(self) -> int:
        return self.packed.shape[-1] * (1 if self.bits == 8 else 2)

    @property
    def group(self) -> int:
        """The number of weights that share a scale."""
        return self.columns // self.scales.shape[-1]


def prepare_matrix(packed: Tensor, scale: Tensor, least: Tensor | None) -> GpuQuantizedMatrix:
    """Arrange a matrix of quantization/packing.py for the kernels; only the scales of 4-bit weights are copied."""
    if least is None:
        return GpuQuantizedMatrix(packed, scale, 8)
    return GpuQuantizedMatrix(packed, torch.stack((scale, least), -1).view(torch.int32).squeeze(-1), 4)


def supports_quantized_linear(x: Tensor, matrix: GpuQuantizedMatrix) -> bool:
    """Return whether `quantized_linear` can be used: for a single 16-bit vector on a GPU, and whole groups."""
    is_vector = x.numel() == x.shape[-1] and x.dtype != torch.float32 and has_kernels(x)
    return is_vector and has_kernel(matrix, x.shape[-1])


def has_kernel(matrix: GpuQuantizedMatrix, in_features: int) -> bool:
    """Return whether the kernel can read a matrix: its rows have no padding, and its groups consist of whole blocks."""
    return matrix.columns == in_features and in_features % QUANTIZED_BLOCK == matrix.group % QUANTIZED_BLOCK == 0


class NextNorm(NamedTuple):
    """An RMS norm of the output of a product."""

    weight: Tensor  # (N,)
    eps: float


def quantized_linear(
    x: Activations,
    matrix: GpuQuantizedMatrix,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    next_norm: NextNorm | None = None,
) -> Activations:
    """Compute activation(x W^T + bias) + residual for a vector x (…, K) and a quantized matrix W (N, K).

    The output is (…, N).  With `next_norm`, the kernel also computes the input of that norm for the next product, if it
    can (see `can_join_norm`).
    """
    N, K = len(matrix.packed), x.values.shape[-1]
    out = x.values.new_empty(*x.values.shape[:-1], N)
    flags = (bias is not None, residual is not None, -1 if activation is None else ACTIVATION_CODES[activation])
    added = (matrix.packed if bias is None else bias, matrix.packed if residual is None else residual)
    kernels, vector = triton_kernels("triton_quantized"), x.rounded
    if vector is None:
        vector, grid = QuantizedVector.empty(K, out.device), (-(-K // (QUANTIZED_BLOCK * BLOCKS_PER_PROGRAM)),)
        values, options = x.values.contiguous(), launch_options()
        kernels.quantize_kernel[grid](values, *vector, K, BLOCKS_PER_PROGRAM, num_warps=4, **options)
    vector, squares, eps = vector if isinstance(vector, NormInput) else (vector, None, 0.0)
    started, norm_arguments = None, (out,) * 5
    if next_norm is not None and can_join_norm(matrix):
        started = NormInput.empty(N, out.device, next_norm.eps)
        norm_arguments = (next_norm.weight, *started.weighted, started.squares)
    rows, blocks, ahead, warps = _tile(matrix, N) if started is None else (QUANTIZED_BLOCK, *NORM_TILE)
    kernels.quantized_matvec_kernel[(-(-N // rows),)](
        *vector, vector.sums if squares is None else squares, matrix.packed, matrix.scales, *added, out,
        *norm_arguments, N, K, eps, matrix.group, matrix.bits, *flags,
        SQUARES=0 if squares is None else next_power_of_two(len(squares)), HAS_NORM=started is not None,
        ROWS=rows, BLOCKS=blocks, AHEAD=ahead, EVEN=matrix.packed.shape[-1] // 16 % blocks == 0, num_warps=warps,
        **launch_options(),
    )  # fmt: skip
    return Activations(out, started)


def can_join_norm(matrix: GpuQuantizedMatrix) -> bool:
    """Return whether a product can also compute the input of a norm of its output, and is faster for it."""
    N = len(matrix.packed)
    return matrix.bits == 4 and N >= MIN_NORM_ROWS and N % QUANTIZED_BLOCK == 0


def can_dequantize(matrix: GpuQuantizedMatrix, in_features: int) -> bool:
    """Return whether `dequantize` can be used: on a GPU, and if the groups of a row are whole."""
    return matrix.packed.is_cuda and matrix.packed.dim() == 2 and matrix.columns == in_features and is_available()


def dequantize(matrix: GpuQuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """Return a quantized matrix as floating-point numbers (N, K)."""
    N, K = len(matrix.packed), matrix.columns
    out = torch.empty(N, K, dtype=dtype, device=matrix.packed.device)
    triton_kernels("triton_quantized").dequantize_kernel[(N, -(-K // 1024))](
        matrix.packed, matrix.scales, out, K, matrix.group, matrix.bits, 1024, num_warps=4
    )
    return out


def _tile(matrix: GpuQuantizedMatrix, N: int) -> tuple[int, int, int, int]:
    """Return the rows of a tile, the blocks of 16 bytes in each, the tiles loaded in advance, and the warps.

    They are the fastest measured on an H200.  A warp reads a block with each of its 32 threads.
    """
    if N >= 8192:
        rows, blocks, ahead = (4, 64, 1) if matrix.bits == 8 else (4, 32, 1)
    else:
        rows, blocks, ahead = (2, 128, 2) if matrix.bits == 8 else (2, 128, 1)
    return rows, min(blocks, max(32, next_power_of_two(matrix.packed.shape[-1] // 16))), ahead, 1
