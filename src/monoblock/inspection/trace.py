"""Record and edit activations of a forward pass by name.

    seen = trace(model, ids, names="decoder.*.attention.weights")
    without = trace(model, ids, names="head.logits", edits=ablate("decoder.3.attention.heads", heads=[2]))

A monoblock model names its activations itself (docs/shapes.md).  Any other module, such as a transformers model, is
traced by hooks: names are those of its modules, and `….weights` and `….heads` of its attention modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.errors import InputError, did_you_mean
from monoblock.inspection.edits import Edit, match_names
from monoblock.inspection.layout import Activation, Layout, OwnLayout, layout_of
from monoblock.inspection.module_taps import tap_modules
from monoblock.nn.arguments import check_model
from monoblock.nn.tap import Tap


class TraceTap:
    """A tap that applies edits and keeps the activations whose names match one of the patterns.

    Activations that cost extra to compute are computed only if a pattern or an edit matches them.
    """

    def __init__(self, names: str | Iterable[str] = (), edits: Iterable[Edit] = (), *, with_gradients: bool = False):
        self.reader = Edit(match_names(names), lambda activation: activation.tensor)
        self.edits = tuple(edits)
        self.with_gradients = with_gradients
        self.activations: dict[str, Tensor] = {}
        self.names: dict[str, None] = {}  # of all activations, in order
        self.used: set[int] = set()  # the indices of edits that matched an activation
        self.layout: Layout = OwnLayout()  # `attach_tap` replaces it by that of the model

    def wants(self, name: str) -> bool:
        return self.reader.matches(name) or self._is_edited(name)

    def changes(self, name: str) -> bool:
        return self.with_gradients or self._is_edited(name)

    def _is_edited(self, name: str) -> bool:
        return any(edit.matches(name) for edit in self.edits)

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        self.names[name] = None
        for index, edit in enumerate(self.edits):
            if edit.matches(name):
                self.used.add(index)
                tensor = edit(Activation(name, tensor, self.layout.axes(name, tensor), self.layout))
        if self.reader.matches(name):
            if self.with_gradients and tensor.requires_grad:
                tensor.retain_grad()
            self.activations[name] = tensor if self.with_gradients else tensor.detach()
        return tensor

    def check(self) -> None:
        """Raise InputError if a pattern or an edit matched no activation."""
        patterns = [edit.names for index, edit in enumerate(self.edits) if index not in self.used]
        if self.reader.names and not self.activations:
            patterns.insert(0, self.reader.names)
        if patterns:
            known = ", ".join(list(self.names)[:6])
            raise InputError(
                f"no activation matches {' or '.join(patterns[0])}; write patterns for names such as {known}"
            )


class Trace(dict[str, Tensor]):
    """Activations by name, and the logits of the same pass (of a model without logits, its hidden states)."""

    logits: Tensor

    def __missing__(self, name: str) -> Tensor:
        raise KeyError(f"{name} was not recorded{did_you_mean(name, list(self)) or '; give it in names='}")


def trace(
    model: nn.Module,
    *inputs: Tensor,
    names: str | Iterable[str] = "*",
    edits: Edit | Iterable[Edit] = (),
    gradients: bool = False,
    **options: Any,
) -> Trace:
    """Run a model once, record its activations, and edit them on the way.

    names: patterns such as "decoder.*.attention.weights".
    edits: what `ablate`, `patch` and `add_vector` return; applied in order, before an activation is recorded.
    gradients: keep the graph, so that after `seen.logits.sum().backward()` each `seen[name].grad` is set.
    options: further arguments of the model, such as attention_mask.
    """
    check_model(model, nn.Module, "trace")
    for value in inputs:  # some models read a dictionary, but none one of the arguments of its own `forward`
        if isinstance(value, Mapping) and value and set(value) <= set(inspect.signature(model.forward).parameters):
            names_given = ", ".join(map(str, value))
            raise InputError(
                f"{names_given} are arguments of the model, but were given in one {type(value).__name__}; write "
                "mb.trace(model, **inputs)"
            )
    tap = TraceTap(names, (edits,) if isinstance(edits, Edit) else edits, with_gradients=gradients)
    with nullcontext() if gradients else torch.no_grad(), attach_tap(model, tap):
        output = model(*inputs, **options)
    tap.check()
    result = Trace(tap.activations)
    result.logits = _logits(output)
    return result


@contextmanager
def attach_tap(model: nn.Module, tap: Tap) -> Iterator[None]:
    """Call a tap at the named activations of every pass of a model inside the `with` block."""
    check_not_compiled(model)
    layout, argument = layout_of(model), {"tap": tap} if takes_tap(model) else {}
    if isinstance(tap, TraceTap):
        tap.layout = layout

    def read_arguments(module: nn.Module, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        layout.read_arguments(arguments, options)
        return arguments, {**options, **argument}

    handle = model.register_forward_pre_hook(read_arguments, with_kwargs=True)
    try:
        with nullcontext() if argument else tap_modules(model, tap):
            yield
    finally:
        handle.remove()


def takes_tap(model: nn.Module) -> bool:
    """Return whether the activations of a model have names of their own: whether its `forward` takes a tap."""
    return "tap" in inspect.signature(model.forward).parameters


def check_not_compiled(model: nn.Module) -> None:
    """Raise InputError for a model under torch.compile, whose activations may not exist in the compiled code."""
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod"):
            place = "it" if not name else f"its module {name}"
            raise InputError(
                f"the model cannot be traced, because {place} was compiled by torch.compile; trace the original, "
                "which is compiled._orig_mod"
            )
        if module._compiled_call_impl is not None:
            raise InputError(
                f"the model cannot be traced, because {name or 'it'} was compiled by .compile(); trace a model that is "
                "not compiled, such as a copy loaded from its folder"
            )


def _logits(output: Any) -> Tensor:
    """Return the logits of a model's output, which may be a tensor, a tuple or an object of transformers."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            tensor: Tensor = getattr(output, name)
            return tensor
    return output[0]
