"""Triton kernels for decoding one token on a GPU: linear layer, norm, gated activation, choice of the best token.

A decoding step reads every weight once and computes little with it, so memory bandwidth and the number of kernel
launches decide its speed.  Each function computes the same as a function in nn/, up to rounding.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
MAX_ROWS = 64  # of x in `linear`
MAX_SMALL_WEIGHT = 1 << 22  # elements of a weight that `linear` multiplies by several rows; torch is faster for larger
COLUMN_MULTIPLE = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
QUANTIZED_BLOCK = 32  # elements of a vector that share a scale
TARGET_PROGRAMS = 528  # four for each multiprocessor of an H200: fewer leave some idle


def assume_constant_result(function: Callable[..., bool]) -> Callable[..., bool]:
    """Let torch.compile call a function while it compiles, as torch.compiler.assume_constant_result does.

    That imports torch._dynamo, for which every command of the package would start two seconds later.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@assume_constant_result  # torch.compile would trace the function and warn that it is cached
def is_available() -> bool:
    """Return whether Triton is installed and there is a GPU of compute capability 8.0 or more."""
    return _is_available()


@functools.cache
def _is_available() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8


def has_kernels(x: Tensor) -> bool:
    """Return whether x is on a GPU that has the kernels, in a dtype that they read."""
    return x.is_cuda and x.dtype in DTYPES and is_available()


@functools.cache
def triton_kernels(file: str = "triton") -> Any:
    """Return a module of this folder with Triton kernels; it can be imported only where `is_available`."""
    return importlib.import_module(f"monoblock.kernels.{file}")


def launch_options() -> dict[str, bool]:
    """Return the options of every launch: whether the next kernel may start while this one runs (see triton.py)."""
    return _launch_options(torch.cuda.current_device())


@functools.cache
def _launch_options(device: int) -> dict[str, bool]:
    has_pdl = torch.cuda.get_device_capability(device)[0] >= 9
    return {"PDL": has_pdl, "launch_pdl": has_pdl}


