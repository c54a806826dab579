"""Identify weights by a SHA-256 digest of the tensors and their names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def compute_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names, shapes, dtypes and values of tensors; their order does not matter."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        data: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(data)
    return digest.hexdigest()


def compute_body_digest(model: nn.Module) -> str:
    """Return the digest of all weights except those of the head, since an adapter may come with its own head."""
    return compute_digest({name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")})
