"""Edits of activations in a forward pass: ablate them, patch them from another run, or add a vector.

trace(model, ids, edits=ablate("decoder.3.attention.heads", heads=[2]))
trace(model, ids, edits=patch("decoder.3.output", other_trace, positions=[5]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from monoblock.errors import InputError

# Activations with an axis of heads, (B, H, T, …): the axis of positions is 2, for all others (B, T, …) it is 1.
HEAD_ACTIVATIONS = ("query", "key", "value", "scores", "weights", "heads")
AblationMethod = Literal["zero", "mean", "resample"]


def match_names(patterns: str | Iterable[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def has_heads(name: str) -> bool:
    """Return whether an activation has an axis of heads, (B, H, T, …)."""
    return name.rpartition(".")[2] in HEAD_ACTIVATIONS


@dataclass(frozen=True)
class Edit:
    """Replace activations by `function(name, tensor)`, where `heads` and `positions` select; None selects all.

    names: patterns such as "decoder.*.attention.heads".
    """

    names: tuple[str, ...]
    function: Callable[[str, Tensor], Tensor]
    heads: tuple[int, ...] | None = None
    positions: tuple[int, ...] | None = None

    def matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.names)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        replacement = self.function(name, tensor)
        selected = self._select(name, tensor)
        return replacement if selected is None else torch.where(selected, replacement, tensor)

    def _select(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return a boolean mask of the selected elements that broadcasts to the tensor; None if all are selected."""
        selected = None
        axes = {"heads": 1 if has_heads(name) else None, "positions": 2 if has_heads(name) else 1}
        for word, indices in (("heads", self.heads), ("positions", self.positions)):
            if indices is None:
                continue
            axis = axes[word]
            if axis is None or tensor.dim() < axis + 2:
                raise InputError(f"{name} {tuple(tensor.shape)} has no axis of {word}; leave {word} out")
            size = tensor.shape[axis]
            if any(not -size <= index < size for index in indices):
                raise InputError(f"{name} has {word} 0 to {size - 1}, but {list(indices)} were given")
            mask = torch.zeros(size, dtype=torch.bool, device=tensor.device)
            mask[list(indices)] = True
            mask = mask.view(-1, *(1,) * (tensor.dim() - axis - 1))
            selected = mask if selected is None else selected & mask
        return selected


def ablate(
    names: str | Iterable[str],
    method: AblationMethod = "zero",
    *,
    heads: Iterable[int] | None = None,
    positions: Iterable[int] | None = None,
    seed: int = 0,
) -> Edit:
    """Remove the information in activations.

    method: "zero" sets them to 0; "mean" to their mean over the rows and positions of the same pass; "resample" to
        those of another row of the batch, which `seed` chooses (the same row for every activation).
    heads, positions: indices of heads and of tokens; None means all.
    """
    if method not in ABLATIONS:
        raise InputError(f"there is no ablation {method!r}; write one of {', '.join(ABLATIONS)}")

    def function(name: str, tensor: Tensor) -> Tensor:
        return ABLATIONS[method](name, tensor, seed)

    return Edit(match_names(names), function, _indices(heads), _indices(positions))


def patch(
    names: str | Iterable[str],
    source: Mapping[str, Tensor],
    *,
    heads: Iterable[int] | None = None,
    positions: Iterable[int] | None = None,
) -> Edit:
    """Replace activations by those of another run, such as a `Trace` of other inputs of the same shape."""

    def function(name: str, tensor: Tensor) -> Tensor:
        if name not in source:
            raise InputError(f"the run to patch from has no activation {name}; record it with names={name!r}")
        replacement = source[name]
        if replacement.shape != tensor.shape:
            raise InputError(
                f"{name} has the shape {tuple(tensor.shape)}, but {tuple(replacement.shape)} in the run to patch from; "
                "give both runs inputs of the same shape"
            )
        return replacement.to(tensor)

    return Edit(match_names(names), function, _indices(heads), _indices(positions))


def add_vector(
    names: str | Iterable[str],
    vector: Tensor,
    *,
    heads: Iterable[int] | None = None,
    positions: Iterable[int] | None = None,
) -> Edit:
    """Add a vector to activations; its shape broadcasts to theirs, such as (D,) to (B, T, D)."""

    def function(name: str, tensor: Tensor) -> Tensor:
        try:
            torch.broadcast_shapes(vector.shape, tensor.shape)
        except RuntimeError:
            shapes = f"{tuple(vector.shape)} to {name} {tuple(tensor.shape)}"
            raise InputError(f"a vector {shapes} cannot be added; give one of size {tensor.shape[-1]}") from None
        return tensor + vector.to(tensor)

    return Edit(match_names(names), function, _indices(heads), _indices(positions))


def _indices(values: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _zero(name: str, tensor: Tensor, seed: int) -> Tensor:
    return torch.zeros_like(tensor)


def _mean(name: str, tensor: Tensor, seed: int) -> Tensor:
    axes = (0, 2) if has_heads(name) else tuple(range(min(2, tensor.dim() - 1)))
    return tensor.mean(axes, keepdim=True).expand_as(tensor)


def _resample(name: str, tensor: Tensor, seed: int) -> Tensor:
    rows = tensor.shape[0]
    if rows < 2:
        raise InputError("resampling takes activations of another row, but the batch has one; give at least two rows")
    return tensor.roll(1 + seed % (rows - 1), 0)


ABLATIONS: dict[str, Callable[[str, Tensor, int], Tensor]] = {"zero": _zero, "mean": _mean, "resample": _resample}
