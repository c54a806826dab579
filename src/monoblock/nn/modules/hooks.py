"""Tell whether a fast path may read a module's weights instead of calling the module.

A call runs what users attach to a module: hooks, a replaced `forward`, parametrizations, adapters, a compiled version,
or a method that they patched in its class.  A fast path that multiplies with `module.weight` would skip all of them, so
it checks `is_plain` first and else calls the module.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Return whether calling `module` runs `kind.forward` on its own parameters and nothing else."""
    return type(module) is kind and not is_customized(module) and not is_patched(kind)


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


def weight_if_plain(module: nn.Module, kind: type[nn.Module]) -> Tensor | nn.Module:
    """Return the weight of a plain module, to compute with directly, or else the module itself, to be called."""
    return cast(Tensor, module.weight) if is_plain(module, kind) else module


# -- patched classes ------------------------------------------------------------------------------------------------

_CALL_METHODS = ("__call__", "_wrapped_call_impl", "_call_impl")
_attributes_as_defined: dict[type, tuple[object, ...]] = {}  # of classes whose methods have been checked


def is_patched(kind: type[nn.Module]) -> bool:
    """Return whether a method of a module class, or of one of its base classes, was replaced."""
    if torch.compiler.is_compiling():  # a compiled graph keeps the methods it was traced with
        return False
    for base in kind.__mro__:
        if base is nn.Module:
            return not all(_is_defined_in(base.__dict__.get(name), base.__module__) for name in _CALL_METHODS)
        if _has_replaced_method(base):
            return True
    return False


def _has_replaced_method(kind: type) -> bool:
    attributes = tuple(kind.__dict__.values())
    if _attributes_as_defined.get(kind) == attributes:
        return False
    if not all(_is_defined_in(attribute, kind.__module__) for attribute in attributes):
        return True
    _attributes_as_defined[kind] = attributes
    return False


def _is_defined_in(attribute: object, module: str) -> bool:
    """Return whether a function, method or property comes from the source of a module; True for other attributes."""
    function = attribute.fget if isinstance(attribute, property) else getattr(attribute, "__func__", attribute)
    while isinstance(function, FunctionType) and function.__globals__["__name__"] == "torch.utils._contextlib":
        function = function.__wrapped__  # type: ignore[attr-defined]  # under torch.no_grad()
    if isinstance(function, FunctionType):
        return function.__globals__ is vars(sys.modules[module])
    return not callable(function) or isinstance(function, type)
