"""A tap is a function `tap(name, tensor)`, called at each named activation, that returns the tensor to use instead.

A tap may have two methods.  `wants(name) -> bool`: activations that cost extra (attention weights, outputs of all
experts) are computed only if it returns True; a tap without this method wants everything.  `changes(name) -> bool`: if
it returns False, the tap only reads this activation; the weights and scores of attention are then computed beside the
fused kernel, whose output does not change by a bit.  A tap without this method may change everything.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from monoblock.errors import InputError

Tap = Callable[[str, Tensor], Tensor]


class PrefixedTap:
    """A tap for a submodule: it calls another tap with the submodule's name in front of the activation's name."""

    def __init__(self, tap: Tap, prefix: str) -> None:
        self.tap, self.prefix = tap, prefix

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        return self.tap(f"{self.prefix}.{name}", tensor)

    def wants(self, name: str) -> bool:
        return tap_wants(self.tap, f"{self.prefix}.{name}")

    def changes(self, name: str) -> bool:
        return tap_changes(self.tap, f"{self.prefix}.{name}")


def prefix_tap(tap: Tap | None, prefix: str) -> Tap | None:
    return None if tap is None else PrefixedTap(tap, prefix)


def tap_wants(tap: Tap | None, name: str) -> bool:
    """Return whether a tap wants the activation `name`, so that it is computed although it costs extra."""
    if tap is None:
        return False
    wants = getattr(tap, "wants", None)
    return True if wants is None else bool(wants(name))


def tap_changes(tap: Tap | None, name: str) -> bool:
    """Return whether a tap may return another tensor for the activation `name` than the one it was given."""
    if tap is None:
        return False
    changes = getattr(tap, "changes", None)
    return True if changes is None else bool(changes(name))


def apply_tap(tap: Tap | None, name: str, tensor: Tensor) -> Tensor:
    if tap is None:
        return tensor
    result = tap(name, tensor)
    if not isinstance(result, Tensor):
        raise InputError(
            f"the tap returned {type(result).__name__} at {name!r}; return a tensor: the one given, or its replacement"
        )
    return result


def tap_argument(module: nn.Module, tap: Tap | None, prefix: str) -> dict[str, Any]:
    """Return {"tap": …} for a call of `module`, or {} if there is no tap or the module's `forward` takes none.

    So a module that replaces a feed-forward or an attention need not have the argument.
    """
    if tap is None:
        return {}
    forward = getattr(module, "_orig_mod", module).forward  # _orig_mod: under torch.compile
    return {"tap": PrefixedTap(tap, prefix)} if _has_tap_parameter(getattr(forward, "__func__", forward)) else {}


@functools.lru_cache(maxsize=256)
def _has_tap_parameter(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters
    return "tap" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def is_customized(module: nn.Module) -> bool:
    """Return whether a call runs more than the `forward` of the module's class.

    It does if there are hooks, if `forward` was replaced, or after `module.compile()`.
    """
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
        or "forward" in module.__dict__
        or module._compiled_call_impl is not None
    )
