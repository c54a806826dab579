"""Switch a model to evaluation mode for a forward pass, and restore the mode of each module afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every sub-module in evaluation mode inside a `with` block, and restore the mode of each one afterwards.

    Several threads may share a model that is in evaluation mode: nothing is changed then.  A model in training mode
    belongs to one thread at a time, as in training.
    """
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
