"""Switch a model to evaluation mode for a forward pass, and restore the mode of each module afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_lock = threading.Lock()
_blocks: list[
    tuple[nn.Module, list[nn.Module]]
] = []  # the model of each open block, and the modules to restore after it


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every sub-module in evaluation mode inside a `with` block, and restore the mode of each one afterwards.

    If several threads are in such a block with one model, the last one restores the modes.
    """
    switched: list[nn.Module] = []
    block = model, switched
    try:
        with _lock:
            _blocks.append(block)
            for module in model.modules():
                if module.training:
                    switched.append(module)
                    module.training = False
        yield
    finally:
        with _lock:
            _blocks[:] = [other for other in _blocks if other is not block]
            heir = next((modules for other, modules in _blocks if other is model), None)
            if heir is not None:
                heir += switched
            else:
                for module in switched:
                    module.training = True
