"""Switch a model to evaluation mode for a forward pass, and restore the mode of each module afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn


class Switched(NamedTuple):
    """A model inside at least one `with` block."""

    training: list[nn.Module]  # its modules that were in training mode
    blocks: set[object]


_lock = threading.Lock()
_switched: dict[nn.Module, Switched] = {}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every sub-module in evaluation mode inside a `with` block, and restore the mode of each one afterwards.

    If several threads are in such a block with one model, the last one restores the modes.
    """
    block = object()
    try:
        with _lock:
            if model not in _switched:
                _switched[model] = Switched([module for module in model.modules() if module.training], set())
            _switched[model].blocks.add(block)
            for module in _switched[model].training:
                module.training = False
        yield
    finally:
        with _lock:
            if (switched := _switched.get(model)) is not None:
                switched.blocks.discard(block)
                if not switched.blocks:
                    for module in switched.training:
                        module.training = True
                    del _switched[model]
