"""Change the number of blocks of a stack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from monoblock.config.limits import MAX_LAYERS
from monoblock.config.parts import Repeat
from monoblock.config.schema import shorten_int
from monoblock.errors import ConfigError


def check_positive_int(name: str, value: Any) -> int:
    """Return `value` if it is a positive whole number, else raise a ConfigError that calls it `name`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} is not a positive whole number; write 1 or more")
    return value


def resize_pattern(pattern: tuple[Repeat, ...], depth: int) -> tuple[Repeat, ...]:
    """Cut a pattern to `depth` blocks, or repeat its last entry until it has `depth` blocks."""
    check_positive_int("depth", depth)
    if depth > MAX_LAYERS:
        raise ConfigError(f"depth={shorten_int(depth)} is too large; write {MAX_LAYERS} or less")
    runs: list[Repeat] = []
    left = depth
    for number, run in enumerate(pattern, start=1):
        times, rest = divmod(left, len(run.blocks))
        is_last = number == len(pattern) or times < run.times or (times == run.times and not rest)
        if not is_last:
            runs.append(run)
            left -= run.times * len(run.blocks)
            continue
        if times:
            runs.append(replace(run, times=times))
        if rest and run.tied:
            size = len(run.blocks)
            fix = depth - rest or size
            raise ConfigError(f"depth={depth} would cut a group of {size} blocks with tied weights; write depth={fix}")
        if rest:
            runs.append(Repeat(blocks=run.blocks[:rest]))
        break
    return tuple(runs)
