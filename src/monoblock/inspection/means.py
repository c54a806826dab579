"""The means of activations over a data set, to ablate them with: `ablate(names, "mean", means=…)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from monoblock.errors import InputError
from monoblock.inspection.edits import Edit, match_names
from monoblock.inspection.layout import Activation
from monoblock.inspection.trace import trace


def mean_activations(
    model: nn.Module, batches: Iterable[Any], *, names: str | Iterable[str], axes: str | None = None
) -> dict[str, Tensor]:
    """Return the mean of activations over all rows and positions of all batches, without padding.

    batches: the inputs of the model: a tensor, a tuple of tensors, or a dictionary of arguments for each batch.
    names: patterns such as "decoder.*.attention.heads".
    axes: a letter for each axis, such as "BTD", of activations whose axes are not known (see `ablate`).
    """
    totals: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}

    def add(activation: Activation) -> Tensor:
        name, (total, count) = activation.name, activation.total()
        if name in totals and totals[name].shape != total.shape:
            shapes = f"{tuple(totals[name].shape)} and {tuple(total.shape)}"
            raise InputError(f"batches have {name} of two shapes, {shapes}, without a mean; give batches of one length")
        totals[name] = totals.get(name, 0) + total.double()
        counts[name] = counts.get(name, 0) + count
        return activation.tensor

    reader = Edit(match_names(names), add, axes=axes)
    for batch in batches:
        if isinstance(batch, Mapping):
            trace(model, names=(), edits=reader, **batch)
        else:
            trace(model, *((batch,) if isinstance(batch, Tensor) else batch), names=(), edits=reader)
    if not totals:
        raise InputError("there is no batch to take means over; give more data")
    return {name: total / counts[name].clamp(min=1) for name, total in totals.items()}
