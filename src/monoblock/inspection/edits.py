"""Edits of activations in a forward pass: ablate them, patch them from another run, or add a vector.

trace(model, ids, edits=ablate("decoder.3.attention.heads", heads=[2]))
trace(model, ids, edits=patch("decoder.3.output", other_trace, positions=[5]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inspection.layout import Activation, OwnLayout

AblationMethod = Literal["zero", "mean", "resample"]


def match_names(patterns: str | Iterable[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


@dataclass(frozen=True)
class Edit:
    """Replace activations by `function(activation)`, where `heads` and `positions` select; None selects all.

    names: patterns such as "decoder.*.attention.heads".
    axes: a letter for each axis of these activations, for those that the model does not declare.
    """

    names: tuple[str, ...]
    function: Callable[[Activation], Tensor]
    heads: tuple[int, ...] | None = None
    positions: tuple[int, ...] | None = None
    axes: str | None = None

    def __post_init__(self) -> None:
        if self.axes is not None and (not self.axes.isalpha() or len(set(self.axes)) != len(self.axes)):
            raise InputError(f"axes are a letter for each axis, such as 'BTD' or 'BHTK', not {self.axes!r}")

    def matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.names)

    def __call__(self, activation: Activation) -> Tensor:
        if self.axes is not None:
            activation = replace(activation, axes=self.axes)
        replacement = self.function(activation)
        selected = self._select(activation)
        return replacement if selected is None else torch.where(selected, replacement, activation.tensor)

    def apply(self, name: str, tensor: Tensor, start: int) -> Tensor:
        """Apply the edit to an activation of one of our models in a pass over tokens from number `start` of a text on.

        `positions` are those of the whole text, so they are counted from 0.
        """
        layout = OwnLayout()
        axes, positions = layout.axes(name, tensor), self.positions
        if positions is not None and axes is not None and "T" in axes:
            if any(index < 0 for index in positions):
                raise InputError(
                    f"positions={list(positions)} are counted from the end of a text that goes on; use 0 or more"
                )
            count = tensor.shape[axes.index("T")]
            positions = tuple(index - start for index in positions if start <= index < start + count)
            if not positions:
                return tensor
        return replace(self, positions=positions)(Activation(name, tensor, axes, layout))

    def _select(self, activation: Activation) -> Tensor | None:
        """Return a boolean mask of the selected elements that broadcasts to the tensor; None if all are selected."""
        selected, tensor = None, activation.tensor
        for word, indices in (("heads", self.heads), ("positions", self.positions)):
            if indices is None:
                continue
            axis = activation.axis(word)
            size = tensor.shape[axis]
            if any(not -size <= index < size for index in indices):
                raise InputError(f"{activation.name} has {word} 0 to {size - 1}, but {list(indices)} were given")
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
    means: Mapping[str, Tensor] | None = None,
    axes: str | None = None,
    seed: int = 0,
) -> Edit:
    """Remove the information in activations.

    method: "zero" sets them to 0; "mean" to their mean over the rows and positions of the same pass, without padding,
        or to `means`; "resample" to those of another row of the batch, which `seed` chooses (the same row for every
        activation).
    heads, positions: indices of heads and of tokens; None means all.
    means: the means of a data set, by name, as `inspection.means.mean_activations` computes them.
    axes: a letter for each axis, such as "BTD" or "BHTK" (B rows, T positions, H heads): needed for outputs of modules
        of a model that is not monoblock's, whose axes are not known.
    """
    if method not in ABLATIONS:
        raise InputError(f"there is no ablation {method!r}; write one of {', '.join(ABLATIONS)}")
    if means is not None and method != "mean":
        raise InputError(f'means have no effect on the ablation {method!r}; write method "mean", or leave means out')

    def function(activation: Activation) -> Tensor:
        if means is not None:
            return _given_mean(activation, means)
        return ABLATIONS[method](activation, seed)

    return Edit(match_names(names), function, _indices(heads), _indices(positions), axes)


def patch(
    names: str | Iterable[str],
    source: Mapping[str, Tensor],
    *,
    heads: Iterable[int] | None = None,
    positions: Iterable[int] | None = None,
    axes: str | None = None,
) -> Edit:
    """Replace activations by those of another run, such as a `Trace` of other inputs of the same shape."""

    def function(activation: Activation) -> Tensor:
        name, tensor = activation.name, activation.tensor
        if name not in source:
            raise InputError(f"the run to patch from has no activation {name}; record it with names={name!r}")
        replacement = source[name]
        if replacement.shape != tensor.shape:
            raise InputError(
                f"{name} has the shape {tuple(tensor.shape)}, but {tuple(replacement.shape)} in the run to patch from; "
                "give both runs inputs of the same shape"
            )
        return replacement.to(tensor)

    return Edit(match_names(names), function, _indices(heads), _indices(positions), axes)


def add_vector(
    names: str | Iterable[str],
    vector: Tensor,
    *,
    heads: Iterable[int] | None = None,
    positions: Iterable[int] | None = None,
    axes: str | None = None,
) -> Edit:
    """Add a vector to activations; its shape broadcasts to theirs, such as (D,) to (B, T, D)."""

    def function(activation: Activation) -> Tensor:
        tensor = activation.tensor
        try:
            torch.broadcast_shapes(vector.shape, tensor.shape)
        except RuntimeError:
            shapes = f"{tuple(vector.shape)} to {activation}"
            raise InputError(f"a vector {shapes} cannot be added; give one of size {tensor.shape[-1]}") from None
        return tensor + vector.to(tensor)

    return Edit(match_names(names), function, _indices(heads), _indices(positions), axes)


def _indices(values: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _zero(activation: Activation, seed: int) -> Tensor:
    return torch.zeros_like(activation.tensor)


def _mean(activation: Activation, seed: int) -> Tensor:
    total, count = activation.total()
    return (total / count.clamp(min=1)).to(activation.tensor).expand_as(activation.tensor)


def _given_mean(activation: Activation, means: Mapping[str, Tensor]) -> Tensor:
    name, tensor = activation.name, activation.tensor
    if name not in means:
        raise InputError(f"the means have no activation {name}; compute them with names={name!r}")
    try:
        return means[name].to(tensor).expand_as(tensor)
    except RuntimeError:
        shape = tuple(means[name].shape)
        raise InputError(f"the mean of {activation} has the shape {shape}; give one that broadcasts to it") from None


def _resample(activation: Activation, seed: int) -> Tensor:
    axis = activation.axis("rows")
    rows = activation.tensor.shape[axis]
    if rows < 2:
        raise InputError("resampling takes activations of another row, but the batch has one; give at least two rows")
    shift, valid = 1 + seed % (rows - 1), activation.valid
    if valid is not None and not torch.equal(valid, valid.roll(shift, 0)):
        raise InputError(
            f"{activation} cannot be resampled from a row with other padding; give rows of equal length, or use 'mean'"
        )
    return activation.tensor.roll(shift, axis)


ABLATIONS: dict[str, Callable[[Activation, int], Tensor]] = {"zero": _zero, "mean": _mean, "resample": _resample}
