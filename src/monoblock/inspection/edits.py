"""Edits of activations in a forward pass: ablate them, patch them from another run, or add a vector.

    trace(model, ids, edits=ablate("decoder.3.attention.heads", heads=[2]))
    trace(model, ids, edits=patch("decoder.3.output", other_trace, positions=[5]))

Which axis of an activation holds what, and where padding is, a monoblock model declares (docs/shapes.md).  Of another
model, only the activations that `tap_modules` adds are known, the weights and heads of attention; the output of a
module may have any axes, whatever its name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from monoblock.config.model import AnyConfig
from monoblock.errors import InputError
from monoblock.nn.transformer import Transformer

# What an axis holds -> the letters that stand for it in the axes of an activation, such as "BHTK" (docs/shapes.md).
# The first of them that an activation has counts: the positions of weights (B, H, T, S) are those of the queries.
AXES = {"rows": "B", "heads": "HG", "positions": "TS"}
# Names of activations -> a letter for each axis.  The axis T is missing from logits of whole texts and of one step.
DECLARED_AXES = {
    r"(input|target)\.(token|patch|frames|output)": "BTD",
    r"(encoder|decoder)\.\d+\.(attention|cross)\.(query|heads)": "BHTK",
    r"(encoder|decoder)\.\d+\.(attention|cross)\.(key|value)": "BGSK",
    r"(encoder|decoder)\.\d+\.(attention|cross)\.(scores|weights)": "BHTS",
    r"(encoder|decoder)\.\d+\.feedforward\.(hidden|router)": "BTF",
    r"(encoder|decoder)\.\d+\.feedforward\.outputs": "NED",  # N = B·T
    r"(encoder|decoder)\.(\d+\.)?((attention|cross|feedforward)\.)?(input|output|norm)": "BTD",
    r"attention\.weights": "BTS",  # without heads
    r"head\.(logits|pooled)": "BTD",
}
SOURCE_ACTIVATIONS = re.compile(r"(input|encoder)\..*|decoder\.\d+\.cross\.(key|value)")  # of an encoder-decoder


@dataclass(frozen=True)
class Activation:
    """A named tensor, with what is known of it.

    axes: a letter for each axis, such as "BHTK"; None if it is not known.
    """

    name: str
    tensor: Tensor
    axes: str | None = None
    layout: Layout | None = None

    @property
    def valid(self) -> Tensor | None:
        """Where tokens are not padding: (rows, positions), or (rows · positions,) in one axis N; None: everywhere."""
        return None if self.layout is None else self.layout.valid(self)

    def __str__(self) -> str:
        return f"{self.name} {tuple(self.tensor.shape)}"

    def axis(self, word: str) -> int:
        """Return the axis of "rows", "heads" or "positions"; raise InputError if there is none or it is not known."""
        if self.axes is None:
            known = {3: 'axes="BTD" (rows, positions, width)', 4: 'axes="BHTK" (rows, heads, positions, features)'}
            example = known.get(self.tensor.dim())
            advice = "name its axes, " + (f"such as {example}" if example else "a letter for each: axes=…")
            if word == "heads":
                elsewhere = "the heads of an attention module of transformers are NAME.heads"
                advice = f"{advice}; {elsewhere}" if self.tensor.dim() > 3 else elsewhere
            raise InputError(f"it is not known which axis of {self} has the {word}; {advice}")
        if len(self.axes) != self.tensor.dim():
            raise InputError(f"{self} does not have the axes {self.axes!r}; give a letter for each, such as 'BTD'")
        found = [letter for letter in AXES[word] if letter in self.axes]
        if not found:
            advice = 'ablate with "zero" or "mean"' if word == "rows" else f"leave {word} out"
            raise InputError(f"{self} has no axis of {word}; {advice}")
        return self.axes.index(found[0])

    def total(self) -> tuple[Tensor, Tensor]:
        """Return the sum over rows and positions without padding, other axes as they are, and the number of tokens."""
        tensor, valid = self.tensor if self.tensor.dtype == torch.float64 else self.tensor.float(), self.valid
        if self.axes is not None and "N" in self.axes:  # rows and positions in one axis
            axes = [self.axes.index("N")]
        else:
            has_positions = self.axes is None or any(letter in self.axes for letter in AXES["positions"])
            axes = [self.axis(word) for word in ("rows", *(["positions"] if has_positions else []))]
            valid = None if valid is None or not has_positions else valid.T if axes[0] > axes[1] else valid
        shape = [size if axis in axes else 1 for axis, size in enumerate(tensor.shape)]
        mask = torch.ones(shape, dtype=torch.bool) if valid is None else valid.reshape(shape)
        mask = mask.to(tensor.device)
        return tensor.where(mask, 0).sum(axes, keepdim=True), mask.sum()


class Layout:
    """Which axis of an activation holds what, and where padding is.

    Of a model that is not monoblock's, only the axes of what `tap_modules` adds to its modules are known.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        config = getattr(model, "config", None)
        self.is_ours = model is None or isinstance(config, AnyConfig)
        self.is_pair = isinstance(config, AnyConfig) and config.family == "encoder-decoder"
        self.signature = inspect.signature(model.forward if model is not None else Transformer.forward)
        has_tap = "tap" in self.signature.parameters
        modules = [] if model is None or has_tap else model.named_modules()
        self.modules = {name for name, _ in modules}  # of a model that is traced by hooks
        self.arguments: dict[str, Any] = {}

    def read_arguments(self, arguments: Any, options: dict[str, Any]) -> None:
        """Note the arguments of a pass, among them its masks."""
        try:
            bound = self.signature.bind_partial(*arguments, **options).arguments
        except TypeError:  # the model itself reports it
            bound = {}
        self.arguments = {**bound, **bound.get("kwargs", {})}

    def axes(self, name: str, tensor: Tensor) -> str | None:
        if not self.is_ours:
            is_added = self.modules and name not in self.modules
            return {"weights": "BHTS", "heads": "BHTK"}.get(name.rpartition(".")[2]) if is_added else None
        for pattern, axes in DECLARED_AXES.items():
            if re.fullmatch(pattern, name):
                return axes if tensor.dim() == len(axes) else axes.replace("T", "", 1)
        return None

    def valid(self, activation: Activation) -> Tensor | None:
        """Return where the tokens of an activation are not padding (rows, positions), or None if there is none."""
        axes = set(activation.axes or "")
        if not self.is_ours:
            if not {"B"} < axes & set("BTS"):
                return None
            shape = tuple(activation.tensor.shape[activation.axis(word)] for word in ("rows", "positions"))
            masks = [mask for mask in self._masks() if mask.shape == shape and not mask.all()]
            if any(not mask.equal(masks[0]) for mask in masks[1:]):
                raise InputError(
                    f"it is not known which of two masks is that of {activation}; give means=…, or no mask"
                )
            return masks[0] if masks else None
        names = ["attention_mask", "target"]
        if self.is_pair:
            is_source = SOURCE_ACTIVATIONS.fullmatch(activation.name)
            names = ["source_mask", "attention_mask"] if is_source else ["target_mask"]
        masks = [self.arguments[name] != 0 for name in names if self.arguments.get(name) is not None]
        if not masks or masks[0].all() or not axes & set("NTS"):
            return None
        if "N" in axes:
            return masks[0].flatten()
        shape = tuple(activation.tensor.shape[activation.axis(word)] for word in ("rows", "positions"))
        if masks[0].shape != shape:
            given = f"the mask {tuple(masks[0].shape)} does not say what is padding in {activation}"
            raise InputError(f"{given}; give means=…")
        return masks[0]

    def _masks(self) -> list[Tensor]:
        tensors = {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}
        padding = [value == 0 for name, value in tensors.items() if name.endswith("key_padding_mask")]  # of PyTorch
        return padding + [value != 0 for name, value in tensors.items() if name.endswith("attention_mask")]


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
        layout = Layout()
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
    means: the means of a data set, by name, as `inspection.trace.mean_activations` computes them.
    axes: a letter for each axis, such as "BTD" or "BHTK" (B rows, T positions, H heads): needed for outputs of modules
        of a model that is not monoblock's, whose axes are not known.
    """
    if method not in ABLATIONS:
        raise InputError(f"there is no ablation {method!r}; write one of {', '.join(ABLATIONS)}")
    if means is not None and method != "mean":
        raise InputError(f'means have no effect on the ablation {method!r}; write method "mean", or leave means out')

    def function(activation: Activation) -> Tensor:
        name, tensor = activation.name, activation.tensor
        if means is None:
            return ABLATIONS[method](activation, seed)
        if name not in means:
            raise InputError(f"the means have no activation {name}; compute them with names={name!r}")
        try:
            return means[name].to(tensor).expand_as(tensor)
        except RuntimeError:
            given = f"has the shape {tuple(means[name].shape)}; give one that broadcasts to it"
            raise InputError(f"the mean of {activation} {given}") from None

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


def _mean(activation: Activation, seed: int) -> Tensor:
    total, count = activation.total()
    return (total / count.clamp(min=1)).to(activation.tensor).expand_as(activation.tensor)


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


ABLATIONS: dict[str, Callable[[Activation, int], Tensor]] = {
    "zero": lambda activation, seed: torch.zeros_like(activation.tensor),
    "mean": _mean,
    "resample": _resample,
}
