"""A residual that a block hands to the last projection of a sublayer, whose kernel adds it to the output.

with pending_residual(layer, x):
    out = sublayer(norm(x))     # calls `layer`, which calls take_residual(layer) and adds x
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class _PendingResidual(threading.local):
    """A residual that `layer` must add to its next output.  Each thread has its own."""

    layer: nn.Module | None = None
    residual: Tensor | None = None


_pending = _PendingResidual()


@contextmanager
def pending_residual(layer: nn.Module, residual: Tensor) -> Iterator[None]:
    """Have `layer` add a residual to its output in the `with` block."""
    _pending.layer, _pending.residual = layer, residual
    try:
        yield
    finally:  # also if the sublayer fails before its last projection
        _pending.layer = _pending.residual = None


def take_residual(layer: nn.Module) -> Tensor | None:
    """Return the residual that a layer must add to its output, once; None if there is none."""
    if _pending.layer is not layer:
        return None
    residual, _pending.layer, _pending.residual = _pending.residual, None, None
    return residual
