"""What a check is given, what it needs, and how it reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.doctor.options import Options, TrainingHistory
from monoblock.doctor.recorder import AttentionRecord, Recorder
from monoblock.doctor.report import Evidence, Finding, NotChecked, Outcome, Verdict
from monoblock.doctor.subject import Subject, difference


@dataclass
class Examination:
    subject: Subject
    options: Options = field(default_factory=Options)
    notes: list[str] = field(default_factory=list)
    pictures: dict[str, Any] = field(default_factory=dict)

    @property
    def generation(self) -> Mapping[str, Any] | None:
        """The default decoding options: those of the user, or those of the model."""
        return self.subject.generation if self.options.generation is None else self.options.generation

    @property
    def module(self) -> nn.Module:
        """The module, for checks that need one."""
        assert self.subject.module is not None
        return self.subject.module

    @property
    def trains(self) -> bool:
        """Whether a training step of the module is given."""
        return self.options.step is not None and self.subject.module is not None

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """All modules with their names; none of a function."""
        return [] if self.subject.module is None else list(self.subject.module.named_modules())

    @property
    def batch(self) -> tuple[Tensor, Tensor]:
        """The ids and labels of the user, on the device of the model."""
        assert self.options.batch is not None
        ids, labels = self.options.batch
        return ids.to(self.subject.device), labels.to(self.subject.device)

    @property
    def history(self) -> TrainingHistory:
        assert self.options.history is not None
        return self.options.history

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

    @property
    def has_window(self) -> bool:
        return bool(self.subject.declared.window) or any(self.subject.declared.windows or ())

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
        return self.subject.reads_tokens and (self.is_per_token or self.recorded.states is not None)

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

    def is_off(self, a: Tensor, b: Tensor) -> float:
        """Return the difference of two outputs that should be equal, or 0 if rounding explains it."""
        distance = difference(a, b)
        return distance if distance > self.subject.tolerance else 0.0


def pad(ids: Tensor, left: int, right: int, fill: int | None) -> tuple[Tensor, Tensor]:
    """Add padding to both sides; return the ids and the mask, 1 for tokens."""
    rows, length = ids.shape
    padded = torch.full((rows, left + length + right), 0 if fill is None else fill, dtype=ids.dtype, device=ids.device)
    padded[:, left : left + length] = ids
    mask = torch.zeros_like(padded)
    mask[:, left : left + length] = 1
    return padded, mask


# Checks that mean nothing where outputs are not reproducible numbers.
MEASURED = (
    "causality prefix window padding batch packing cache cross_padding positions mask_after_softmax collapse overfit "
    "initial_loss"
)

# -- checks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One check.  A finding of it makes those of the checks in `explains` redundant: it is their cause."""

    name: str
    about: str
    function: Callable[[Examination], Outcome]
    needs: tuple[str, ...]  # keys of REQUIREMENTS
    explains: tuple[str, ...]
    group: str
    is_slow: bool  # left out before a training
    max_parameters: float  # left out for larger models, to keep a report quick

    def __call__(self, exam: Examination) -> Outcome:
        outcome = self.function(exam)
        return outcome if outcome is None or outcome.check else replace(outcome, check=self.name)


def check(
    about: str,
    *needs: str,
    explains: str = "",
    group: str = "structure",
    is_slow: bool = False,
    max_parameters: float = float("inf"),
) -> Callable[[Callable[[Examination], Outcome]], Check]:
    """Make the check NAME of a function `check_NAME`; explains: the names of other checks, separated by spaces."""

    def make(function: Callable[[Examination], Outcome]) -> Check:
        name = function.__name__.removeprefix("check_")
        return Check(name, about, function, needs, tuple(explains.split()), group, is_slow, max_parameters)

    return make


def finding(
    verdict: Verdict,
    evidence: Evidence,
    reason: str,
    fix: str,
    title: str = "",
    *,
    explains: tuple[str, ...] = (),
    check: str = "",
) -> Finding:
    """Report a fault; check: "" stands for the check that reports it."""
    return Finding(check, verdict, evidence, reason, fix, title, explains)


fail, warn, unsupported = partial(finding, "fail"), partial(finding, "warn"), partial(finding, "unsupported")


