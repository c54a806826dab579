"""What makes training on a CPU quicker: GELU (tanh) and causal attention by kernels, each with its gradient.

They run where they pay, on many fp32 numbers of which gradients are wanted; everything else is left to torch, and so is
whatever looks closer than an ordinary backward pass: forward mode, vmap, tracing, compilation.  Which of the two runs
depends on the machine, its threads and the shapes alone, so that a run that is killed goes on with the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from monoblock.native.library import load

MANY = 1 << 16  # numbers: fewer are not worth asking for a compiler
HEAD = 1 << 16  # numbers in one head of keys: more do not stay in a core's cache


def trained(*given: Tensor) -> bool:
    """Whether this is ordinary training on a CPU, with many numbers: nobody records or transforms what is computed."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or given[0].numel() < MANY:
        return False
    plain = all(type(x) is Tensor and x.device.type == "cpu" and x.dtype == torch.float32 for x in given)
    if not plain or not any(x.requires_grad for x in given) or torch.is_autocast_enabled("cpu"):
        return False
    transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    recorded = torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0
    return not transformed and not recorded


def gelu_tanh(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016)."""
    if trained(x) and x.is_contiguous() and load().ready:
        return _Gelu.apply(x)
    return F.gelu(x, approximate="tanh")


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.ops.monoblock.gelu_tanh(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # this gradient is to have one itself
            return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
        return torch.ops.monoblock.gelu_tanh_backward(grad, x)


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel is for q (B, H, T, K) and k, v (B, G, T, *): short sequences, and work for every core."""
    if not trained(q, k, v) or q.shape[2] != k.shape[2] or any(x.stride(-1) != 1 for x in (q, k, v)):
        return False
    short = k.shape[2] * max(k.shape[3], v.shape[3]) <= HEAD
    return short and k.shape[0] * k.shape[1] >= torch.get_num_threads() and load().ready


def attend_causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Equation 1 where each query sees the keys up to its own."""
    return _Attention.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, logs = torch.ops.monoblock.attend_causal(q, k, v, scale)
        ctx.save_for_backward(q, k, v, out, logs)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logs = ctx.saved_tensors
        if torch.is_grad_enabled():  # these gradients are to have some themselves
            return *_plain_gradients(grad, q, k, v, ctx.scale), None
        return *torch.ops.monoblock.attend_causal_backward(grad, q, k, v, out, logs, ctx.scale), None


def split(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """The columns of x (B, T, *) apart."""
    if trained(x) and x.dim() == 3 and x.is_contiguous():
        return _Split.apply(x, sizes)
    return x.split(sizes, dim=-1)


class _Split(torch.autograd.Function):
    """Gradients that lie side by side already, as those of `attend_causal` do, are put together without a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return x.split(sizes, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        width = sum(grad.shape[-1] for grad in grads)
        B, T, _ = grads[0].shape
        at, storage = grads[0].storage_offset(), grads[0].untyped_storage().data_ptr()
        whole = not torch.is_grad_enabled() and at == 0
        for grad in grads:
            beside = grad.storage_offset() == at and grad.untyped_storage().data_ptr() == storage
            whole, at = whole and beside and grad.stride() == (T * width, width, 1), at + grad.shape[-1]
        return grads[0].as_strided((B, T, width), (T * width, width, 1)) if whole else torch.cat(grads, dim=-1), None


def _plain_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor | None, ...]:
    q, k, v = heads = tuple(x.view_as(x) for x in (q, k, v))  # three inputs, even where one tensor is given thrice
    with sdpa_kernel(SDPBackend.MATH):
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    wanted = [x for x in heads if x.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return tuple(next(found) if x.requires_grad else None for x in heads)
