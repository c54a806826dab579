"""Numbers to small whole numbers and back: a row is cut into groups, each with a scale of its own.

    8 bits   w = s q            q from -127 to 127
    4 bits   w = m + s q        q from 0 to 15, two in a byte: of 32 neighbours the first 16 are the lower halves of
                                16 bytes, the others the upper halves
Scales s and least values m are bfloat16; q is chosen for the rounded ones, so that rounding them costs next to nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.errors import InputError
from monoblock.native.library import load

HALF_CHUNK = 16
LARGE = 1 << 20  # weights from which the kernel that packs them is worth compiling
AT_ONCE = 1 << 22  # weights quantised in one piece, so that the search holds little memory
WIDTHS = [14.0 + step / 4 for step in range(9)]  # 4 bits: the steps a group's range is cut into, from clipped to wide


class Packed(NamedTuple):
    """A matrix (…, rows, columns), stored."""

    packed: Tensor  # int8 (…, rows, columns), or uint8 (…, rows, columns / 2)
    scale: Tensor  # (…, rows, groups)
    least: Tensor | None = None  # (…, rows, groups), 4 bits only


def pack(weight: Tensor, bits: int, group: int) -> Packed:
    """Store a matrix (…, rows, inputs); the last group of a row is filled up with zeros."""
    if not bool(weight.isfinite().all()):
        raise InputError("a weight is not a finite number, so it cannot be quantised; look for where training diverged")
    wide = F.pad(weight.detach(), (0, -weight.shape[-1] % group))
    flat = wide.reshape(-1, group)
    each = max(1, AT_ONCE // group)
    pieces = [(_eight if bits == 8 else _four)(piece.float()) for piece in flat.split(each)]
    numbers, *others = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    if bits == 4:
        numbers = _paired(numbers)
    rows = weight.shape[:-1]
    return Packed(numbers.reshape(*rows, -1), *(one.reshape(*rows, -1) for one in others))


def unpack(stored: Packed, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix (…, rows, inputs) that is stored."""
    numbers = stored.packed if stored.least is None else _apart(stored.packed)
    grouped = numbers.unflatten(-1, (stored.scale.shape[-1], -1)).to(dtype)
    weight = grouped * stored.scale.to(dtype)[..., None]
    if stored.least is not None:
        weight = weight + stored.least.to(dtype)[..., None]
    return weight.flatten(-2)[..., :inputs]


def empty(shape: tuple[int, ...], bits: int, group: int, device: torch.device) -> Packed:
    """Room for a matrix of this shape."""
    *rows, inputs = shape
    groups = math.ceil(inputs / group)
    kind, columns = (torch.int8, groups * group) if bits == 8 else (torch.uint8, groups * group // 2)

    def scales() -> Tensor:
        return torch.empty((*rows, groups), dtype=torch.bfloat16, device=device)

    numbers = torch.empty((*rows, columns), dtype=kind, device=device)
    return Packed(numbers, scales(), scales() if bits == 4 else None)


# -- one group a row -------------------------------------------------------------------------------------------------


def _eight(group: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of a group becomes ±127; the scale is rounded up, so that nothing is cut off."""
    if group.device.type == "cpu" and group.shape[-1] % HALF_CHUNK == 0 and group.numel() >= LARGE and load().ready:
        numbers, scale = torch.ops.monoblock.pack8(group.contiguous())
        return numbers, scale
    return eight(group)


def eight(group: Tensor) -> tuple[Tensor, Tensor]:
    """The same, said by operations of torch."""
    scale = _rounded_up(group.abs().amax(-1) / 127)
    numbers = (group / _divisor(scale.float())[:, None]).round().clamp(-127, 127)
    return numbers.to(torch.int8), scale


def _divisor(given: Tensor) -> Tensor:
    return torch.where(given == 0, 1.0, given)


def _rounded_up(given: Tensor) -> Tensor:
    near = given.to(torch.bfloat16)
    return torch.where(near.float() < given, torch.nextafter(near, torch.full_like(near, math.inf)), near)


def _four(group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of several ways to cut the range, the one that leaves the least squared error after s and m are fitted to it."""
    low, high = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
    spread = _divisor(high - low)
    best = torch.full_like(low, math.inf)
    scale, least = spread / 15, low
    for width in WIDTHS:
        middle = (high + low) / 2
        start = middle - 7.5 * spread / width
        numbers = ((group - start) * (width / spread)).round().clamp(0, 15)
        s, m = _fitted(group, numbers)
        error = (_nearest(group, s, m) * s + m - group).square().sum(-1, keepdim=True)
        better = error < best
        best, scale, least = (torch.where(better, new, old) for new, old in ((error, best), (s, scale), (m, least)))
    scale, least = scale.to(torch.bfloat16), least.to(torch.bfloat16)
    numbers = _nearest(group, scale.float(), least.float())
    return numbers.to(torch.uint8), scale[:, 0], least[:, 0]


def _fitted(group: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The line m + s q that comes closest to a group: least squares.  As bfloat16 will hold it."""
    mean_w, mean_q = group.mean(-1, keepdim=True), numbers.mean(-1, keepdim=True)
    off = numbers - mean_q
    s = (off * (group - mean_w)).sum(-1, keepdim=True) / _divisor(off.square().sum(-1, keepdim=True))
    s = s.to(torch.bfloat16).float()
    return s, (mean_w - s * mean_q).to(torch.bfloat16).float()


def _nearest(group: Tensor, scale: Tensor, least: Tensor) -> Tensor:
    return ((group - least) / _divisor(scale)).round().clamp(0, 15)


def _paired(numbers: Tensor) -> Tensor:
    """(n, group) numbers from 0 to 15 -> (n, group / 2) bytes."""
    low, high = numbers.unflatten(-1, (-1, 2, HALF_CHUNK)).unbind(-2)
    return (low | high << 4).flatten(-2)


def _apart(packed: Tensor) -> Tensor:
    """(…, columns / 2) bytes -> (…, columns) numbers from 0 to 15."""
    both = packed.unflatten(-1, (-1, HALF_CHUNK))
    return torch.stack((both & 15, both >> 4), dim=-2).flatten(-3)
