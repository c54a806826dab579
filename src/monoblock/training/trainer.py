"""The training loop, which is independent of the model and the data and yields its progress as events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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
from monoblock.training.guard import Update, UpdateGuard, Updater
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
