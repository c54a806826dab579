"""Collect what a strategy has split among processes: whole weights and the norm of all gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gather_tensors(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Gather whole tensors on the CPU, one after the other; every process must call this.

    keep: whether this process needs the result; else an empty dict is returned.
    """
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            whole[name] = full.detach().cpu()
    return whole


def copy_without_weights(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose weights and buffers are on the meta device, so that it needs no memory."""
    replaced: dict[int, object] = {}
    for weight in model.parameters():
        replaced[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
    for buffer in model.buffers():
        replaced[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, replaced)


def clip_gradients(weights: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before."""
    trained = [weight for weight in weights if weight.grad is not None]
    if not any(isinstance(weight, DTensor) for weight in trained):
        return float(nn.utils.clip_grad_norm_(trained, max_norm))
    norm = torch.stack([_total_norm(group) for group in _group_by_mesh(trained)]).norm()
    nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
    return float(norm)


def _group_by_mesh(weights: list[nn.Parameter]) -> list[list[Tensor]]:
    """Group gradients that can be used in one operation: those on the same mesh, and plain tensors."""
    groups: dict[object, list[Tensor]] = {}
    for weight in weights:
        assert weight.grad is not None
        mesh = weight.grad.device_mesh if isinstance(weight.grad, DTensor) else None
        groups.setdefault(mesh, []).append(weight.grad)
    return list(groups.values())


def _total_norm(gradients: list[Tensor]) -> Tensor:
    norm = nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
