"""The loop: one update after another, told as events; nothing here knows what is trained or where data come from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.errors import FileError, InputError, MonoblockError
from monoblock.training import checkpoint
from monoblock.training.adversarial import Adversarial
from monoblock.training.averaging import Average
from monoblock.training.events import Evaluated, Event, Finished, Sampled, Saved, Skipped, Stepped, Warned
from monoblock.training.guard import Guard
from monoblock.training.objectives import Loss, Prepared
from monoblock.training.optimizer import Optimizers
from monoblock.training.parallel import ALONE, World
from monoblock.training.precision import Choice
from monoblock.training.state import (
    check_same,
    circumstances,
    differing,
    optimizer_tensors,
    random_of,
    random_tensors,
    restore_optimizer,
    restore_random,
)

NOWHERE = -1  # the step of no checkpoint
SHOWN = 8  # samples of a bad batch in a message


@dataclass(frozen=True)
class Plan:
    """How long, how often."""

    steps: int
    accumulate: int = 1
    clip: float = 1.0
    save_every: int = 0
    eval_every: int = 0
    sample_every: int = 0
    keep: int = 3
    ema: float = 0.0


@dataclass
class Trainer:
    """All a run needs.  `batches(step)` yields the batches from that step on; `identity` says what must not change."""

    model: nn.Module
    optimizers: Optimizers
    rate: Callable[[int], float]
    loss: Loss | Adversarial
    batches: Callable[[int], Iterator[Prepared]]
    plan: Plan
    choice: Choice
    folder: Path
    identity: dict[str, Any] = field(default_factory=dict)
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None
    sample: Callable[[nn.Module], str] | None = None
    guard: Guard = field(default_factory=Guard)
    stop: Callable[[], bool] = lambda: False
    world: World = ALONE
    partial: bool = False  # checkpoints hold what is trained alone: the rest is where the model began

    def __post_init__(self) -> None:
        self.step, self.tokens, self.parts = 0, 0, self.plan.accumulate
        self.best: dict[str, Any] = {"step": None, "loss": None}
        self.sound: int | None = None  # the last checkpoint that was not saved amid bad updates
        self.average = Average(self.model, self.plan.ema) if self.plan.ema else None
        self.scaler = torch.amp.GradScaler(self.choice.device.type, enabled=self.choice.autocast == torch.float16)
        self.compute = torch.compile(self._loss, mode=self.choice.mode) if self.choice.compiled else self._loss

    def _loss(self, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        return self.loss(self.model, inputs, labels)

    # -- the run --------------------------------------------------------------------------------------------------

    def run(self, *, resume: bool = False) -> Iterator[Event]:
        """Train to the last step, from the newest checkpoint on when resuming."""
        self.choice.prepare()
        if resume:  # before anything is said: whoever listens may take the first word for a run that goes on
            yield from self._resume()
        yield from self.choice.said
        batches = self.batches(self.step)
        try:
            while self.step < self.plan.steps and not any(self.world.total(self.stop())):
                yield from self._turn(next(batches))
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()
        interrupted = self.step < self.plan.steps
        if interrupted or not self._due(self.plan.save_every):
            yield self._save()
        yield Finished(self.step, interrupted)

    def _turn(self, batch: Prepared) -> Iterator[Event]:
        """One step and what is due after it."""
        yield from self._update(batch)
        if self._due(self.plan.eval_every) or (self.evaluate and self.plan.eval_every and self.step == self.plan.steps):
            yield from self._evaluate()
        if self._due(self.plan.sample_every) and self.sample is not None and self.world.leads:
            yield Sampled(self.step, self.sample(self.model))
        if self._due(self.plan.save_every):
            yield self._save()

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    # -- one update -----------------------------------------------------------------------------------------------

    def _update(self, batch: Prepared) -> Iterator[Event]:
        begun, lr = time.perf_counter(), self.rate(self.step)
        asked, rows = map(int, self.world.total(batch.asked, batch.rows))
        loss, warnings = self._gradients(batch, asked, -(-rows // self.world.size))
        yield from warnings
        grad_norm = self._clip()
        objection = self.guard.objection(loss, grad_norm) if asked else "nothing is asked of this batch"
        if objection is None:
            self.optimizers.set_rate(lr)
            self._apply()
            self.guard.passed(grad_norm)
        elif self.scaler.is_enabled():
            self.scaler.update()  # it halves the scale if a gradient was not finite
        self.optimizers.zero_grad()
        self.step += 1
        self.tokens += asked
        if objection is None:
            yield Stepped(self.step, loss, lr, grad_norm, self.tokens, time.perf_counter() - begun)
            return
        skipped = Skipped(self.step, objection, batch.epoch, batch.samples)
        yield skipped
        if not self._overflowed(loss, grad_norm) and self.guard.refused():
            yield from self._roll_back(skipped)

    def _overflowed(self, loss: float, grad_norm: float) -> bool:
        """Whether fp16 was too small for the scaled gradient: its scale fell, and the weights are not to blame."""
        scaled = self.scaler.is_enabled() and self.scaler.get_scale() >= 1
        return scaled and math.isfinite(loss) and not math.isfinite(grad_norm)

    def _gradients(self, batch: Prepared, asked: int, rows: int) -> tuple[float, list[Warned]]:
        """The loss of the batch, and its gradients in the weights; halves the micro-batch when memory runs out.

        `rows` is how many the largest part of a process has: all decide together.
        """
        self.model.train()
        warnings: list[Warned] = []
        while True:
            try:
                loss, failed = self._accumulate(batch, asked), False
            except torch.OutOfMemoryError:
                loss, failed = 0.0, True
            loss, failures = self.world.total(loss, failed)
            if not failures:
                self.world.add_gradients(self.model.parameters())
                return loss, warnings
            warnings.append(self._halve(rows, batch))

    def _halve(self, rows: int, batch: Prepared) -> Warned:
        self.optimizers.zero_grad()
        if self.parts >= rows:
            raise InputError(
                f"memory runs out with a single sequence of {batch.labels.shape[-1]} tokens; "
                f"shorten it (model.context) or take a smaller model"
            )
        self.parts = min(2 * self.parts, rows)
        if self.choice.device.type == "cuda":
            torch.cuda.empty_cache()
        size = -(-rows // self.parts)
        return Warned(f"memory ran out: micro-batches of {size} from here on, the same batch in all")

    def _accumulate(self, batch: Prepared, asked: int) -> float:
        total = torch.zeros((), device=self.choice.device)
        for micro in batch.split(self.parts):
            part = micro.to(self.choice.device)
            with self.choice.computing():
                loss = self.compute(part.inputs, part.labels) / max(asked, 1)
            self.scaler.scale(loss).backward()
            total += loss.detach()
        return float(total)

    def _clip(self) -> float:
        for optimizer in self.optimizers.each:
            self.scaler.unscale_(optimizer)
        weights = [w for w in self.model.parameters() if w.grad is not None]
        limit = self.plan.clip or float("inf")
        return float(nn.utils.clip_grad_norm_(weights, limit))

    def _apply(self) -> None:
        for optimizer in self.optimizers.each:
            self.scaler.step(optimizer)
        self.scaler.update()
        if self.average is not None:
            self.average.update(self.model)

    # -- evaluation and state -------------------------------------------------------------------------------------

    def _evaluate(self) -> Iterator[Event]:
        if self.evaluate is None or not self.world.leads:
            return
        with torch.no_grad(), self._averaged():
            self.model.eval()
            metrics = self.evaluate(self.model)
        self.model.train()
        best = self.best["loss"] is None or metrics["val_loss"] < self.best["loss"]
        if best:
            self.best = {"step": self.step, "loss": metrics["val_loss"]}
        yield Evaluated(self.step, metrics, best)

    def _averaged(self) -> Any:
        return nullcontext() if self.average is None else self.average.in_place(self.model)

    def state(self) -> checkpoint.State:
        tensors = {
            "model": self._weights(),
            "optimizer": optimizer_tensors(self.model, self.optimizers),
        }
        for rank, random in enumerate(self.world.gathered(random_tensors())):
            tensors[random_of(rank)] = random
        if self.average is not None:
            tensors["average"] = self.average.tensors
        facts = {
            "tokens": self.tokens,
            "parts": self.parts,
            "guard": self.guard.facts(),
            "scaler": self.scaler.state_dict(),
            "best": self.best,
            "sound": self.sound,
            "identity": self.identity,
            "circumstances": self._circumstances(),
        }
        return checkpoint.State(self.step, tensors, facts)

    def _weights(self) -> dict[str, Tensor]:
        trained = {name for name, weight in self.model.named_parameters() if weight.requires_grad}
        return {key: tensor for key, tensor in self.model.state_dict().items() if not self.partial or key in trained}

    def _circumstances(self) -> dict[str, Any]:
        return circumstances(self.choice.device, self.choice.compiled, self.world.size)

    def _save(self) -> Saved:
        if not self.guard.bad_in_a_row:
            self.sound = self.step
        plan, state, best = self.plan, self.state(), self.best["step"]
        if self.world.leads:
            checkpoint.save(self.folder, state, keep=plan.keep, best=best, sound=self.sound, every=plan.save_every)
        return Saved(self.step, self.folder / f"step-{self.step}")

    def _resume(self) -> Iterator[Event]:
        place, passed_over = checkpoint.newest(self.folder) if self.world.leads else (None, [])
        for problem in passed_over:
            yield Warned(f"passed over a checkpoint: {problem}")
        step = self.world.told(NOWHERE if place is None else checkpoint.step_of(place))
        if step == NOWHERE:
            raise FileError(f"no checkpoint in {self.folder} is whole; start a new run with --out")
        place = self.folder / f"step-{step}"
        state = checkpoint.load(place)
        check_same(state.facts["identity"], self.identity)
        yield from self._restore(state)
        if passed_over:
            yield Warned(f"resuming from {place.name}, the newest that is whole")

    def _restore(self, state: checkpoint.State) -> Iterator[Event]:
        self.model.load_state_dict(dict(state.tensors["model"]), strict=not self.partial)
        restore_optimizer(self.model, self.optimizers, state.tensors["optimizer"])
        if self.average is not None:
            self.average.restore(state.tensors["average"])
        facts = state.facts
        self.step, self.tokens, self.parts = state.step, facts["tokens"], facts["parts"]
        self.best, self.sound = facts["best"], facts["sound"]
        self.guard.restore(facts["guard"])
        if self.scaler.is_enabled() and facts["scaler"]:
            self.scaler.load_state_dict(facts["scaler"])
        for difference in differing(facts["circumstances"], self._circumstances()):
            yield Warned(f"{difference}: the run goes on, but not bit for bit as it would have")
        if (own := random_of(self.world.rank)) in state.tensors:
            restore_random(state.tensors[own])
        else:  # there were fewer processes
            torch.manual_seed((torch.initial_seed() + state.step) % 2**63)

    def _roll_back(self, last: Skipped) -> Iterator[Event]:
        """The weights of the last checkpoint, the data from here on: what was bad is not met again."""
        patience = self.guard.patience
        back = self.world.told(self._before_it_went_bad() if self.world.leads else NOWHERE)
        if back == NOWHERE:
            raise FileError(f"{patience} bad updates in a row and no checkpoint to go back to; lower train.lr")
        if self.guard.lost:
            raise MonoblockError(
                f"gone back {self.guard.gone_back} times and no better: at step {last.step} {last.reason} "
                f"(epoch {last.epoch}, samples {', '.join(map(str, last.samples[:SHOWN]))} …); "
                f"the last good checkpoint is step-{back}: look at these samples, or lower train.lr"
            )
        step, tokens, parts, random = self.step, self.tokens, self.parts, random_tensors()
        before = self.guard.gone_back
        yield from self._restore(checkpoint.load(self.folder / f"step-{back}"))
        self.step, self.tokens, self.parts = step, tokens, parts
        self.guard.went_back(before)
        restore_random(random)
        yield Warned(f"{patience} bad updates in a row: back to the weights of step-{back}, on with new data")

    def _before_it_went_bad(self) -> int:
        """The newest checkpoint that was not saved amid bad updates: those hold the weights that made them."""
        for step in reversed(checkpoint.steps(self.folder)):
            place = self.folder / f"step-{step}"
            if checkpoint.problem_with(place) is None and not checkpoint.facts(place)["guard"]["bad_in_a_row"]:
                return step
        return NOWHERE
