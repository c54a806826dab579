"""All checks, in the order in which they are run."""

from __future__ import annotations

from monoblock.doctor.checks import (
    attention,
    cache,
    causality,
    fit,
    loss,
    modules,
    numerics,
    optimizer,
    padding,
    positions,
)
from monoblock.doctor.examination import Check

# What makes other checks meaningless comes first.
MODULES = (numerics, modules, attention, causality, positions, padding, cache, fit, optimizer, loss)
CHECKS: tuple[Check, ...] = tuple(
    value for module in MODULES for value in vars(module).values() if isinstance(value, Check)
)
