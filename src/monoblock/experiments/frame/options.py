"""Parse the arguments key=value of an experiment: its own options, and the arms and seeds that all experiments have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from monoblock.config.schema import from_dict
from monoblock.errors import ConfigError, did_you_mean

MAX_SEED = 2**63 - 1  # the largest that torch takes


def parse_options(cls: type, values: Mapping[str, Any]) -> Any:
    """Build the options of an experiment from key=value arguments; `cls` is its dataclass of options."""
    known = [*cls.__dataclass_fields__, "seeds", "arms"]  # type: ignore[attr-defined]
    for key in values:
        if key not in known:
            raise ConfigError(
                f"this experiment has no option {key}=; its options are {', '.join(f'{one}=' for one in known)}"
                f"{did_you_mean(key, known)}"
            )
    try:
        return from_dict(cls, dict(values))
    except ConfigError as problem:
        raise ConfigError(str(problem).removeprefix(f"{cls.__name__}.")) from None


def parse_arms(words: str, known: Sequence[str]) -> list[str]:
    """Parse a comma-separated list of arms, in which * stands for any text; keep the order of `known`."""
    patterns = [word.strip() for word in words.split(",") if word.strip()]
    if not patterns:
        raise ConfigError(f"arms= names no arm; the arms are {', '.join(known)}, and arms=* is all of them")
    for pattern in patterns:
        if not any(fnmatchcase(arm, pattern) for arm in known):
            raise ConfigError(
                f"this experiment has no arm {pattern!r}; its arms are {', '.join(known)}{did_you_mean(pattern, known)}"
            )
    return [arm for arm in known if any(fnmatchcase(arm, pattern) for pattern in patterns)]


def parse_seeds(words: str | int) -> list[int]:
    """Parse a comma-separated list of seeds."""
    try:
        seeds = list(dict.fromkeys(int(word) for word in str(words).split(",")))
    except ValueError:
        raise ConfigError(f"seeds={words!r} is not a list of whole numbers; write seeds=1,2,3") from None
    if not all(0 <= seed <= MAX_SEED for seed in seeds):
        raise ConfigError(f"seeds={words!r} has a seed that is not between 0 and {MAX_SEED}")
    return seeds
