"""List the modules of a model quickly: every call of `generate` looks through them."""

from __future__ import annotations

from torch import nn


def list_modules(model: nn.Module) -> list[nn.Module]:
    """Return a module and all modules in it, each once: what `model.modules()` yields, in a fraction of its time."""
    found: dict[nn.Module, None] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found)
