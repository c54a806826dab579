"""Collect what a strategy has split among processes: whole weights and the norm of all gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def gather_tensors(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Gather whole tensors on the CPU, one after the other; every process must call this.

    keep: whether this process needs the result; else an empty dict is returned.
    """
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = whole_tensor(tensor)
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


def count_bytes(model: nn.Module) -> int:
    """Return the number of bytes of the weights and buffers of a model."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def free_memory(device: torch.device) -> int:
    """Return the number of bytes that this process can still allocate on a CUDA device."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def clip_gradients(weights: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before."""
    trained = [weight for weight in weights if weight.grad is not None]
    if not any(isinstance(weight, DTensor) for weight in trained):
        return nn.utils.clip_grad_norm_(trained, max_norm)
    groups = _group_by_mesh(trained)
    norm = torch.stack([_total_norm(group) for group in groups]).norm()
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


def whole_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def split_like(whole: Tensor, other: Tensor) -> Tensor:
    """Split a tensor among processes like another one; all of them have the whole tensor."""
    if not isinstance(other, DTensor):
        return whole
    return distribute_tensor(whole, other.device_mesh, other.placements, src_data_rank=None)


def mesh_of(tensor: Tensor) -> object:
    """Return the mesh among whose processes a tensor is split, or None if each process has all of it."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _group_by_mesh(weights: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group weights that can be used in one operation: those on the same mesh, and plain tensors."""
    groups: dict[object, list[nn.Parameter]] = {}
    for weight in weights:
        groups.setdefault(mesh_of(weight), []).append(weight)
    return list(groups.values())


def _total_norm(weights: list[nn.Parameter]) -> Tensor:
    return whole_tensor(nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None]))
