"""Named activations: `tap(name, tensor) -> tensor` is called at every one, and what it returns goes on.

A tap may have a method `wants(name) -> bool`; activations that cost extra (attention weights, the plain path of
experts) are made only when it says so.  A tap without it wants everything.  `tap=None` is the fast path.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Tap = Callable[[str, Tensor], Tensor]


class Under:
    """A tap seen from inside a part: names gain the part's own name in front."""

    def __init__(self, tap: Tap, prefix: str) -> None:
        self.tap, self.prefix = tap, prefix

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        return self.tap(f"{self.prefix}.{name}", tensor)

    def wants(self, name: str) -> bool:
        return wants(self.tap, f"{self.prefix}.{name}")


def under(tap: Tap | None, prefix: str) -> Tap | None:
    return None if tap is None else Under(tap, prefix)


def wants(tap: Tap | None, name: str) -> bool:
    """Whether an activation that costs extra must be made."""
    if tap is None:
        return False
    asked = getattr(tap, "wants", None)
    return True if asked is None else bool(asked(name))


def tapped(tap: Tap | None, name: str, tensor: Tensor) -> Tensor:
    return tensor if tap is None else tap(name, tensor)