# -- requirements ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Requirement:
    """What a check needs.  Without an `argument` there is nothing to pass: the check does not apply to the model."""

    is_met: Callable[[Examination], bool]
    reason: str  # why it is missing
    argument: str = ""  # what to pass
    details: str = ""  # what else to know about the argument
    condition: str = ""  # what the model must have for the argument to make sense
    is_declared: bool = False  # models of this package and of transformers declare it: there is nothing to pass

    def describe(self, check: str, *, is_known: bool) -> NotChecked:
        """Return why a check is left out; is_known: the model declares that it has nothing of this kind."""
        if not self.argument or is_known:
            return NotChecked(self.reason, check=check)
        how = f"pass {self.argument}{self.details}{self.condition and f' if it has {self.condition}'}"
        return NotChecked(self.reason, how, self.argument, self.condition, check)


BATCH, STEP, OPTIMIZER, RUN = "batch=(ids, labels)", "step=f", "optimizer=…", "the folder of a run"

REQUIREMENTS: dict[str, Requirement] = {
    "tokens": Requirement(lambda e: e.subject.reads_tokens, "the model reads no tokens"),
    "causal": Requirement(
        lambda e: e.is_causal,
        "the model reads in both directions or gives one output for a text",
        "kind='causal'",
        " if it must not see the future, and return the logits of every token, (B, T, V)",
        is_declared=True,
    ),
    "per_token": Requirement(lambda e: e.is_per_token, "the model gives one output for a text"),
    "mask": Requirement(
        lambda e: e.subject.takes_mask, "the model takes no mask", "pad_id=0", " or mask_argument='attention_mask'"
    ),
    "prefix": Requirement(
        lambda e: e.subject.takes_prefix,
        "no argument for a prefix is named",
        "prefix_argument='prefix'",
        condition="a prefix whose tokens see each other",
        is_declared=True,
    ),
    "window": Requirement(
        lambda e: e.has_window,
        "no window is declared",
        "window=4",
        condition="a window",
        is_declared=True,
    ),
    "documents": Requirement(
        lambda e: e.subject.takes_documents,
        "no argument for packed documents is named",
        "documents_argument='documents'",
        condition="several documents in a row",
        is_declared=True,
    ),
    "cache": Requirement(
        lambda e: e.subject.has_cache,
        "there is no cached step",
        "cached=f",
        ", where f(ids, state) returns the logits of the next ids and the new state, which is None at first",
    ),
    "source": Requirement(
        lambda e: e.subject.source is not None and e.subject.takes_source_mask,
        "the model reads no source with a mask",
        "source=ids and pad_id=0",
        condition="an encoder beside its decoder",
        is_declared=True,
    ),
    "attention": Requirement(
        lambda e: bool(e.recorded.attentions),
        "no attention was seen: the model has none, or it is compiled, or not written in PyTorch",
        "the model as an nn.Module that is not compiled",
    ),
    "module": Requirement(
        lambda e: e.subject.module is not None, "the weights of a function are not seen", "the nn.Module"
    ),
    "tokenizer": Requirement(lambda e: e.options.tokenizer is not None, "there is no tokenizer", "tokenizer=…"),
    "generation": Requirement(
        lambda e: e.generation is not None, "there are no decoding options", "generation={'eos_token_id': 2, …}"
    ),
    "batch": Requirement(lambda e: e.options.batch is not None, "there is no batch", BATCH),
    "optimizer": Requirement(
        lambda e: e.trains or (e.options.optimizer is not None and e.subject.module is not None),
        "there is no optimizer",
        OPTIMIZER,
        " or step=f with the module",
    ),
    "optimizer_or_run": Requirement(
        lambda e: e.options.optimizer is not None or e.options.history is not None,
        "there is no optimizer",
        OPTIMIZER,
        ", or the folder of a run",
    ),
    "run": Requirement(lambda e: e.options.history is not None, "there is no training run", RUN),
    "training": Requirement(
        lambda e: REQUIREMENTS["optimizer"].is_met(e) or e.options.history is not None,
        "there is neither a training step nor a run",
        STEP,
        ", where f() makes one training step of the module, or the folder of a run",
    ),
    "batch_or_step": Requirement(
        lambda e: e.options.batch is not None or e.trains,
        "there is neither a batch nor a training step",
        BATCH,
        ", or step=f with the module",
    ),
    "batch_or_run": Requirement(
        lambda e: e.options.batch is not None or e.options.history is not None,
        "there is neither a batch nor a run",
        BATCH,
        ", or the folder of a run",
    ),
}
