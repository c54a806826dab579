"""Choose the files to damage, so that each group of files gets its share of the cases."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _file_seeds import Seed

# The groups of files, the share of the cases that damage a file of each, and how many there must be in 20,000.
GROUPS = {
    "safetensors": (0.17, 3000),
    "configuration or index": (0.17, 3000),
    "tokenizer": (0.14, 2000),
    "pickle": (0.055, 1000),
    "checkpoint": (0.06, 1000),
    "other": (0.405, 0),
}


def file_group(seed: Seed, file: str) -> str:
    """Return the group of a file in a folder of valid files."""
    if seed.kind in ("pickle", "checkpoint"):
        return seed.kind
    if file.endswith(".safetensors"):
        return "safetensors"
    if seed.read in ("tokenizer", "chat", "gguf tokenizer") or file.startswith("tokenizer"):
        return "tokenizer"
    return "configuration or index" if seed.read in ("model", "weights", "config", "adapter") else "other"


def group_targets(seeds: list[Seed]) -> dict[str, list[tuple[Seed, str]]]:
    """Return the files that may be damaged, with the folders they are in, by their group."""
    groups: dict[str, list[tuple[Seed, str]]] = {}
    for seed in seeds:
        for file in seed.files:
            groups.setdefault(file_group(seed, file), []).append((seed, file))
    return groups


def choose_target(targets: dict[str, list[tuple[Seed, str]]], rng: random.Random) -> tuple[Seed, str]:
    """Choose a file at random, from each group as often as its share says."""
    names = sorted(targets)
    group = rng.choices(names, [GROUPS[name][0] for name in names])[0]
    return rng.choice(targets[group])
