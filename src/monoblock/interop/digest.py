"""Which weights these are: SHA-256 of tensors by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Of names, shapes, dtypes and values, whatever the order."""
    made = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        data: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
        made.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        made.update(data)
    return made.hexdigest()


def digest_of_body(model: nn.Module) -> str:
    """Of all but the head, which an adapter may bring along."""
    return digest_of({name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")})
