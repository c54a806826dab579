"""What checks need of an examination, as data: a test, why it is missing, and how to hand it over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from monoblock.doctor.examination import Examination
from monoblock.doctor.report import NotChecked


@dataclass(frozen=True)
class Requirement:
    """What a check needs.  Without `hand_over` there is nothing to pass: the check does not apply to the model."""

    is_met: Callable[[Examination], bool]
    reason: str  # why it is missing
    hand_over: str = ""  # the argument that brings it
    further: str = ""  # what else to know about the argument
    condition: str = ""  # what the model must have for the argument to make sense

    def describe(self, check: str, *, is_known: bool) -> NotChecked:
        """Return why a check is left out; is_known: the model itself says that it has nothing of this kind."""
        if not self.hand_over or is_known:
            return NotChecked(check, self.reason)
        how = f"pass {self.hand_over}{self.further}{self.condition and f' if it has {self.condition}'}"
        return NotChecked(check, self.reason, how, self.hand_over, self.condition)


BATCH, STEP, OPTIMIZER, RUN = "batch=(ids, labels)", "step=f", "optimizer=…", "the folder of a run"

REQUIREMENTS: dict[str, Requirement] = {
    "tokens": Requirement(lambda e: e.subject.reads_tokens, "the model reads no tokens"),
    "causal": Requirement(
        lambda e: e.is_causal,
        "the model reads in both directions or gives one output for a text",
        "kind='causal'",
        " if it must not see the future, and return the logits of every token, (B, T, V)",
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
    ),
    "window": Requirement(
        lambda e: bool(e.subject.declared.window) or any(e.subject.declared.windows or ()),
        "no window is declared",
        "window=4",
        condition="a window",
    ),
    "documents": Requirement(
        lambda e: e.subject.takes_documents,
        "no argument for packed documents is named",
        "documents_argument='documents'",
        condition="several documents in a row",
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
    ),
    "attention": Requirement(
        lambda e: bool(e.recorded.attentions),
        "no attention was seen: the model has none, or it is compiled, or not written in PyTorch",
        "the model as an nn.Module that is not compiled",
    ),
    "module": Requirement(
        lambda e: e.subject.module is not None, "the weights of a function are not seen", "the nn.Module"
    ),
    "tokenizer": Requirement(lambda e: e.handed.tokenizer is not None, "there is no tokenizer", "tokenizer=…"),
    "generation": Requirement(
        lambda e: e.generation is not None, "there are no decoding options", "generation={'eos_token_id': 2, …}"
    ),
    "batch": Requirement(lambda e: e.handed.batch is not None, "there is no batch", BATCH),
    "optimizer": Requirement(
        lambda e: (e.handed.optimizer is not None or e.handed.step is not None) and e.subject.module is not None,
        "there is no optimizer",
        OPTIMIZER,
        " or step=f with the module",
    ),
    "optimizer_or_run": Requirement(
        lambda e: e.handed.optimizer is not None or e.handed.history is not None,
        "there is no optimizer",
        OPTIMIZER,
        ", or the folder of a run",
    ),
    "run": Requirement(lambda e: e.handed.history is not None, "there is no training run", RUN),
    "training": Requirement(
        lambda e: (
            ((e.handed.step is not None or e.handed.optimizer is not None) and e.subject.module is not None)
            or e.handed.history is not None
        ),
        "there is neither a training step nor a run",
        STEP,
        ", where f() makes one training step of the module, or the folder of a run",
    ),
    "batch_or_step": Requirement(
        lambda e: e.handed.batch is not None or (e.handed.step is not None and e.subject.module is not None),
        "there is neither a batch nor a training step",
        BATCH,
        ", or step=f with the module",
    ),
    "batch_or_run": Requirement(
        lambda e: e.handed.batch is not None or e.handed.history is not None,
        "there is neither a batch nor a run",
        BATCH,
        ", or the folder of a run",
    ),
}

# What a model of this package or of transformers says itself: if it has none, there is nothing to hand over.
SAID_BY_THE_MODEL = frozenset(("causal", "window", "source", "documents", "prefix"))
