"""The last matrix product of a language model and its cross-entropy on a GPU, without keeping the logits.

The logits of a batch are far larger than all else: those of 32 × 1,024 tokens of GPT-2 take 3.3 GB in 16 bits.  Here
they are computed for a part of the tokens at a time.  One kernel reads them, computes the loss, and writes their
gradient in their place; two products then give the gradients of input and weight.  So the forward pass computes
everything, and the backward pass only multiplies both gradients by that of the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monoblock.kernels.fp8_linear import SIZE_MULTIPLE, is_fp8_training, multiply, quantize_matrix
from monoblock.kernels.gpu import is_available, triton_kernels

BLOCK, WARPS = 2048, 4  # the fastest measured on an H200


def supports_linear_cross_entropy(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear_cross_entropy` can be used for x (…, D) and weight (V, D), and is faster for a large V.

    It can on a GPU with Triton, if gradients are computed and the product is in bfloat16.
    """
    is_trained = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    is_plain = type(weight) in (Tensor, torch.nn.Parameter)  # not split among processes
    return x.is_cuda and is_trained and x.numel() > 0 and dtype == torch.bfloat16 and is_plain and is_available()


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    ignore_index: int,
    rows: int,
    columns: int,
    label_smoothing: float = 0.0,
    fp8: bool = False,
) -> Tensor:
    """Return the cross-entropy of the logits x weight^T + bias, summed over all labels that are not `ignore_index`.

    x (N, D), weight (V, D), bias (V,), labels (N,).  The products are computed in bfloat16 and the rest in fp32; `fp8`
    computes the product of the logits in 8 bits in training under autocast, if D is a multiple of SIZE_MULTIPLE.

    rows: the number of tokens whose logits exist at a time.
    columns: the number of columns of the logits: V, or more, which are padding.
    """
    fp8 = fp8 and is_fp8_training(x.device.type) and x.shape[1] % SIZE_MULTIPLE == 0
    with torch.autocast("cuda", enabled=False):
        loss, *_ = torch.ops.monoblock_python.linear_cross_entropy(
            x.to(torch.bfloat16), weight, bias, labels, ignore_index, label_smoothing, weight.requires_grad, fp8,
            rows, columns,
        )  # fmt: skip
    return loss


@torch.library.custom_op("monoblock_python::linear_cross_entropy", mutates_args=())
def _loss_and_gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    label_smoothing: float,
    trains_weight: bool,
    fp8: bool,
    rows: int,
    columns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss and the gradients of x, weight and bias; a gradient that is not needed is empty."""
    (N, D), V = x.shape, weight.shape[0]
    table = weight.to(torch.bfloat16) if columns == V else weight.new_zeros(columns, D, dtype=torch.bfloat16)
    if columns > V:
        table[:V] = weight
    losses = torch.empty(N, dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x)
    dweight = torch.zeros(columns if trains_weight else 0, D, dtype=torch.float32, device=x.device)
    dbias = torch.zeros(0 if bias is None else columns, dtype=torch.float32, device=x.device)
    rounded = (quantize_matrix(x), quantize_matrix(table)) if fp8 else None
    for start in range(0, N, rows):
        part = slice(start, min(start + rows, N))
        if rounded is None:
            logits = x[part] @ table.T
        else:
            logits = multiply(rounded[0]._replace(values=rounded[0].values[part]), rounded[1])
        if bias is not None:
            logits[:, :V] += bias
        _replace_by_gradient(logits, labels[part], losses[part], V, ignore_index, label_smoothing)
        torch.mm(logits, table, out=dx[part])
        if trains_weight:
            _add_product(dweight, logits, x[part])
        if bias is not None:
            dbias += logits.sum(0, dtype=torch.float32)
        del logits
    return losses.sum(), dx, dweight[:V].to(weight.dtype), dbias[:V].to(x.dtype if bias is None else bias.dtype)


@_loss_and_gradients.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int, label_smoothing: float,
    trains_weight: bool, *sizes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dweight = torch.empty_like(weight) if trains_weight else weight.new_empty(0, x.shape[1])
    dbias = x.new_empty(0) if bias is None else torch.empty_like(bias)
    return x.new_empty((), dtype=torch.float32), torch.empty_like(x), dweight, dbias


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.has_bias, ctx.trains_weight = inputs[2] is not None, inputs[6]
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dx, dweight, dbias = ctx.saved_tensors
    return (
        dx * grad.to(dx.dtype),
        dweight * grad.to(dweight.dtype) if ctx.trains_weight else None,
        dbias * grad.to(dbias.dtype) if ctx.has_bias else None,
        *[None] * 7,
    )


_loss_and_gradients.register_autograd(_scale_gradients, setup_context=_save_gradients)


def _add_product(total: Tensor, gradient: Tensor, x: Tensor) -> None:
    """Add gradient^T x to `total` in fp32."""
    torch.addmm(total, gradient.T, x, out_dtype=torch.float32, out=total)


def _replace_by_gradient(
    logits: Tensor, labels: Tensor, losses: Tensor, num_classes: int, ignore_index: int, label_smoothing: float
) -> None:
    """Write the loss of each row of logits (N, columns) to `losses` (N,), and its gradient in place of the logits."""
    triton_kernels("triton_training").cross_entropy_kernel[(len(logits),)](
        logits, labels, losses, num_classes, logits.stride(0), ignore_index, label_smoothing,
        SMOOTHED=label_smoothing != 0.0, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
