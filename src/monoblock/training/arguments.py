"""The lengths and intervals of a training run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingArguments:
    """Counted in steps; an interval of 0 is never."""

    steps: int
    accumulate: int = 1  # micro-batches of a step
    clip: float = 1.0  # largest gradient norm; 0: no clipping
    save_every: int = 0
    eval_every: int = 0
    sample_every: int = 0
    keep: int = 3  # checkpoints
    ema: float = 0.0  # decay of the weight average; 0: none
