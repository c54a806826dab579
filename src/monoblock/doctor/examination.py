"""What a check may look at: the subject, what was handed over with it, and results that several checks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from monoblock.doctor.recorder import Recorder
from monoblock.doctor.records import AttentionRecord
from monoblock.doctor.report import DOCS, Evidence, Finding, NotChecked, Verdict
from monoblock.doctor.subject import Subject, difference


@dataclass
class TrainingHistory:
    """What a run has written down: its settings, and the losses of its steps."""

    steps: Sequence[Mapping[str, float]] = ()  # step, loss, lr, grad_norm
    evaluations: Sequence[Mapping[str, float]] = ()  # step, val_loss
    lr: float | None = None
    warmup: float = 0.0
    total_steps: int = 0
    clip: float | None = None  # None or 0: gradients are not clipped
    optimizer: str = ""
    beta2: float | None = None
    weight_decay: float | None = None
    starts_fresh: bool = True  # from random weights
    uniform_loss: float | None = None  # ln V, or ln of the number of classes
    epochs: float | None = None  # how often the data were read


@dataclass
class Handed:
    """What the user hands over beside the model; None where nothing was."""

    batch: tuple[Tensor, Tensor] | None = None  # ids and labels
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    step: Callable[[], Any] | None = None
    generate: Callable[[Tensor], Any] | None = None
    optimizer: torch.optim.Optimizer | None = None
    tokenizer: Any = None
    texts: Sequence[str] = ()
    objective: str | None = None  # the task that the model is for, such as "causal_lm" or "classification"
    labels: Sequence[str] = ()  # names of classes
    generation: Mapping[str, Any] | None = None  # default decoding options
    history: TrainingHistory | None = None


@dataclass
class Examination:
    subject: Subject
    handed: Handed = field(default_factory=Handed)
    notes: list[str] = field(default_factory=list)
    pictures: dict[str, Any] = field(default_factory=dict)

    @property
    def generation(self) -> Mapping[str, Any] | None:
        """The default decoding options: those that were handed over, or those of the model."""
        return self.subject.generation if self.handed.generation is None else self.handed.generation

    @cached_property
    def ids(self) -> Tensor:
        return self.subject.probe(rows=self.subject.rows)

    @cached_property
    def output(self) -> Tensor:
        with self.subject.evaluating():
            return self.subject.logits(self.ids)

    @property
    def is_per_token(self) -> bool:
        return self.subject.reads_tokens and self.output.dim() >= 3 and self.output.shape[:2] == self.ids.shape

    @property
    def is_causal(self) -> bool:
        """Whether no token may depend on later ones, and states that show it can be compared."""
        return self.subject.kind in ("causal", "encoder-decoder") and self.has_states

    @cached_property
    def long_ids(self) -> Tensor | None:
        """A text about as long as the model can read; None if no length beyond that of the probes is known to work."""
        for length in self.subject.long_lengths(self.recorded.lookups):
            ids = self.subject.probe(rows=2, length=length, seed=3)
            try:
                self.run(ids)
            except Exception:  # the attribute that named the length meant something else
                continue
            return ids
        return None

    @cached_property
    def has_states(self) -> bool:
        """Whether `states` can be compared: the output has one row for each token, or hidden states were recorded."""
        if not self.subject.reads_tokens:
            return False
        return self.is_per_token or self.recorded.states is not None

    def states(self, ids: Tensor) -> Tensor:
        """Return what the model computes for each token, (B, T, *): its output, or else its last hidden states."""
        if self.is_per_token:
            return self.run(ids)
        states = self.record(ids.clone()).states
        assert states is not None
        return states

    def run(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        with self.subject.evaluating():
            return self.subject.logits(ids, mask, **options)

    def record(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Recorder:
        """Run the subject and record its operations."""
        recorder, source = Recorder(), options.get("source")
        if self.subject.source is not None and source is None:
            source = options["source"] = self.subject.source[:1].expand(ids.shape[0], -1).contiguous()
        with self.subject.evaluating(), recorder.recording(ids, *([] if source is None else [source])):
            self.subject.recorded_logits(ids, mask, **options)
        return recorder

    @cached_property
    def recorded(self) -> Recorder:
        return self.record(self.ids[:2].clone())

    @property
    def self_attentions(self) -> list[AttentionRecord]:
        """The attentions of the recorded pass from tokens to the same tokens."""
        length = self.ids.shape[1]
        return [r for r in self.recorded.attentions if r.weights.shape[-2:] == (length, length)]

    def is_off(self, a: Tensor, b: Tensor, *, factor: float = 1.0) -> float:
        """Return the difference of two outputs that should be equal, or 0 if rounding explains it."""
        distance = difference(a, b)
        return distance if self.is_above_rounding(distance, factor=factor) else 0.0

    def is_above_rounding(self, distance: float, *, factor: float = 1.0) -> bool:
        return distance > self.subject.tolerance * factor


def finding(
    check: str,
    verdict: Verdict,
    evidence: Evidence,
    reason: str,
    fix: str,
    title: str = "",
    *,
    explains: tuple[str, ...] = (),
) -> Finding:
    return Finding(check, verdict, evidence, reason, fix, f"{DOCS}#{check}", title, explains)


def not_applicable(check: str, reason: str) -> NotChecked:
    """Return that a check has nothing to look at in this model."""
    return NotChecked(check, reason)


def pad(ids: Tensor, left: int, right: int, fill: int | None) -> tuple[Tensor, Tensor]:
    """Add padding to both sides; return the ids and the mask, 1 for tokens."""
    rows, length = ids.shape
    padded = torch.full((rows, left + length + right), 0 if fill is None else fill, dtype=ids.dtype, device=ids.device)
    padded[:, left : left + length] = ids
    mask = torch.zeros_like(padded)
    mask[:, left : left + length] = 1
    return padded, mask
