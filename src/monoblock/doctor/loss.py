"""The loss of a training: how it is computed, and which label it compares with which logits, read off its gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from monoblock.doctor.examination import Examination

IGNORED = -100
FAILURES = (RuntimeError, TypeError, ValueError, IndexError)


def default_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy over labels that are not -100."""
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED)


def handed_batch(exam: Examination) -> tuple[Tensor, Tensor]:
    assert exam.handed.batch is not None
    ids, labels = exam.handed.batch
    return ids.to(exam.subject.device), labels.to(exam.subject.device)


def loss_function(exam: Examination) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of logits and labels: the one that was handed over, that of the model, or cross-entropy."""
    return exam.handed.loss or exam.subject.own_loss or default_loss


def made_up_logits(exam: Examination, ids: Tensor) -> Tensor:
    """Return logits (B, T, C) of which no two neighbours are equal; those of a longer text begin with the same ones."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(67, exam.output.shape[-1], generator=generator).to(exam.subject.device)
    rows, columns = (torch.arange(n, device=ids.device) for n in ids.shape)
    logits = table[(13 * rows[:, None] + columns) % 67]
    return logits.softmax(-1) if are_probabilities(exam.output) else logits


def perfect_output(exam: Examination, labels: Tensor) -> Tensor:
    """Return what a perfect model of this kind gives for labels: logits, probabilities or their logarithms."""
    perfect = F.one_hot(labels.clamp(min=0), exam.output.shape[-1]).float()
    if are_probabilities(exam.output):
        return perfect
    return (30 * perfect).log_softmax(-1) if are_probabilities(exam.output.float().exp()) else 30 * perfect


def cross_entropy_of(exam: Examination, output: Tensor, labels: Tensor) -> float:
    """Return the cross-entropy of an output of the model, whether it is of logits or of probabilities."""
    return float(default_loss(output.clamp(min=1e-12).log() if are_probabilities(exam.output) else output, labels))


def are_probabilities(output: Tensor) -> bool:
    sums = output.float().sum(-1)
    return output.shape[-1] > 1 and bool((output >= 0).all()) and bool(((sums - 1).abs() < 1e-2).all())


@dataclass
class Reading:
    """The gradient (B, T, C) of one loss at the logits of these ids, and where that loss is computed.

    An optimizer goes against it; where it maximizes, the gradient is turned round.
    """

    ids: Tensor
    gradient: Tensor
    place: str
    labels: Tensor | None = None  # that were handed over
    maximizes: bool = False

    @property
    def targets(self) -> Tensor:
        return read_targets(self.gradient)


def read_targets(gradient: Tensor) -> Tensor:
    """Return the class that a loss pulls up at each place, which is its label; -100 where it takes no notice."""
    return gradient.argmin(-1).masked_fill(gradient.abs().amax(-1) == 0, IGNORED)


def read_batch(exam: Examination) -> Reading | None:
    """Read the loss of the batch; None if it cannot be called or has no gradient."""
    ids, labels = handed_batch(exam)
    logits = made_up_logits(exam, ids).requires_grad_()
    try:
        with torch.enable_grad():
            loss = loss_function(exam)(logits, labels)
        gradient = torch.autograd.grad(loss, logits, allow_unused=True)[0]
    except FAILURES as error:
        exam.notes.append(f"the loss could not be called as loss(logits, labels): {error!s:.80}")
        return None
    return None if gradient is None else Reading(ids, gradient, "the loss", labels)


def read_step(exam: Examination) -> Reading | None:
    """Read the loss inside a training step; None if no logits of its ids are seen."""
    module, step = exam.subject.module, exam.handed.step
    if module is None or step is None:
        return None
    with restoring(module) as updates, _watching(exam) as seen:
        step()
    if not seen:
        return None
    optimizers = updates if exam.handed.optimizer is None else [*updates, exam.handed.optimizer]
    maximizes = any(group.get("maximize") for optimizer in optimizers for group in optimizer.param_groups)
    ids, gradient = seen[-1]
    return Reading(ids, -gradient if maximizes else gradient, "the training step", maximizes=maximizes)


@contextmanager
def _watching(exam: Examination) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Give a list to which the ids and the gradient at the logits of each later pass are added."""
    module, outputs = exam.subject.module, exam.output.shape[-1]
    assert module is not None
    ids, logits, seen = list[Tensor](), list[Tensor](), list[tuple[Tensor, Tensor]]()

    def before(_: nn.Module, inputs: tuple[object, ...], options: dict[str, object]) -> None:
        given = [t for t in (*inputs, *options.values()) if isinstance(t, Tensor) and t.dim() == 2]
        ids[:] = [t for t in given if not t.is_floating_point()][:1]
        logits.clear()

    def after(_: nn.Module, inputs: object, output: object) -> None:
        if ids and isinstance(output, Tensor) and output.shape == (*ids[0].shape, outputs) and output.requires_grad:
            logits[:] = [output]

    def after_all(_: nn.Module, inputs: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        if not logits:
            after(module, inputs, first)
        if logits:
            given = ids[0]
            logits[0].register_hook(lambda gradient: seen.append((given, gradient.detach())))

    handles = [module.register_forward_pre_hook(before, with_kwargs=True)]
    handles += [part.register_forward_hook(after) for part in module.modules() if part is not module]
    handles.append(module.register_forward_hook(after_all))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def restoring(module: nn.Module) -> Iterator[list[Optimizer]]:
    """Put weights, buffers and the state of each optimizer that makes a step back after an experiment.

    Gives a list to which an optimizer is added with each step that it makes.
    """
    saved = {name: p.detach().clone() for name, p in module.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    steps, states = list[Optimizer](), dict[Optimizer, dict[str, Any]]()

    def before_step(optimizer: Optimizer, *_: object) -> None:
        steps.append(optimizer)
        if optimizer not in states:
            states[optimizer] = copy.deepcopy(optimizer.state_dict())

    watch = register_optimizer_step_pre_hook(before_step)
    try:
        yield steps
    finally:
        watch.remove()
        with torch.no_grad():
            for name, p in module.named_parameters():
                p.copy_(saved[name])
                p.grad = None
            for name, buffer in module.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])
        for optimizer, state in states.items():
            optimizer.load_state_dict(state)
