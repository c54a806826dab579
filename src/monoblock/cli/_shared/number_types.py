"""Types of options that are numbers."""

from __future__ import annotations

import math
from typing import Any

import click


class NumberRange(click.FloatRange):
    """A number in a range, which `nan` and `inf` are not; click.FloatRange accepts nan in any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number; write one such as 0.5", param, ctx)
        return float(number)
