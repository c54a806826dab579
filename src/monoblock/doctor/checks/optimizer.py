"""Checks of an optimizer and of a training step, and of the settings and metrics of a run."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from monoblock.doctor.checks.loss import default_loss, loss_function, restoring
from monoblock.doctor.examination import STEP, Examination, check, fail, warn
from monoblock.doctor.report import Finding, NotChecked, Outcome
from monoblock.doctor.subject import hooks

MAX_WEIGHT_DECAY = 0.3
STEPS = 8  # until which a weight must have moved; a step may only add gradients up
MIN_SHARE = 0.05  # of an old gradient, above what chance explains
USUAL_SIZE = 0.02  # root mean square of a weight at the start
MIN_WEIGHT_SIZE = 0.025  # weights of Transformers have a root mean square of 0.02 (GPT-2 at the start) to 0.1


@check("the optimizer holds the weights of the model", "optimizer", explains="overfit learning_rate", group="training")
def check_optimizer(exam: Examination) -> Finding | None:
    """Compare the tensors of the optimizer with the weights of the model; given a step, observe its effect on them."""
    module, optimizers = exam.module, [o for o in (exam.options.optimizer,) if o is not None]
    own = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    if not own:
        return None  # gradient_flow says so
    step = None if exam.options.step is None else _watch_step(exam.options.step, module)
    optimizers = list(dict.fromkeys((*optimizers, *(step.updates if step is not None else ()))))
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    foreign, missing = held - {id(p) for p in module.parameters()}, [name for i, name in own.items() if i not in held]
    if optimizers and (foreign or missing):
        reason = (
            "the optimizer holds other tensors than the model: it was built before the model was replaced, copied or "
            "moved"
            if foreign
            else f"the optimizer does not hold {missing[0]}, so it never changes"
        )
        return fail(
            {"weights_of_the_model": len(own), "held": len(held) - len(foreign), "foreign": len(foreign)},
            reason,
            "build the optimizer last: optimizer = AdamW(model.parameters()), after model.to(device), resizing and "
            "tying",
        )
    return None if step is None else _judge_step(step, optimizers)


@dataclass
class _Step:
    """What the training step did in a few calls."""

    calls: int = 0
    moves: bool = False
    gradients: int = 0  # that backward() gave to weights
    updates: list[Optimizer] = field(default_factory=list)  # the optimizer of each call of optimizer.step()
    old_gradient: float = 0.0  # the share of a gradient from before two updates in that after them


def _watch_step(step: Callable[[], Any], module: nn.Module) -> _Step:
    weights = [p for p in module.parameters() if p.requires_grad]
    seen = _Step()

    def count(_: Tensor) -> None:
        seen.gradients += 1

    with restoring(module) as updates:
        with hooks(p.register_hook(count) for p in weights):
            while not seen.moves and seen.calls < STEPS:
                seen.moves, seen.calls = _moves(step, weights), seen.calls + 1
        seen.updates = [*updates]
        if seen.moves:
            seen.old_gradient = _share_of_old_gradient(step, weights)
    return seen


def _moves(step: Callable[[], Any], weights: list[nn.Parameter]) -> bool:
    before = [p.detach().clone() for p in weights]
    step()
    return any(not torch.equal(p, b) for p, b in zip(weights, before, strict=True))


def _share_of_old_gradient(step: Callable[[], Any], weights: list[nn.Parameter]) -> float:
    """Plant gradients, and return how much of them is left after two updates; 0 as soon as they are gone.

    A step may add the gradients of several calls up, but between two updates they begin at zero.
    """
    generator = torch.Generator().manual_seed(5)
    size = 10 / math.sqrt(sum(p.numel() for p in weights))
    planted = [(size * torch.randn(p.shape, generator=generator)).to(p) for p in weights]
    for p, gradient in zip(weights, planted, strict=True):
        p.grad = gradient.clone()
    added_up, updates = [p.grad for p in weights], 0  # in place, unless zero_grad() makes them None
    for _ in range(2 * STEPS):
        updates += _moves(step, weights)
        kept = [i for i, p in enumerate(weights) if p.grad is added_up[i]]
        if not kept:
            return 0.0
        old = torch.cat([planted[i].flatten().float() for i in kept])
        new = torch.cat([g.flatten().float() for i in kept if (g := weights[i].grad) is not None])
        share = float(F.cosine_similarity(old, new, dim=0))
        if not share > MIN_SHARE + 6 / math.sqrt(len(old)):  # which chance may give
            return 0.0
        if updates == 2:
            return share
    return 0.0


def _judge_step(step: _Step, optimizers: list[Optimizer]) -> Finding | None:
    if step.moves and step.old_gradient == 0:
        return None
    evidence: dict[str, Any] = {"steps": step.calls, "calls_of_optimizer_step": len(step.updates)}
    rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    fix = "write optimizer.zero_grad(), loss.backward() and optimizer.step() in each training step, in this order"
    if step.moves:
        evidence |= {"share_of_an_old_gradient_after_two_updates": step.old_gradient, "expected": 0.0}
        reason = (
            "optimizer.zero_grad() is not called: the gradients of all earlier steps are added to the new one, and the "
            "weights follow their sum"
        )
    elif rates and not any(rates):
        reason = "no weight of the model changes: the learning rate is 0"
        fix = "give one: AdamW(model.parameters(), lr=3e-4)"
    elif step.gradients and not step.updates:
        reason = "no weight of the model changes, though all have gradients: optimizer.step() is not called"
    elif step.gradients:
        reason = "no weight of the model changes: zero_grad() comes between loss.backward() and optimizer.step()"
    elif step.updates:
        reason = "no weight of the model changes: loss.backward() is not called, or the loss is that of another model"
    else:
        reason = "no weight of the model changes: neither loss.backward() nor optimizer.step() is called"
    title = "gradients are added up" if step.moves else "no weight changes"
    return fail(evidence, reason, fix, title)


@check(
    "the learning rate moves the loss down",
    "training",
    explains="clipping warmup train_eval_gap",
    group="training",
    is_slow=True,
)
def check_learning_rate(exam: Examination) -> Outcome:
    """Look at the losses of a run, or make a few steps: the loss must fall."""
    if exam.options.history is not None and len(exam.options.history.steps) >= 10:
        losses = [float(row["loss"]) for row in exam.options.history.steps]
        lr = exam.options.history.lr
        return _judge_losses(losses, {} if lr is None else {"learning_rate": lr})
    module = exam.module
    if exam.options.step is None:
        return _check_first_update(exam, module)
    with restoring(module):
        before = [p.detach().clone() for p in module.parameters() if p.requires_grad]
        values = [_number(exam.options.step()) for _ in range(10)]
        changes = [
            float((p.detach() - b).norm()) / max(float(b.norm()), 1e-6)
            for p, b in zip((p for p in module.parameters() if p.requires_grad), before, strict=True)
            if b.dim() > 1
        ]
    change = sorted(changes)[len(changes) // 2] / 10 if changes else 0.0
    known = [value for value in values if value is not None]
    falls = len(known) < len(values) or known[-1] < known[0]
    if change > (1.0 if falls else 0.1):  # usual: 0.001 a step
        return _rate_finding("too high", {"relative_change_of_weights_per_step": change, "usual": 1e-3})
    if 0 < change < 1e-7:
        return _rate_finding("too low", {"relative_change_of_weights_per_step": change, "usual": 1e-3})
    return _judge_losses(known, {}, few=True) if len(known) == len(values) else None


def _check_first_update(exam: Examination, module: nn.Module) -> Outcome:
    """Let a copy of the optimizer make one step on copies of the weights: it must not move them by their own size.

    The gradient is that of the batch, or of random labels, which has the usual size.
    """
    optimizer = exam.options.optimizer
    assert optimizer is not None
    weights = [p for p in module.parameters() if p.requires_grad]
    with exam.subject.evaluating(), torch.enable_grad():
        if exam.options.batch is not None and not exam.options.batch[1].is_floating_point():
            ids, labels = exam.batch
            loss = loss_function(exam)(exam.subject.logits(ids), labels)
        else:
            logits, generator = exam.subject.logits(exam.ids), torch.Generator().manual_seed(4)
            labels = torch.randint(logits.shape[-1], logits.shape[:-1], generator=generator)
            loss = default_loss(logits, labels.to(logits.device))
        gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    of_weight = {id(p): g for p, g in zip(weights, gradients, strict=True)}
    trial, changes = copy.deepcopy(optimizer), list[float]()
    held = [
        (p, q)
        for g, h in zip(optimizer.param_groups, trial.param_groups, strict=True)
        for p, q in zip(g["params"], h["params"], strict=True)
    ]
    for p, q in held:
        q.grad = of_weight.get(id(p))
    trial.step()
    for p, q in held:
        if q.grad is not None and p.dim() > 1:
            usual = USUAL_SIZE * math.sqrt(p.numel())
            changes.append(float((q - p).detach().norm()) / max(float(p.detach().norm()), usual))
    change = max(changes, default=0.0)
    if not change < 1:
        evidence = {"learning_rate": max(float(g["lr"]) for g in optimizer.param_groups)}
        return _rate_finding("too high", {**evidence, "change_of_weights_in_the_first_step": change, "usual": 0.01})
    how = f"pass {STEP}, where f() makes one training step of the module"
    return NotChecked("the first update is not too large, but no losses were seen", how, STEP)


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
    if few and all(later > earlier for earlier, later in pairwise(losses)):
        reason = "the loss rises with each step: its sign is wrong, the optimizer maximizes it, or its rate is too high"
        fix = "write loss.backward() without a minus, and AdamW(model.parameters(), lr=3e-4) without maximize=True"
        return fail(evidence, reason, fix, "the loss rises")
    if not few and len(losses) >= 20 and abs(last - first) < 0.005 * abs(first) and min(losses) > 0.98 * first:
        return _rate_finding("too low", evidence)
    return None


def _rate_finding(rate: str, evidence: dict[str, Any]) -> Finding:
    change = next((value for name, value in evidence.items() if "change_of_weights" in name), None)
    if rate == "too low":
        reason = "the loss does not move: the learning rate is too low, or nothing is trained"
    elif change is not None:
        reason = f"the learning rate is too high: one step changes the weights by {change:.2g} times their size"
    else:
        reason = "the learning rate is too high: the loss rises or is not finite"
    further = (
        "halve it as long as the loss rises"
        if rate == "too high"
        else "multiply it by 10 if the loss still does not move"
    )
    fix = f"write AdamW(model.parameters(), lr=3e-4), and reach it over the first tenth of the steps; then {further}"
    return fail(evidence, reason, fix, rate)


@check("beta2 and weight decay are usual", "optimizer_or_run", group="training")
def check_optimizer_settings(exam: Examination) -> Finding | None:
    """Compare beta2 and weight decay with values that train Transformers."""
    rows: list[tuple[Any, Any, Any]] = []
    if exam.options.optimizer is not None:
        groups = exam.options.optimizer.param_groups
        rows = [(g.get("betas", (None, None))[1], g.get("weight_decay"), g.get("lr")) for g in groups]
    elif (history := exam.options.history) is not None:
        rows = [(history.beta2, history.weight_decay, history.lr)]
    for beta2, decay, lr in rows:
        if isinstance(beta2, float) and not 0.9 <= beta2 <= 0.999:
            reason = f"beta2={beta2:g} is unusual: GPTs use 0.95, the paper 0.98, PyTorch 0.999"
            return warn({"beta2": beta2}, reason, "write betas=(0.9, 0.95)")
        if isinstance(decay, float) and decay > MAX_WEIGHT_DECAY:
            # The root mean square that AdamW's weights tend to.
            size = math.sqrt(lr / (2 * decay)) if isinstance(lr, float) else 0.0
            if size < MIN_WEIGHT_SIZE:
                return warn(
                    {"weight_decay": decay, "size_of_a_weight": size},
                    f"weight_decay={decay:g} exceeds the usual 0 to {MAX_WEIGHT_DECAY}: it pulls the weights to zero",
                    "write weight_decay=0.1",
                )
    return None


SPIKE = 10.0  # times the median of the gradient norms
MAX_EPOCHS = 16.0  # more repetitions of the data teach little (Muennighoff et al. 2023)


@check("post-norm models warm up", "run", group="training")
def check_warmup(exam: Examination) -> Finding | None:
    """Look for a post-norm model that starts at its full learning rate."""
    history = exam.history
    if not exam.subject.declared.post_norm or not history.starts_fresh or history.warmup >= 10:
        return None
    return warn(
        {"warmup_steps": history.warmup, "usual": 100},
        "a post-norm model starts at its full learning rate: its gradients near the output are large at the start, "
        "and it diverges or stalls",
        "raise the learning rate over the first 100 steps or more (train.warmup), or normalize before each sublayer",
    )


@check("gradients with spikes are clipped", "run", group="training")
def check_clipping(exam: Examination) -> Finding | None:
    """Look for spikes of the gradient norm in a run without clipping."""
    history = exam.history
    norms = [float(row["grad_norm"]) for row in history.steps if row.get("grad_norm") is not None]
    if history.clip or len(norms) < 10:
        return None
    later = norms[max(5, len(norms) // 10) :]
    middle = statistics.median(later)
    spikes = [norm for norm in later if norm > SPIKE * middle]
    if not spikes:
        return None
    return warn(
        {"spikes": len(spikes), "largest_norm": max(spikes), "median_norm": middle},
        f"the gradient norm has {len(spikes)} spikes of more than {SPIKE:.0f} times its median, and nothing clips "
        "them: one such update can undo days of training",
        "clip gradients: train.clip = 1.0, or torch.nn.utils.clip_grad_norm_(parameters, 1.0) before every step",
    )


@check("the loss on held-out data follows that of training", "run", group="training")
def check_train_eval_gap(exam: Examination) -> Finding | None:
    """Look for a loss on held-out data that rises while that of training falls."""
    history = exam.history
    values = history.validation_losses
    if len(values) < 2 or len(history.steps) < 10:
        return None
    train, last, best = history.last_train_loss, values[-1], min(values)
    if last < 1.1 * best or last < 1.3 * train:
        return None
    return warn(
        {"train_loss": train, "validation_loss": last, "best_validation_loss": best},
        "the model memorizes its training data: the loss on held-out data rises again",
        "stop at the best step (train.load_best), add dropout or data, or take a smaller model",
    )


@check("data are not repeated without need", "batch_or_run", group="training")
def check_repeated_data(exam: Examination) -> Finding | None:
    """Look for rows that a batch has twice, and for runs that read their data too often."""
    if exam.options.batch is not None and exam.options.batch[0].shape[0] > 1:
        ids = exam.options.batch[0]
        unique = len(torch.unique(ids.flatten(1), dim=0))
        if unique <= ids.shape[0] / 2:
            return fail(
                {"rows": ids.shape[0], "different_rows": unique},
                "rows of the batch are copies of each other: the loader draws the same sample again and again",
                "draw rows without replacement, and give every worker its own seed",
            )
    history = exam.options.history
    if history is None or not history.epochs or history.epochs <= MAX_EPOCHS or not history.evaluations:
        return None
    values, train = history.validation_losses, history.last_train_loss
    if not values or not history.steps or values[-1] < 2 * train:
        return None
    return warn(
        {"times_read": history.epochs, "train_loss": train, "validation_loss": values[-1]},
        f"the data were read {history.epochs:.0f} times and are memorized; more than four times teaches little",
        "use more data, or stop earlier",
    )
