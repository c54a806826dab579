"""Check the ids and masks of an LSTM."""

from __future__ import annotations

import torch
from torch import Tensor

from monoblock.errors import InputError


def check_ids(name: str, ids: Tensor, vocab: int, axes: str) -> None:
    if ids.dim() != len(axes) or ids.numel() == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise InputError(
            f"{name} has dtype {ids.dtype} and shape {tuple(ids.shape)}; give whole numbers of shape "
            f"({', '.join(axes)}), at least one"
        )
    if ids.device.type == "cpu" and (ids.min() < 0 or ids.max() >= vocab):  # on a GPU it would synchronize
        wrong = ids[(ids < 0) | (ids >= vocab)][0].item()
        raise InputError(f"{name} holds the id {wrong}, which is not in the vocabulary; give ids from 0 to {vocab - 1}")


def valid_lengths(name: str, mask: Tensor | None, ids: Tensor) -> Tensor | None:
    """Return the number of valid tokens in each row, a tensor (B,), or None without a mask."""
    if mask is None:
        return None
    if mask.shape != ids.shape:
        raise InputError(
            f"{name} has shape {tuple(mask.shape)}, but its ids have {tuple(ids.shape)}; give a 1 or 0 for each id"
        )
    if ((mask != 0) & (mask != 1)).any():
        raise InputError(f"{name} has values other than 0 and 1; write 1 for a real token and 0 for padding")
    valid = mask.bool()
    if (valid[:, 1:] & ~valid[:, :-1]).any():
        raise InputError(f"{name} has padding before a real token, which an LSTM would read first; pad on the right")
    if not valid[:, 0].all():
        raise InputError(f"{name} leaves a row without a real token; drop that row")
    return valid.sum(1)
