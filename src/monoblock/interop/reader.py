"""Reading weights in the wanted dtype without ever holding much more than them.

What can stay as it is stored is a view of the mapped file, read when it is used.  What must be changed is read through
a second mapping, which is let go again and again: its pages would count as memory held.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from monoblock.errors import FileError
from monoblock.interop.safely import Weights
from monoblock.untrusted import shown

PASSING = 2**22  # bytes read through a mapping before it is let go, or a part of the file where that is more
PARTS = 32
Change = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def same(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors


def _again(stored: Weights) -> Weights:
    """The same files, whose headers are known, to be mapped anew."""
    other = copy.copy(stored)
    other._open = {}
    return other


class Reader:
    def __init__(self, stored: Weights, dtype: torch.dtype, device: str = "cpu") -> None:
        self.kept, self.dtype, self.device = stored, dtype, torch.device(device)
        self.passing, self.read = _again(stored), 0
        self.most = max(PASSING, stored.nbytes // PARTS)

    def take(self, keys: Sequence[str], change: Change = same) -> Sequence[Tensor]:
        """Stored tensors, changed, in the wanted dtype."""
        for key in keys:
            dtype = self.kept.stored[key].dtype
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise FileError(f"{shown(key)} holds {dtype} where weights are floating-point numbers")
        parts = self._changed(self.passing, keys, change)
        if len(keys) == 1 and all(self._stays(part) for part in parts):
            return self._changed(self.kept, keys, change)
        if len(keys) > 1:  # joined already, in memory of their own
            made = [part.to(self.device, self.dtype, memory_format=torch.contiguous_format) for part in parts]
            self._let_go(sum(part.nbytes for part in parts))
            return made
        shapes = [part.shape for part in parts]
        del parts
        return [self._copied(keys, change, number, shape) for number, shape in enumerate(shapes)]

    def _copied(self, keys: Sequence[str], change: Change, number: int, shape: torch.Size) -> Tensor:
        """One of the tensors that a stored one becomes, some rows at a time."""
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        size = self.kept.stored[keys[0]].dtype.itemsize * shape.numel()
        rows = max(1, self.most * shape[0] // size) if shape.numel() else 1
        for start in range(0, shape[0], rows):
            part = self._changed(self.passing, keys, change)[number][start : start + rows]
            made[start : start + rows].copy_(part)
            self._let_go(part.nbytes)
        return made

    def _let_go(self, read: int) -> None:
        self.read += read
        if self.read > self.most:
            self.passing, self.read = _again(self.kept), 0

    def _stays(self, part: Tensor) -> bool:
        return part.dtype == self.dtype and self.device.type == "cpu" and part.is_contiguous()

    @staticmethod
    def _changed(source: Weights, keys: Sequence[str], change: Change) -> Sequence[Tensor]:
        found = [source[key] for key in keys]
        try:
            return change(found)
        except RuntimeError as problem:
            said = " ".join(str(problem).split())[:100]
            raise FileError(f"{shown(keys[0])} of shape {source.shapes[keys[0]]} does not fit: {said}") from None
