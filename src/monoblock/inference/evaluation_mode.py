"""Switch a model to evaluation mode for a forward pass, and restore the mode of each module afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from monoblock.nn.modules.tree import list_modules

_lock = threading.Lock()
_active: dict[
    int, tuple[int, list[nn.Module]]
] = {}  # by id(model): the number of `with` blocks under way, and the modules that were in training mode


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every sub-module in evaluation mode inside a `with` block, and restore the mode of each one afterwards.

    Blocks of several threads may overlap: the last one that ends restores the modes.
    """
    with _lock:
        count, training = _active.get(id(model), (0, []))
        if count == 0:
            training = [module for module in list_modules(model) if module.training]
            _set_training(training, False)
        _active[id(model)] = count + 1, training
    try:
        yield
    finally:
        with _lock:
            count, training = _active.pop(id(model))
            if count > 1:
                _active[id(model)] = count - 1, training
            else:
                _set_training(training, True)


def _set_training(modules: list[nn.Module], value: bool) -> None:
    for module in modules:
        module.training = value
