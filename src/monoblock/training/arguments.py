"""The length of a training run, and how often it evaluates, samples and saves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingArguments:
    """Settings of a training run; intervals (`…_every`) are in steps, and 0 means never."""

    steps: int
    accumulate: int = 1  # micro-batches of a step
    clip: float = 1.0  # largest gradient norm; 0: no clipping
    save_every: int = 0
    eval_every: int = 0
    sample_every: int = 0
    keep: int = 3  # checkpoints
    ema: float = 0.0  # decay of the weight average; 0: none
