"""A feed-forward network down(GELU(up(x))) with products in 8 bits: both linear layers of `fp8_linear` as one function.

GELU and its derivative are computed by kernels that also round their results to 8 bits, for the next product, while
they have them at hand; torch.compile would read the rows again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from monoblock.kernels.fp8_linear import (
    E4M3,
    E4M3_MAX,
    MAX_KERNEL,
    SMALLEST_MAXIMUM,
    Fp8Matrix,
    multiply,
    quantize_rows,
    quantize_rows_plain,
    supports_fp8,
)
from monoblock.kernels.gpu import is_available


def supports_fp8_feedforward(x: Tensor, up: Tensor, down: Tensor) -> bool:
    """Return whether `fp8_feedforward` is to be used for x (…, D), up (F, D) and down (D, F), and can be."""
    return supports_fp8(x, up) and supports_fp8(x, down) and up.shape[0] <= MAX_KERNEL


def fp8_feedforward(x: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None) -> Tensor:
    """Compute F.linear(GELU(F.linear(x, up, up_bias)), down, down_bias) in bfloat16, with the tanh form of GELU."""
    rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
    out: Tensor = _Fp8FeedForward.apply(rows, up, up_bias, down, down_bias)
    return out.view(*x.shape[:-1], down.shape[0])


class _Fp8FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None
    ) -> Tensor:
        u = multiply(quantize_rows(x), quantize_rows(up), up_bias)
        hidden, *rounded = torch.ops.monoblock_python.gelu_rows(u)
        ctx.save_for_backward(x, up, u, hidden, down)
        ctx.bias_dtypes = tuple(None if bias is None else bias.dtype for bias in (up_bias, down_bias))
        return multiply(Fp8Matrix(*rounded), quantize_rows(down), down_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, up, u, hidden, down = ctx.saved_tensors
        grad_hidden = multiply(quantize_rows(grad), quantize_rows(down.T))
        grad_u, *rounded = torch.ops.monoblock_python.gelu_backward_rows(u, grad_hidden)
        grad_x = multiply(Fp8Matrix(*rounded), quantize_rows(up.T)) if ctx.needs_input_grad[0] else None
        biases = [
            None if dtype is None else g.sum(0).to(dtype)
            for g, dtype in zip((grad_u, grad), ctx.bias_dtypes, strict=True)
        ]
        return grad_x, (grad_u.T @ x).to(up.dtype), biases[0], (grad.T @ hidden).to(down.dtype), biases[1]


@torch.library.custom_op("monoblock_python::gelu_rows", mutates_args=())
def _gelu_rows(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return GELU(u) for u (N, K), and its rows rounded to 8 bits: values and scales."""
    if not (u.is_cuda and is_available()):
        hidden = F.gelu(u, approximate="tanh")
        return hidden, *quantize_rows_plain(hidden)
    return _launch("gelu_rows_kernel", u)


@torch.library.custom_op("monoblock_python::gelu_backward_rows", mutates_args=())
def _gelu_backward_rows(u: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of u, given that of GELU(u), and its rows rounded to 8 bits."""
    if not (u.is_cuda and is_available()):
        result = torch.ops.aten.gelu_backward(grad, u, approximate="tanh")
        return result, *quantize_rows_plain(result)
    return _launch("gelu_backward_rows_kernel", u, grad.contiguous())


def _launch(name: str, u: Tensor, *more: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from monoblock.kernels import triton_fp8

    N, K = u.shape
    out, values = torch.empty_like(u), torch.empty(N, K, dtype=E4M3, device=u.device)
    scales = torch.empty(N, 1, dtype=torch.float32, device=u.device)
    getattr(triton_fp8, name)[(N,)](
        u, *more, out, values, scales, K, E4M3_MAX, SMALLEST_MAXIMUM,
        BLOCK=1 << (K - 1).bit_length(), num_warps=4 if K <= 2048 else 8,
    )  # fmt: skip
    return out, values, scales


@_gelu_rows.register_fake
def _(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(u), u.new_empty(u.shape, dtype=E4M3), u.new_empty((len(u), 1), dtype=torch.float32)


@_gelu_backward_rows.register_fake
def _(u: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(u), u.new_empty(u.shape, dtype=E4M3), u.new_empty((len(u), 1), dtype=torch.float32)
