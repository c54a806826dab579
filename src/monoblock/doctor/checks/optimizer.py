"""Checks of an optimizer and of a training step, or of the losses of a run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.doctor.checks.training_start import restoring
from monoblock.doctor.examination import Examination, finding
from monoblock.doctor.report import Finding

MAX_WEIGHT_DECAY = 0.3
STEPS = 8  # until which a weight must have moved; a step may only add gradients up
MIN_WEIGHT_SIZE = 0.025  # weights of Transformers have a root mean square of 0.02 (GPT-2 at the start) to 0.1


def check_optimizer(exam: Examination) -> Finding | None:
    """Compare the tensors of the optimizer with the weights of the model; with a step, see whether they move."""
    module, optimizer = exam.subject.module, exam.handed.optimizer
    assert module is not None
    own = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    if optimizer is None:
        return _check_step_moves(exam, module)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    foreign, missing = [i for i in held if i not in own], [name for i, name in own.items() if i not in set(held)]
    all_parameters = {id(p) for p in module.parameters()}
    foreign = [i for i in foreign if i not in all_parameters]
    if not foreign and not missing:
        return None if exam.handed.step is None else _check_step_moves(exam, module)
    reason = (
        "the optimizer holds other tensors than the model: it was built before the model was replaced, copied or moved"
        if foreign
        else f"the optimizer does not hold {missing[0]}, so it never changes"
    )
    return finding(
        "optimizer",
        "fail",
        {"weights_of_the_model": len(own), "held": len(held) - len(foreign), "foreign": len(foreign)},
        reason,
        "build the optimizer last: optimizer = AdamW(model.parameters()), after model.to(device), resizing and tying",
    )


def _check_step_moves(exam: Examination, module: nn.Module) -> Finding | None:
    assert exam.handed.step is not None
    optimizer, moves = exam.handed.optimizer, False
    with restoring(module, optimizer):
        before = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
        for _ in range(STEPS):
            exam.handed.step()
            moves = any(not torch.equal(p, before[name]) for name, p in module.named_parameters() if name in before)
            if moves:
                break
    if moves or not before:
        return None
    if optimizer is not None:
        rates = {float(group["lr"]) for group in optimizer.param_groups}
        return finding(
            "optimizer",
            "fail",
            {"weights_of_the_model": len(before), "moved": 0, "steps": STEPS, "learning_rate": max(rates)},
            f"no weight of the model changes in {STEPS} steps, though the optimizer holds them: "
            + ("optimizer.step() is not called, or there is no gradient" if any(rates) else "the learning rate is 0"),
            "call loss.backward() and optimizer.step() in each step, with a learning rate such as 3e-4 for AdamW",
        )
    return finding(
        "optimizer",
        "fail",
        {"weights_of_the_model": len(before), "moved": 0},
        "no weight of the model changes in a training step: the optimizer holds other tensors, or the learning rate "
        "is 0",
        "build the optimizer last: optimizer = AdamW(model.parameters()), after model.to(device), resizing and tying",
    )


def check_learning_rate(exam: Examination) -> Finding | None:
    """Look at the losses of a run, or make a few steps: the loss must move, and down."""
    if exam.handed.history is not None and len(exam.handed.history.steps) >= 10:
        losses = [float(row["loss"]) for row in exam.handed.history.steps]
        lr = exam.handed.history.lr
        return _judge_losses(losses, {} if lr is None else {"learning_rate": lr})
    module = exam.subject.module
    if module is None or exam.handed.step is None:
        return None
    with restoring(module, exam.handed.optimizer):
        before = [p.detach().clone() for p in module.parameters() if p.requires_grad]
        values = [_number(exam.handed.step()) for _ in range(10)]
        changes = [
            float((p.detach() - b).norm()) / max(float(b.norm()), 1e-6)
            for p, b in zip((p for p in module.parameters() if p.requires_grad), before, strict=True)
            if b.dim() > 1
        ]
    change = sorted(changes)[len(changes) // 2] / 10 if changes else 0.0
    if change > 0.1:  # usual: 0.001 a step
        return _rate_finding("too high", {"relative_change_of_weights_per_step": change, "usual": 1e-3})
    if 0 < change < 1e-7:
        return _rate_finding("too low", {"relative_change_of_weights_per_step": change, "usual": 1e-3})
    known = [value for value in values if value is not None]
    return _judge_losses(known, {}, few=True) if len(known) == len(values) else None


def _number(value: Any) -> float | None:
    value = value[0] if isinstance(value, tuple) and value else value
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    return float(value) if isinstance(value, int | float) else None


def _judge_losses(losses: list[float], evidence: dict[str, Any], *, few: bool = False) -> Finding | None:
    part = max(1, len(losses) // 10)
    first, last = sum(losses[:part]) / part, sum(losses[-part:]) / part
    evidence = {**evidence, "first_loss": first, "last_loss": last}
    if not all(math.isfinite(loss) for loss in losses):
        return _rate_finding(
            "too high", {**evidence, "first_bad_step": next(i for i, x in enumerate(losses) if not math.isfinite(x))}
        )
    if last > first + 0.2 * abs(first) + 0.1:  # a loss may be negative
        return _rate_finding("too high", evidence)
    if not few and len(losses) >= 20 and abs(last - first) < 0.005 * abs(first) and min(losses) > 0.98 * first:
        return _rate_finding("too low", evidence)
    return None


def _rate_finding(what: str, evidence: dict[str, Any]) -> Finding:
    high = what == "too high"
    return finding(
        "learning_rate",
        "fail",
        evidence,
        "the learning rate is too high: the loss rises or is not finite"
        if high
        else "the loss does not move: the learning rate is too low, or nothing is trained",
        "use 3e-4 with AdamW, and reach it over the first tenth of the steps; then "
        + ("halve it as long as the loss rises" if high else "multiply it by 10 if the loss still does not move"),
    )


def check_optimizer_settings(exam: Examination) -> Finding | None:
    """Compare beta2 and weight decay with what trains Transformers."""
    rows: list[tuple[Any, Any, Any]] = []
    if exam.handed.optimizer is not None:
        for group in exam.handed.optimizer.param_groups:
            rows.append((group.get("betas", (None, None))[1], group.get("weight_decay"), group.get("lr")))
    elif exam.handed.history is not None:
        rows.append((exam.handed.history.beta2, exam.handed.history.weight_decay, exam.handed.history.lr))
    for beta2, decay, lr in rows:
        if isinstance(beta2, float) and not 0.9 <= beta2 <= 0.999:
            reason = f"beta2={beta2:g} is out of the usual: GPTs use 0.95, the paper 0.98, PyTorch 0.999"
            return finding("optimizer_settings", "warn", {"beta2": beta2}, reason, "write betas=(0.9, 0.95)")
        if isinstance(decay, float) and decay > MAX_WEIGHT_DECAY and _weight_size(decay, lr) < MIN_WEIGHT_SIZE:
            reason = f"weight_decay={decay:g} is out of the usual 0 to {MAX_WEIGHT_DECAY}: it pulls the weights to zero"
            evidence = {"weight_decay": decay, "size_of_a_weight": _weight_size(decay, lr)}
            return finding("optimizer_settings", "warn", evidence, reason, "write weight_decay=0.1")
    return None


def _weight_size(decay: float, lr: Any) -> float:
    """Return the root mean square that AdamW's weights tend to, √(lr / (2 · weight decay)); 0 without a rate."""
    return math.sqrt(lr / (2 * decay)) if isinstance(lr, float) else 0.0
