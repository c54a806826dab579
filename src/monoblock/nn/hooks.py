"""Tell whether calling a module runs more than the `forward` that its class defines: what a fast copy would skip."""

from __future__ import annotations

import sys
from types import FunctionType

import torch
from torch import nn
from torch.nn.modules import module as torch_module


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
