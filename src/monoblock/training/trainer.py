"""The training loop, which is independent of the model and the data and yields its progress as events.

The step of `Trainer` computes the gradients of a batch, clips them and hands them to `Updater`, which runs the
optimizers unless `UpdateGuard` rejects the update: if its loss or gradient is not finite, or its gradient norm is far
above the usual. A GPU that waits for Python between two steps is idle, so where it can, `DeviceGuard` decides this on
the device, and Python reads loss and norm while the next step runs, decides the same, and reports it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from monoblock.errors import ConfigError, FileError, InputError, MonoblockError
from monoblock.metrics.table import is_better
from monoblock.parallel.strategy import Strategy, call_with_whole_model, group_by_mesh
from monoblock.parallel.world import World
from monoblock.training import checkpoint, resume_state
from monoblock.training.checkpoint import CheckpointSaver
from monoblock.training.collate import TensorBatch
from monoblock.training.events import (
    EvaluationEvent,
    FinishedEvent,
    SampleEvent,
    SkippedUpdateEvent,
    StepEvent,
    TrainingEvent,
    WarningEvent,
)
from monoblock.training.loss import FunctionLoss, Loss
from monoblock.training.optimizer import Optimizers
from monoblock.training.runtime import RuntimeConfig
from monoblock.training.weight_averaging import ExponentialMovingAverage
from monoblock.untrusted_files import reading


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


NO_SAMPLE = "(no sample: the whole model does not fit on the device of the main process)"
NO_CHECKPOINT = -1  # stands for None when a step is broadcast
MAX_SAMPLES_SHOWN = 8  # how many samples of a bad batch a message lists
SECONDS_BETWEEN_REPORTS = 1.0  # of the losses of several processes, which are summed only to be reported


class Counts(NamedTuple):
    """What the processes agree on before a step."""

    targets: int  # in all processes
    rows: int  # of the largest part of the batch
    stop: bool = False
    report: bool = True  # whether to report the steps so far


@dataclass
class UpdateGuard:
    """Track the usual gradient norm and decide whether to apply an update.

    An update is rejected if its norm is more than `spike` times the running mean, but only after `min_good_updates`
    updates. After `patience` rejected updates in a row, the trainer rolls back to the last good checkpoint. After
    `max_rollbacks` rollbacks without `patience` good updates in a row between them, the run ends.
    """

    MIN_WEIGHT: ClassVar[float] = 0.02  # of the newest norm in the running mean

    spike: float = 10.0
    patience: int = 5
    min_good_updates: int = 100
    max_rollbacks: int = 3
    mean: float = 0.0
    good: int = 0
    bad_in_a_row: int = 0
    good_in_a_row: int = 0
    rollbacks: int = 0  # since there were `patience` good updates in a row

    def rejection_reason(self, loss: float, grad_norm: float) -> str | None:
        """Return why an update must not be applied, or None if it may be applied."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        if self.spike and self.good >= self.min_good_updates and grad_norm > self.spike * self.mean:
            ratio = grad_norm / self.mean if self.mean else math.inf
            return f"the gradient norm jumped to {grad_norm:.3g}, {ratio:.0f} times its mean {self.mean:.3g}"
        return None

    def record_good_update(self, grad_norm: float) -> None:
        self.bad_in_a_row = 0
        self.good_in_a_row += 1
        if self.good_in_a_row >= self.patience:
            self.rollbacks = 0
        self.good += 1
        # At first a plain mean, later an exponential one.
        self.mean += max(self.MIN_WEIGHT, 1 / self.good) * (grad_norm - self.mean)

    def record_bad_update(self) -> bool:
        """Count a rejected update; return whether to roll back, because `patience` updates in a row were rejected."""
        self.bad_in_a_row += 1
        self.good_in_a_row = 0
        if self.bad_in_a_row < self.patience:
            return False
        self.bad_in_a_row = 0
        return True

    def record_rollback(self, previous_rollbacks: int) -> None:
        """Set the number of rollbacks to previous_rollbacks + 1; restoring the checkpoint has reset it."""
        self.rollbacks, self.good_in_a_row = previous_rollbacks + 1, 0

    @property
    def is_exhausted(self) -> bool:
        return self.rollbacks >= self.max_rollbacks

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in resume_state.GUARD_FIELDS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in resume_state.GUARD_FIELDS:
            setattr(self, name, state[name])


