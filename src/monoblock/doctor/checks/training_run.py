"""Checks of a run by its settings and its metrics."""

from __future__ import annotations

import statistics

import torch

from monoblock.doctor.examination import Examination, TrainingHistory, finding
from monoblock.doctor.report import Finding

SPIKE = 10.0  # times the median of the gradient norms
MAX_EPOCHS = 16.0  # more repetitions of the data teach little (Muennighoff et al. 2023)


def _history(exam: Examination) -> TrainingHistory:
    assert exam.handed.history is not None
    return exam.handed.history


def check_warmup(exam: Examination) -> Finding | None:
    """Look for a post-norm model that starts at its full learning rate."""
    history = _history(exam)
    if not exam.subject.declared.post_norm or not history.starts_fresh or history.warmup >= 10:
        return None
    return finding(
        "warmup",
        "warn",
        {"warmup_steps": history.warmup, "usual": 100},
        "a post-norm model starts at its full learning rate: its gradients near the output are large at the start, "
        "and it diverges or stalls",
        "raise the learning rate over the first 100 steps or more (train.warmup), or normalize before each sublayer",
    )


def check_clipping(exam: Examination) -> Finding | None:
    """Look for spikes of the gradient norm in a run without clipping."""
    history = _history(exam)
    norms = [float(row["grad_norm"]) for row in history.steps if row.get("grad_norm") is not None]
    if history.clip or len(norms) < 10:
        return None
    later = norms[max(5, len(norms) // 10) :]
    middle = statistics.median(later)
    spikes = [norm for norm in later if norm > SPIKE * middle]
    if not spikes:
        return None
    return finding(
        "clipping",
        "warn",
        {"spikes": len(spikes), "largest_norm": max(spikes), "median_norm": middle},
        f"the gradient norm has {len(spikes)} spikes of more than {SPIKE:.0f} times its median, and nothing clips "
        "them: one such update can undo days of training",
        "clip gradients: train.clip = 1.0, or torch.nn.utils.clip_grad_norm_(parameters, 1.0) before every step",
    )


def check_train_eval_gap(exam: Examination) -> Finding | None:
    """Look for a loss on held-out data that rises while that of training falls."""
    history = _history(exam)
    values = [float(row["val_loss"]) for row in history.evaluations if "val_loss" in row]
    losses = [float(row["loss"]) for row in history.steps]
    if len(values) < 2 or len(losses) < 10:
        return None
    part = max(1, len(losses) // 10)
    train, last, best = sum(losses[-part:]) / part, values[-1], min(values)
    if last < 1.1 * best or last < 1.3 * train:
        return None
    return finding(
        "train_eval_gap",
        "warn",
        {"train_loss": train, "validation_loss": last, "best_validation_loss": best},
        "the model memorizes its training data: the loss on held-out data rises again",
        "stop at the best step (train.load_best), add dropout or data, or take a smaller model",
    )


def check_repeated_data(exam: Examination) -> Finding | None:
    """Look for rows that a batch has twice, and for runs that read their data too often."""
    if exam.handed.batch is not None and exam.handed.batch[0].shape[0] > 1:
        ids = exam.handed.batch[0]
        unique = len(torch.unique(ids.flatten(1), dim=0))
        if unique <= ids.shape[0] / 2:
            return finding(
                "repeated_data",
                "fail",
                {"rows": ids.shape[0], "different_rows": unique},
                "rows of the batch are copies of each other: the loader draws the same sample again and again",
                "draw rows without replacement, and give every worker its own seed",
            )
    history = exam.handed.history
    if history is None or not history.epochs or history.epochs <= MAX_EPOCHS or not history.evaluations:
        return None
    values = [float(row["val_loss"]) for row in history.evaluations if "val_loss" in row]
    losses = [float(row["loss"]) for row in history.steps]
    part = max(1, len(losses) // 10)
    if not values or not losses or values[-1] < 2 * sum(losses[-part:]) / part:
        return None
    return finding(
        "repeated_data",
        "warn",
        {"times_read": history.epochs, "train_loss": sum(losses[-part:]) / part, "validation_loss": values[-1]},
        f"the data were read {history.epochs:.0f} times and are memorized; more than four times teaches little",
        "use more data, or stop earlier",
    )
