"""Tell whether a fast path may read a module's weights instead of calling the module.

A call runs what users attach to a module: hooks, a replaced `forward`, parametrizations, adapters, a compiled version.
A fast path that multiplies with `module.weight` would skip all of them, so it checks `is_plain` first and else calls
the module.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn.modules import module as torch_module


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether calling `module` runs `kind.forward` on its own parameters and nothing else."""
    return type(module) is kind and not is_customized(module)


def is_customized(module: nn.Module) -> bool:
    """Whether a call runs more than the `forward` of the module's class: hooks, a replaced `forward`, `compile()`."""
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
    """The weight of a plain module, to compute with directly, or else the module itself, to be called."""
    return cast(Tensor, module.weight) if is_plain(module, kind) else module