def supports_linear(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear` can be used for x (…, K) and weight (N, K), and is faster than torch.

    It is for a single vector, and for up to MAX_ROWS vectors if the weight is small, so that launches decide.
    """
    if x.dtype == torch.float32 or x.dtype != weight.dtype or not has_kernels(x):
        return False
    rows = x.numel() // x.shape[-1]
    is_small = weight.numel() <= MAX_SMALL_WEIGHT and weight.shape[-1] % COLUMN_MULTIPLE == 0
    return x.is_contiguous() and weight.is_contiguous() and (rows == 1 or (1 < rows <= MAX_ROWS and is_small))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """Compute activation(x weight^T + bias) + residual for x (…, K), weight (N, K), bias (N,) and residual (…, N).

    The output is (…, N).  Every intermediate result is rounded to the dtype of x, as by separate kernels.

    exact: the bits of a vector do not depend on the others, of which there may be any number.  Every sum is added up in
    steps of 16 inputs in their order, whatever the tile: the instruction that multiplies has 64 rows, of which some may
    be empty.  K must be a multiple of 16.
    """
    (N, K), M = weight.shape, x.numel() // x.shape[-1]
    out = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
    operands = (x, weight, weight if bias is None else bias, weight if residual is None else residual, out)
    flags = (bias is not None, residual is not None, -1 if activation is None else ACTIVATION_CODES[activation])
    kernels, options = triton_kernels(), launch_options()
    if M == 1 and not exact:
        rows, columns, warps = _vector_tile(N, K)
        kernels.matvec_kernel[(-(-N // rows),)](
            *operands, N, K, *flags, False, rows, columns, num_warps=warps, **options
        )
    elif M:
        m, n, k, warps, stages = _tile(M, N, K)
        shape = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}
        shape["PREFETCH"] = M <= 16 and k % 64 == 0 and N * K <= MAX_SMALL_WEIGHT
        kernels.matmul_kernel[(-(-N // n), -(-M // m))](*operands, M, N, K, *flags, **shape, **options)
    return out


def _tile(M: int, N: int, K: int) -> tuple[int, int, int, int, int]:
    """Return the sizes M, N and K of a tile, warps and stages, the fastest measured on an H200.

    No choice changes the order of a sum.
    """
    depth = next(size for size in (256, 128, 64, 32, 16) if K % size == 0)
    if M > MAX_ROWS:
        return 128, 128, min(depth, 64), 8, 3
    has_room = depth == 256 and _has_room_for_large_tiles(torch.cuda.current_device())
    if M <= 16 and N * K <= MAX_SMALL_WEIGHT:
        return (
            (16, 16, 512, 4, 5) if has_room and K % 512 == 0 and K >= 2048 else (16, 16, depth, 2, 4 if N < 2048 else 6)
        )
    if M <= 16:
        return 16, 32, depth, 2, 4
    if not has_room:
        depth = min(depth, 128)
    return (64, 16, depth, 4, 4) if N < 2048 else (64, 32, min(depth, 128), 4, 4)


def supports_gated_linear(x: Tensor, weight: Tensor) -> bool:
    """Return whether `gated_linear` can be used: for a single 16-bit vector x (…, K), and a weight (2F, K)."""
    return x.numel() == x.shape[-1] and supports_linear(x, weight)


def gated_linear(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """Compute activation(gate) * up (…, F) for x (…, K); the weight (2F, K) has the rows of gate, then those of up."""
    F, K = len(weight) // 2, weight.shape[-1]
    out = torch.empty(*x.shape[:-1], F, dtype=x.dtype, device=x.device)
    columns = 512 if K <= 1024 else 1024  # of a tile of two rows of gate, and of one of up
    triton_kernels().matvec_kernel[(-(-F // 2),)](
        x, weight, weight, weight, out, F, K, False, False, ACTIVATION_CODES[activation], True, 2, columns,
        num_warps=4, **launch_options(),
    )  # fmt: skip
    return out


def _vector_tile(N: int, K: int) -> tuple[int, int, int]:
    """Return the rows and columns of a tile and the number of warps, the fastest measured on an H200."""
    if K <= 1024:
        return (8, 256, 2) if N > 16384 else (4, 1024, 2) if N >= 3072 else (2, 1024, 2) if N >= 2048 else (2, 1024, 4)
    if K > 8192:
        return 4, 1024, 4
    if N < 2048:
        return (2, 4096, 4) if K <= 4096 else (2, 2048, 4)
    return (2, 2048, 4) if N >= 8192 else (4, 1024, 2)


@functools.cache
def _has_room_for_large_tiles(device: int) -> bool:
    """Return whether the shared memory of a multiprocessor has room for four tiles of 64 x 256 and 16 x 256."""
    properties = torch.cuda.get_device_properties(device)
    size: int = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return size >= 4 * (64 + 16) * 256 * 2


class QuantizedVector(NamedTuple):
    """A vector (K,) rounded to 8 bits, with a scale for each block of 32 elements."""

    integers: Tensor  # int8 (K,)
    scales: Tensor  # fp32 (K / 32,)
    sums: Tensor  # fp32 (K / 32,), the sum of each block

    @classmethod
    def empty(cls, K: int, device: torch.device) -> QuantizedVector:
        scales, sums = torch.empty(2, K // QUANTIZED_BLOCK, dtype=torch.float32, device=device)
        return cls(torch.empty(K, dtype=torch.int8, device=device), scales, sums)


class NormInput(NamedTuple):
    """The input x (K,) of an RMS norm, times the weight of the norm, rounded to 8 bits.

    What is missing is the factor 1 / sqrt(mean of x² + eps).  A product multiplies its result by it, so that the norm
    needs no kernel of its own.
    """

    weighted: QuantizedVector
    squares: Tensor  # fp32 (K / 32,), the sum of x² in each block
    eps: float

    @classmethod
    def empty(cls, K: int, device: torch.device, eps: float) -> NormInput:
        squares = torch.empty(K // QUANTIZED_BLOCK, dtype=torch.float32, device=device)
        return cls(QuantizedVector.empty(K, device), squares, eps)


class Activations(NamedTuple):
    """Activations (…, K) and, if a kernel has computed it beside them, the 8-bit form of a single vector.

    With a `NormInput`, the vector that a product reads is the norm of `values`, which the product itself completes.
    """

    values: Tensor
    rounded: QuantizedVector | NormInput | None = None


def next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def quantized_arguments(out: Tensor, is_wanted: bool) -> tuple[tuple[Tensor, Tensor, Tensor], QuantizedVector | None]:
    """Return the arguments of a kernel for the 8-bit form of `out`, and that form: None if it is not computed.

    It is computed if it is wanted and `out` is a single vector of whole blocks.
    """
    K = out.shape[-1]
    if not is_wanted or out.numel() != K or K % QUANTIZED_BLOCK:
        return (out, out, out), None
    rounded = QuantizedVector.empty(K, out.device)
    return rounded, rounded


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    centered: bool,
    cast_after_scale: bool,
    quantize: bool = False,
) -> Activations:
    """Compute `layer_norm` of nn/norm.py if `centered`, else `rms_norm`, over the last axis of x in one kernel.

    With `quantize`, the kernel also computes the 8-bit form of a single vector.
    """
    out, K = torch.empty_like(x), x.shape[-1]
    quantized, rounded = quantized_arguments(out, quantize)
    parameters = (x if weight is None else weight, x if bias is None else bias)
    triton_kernels().norm_kernel[(x.numel() // K,)](
        x, *parameters, out, *quantized, K, eps,
        CENTERED=centered, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, CAST_AFTER_SCALE=cast_after_scale,
        QUANTIZE=rounded is not None, BLOCK=next_power_of_two(K), num_warps=4 if K < 4096 else 8, **launch_options(),
    )  # fmt: skip
    return Activations(out, rounded)


def gated_activation(gate_up: Tensor, activation: str, *, quantize: bool = False) -> Activations:
    """Compute activation(gate) * up (…, F); `gate_up` (…, 2F) is the concatenation of gate and up.

    With `quantize`, the kernel also computes the 8-bit form of a single vector.
    """
    F = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], F, dtype=gate_up.dtype, device=gate_up.device)
    quantized, rounded = quantized_arguments(out, quantize)
    blocks = -(-F // 512)
    triton_kernels().gated_activation_kernel[(gate_up.numel() // (2 * F), blocks)](
        gate_up, out, *quantized, F, ACTIVATION_CODES[activation], rounded is not None, 512,
        num_warps=4, **launch_options(),
    )  # fmt: skip
    return Activations(out, rounded)


def argmax(x: Tensor) -> Tensor:
    """Return the index of the largest element of each row of x (B, V), the first if several are equal.

    On a GPU one kernel finds it, which for few rows is much faster than `Tensor.argmax`.
    """
    if x.stride(-1) != 1 or not has_kernels(x):
        return x.argmax(-1)
    B, V = x.shape
    out = torch.empty(B, dtype=torch.long, device=x.device)
    triton_kernels().argmax_kernel[(B,)](x, out, V, x.stride(0), 16384, num_warps=32, **launch_options())
    return out
