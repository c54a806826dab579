"""Record and edit activations of a forward pass by name.

    seen = trace(model, ids, names="decoder.*.attention.weights")
    without = trace(model, ids, names="head.logits", edits=ablate("decoder.3.attention.heads", heads=[2]))

A monoblock model names its activations itself (docs/shapes.md).  Any other module, such as a transformers model, is
traced by forward hooks: the output of every module is an activation with the name of the module.  The attention modules
of transformers call an attention function from a table; a function in its place gives the tap `….heads` (B, H, T, K)
and, if it wants them, `….weights` (B, H, T, S), which are computed beside the function that the model uses.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.errors import InputError, did_you_mean
from monoblock.inspection.edits import Activation, Edit, Layout, match_names
from monoblock.nn.arguments import check_model
from monoblock.nn.tap import Tap, apply_tap, tap_changes, tap_wants


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
        self.layout = Layout()  # `attach_tap` replaces it by that of the model

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
    layout = Layout(model)
    argument = {"tap": tap} if "tap" in layout.signature.parameters else {}  # else hooks call it
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


ATTENTION_TABLE = "ALL_ATTENTION_FUNCTIONS"  # in the modules of transformers


@contextmanager
def tap_modules(model: nn.Module, tap: Tap) -> Iterator[None]:
    """Call a tap with the output of every module of a model inside the `with` block."""
    names = {id(module): name for name, module in model.named_modules() if name}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                handle = module.register_forward_hook(_output_hook(tap, name))
                stack.callback(handle.remove)
        for table in _attention_tables(model):
            stack.enter_context(_replace_functions(table, names, tap))
        yield


def _output_hook(tap: Tap, name: str) -> Callable[..., Any]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return apply_tap(tap, name, output)
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            return (apply_tap(tap, name, output[0]), *output[1:])
        return None  # anything else stays as it is

    return hook


def _attention_tables(model: nn.Module) -> list[Any]:
    """Return the tables of attention functions that the modules of a transformers model read."""
    modules = {type(module).__module__ for module in model.modules()}
    tables = {
        id(table): table
        for name in modules
        if name.startswith("transformers.") and (table := getattr(sys.modules[name], ATTENTION_TABLE, None)) is not None
    }
    return list(tables.values())


@contextmanager
def _replace_functions(table: Any, names: dict[int, str], tap: Tap) -> Iterator[None]:
    """Replace the attention functions in a table; other models that run meanwhile are not affected."""
    original = dict(table._local_mapping)
    for key in ("eager", "sdpa"):
        table[key] = _tapped_function(original.get(key, table._global_mapping.get(key)), names, tap)
    try:
        yield
    finally:
        table._local_mapping.clear()
        table._local_mapping.update(original)


def _tapped_function(function: Callable[..., Any] | None, names: dict[int, str], tap: Tap) -> Callable[..., Any]:
    def run(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
        eager: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
        run_original = function or eager
        out, weights = run_original(module, q, k, v, mask, **options)
        if id(module) not in names:
            return out, weights
        name = names[id(module)]
        if tap_wants(tap, f"{name}.weights"):
            if weights is None:
                _, weights = eager(module, q, k, v, _additive_mask(module, q, k, mask, options), **options)
            weights = apply_tap(tap, f"{name}.weights", weights)
            if tap_changes(tap, f"{name}.weights"):
                values = v if v.shape[1] == weights.shape[1] else v.repeat_interleave(weights.shape[1] // v.shape[1], 1)
                out = (weights.to(v.dtype) @ values).transpose(1, 2)
        # (B, T, H, K) in transformers
        out = apply_tap(tap, f"{name}.heads", out.transpose(1, 2)).transpose(1, 2).contiguous()
        return out, weights

    return run


def _additive_mask(
    module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Tensor | None:
    """Return the mask as the plain attention of transformers adds it to the scores.

    Its fused attention takes booleans, or no mask at all if the attention is causal.
    """
    least = torch.finfo(q.dtype).min
    if mask is None:
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not is_causal or q.shape[2] == 1:
            return None
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, least)
    return mask


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
