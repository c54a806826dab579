"""C++ kernels for training on a CPU: linear layers, GELU (tanh) and causal attention, each with its gradient.

They run where they are faster, on large fp32 tensors that require gradients.  Everything else is left to torch:
forward-mode differentiation, vmap, tracing, compilation and double backward.  The choice depends only on the machine,
its number of threads and the shapes, so that a resumed training run computes exactly the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from monoblock.kernels.cpu import library
from monoblock.kernels.cpu.library import has_matrix_tiles, load_kernels

PLAIN_TYPES = (Tensor, nn.Parameter)
MIN_ELEMENTS = 1 << 16  # smaller tensors are not worth compiling the kernels for
MIN_TILE_ROWS = 256  # rows of x from which a linear layer is faster in matrix tiles
MAX_HEAD_ELEMENTS = 1 << 16  # elements in the keys of one head; more do not fit in a core's cache


def is_eager_training(*tensors: Tensor) -> bool:
    """Return whether the C++ training kernels can be used for these tensors.

    They can if gradients are enabled, the tensors are fp32 CPU tensors and the first is large, one of them requires a
    gradient, and no tracing, compilation, autocast or torch.func transform is active.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or tensors[0].numel() < MIN_ELEMENTS:
        return False
    if not all(type(x) in PLAIN_TYPES and x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors):
        return False
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    is_traced = torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0
    is_plain = not is_transformed and not is_traced and not torch.is_autocast_enabled("cpu")
    return is_plain and any(x.requires_grad for x in tensors)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute F.linear(x, weight, bias) for training.

    With matrix tiles (AMX), fp32 numbers are split into three bfloat16 numbers each; the result is as accurate as in
    fp32, and takes less time.
    """
    tensors, is_large = (x, weight) if bias is None else (x, weight, bias), x.numel() >= MIN_TILE_ROWS * x.shape[-1]
    if x.dim() > 1 and is_large and is_eager_training(*tensors) and weight.is_contiguous() and has_matrix_tiles():
        return _LinearFunction.apply(x, weight, bias)
    with library.without_slow_onednn():
        return F.linear(x, weight, bias)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.ops.monoblock.linear_tiles(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows, grad_x = grad.flatten(0, -2), None
        if needs_x:
            is_double = torch.is_grad_enabled()  # double backward
            grad_x = grad @ weight if is_double else torch.ops.monoblock.linear_tiles_grad_input(grad, weight)
        return grad_x, rows.T @ x.flatten(0, -2) if needs_weight else None, rows.sum(0) if needs_bias else None


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute GELU by its tanh approximation (Hendrycks and Gimpel 2016).

    It is 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
    """
    if is_eager_training(x) and x.is_contiguous() and load_kernels().is_ready:
        return _GeluFunction.apply(x)
    return F.gelu(x, approximate="tanh")


def gelu_tanh_inference(x: Tensor) -> Tensor:
    """Compute `gelu_tanh` for inference with the C++ kernel, which must be loaded, wherever it supports x."""
    is_supported = type(x) is Tensor and x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous()
    if not is_supported or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    out: Tensor = torch.ops.monoblock.gelu_tanh(x)
    return out


class _GeluFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.ops.monoblock.gelu_tanh(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward
            return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
        return torch.ops.monoblock.gelu_tanh_backward(grad, x)


def supports_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether `attend_causal` can be used for q (B, H, T, K) and k, v (B, G, T, *), and is faster than torch.

    It is faster on short sequences if there is at least one key head for every thread.
    """
    if not is_eager_training(q, k, v) or q.shape[2] != k.shape[2] or any(x.stride(-1) != 1 for x in (q, k, v)):
        return False
    is_short = k.shape[2] * max(k.shape[3], v.shape[3]) <= MAX_HEAD_ELEMENTS
    return is_short and k.shape[0] * k.shape[1] >= torch.get_num_threads() and load_kernels().is_ready


def attend_causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Attend from q (B, H, T, K) to k, v (B, G, T, *), where each query sees the keys up to its own position."""
    return _CausalAttentionFunction.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)


class _CausalAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, logs = torch.ops.monoblock.attend_causal(q, k, v, scale)
        ctx.save_for_backward(q, k, v, out, logs)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logs = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward
            return *_reference_gradients(grad, q, k, v, ctx.scale), None
        return *torch.ops.monoblock.attend_causal_backward(grad, q, k, v, out, logs, ctx.scale), None


def _reference_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor | None, ...]:
    """Compute the gradients of causal attention with torch operations, so that they can be differentiated again."""
    q, k, v = inputs = tuple(x.view_as(x) for x in (q, k, v))  # three inputs, even if one tensor is passed three times
    with sdpa_kernel(SDPBackend.MATH):
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    differentiable = [x for x in inputs if x.requires_grad]
    grads = iter(torch.autograd.grad(out, differentiable, grad, create_graph=True))
    return tuple(next(grads) if x.requires_grad else None for x in inputs)
