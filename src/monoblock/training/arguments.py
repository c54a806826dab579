"""The length of a training run, and how often it evaluates, samples and saves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingArguments:
    """Settings of a training run; intervals (`…_every`) are in steps, and 0 means never."""

    steps: int
    accumulate: int = 1  # micro-batches per step
    clip: float = 1.0  # the largest gradient norm; 0 means no clipping
    save_every: int = 0
    save_async: bool = False  # write checkpoints in a thread while training continues
    eval_every: int = 0
    sample_every: int = 0
    keep: int = 3  # how many of the last checkpoints to keep; 0 means all
    ema: float = 0.0  # decay of the exponential moving average of the weights; 0 means no average