@dataclass
class Trainer:
    """A training run.

    `batches(step)` yields the batches from that step on. `identity` describes the model, data and recipe; a run can be
    resumed only with the same identity.
    """

    model: nn.Module
    optimizers: Optimizers
    learning_rate: Callable[[int], float]
    loss: Loss
    batches: Callable[[int], Iterator[TensorBatch]]
    args: TrainingArguments
    runtime: RuntimeConfig
    folder: Path
    identity: dict[str, Any] = field(default_factory=dict)
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None
    sample: Callable[[nn.Module], str] | None = None
    guard: UpdateGuard = field(default_factory=UpdateGuard)
    should_stop: Callable[[], bool] = lambda: False
    strategy: Strategy = field(default_factory=Strategy)
    module: nn.Module | None = None  # computes the losses; None is the model, which a strategy may have wrapped
    save_trainable_only: bool = False  # leave out frozen weights, which are those of the base model

    def __post_init__(self) -> None:
        self.step, self.tokens, self.num_micro_batches = 0, 0, self.args.accumulate
        self.best: dict[str, Any] = {"step": None, "loss": None}
        self.last_good_step: int | None = None  # of the last checkpoint without rejected updates just before it
        self.last_report = 0.0  # when losses were last summed over the processes
        self.average = ExponentialMovingAverage(self.model, self.args.ema) if self.args.ema else None
        self.scaler = torch.amp.GradScaler(
            self.runtime.device.type, enabled=self.runtime.autocast_dtype == torch.float16
        )
        parts = (self.model, self.optimizers, self.guard, self.scaler, self.average)
        # Optimizers of weights that are split cannot leave out an update on the device.
        can_wait = self.runtime.device.type == "cuda" and not self.strategy.is_sharded
        self.updater = Updater(*parts, can_wait=can_wait, sum_losses=self.world.sum_losses)
        self.saver = CheckpointSaver(self.folder, self.strategy, in_background=self.args.save_async)
        self.compute_loss = self._eager_loss
        if self.runtime.compiled:
            self.compute_loss = torch.compile(self._eager_loss, mode=self.runtime.compile_mode)

    def _eager_loss(self, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        return self.strategy.compute_loss(self.module or self.model, self.loss, inputs, labels)

    @property
    def world(self) -> World:
        return self.strategy.world

    # -- the run --------------------------------------------------------------------------------------------------

    def run(self, *, resume: bool = False) -> Iterator[TrainingEvent]:
        """Train to the last step and yield events; with `resume`, continue from the newest intact checkpoint."""
        self.runtime.apply_torch_settings()
        if resume:  # before the first event, which tells a listener that the checkpoint was accepted
            yield from self._resume()
        yield from self.runtime.decisions
        batches, first_step = self.batches(self.step), self.step
        with self.saver.finish_on_error():
            try:
                while self.step < self.args.steps and not self._must_stop():
                    batch = next(batches)
                    if self.step == first_step:
                        yield from self._check_loss(batch)
                    counts = self._count(batch)
                    if counts.stop:
                        break
                    yield from self._train_step(batch, counts)
                    yield from self._evaluate_and_save()
                yield from self._report(self.updater.read())
            finally:
                getattr(batches, "close", lambda: None)()
            interrupted = self.step < self.args.steps
            if interrupted or not self._is_due(self.args.save_every):
                yield from self._save()
            yield from self.saver.wait()
        yield FinishedEvent(self.step, interrupted)

    def _must_stop(self) -> bool:
        """Return whether a single process was asked to stop; several tell each other when they count a batch."""
        if self.world.size > 1:
            return False
        self.saver.raise_error_if(self.saver.has_failed)
        return self.should_stop()

    def _count(self, batch: TensorBatch) -> Counts:
        """Count a batch in all processes, which exchange these numbers, and no others, in every step."""
        world, now = self.world, time.monotonic()
        if world.size == 1:
            return Counts(batch.target_count, batch.batch_size)
        is_due = world.is_main and now - self.last_report >= SECONDS_BETWEEN_REPORTS
        own = (batch.target_count, batch.batch_size, self.should_stop(), self.saver.has_failed, is_due)
        targets, rows, stop, failed, report = world.all_reduce_sum(*own)
        self.saver.raise_error_if(failed)
        self.last_report = now if report else self.last_report
        copies = world.size // world.data_size  # processes that read the same part of a batch
        return Counts(int(targets) // copies, math.ceil(rows / world.size), bool(stop), bool(report))

    def _check_loss(self, batch: TensorBatch) -> Iterator[WarningEvent]:
        """Warn if a loss of the user is not a finite sum over the targets; this changes no state of the training."""
        if not isinstance(self.loss, FunctionLoss) or self.world.size > 1:
            return
        batch, rng_state = batch.to(self.runtime.device), resume_state.rng_tensors()
        self.model.eval()
        try:
            with self.runtime.autocast():
                problem = self.loss.find_problem(self.model, batch.inputs, batch.labels)
        except Exception:  # a function that cannot compute the loss of one row; another error comes again in the step
            problem = None
        finally:
            self.model.train()
            resume_state.restore_rng(rng_state)
        if problem is not None:
            yield WarningEvent(problem)

    # -- one step -------------------------------------------------------------------------------------------------

    def _train_step(self, batch: TensorBatch, counts: Counts) -> Iterator[TrainingEvent]:
        """Compute the gradients of a batch, clip them and update the weights, unless the guard rejects the update."""
        start, lr = time.perf_counter(), self.learning_rate(self.step)
        loss, warnings = self._compute_gradients(batch, counts.targets, counts.rows)
        yield from warnings
        for optimizer in self.optimizers.optimizers:
            self.scaler.unscale_(optimizer)
        norm = self.strategy.gradient_norm(self.model)
        if self.args.clip:
            clip_gradients(self.model.parameters(), self.args.clip, norm)
        self.step, self.tokens = self.step + 1, self.tokens + counts.targets
        update = Update(self.step, self.tokens, lr, start, batch, bool(counts.targets), loss, norm)
        self.updater.run(update)
        if counts.report or update.reason is not None:
            yield from self._report(self.updater.read(keep=self.updater.lag))

    def _compute_gradients(
        self, batch: TensorBatch, target_count: int, rows: int
    ) -> tuple[float | Tensor, list[WarningEvent]]:
        """Return the loss of a batch and store its gradients in the weights; halve the micro-batch if out of memory.

        target_count: the number of targets in all processes.
        rows: the largest batch size of any process.
        """
        self.model.train()
        warnings: list[WarningEvent] = []
        while True:
            try:
                return self._accumulate_gradients(batch, max(target_count, 1), rows), warnings
            except torch.OutOfMemoryError:
                if self.world.size > 1:  # the other processes wait for the gradients of this one
                    raise MonoblockError(
                        f"process {self.world.rank} ran out of memory in step {self.step + 1}; write a larger "
                        f"train.accumulate and a smaller train.batch, and continue with --resume"
                    ) from None
            warnings.append(self._halve_micro_batch(rows, batch))

    def _accumulate_gradients(self, batch: TensorBatch, target_count: int, rows: int) -> float | Tensor:
        """Add up the gradients of all micro-batches; return the sum of their losses in this process."""
        module = self.module or self.model
        micro_batches = batch.split_alike(self.strategy.count_micro_batches(self.num_micro_batches, rows), rows)
        if self.strategy.has_schedule:  # micro-batches pass through several processes
            mean_loss = lambda *batch: _spread_problem(self.loss(*batch) / target_count)
            return self.strategy.run_schedule(module, micro_batches, mean_loss)
        total: float | Tensor = 0.0
        for number, micro_batch in enumerate(micro_batches, 1):
            micro_batch = micro_batch.to(self.runtime.device)
            with self.strategy.accumulate(module, is_last=number == len(micro_batches)):
                with self.runtime.autocast():
                    loss = self.compute_loss(micro_batch.inputs, micro_batch.labels) / target_count
                total = total + loss.detach()
                self.scaler.scale(loss if self.world.data_size == 1 else _spread_problem(loss)).backward()
        return total

    def _halve_micro_batch(self, rows: int, batch: TensorBatch) -> WarningEvent:
        self.optimizers.zero_grad()
        if self.num_micro_batches >= rows:
            raise InputError(
                f"out of memory with a single sequence of {batch.labels.shape[-1]} tokens; "
                f"lower model.context, or use a smaller model"
            )
        self.num_micro_batches = min(2 * self.num_micro_batches, rows)
        if self.runtime.device.type == "cuda":
            torch.cuda.empty_cache()
        size = -(-rows // self.num_micro_batches)
        return WarningEvent(f"out of memory: continuing with micro-batches of {size}, the batch size stays the same")

    def _report(self, updates: Iterator[Update]) -> Iterator[TrainingEvent]:
        """Yield the events of steps; roll back after too many bad ones."""
        bad: SkippedUpdateEvent | None = None  # the one after which to roll back
        for update in updates:
            loss, grad_norm = update.wait()
            if update.reason is None:
                yield StepEvent(update.step, loss, update.lr, grad_norm, update.tokens, update.seconds)
                continue
            skipped = SkippedUpdateEvent(update.step, update.reason, update.batch.epoch, update.batch.samples)
            yield skipped
            if not update.is_fp16_overflow and self.guard.record_bad_update():
                bad = skipped
        if bad is not None:
            yield from self._roll_back(bad)

    # -- what follows a step --------------------------------------------------------------------------------------

    def _evaluate_and_save(self) -> Iterator[TrainingEvent]:
        """Evaluate, sample and save, each if it is due after this step."""
        is_last = self.step == self.args.steps
        if any(map(self._is_due, (self.args.eval_every, self.args.sample_every, self.args.save_every))) or is_last:
            yield from self._report(self.updater.read())
        if self._is_due(self.args.eval_every) or (self.evaluate and self.args.eval_every and is_last):
            yield from self._evaluate()
        if self._is_due(self.args.sample_every) and self.sample is not None:
            text = call_with_whole_model(self.strategy, self.model, self.runtime.device, self.sample, NO_SAMPLE)
            if text is not None:
                yield SampleEvent(self.step, text)
        yield from self.saver.poll()
        if self._is_due(self.args.save_every):
            yield from self._save()

    def _is_due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def _evaluate(self) -> Iterator[TrainingEvent]:
        if self.evaluate is None:
            return
        weights = nullcontext() if self.average is None else self.average.average_parameters(self.model)
        with torch.no_grad(), weights:
            self.model.eval()
            metrics = self.evaluate(self.model)
        self.model.train()
        is_best = self.best["loss"] is None or is_better("loss", metrics["val_loss"], self.best["loss"])
        if is_best:
            self.best = {"step": self.step, "loss": metrics["val_loss"]}
        yield EvaluationEvent(self.step, metrics, is_best)

    def checkpoint_state(self) -> checkpoint.Checkpoint:
        """Return a checkpoint of all that the next step depends on; each process has its part of the tensors."""
        tensors = {
            "model": resume_state.model_tensors(self.model, trainable_only=self.save_trainable_only),
            "optimizer": resume_state.optimizer_tensors(self.model, self.optimizers),
        }
        kept = {"average": self.average, "carried": getattr(self.loss, "carried", None)}
        tensors |= {name: one.tensors for name, one in kept.items() if one is not None and one.tensors}
        rng_states = self.world.all_gather(resume_state.rng_tensors() | {"part": torch.tensor(self.world.random_part)})
        tensors |= {resume_state.rng_name(int(state.pop("part"))): state for state in rng_states}
        metadata = {
            "tokens": self.tokens,
            "micro_batches": self.num_micro_batches,
            "guard": self.guard.state_dict(),
            "scaler": self.scaler.state_dict(),
            "best": self.best,
            "last_good": self.last_good_step,
            "identity": self.identity,
            "environment": resume_state.environment(self.runtime.device, self.runtime.compiled, self.world.size),
        }
        return checkpoint.Checkpoint(self.step, tensors, metadata)

    def _save(self) -> Iterator[TrainingEvent]:
        if not self.guard.bad_in_a_row:
            self.last_good_step = self.step
        retention: dict[str, Any] = {"keep": self.args.keep, "save_every": self.args.save_every}
        retention |= {"best": self.best["step"], "last_good": self.last_good_step}
        yield from self.saver.save(self.checkpoint_state(), **retention)

    def _resume(self) -> Iterator[TrainingEvent]:
        path, problems = checkpoint.find_newest(self.folder) if self.world.is_main else (None, [])
        yield from (WarningEvent(f"skipped a checkpoint: {problem}") for problem in problems)
        step = self.world.broadcast(NO_CHECKPOINT if path is None else checkpoint.parse_step(path))
        if step == NO_CHECKPOINT:
            raise FileError(f"no checkpoint in {self.folder} is intact; start a new run with --out")
        path = self.folder / f"step-{step}"
        with reading(path):
            identity = checkpoint.load_metadata(path)["identity"]
            resume_state.check_same_run(identity, self.identity)
            if step > self.args.steps:
                raise ConfigError(
                    f"train.steps={self.args.steps}, but the run in {self.folder.parent} has already done {step} "
                    f"steps; write train.steps={step} or more, or train in another folder"
                )
            yield from self._restore(path)
        if problems:
            yield WarningEvent(f"resuming from {path.name}, the newest intact checkpoint")

    def _restore(self, path: Path) -> Iterator[TrainingEvent]:
        state = resume_state.load_state(
            path,
            self.model,
            self.optimizers,
            {} if self.average is None else self.average.tensors,
            self.scaler,
            whole=not self.strategy.is_sharded,
            trainable_only=self.save_trainable_only,
            elsewhere=self.strategy.weights_elsewhere,
            carried=getattr(self.loss, "carried", None),
        )
        metadata = state.metadata
        self.step, self.tokens, self.num_micro_batches = state.step, metadata["tokens"], metadata["micro_batches"]
        self.best, self.last_good_step = metadata["best"], metadata["last_good"]
        self.guard.load_state_dict(metadata["guard"])
        self.updater.discard()
        if self.scaler.is_enabled() and metadata["scaler"]:
            self.scaler.load_state_dict(metadata["scaler"])
        current = resume_state.environment(self.runtime.device, self.runtime.compiled, self.world.size)
        for difference in resume_state.describe_differences(metadata["environment"], current):
            yield WarningEvent(f"{difference}: the resumed run will not be bit for bit the same")
        resume_state.restore_process_rng(state.tensors, self.world.random_part, state.step)

    def _roll_back(self, last: SkippedUpdateEvent) -> Iterator[TrainingEvent]:
        """Restore the last good checkpoint, but continue with the next batches, and not with the bad ones again."""
        yield from self.saver.wait()
        patience, rollbacks = self.guard.patience, self.guard.rollbacks
        step = resume_state.last_good_step(self.folder) if self.world.is_main else None
        target = self.world.broadcast(NO_CHECKPOINT if step is None else step)
        if target == NO_CHECKPOINT:
            problem = f"{patience} bad updates in a row ({last.reason})"
            raise MonoblockError(f"{problem}, but no checkpoint to roll back to; look at the data, or lower train.lr")
        if self.guard.is_exhausted:
            raise MonoblockError(
                f"no improvement after {rollbacks} rollbacks: at step {last.step} {last.reason} "
                f"(epoch {last.epoch}, samples {', '.join(map(str, last.samples[:MAX_SAMPLES_SHOWN]))} …); "
                f"the last good checkpoint is step-{target}; look at these samples, or lower train.lr"
            )
        progress, rng_state = (self.step, self.tokens, self.num_micro_batches), resume_state.rng_tensors()
        yield from self._restore(self.folder / f"step-{target}")
        self.step, self.tokens, self.num_micro_batches = progress
        self.guard.record_rollback(rollbacks)
        resume_state.restore_rng(rng_state)
        yield WarningEvent(f"{patience} bad updates in a row: rolled back to step-{target}, continuing with new data")


def clip_gradients(weights: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients of weights, whose norm is `norm`, so that it is at most `max_norm` (Pascanu et al. 2013)."""
    for group in group_by_mesh(weights):
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)


def _spread_problem(loss: Tensor) -> Tensor:
    """Return the same loss; if it is not finite, so are its gradients, and thereby those of all processes."""
    return loss * (1 + 0 * loss.detach())


# -- updates -----------------------------------------------------------------------------------------------------------

DEFERRABLE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)  # whose fused kernels can leave out an update


class DeviceGuard:
    """The decisions of an `UpdateGuard`, computed on the device in the same arithmetic."""

    def __init__(self, guard: UpdateGuard) -> None:
        self.guard = guard
        self._mean: Tensor | None = None
        self._good: Tensor | None = None

    def reset(self) -> None:
        """Take mean and counter from the host again, before the next update."""
        self._mean = self._good = None

    def apply_unless_bad(self, optimizers: Optimizers, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Run the optimizers, unless the guard rejects the update; return whether they ran, a bool on the device."""
        guard, norm = self.guard, grad_norm.double()
        if self._mean is None or self._good is None:
            self._mean = torch.tensor(guard.mean, dtype=torch.float64, device=norm.device)
            self._good = torch.tensor(guard.good, dtype=torch.float64, device=norm.device)
        is_good = loss.isfinite() & norm.isfinite()
        if guard.spike:
            is_good &= (self._good < guard.min_good_updates) | (norm <= guard.spike * self._mean)
        for optimizer in optimizers.optimizers:
            optimizer.found_inf = (~is_good).float()  # type: ignore[attr-defined]
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
        good = self._good + 1
        mean = self._mean + (1 / good).clamp(min=guard.MIN_WEIGHT) * (norm - self._mean)
        self._good, self._mean = torch.where(is_good, good, self._good), torch.where(is_good, mean, self._mean)
        return is_good


NO_TARGETS = "the batch has no targets"


@dataclass
class Update:
    """One step: what its events report. Loss and gradient norm may still be on their way from the GPU."""

    step: int
    tokens: int
    lr: float
    start: float
    batch: TensorBatch
    has_targets: bool
    loss: float | Tensor
    grad_norm: float | Tensor
    reason: str | None = None  # why it was rejected
    seconds: float = 0.0
    is_fp16_overflow: bool = False
    is_decided: bool = True  # whether Python knows if it was rejected
    _arrival: torch.cuda.Event | None = field(default=None, repr=False)

    def send_to_host(self) -> None:
        """Start to copy loss and gradient norm from a GPU, without waiting."""
        assert isinstance(self.loss, Tensor)
        assert isinstance(self.grad_norm, Tensor)
        if self.loss.is_cuda:
            numbers = torch.empty(2, dtype=torch.float64, pin_memory=True)
            numbers.copy_(torch.stack((self.loss.double(), self.grad_norm.double())), non_blocking=True)
            self.loss, self.grad_norm = numbers
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def wait(self) -> tuple[float, float]:
        """Return loss and gradient norm; wait until they have arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
        self.loss, self.grad_norm = float(self.loss), float(self.grad_norm)
        return self.loss, self.grad_norm


class Updater:
    """Run the optimizers of a training run, guarded by an `UpdateGuard`.

    can_wait: whether loss and gradient norm are read one step later, where the optimizers allow it.
    sum_losses: a function that sums the losses of several steps over the processes of the run.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        guard: UpdateGuard,
        scaler: torch.amp.GradScaler,
        average: ExponentialMovingAverage | None = None,
        *,
        can_wait: bool = False,
        sum_losses: Callable[..., list[float]] = lambda *losses: list(losses),
    ) -> None:
        self.model, self.optimizers, self.guard, self.scaler, self.average = model, optimizers, guard, scaler, average
        fused = [type(one) in DEFERRABLE and one.defaults.get("fused") for one in optimizers.optimizers]
        is_deferred = can_wait and not scaler.is_enabled() and all(fused)
        self.device_guard = DeviceGuard(guard) if is_deferred else None
        self.lag = int(is_deferred)  # how many steps are read later, while the next one runs
        self.sum_losses = sum_losses
        self.unread: list[Update] = []  # the steps that were not reported yet
        self.last_end = 0.0  # when the last step was reported

    def run(self, update: Update) -> None:
        """Apply the update of a step, unless it is rejected."""
        self.optimizers.set_lr(update.lr)
        if self.device_guard is None or not update.has_targets:
            self._decide(update)
            if update.reason is None:
                for optimizer in self.optimizers.optimizers:
                    self.scaler.step(optimizer)
            if update.reason is None or self.scaler.is_enabled():
                self.scaler.update()  # halves the scale if a gradient is not finite
            if update.reason is None and self.average is not None:
                self.average.update(self.model)
            update.is_fp16_overflow = self.is_fp16_overflow(*update.wait())
        else:
            assert isinstance(update.loss, Tensor)
            assert isinstance(update.grad_norm, Tensor)
            is_good = self.device_guard.apply_unless_bad(self.optimizers, update.loss, update.grad_norm)
            if self.average is not None:
                self.average.update_if(is_good, self.model)
            update.is_decided = False
            update.send_to_host()
        self.optimizers.zero_grad()
        self.unread.append(update)

    def read(self, keep: int = 0) -> Iterator[Update]:
        """Yield the steps that were not reported yet, but the last `keep`, with their losses and gradient norms."""
        count = len(self.unread) - keep
        updates, self.unread = self.unread[: max(count, 0)], self.unread[max(count, 0) :]
        if not updates:
            return
        losses = self.sum_losses(*(update.wait()[0] for update in updates))
        now, start = time.perf_counter(), max(updates[0].start, self.last_end)
        self.last_end = now
        for update, loss in zip(updates, losses, strict=True):
            update.loss, update.seconds = loss, (now - start) / len(updates)
            update.is_fp16_overflow &= math.isfinite(loss)  # in all processes
            if not update.is_decided:
                self._decide(update)
            elif update.reason not in (None, NO_TARGETS) and not math.isfinite(loss):
                update.reason = self.guard.rejection_reason(*update.wait())
            yield update

    def discard(self) -> None:
        """Forget unread steps and what the device knows of the guard, because weights and guard were replaced."""
        self.unread = []
        if self.device_guard is not None:
            self.device_guard.reset()

    def _decide(self, update: Update) -> None:
        """Ask the guard whether to apply an update; a good one changes the usual norm."""
        loss, grad_norm = update.wait()
        update.reason = self.guard.rejection_reason(loss, grad_norm) if update.has_targets else NO_TARGETS
        if update.reason is None:
            self.guard.record_good_update(grad_norm)

    def is_fp16_overflow(self, loss: float, grad_norm: float) -> bool:
        """Return whether only the loss scale is too large for fp16, so that the gradient overflowed."""
        is_scaled = self.scaler.is_enabled() and self.scaler.get_scale() >= 1
        return is_scaled and math.isfinite(loss) and not math.isfinite(grad_norm)
