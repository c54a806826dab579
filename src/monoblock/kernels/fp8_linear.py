"""Linear layers with matrix products in 8-bit floating point (Micikevicius et al. 2022), for training on a GPU.

The output of a layer (`Linear` in nn/linear.py) and the gradient of its input are computed from operands in e4m3,
with a scale for each row, such that the largest number of the row is the largest one of the format.  Products are
summed by the tensor cores, with fewer digits than fp32 in sums of at most MAX_FAST_SUM terms, and multiplied by the
scales.  So are the logits of a language model, with one scale for each matrix.

The gradients of weights stay in bfloat16, because both operands would have to be quantized again, along the other axis.
So do layers whose sizes are not multiples of SIZE_MULTIPLE, and experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from monoblock.kernels.gpu import is_available, next_power_of_two, triton_kernels

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST_MAXIMUM = 1e-30  # of a row: its scale is not 0
SIZE_MULTIPLE = 16  # of inputs and outputs
MAX_FAST_SUM = 4096  # terms of a sum that the tensor cores may add with fewer digits
MAX_FUSED, MAX_KERNEL = 1024, 16384  # numbers in a row: what torch.compile reads once, and what the kernel can
MIN_CAPABILITY = (8, 9)  # of the GPU (Ada)


def has_fp8(device: torch.device) -> bool:
    """Return whether a device multiplies numbers of 8 bits in its tensor cores."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def is_fp8_training(device: str) -> bool:
    """Return whether gradients are computed under autocast to bfloat16, the one place for products in 8 bits."""
    is_autocast = torch.is_grad_enabled() and torch.is_autocast_enabled(device)
    return is_autocast and torch.get_autocast_dtype(device) == torch.bfloat16


def supports_fp8(x: Tensor, weight: Tensor) -> bool:
    """Return whether `fp8_linear` can be used for x (…, D) and weight (O, D) in training: their sizes fit."""
    is_plain = type(weight) in (Tensor, nn.Parameter)  # not split among processes
    is_trained = is_fp8_training(x.device.type) and (x.requires_grad or weight.requires_grad)
    return is_trained and is_plain and sizes_fit(weight)


def sizes_fit(weight: Tensor) -> bool:
    return all(size % SIZE_MULTIPLE == 0 for size in weight.shape)


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute F.linear(x, weight, bias) in bfloat16, with products in 8 bits; x (…, D), weight (O, D), bias (O,)."""
    rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
    out: Tensor = _Fp8Linear.apply(rows, weight, bias)
    return out.view(*x.shape[:-1], weight.shape[0])


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return multiply(quantize_rows(x), quantize_rows(weight), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = multiply(quantize_rows(grad), quantize_rows(weight.T)) if needs_x else None
        grad_weight = (grad.T @ x).to(weight.dtype) if needs_weight else None
        return grad_x, grad_weight, grad.sum(0).to(ctx.bias_dtype) if needs_bias else None


class Fp8Matrix(NamedTuple):
    """A matrix of 8-bit numbers: the matrix is about values * scales."""

    values: Tensor  # (N, K), e4m3
    scales: Tensor  # (N, 1) or (), fp32


def quantize_rows(x: Tensor) -> Fp8Matrix:
    """Round a matrix (N, K) to e4m3 with a scale for each row.  Products of a row with a NaN or an infinity are NaN.

    torch.compile joins the rounding of short rows with the function that computes x.  For long rows it would compute x
    twice, so they have a kernel, if x is stored row by row.
    """
    if x.is_cuda and MAX_FUSED < x.shape[1] <= MAX_KERNEL and x.stride(1) == 1 and is_available():
        return Fp8Matrix(*torch.ops.monoblock_python.quantize_rows(x))
    return quantize_rows_plain(x)


def quantize_rows_plain(x: Tensor) -> Fp8Matrix:
    """Compute `quantize_rows` step by step, on any device."""
    largest = x.abs().amax(-1, keepdim=True).float().clamp(min=SMALLEST_MAXIMUM)
    return Fp8Matrix((x.float() * (E4M3_MAX / largest)).to(E4M3).contiguous(), largest / E4M3_MAX)


@torch.library.custom_op("monoblock_python::quantize_rows", mutates_args=())
def _quantize_long_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values (N, K) and the scales (N, 1) of `quantize_rows`, by the kernel."""
    N, K = x.shape
    values = torch.empty(N, K, dtype=E4M3, device=x.device)
    scales = torch.empty(N, 1, dtype=torch.float32, device=x.device)
    triton_kernels("triton_training").quantize_rows_kernel[(N,)](
        x, values, scales, K, x.stride(0), E4M3_MAX, SMALLEST_MAXIMUM,
        BLOCK=next_power_of_two(K), num_warps=4 if K <= 4096 else 8,
    )  # fmt: skip
    return values, scales


@_quantize_long_rows.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty((len(x), 1), dtype=torch.float32)


def quantize_matrix(x: Tensor) -> Fp8Matrix:
    """Round a matrix (N, K) to e4m3 with one scale."""
    largest = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32).clamp(min=SMALLEST_MAXIMUM)
    return Fp8Matrix((x.float() * (E4M3_MAX / largest)).to(E4M3), largest / E4M3_MAX)


def multiply(a: Fp8Matrix, b: Fp8Matrix, bias: Tensor | None = None) -> Tensor:
    """Return the product of a (N, K) and the transpose of b (M, K), plus bias (M,), in bfloat16.

    Both have a scale for each row, or both have one scale.
    """
    return (multiply_fused if a.values.is_cuda else multiply_plain)(a, b, bias)


def multiply_fused(a: Fp8Matrix, b: Fp8Matrix, bias: Tensor | None = None) -> Tensor:
    """Compute `multiply` with one kernel.  Long sums are added in full fp32."""
    return torch._scaled_mm(
        a.values,
        b.values.T,
        scale_a=a.scales,
        scale_b=b.scales.t(),
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,
        use_fast_accum=a.values.shape[1] <= MAX_FAST_SUM,
    )


def multiply_plain(a: Fp8Matrix, b: Fp8Matrix, bias: Tensor | None = None) -> Tensor:
    """Compute `multiply` step by step, on any device."""
    product = (a.values.float() @ b.values.float().T) * a.scales * b.scales.t()
    return (product if bias is None else product + bias.to(torch.bfloat16)).to(torch.bfloat16)
