"""What checks need of an examination, as data: a test, why it is missing, and how to hand it over."""

from __future__ import annotations

from collections.abc import Callable

from monoblock.doctor.examination import Examination

# What a check may need: a test of an examination, why it is missing, and how to hand it over ("": it does not apply).
REQUIREMENTS: dict[str, tuple[Callable[[Examination], bool], str, str]] = {
    "tokens": (lambda e: e.subject.reads_tokens, "the model reads no tokens", ""),
    "causal": (
        lambda e: e.is_causal,
        "the model reads in both directions or gives one output for a text",
        "pass kind='causal' if it must not see the future, and return the logits of every token, (B, T, V)",
    ),
    "per_token": (lambda e: e.is_per_token, "the model gives one output for a text", ""),
    "mask": (
        lambda e: e.subject.takes_mask,
        "the model takes no mask",
        "pass mask_argument='attention_mask' or pad_id=0",
    ),
    "prefix": (
        lambda e: e.subject.takes_prefix,
        "no argument for a prefix is named",
        "pass prefix_argument='prefix' if tokens of a prefix see each other",
    ),
    "window": (
        lambda e: bool(e.subject.declared.window) or any(e.subject.declared.windows or ()),
        "no window is declared",
        "pass window=4 if it has one",
    ),
    "documents": (
        lambda e: e.subject.takes_documents,
        "no argument for packed documents is named",
        "pass documents_argument='documents' if it reads several documents in a row",
    ),
    "cache": (
        lambda e: e.subject.has_cache,
        "there is no cached step",
        "pass cached=f, where f(ids, state) returns the logits of the next ids and the new state; state is None at "
        "first",
    ),
    "source": (
        lambda e: e.subject.source is not None and e.subject.takes_source_mask,
        "the model reads no source with a mask",
        "pass source=ids and pad_id=0 for an encoder-decoder",
    ),
    "attention": (
        lambda e: bool(e.recorded.attentions),
        "no attention was seen: the model has none, or it is compiled, or not written in PyTorch",
        "pass the model as an nn.Module that is not compiled",
    ),
    "module": (lambda e: e.subject.module is not None, "the weights of a function are not seen", "pass the nn.Module"),
    "tokenizer": (lambda e: e.handed.tokenizer is not None, "there is no tokenizer", "pass tokenizer=…"),
    "objective": (
        lambda e: e.handed.objective is not None,
        "the task is not known",
        "pass objective='causal_lm' (or 'classification', …)",
    ),
    "generation": (
        lambda e: e.handed.generation is not None,
        "there are no decoding options",
        "pass generation={'eos_token_id': 2, …}",
    ),
    "batch": (lambda e: e.handed.batch is not None, "there is no batch", "pass batch=(ids, labels)"),
    "step": (
        lambda e: e.handed.step is not None and e.subject.module is not None,
        "there is no training step",
        "pass step=f, where f() makes one training step of the module",
    ),
    "optimizer": (
        lambda e: (e.handed.optimizer is not None or e.handed.step is not None) and e.subject.module is not None,
        "there is no optimizer",
        "pass optimizer=… or step=f with the module",
    ),
    "optimizer_or_run": (
        lambda e: e.handed.optimizer is not None or e.handed.history is not None,
        "there is no optimizer",
        "pass optimizer=…, or the folder of a run",
    ),
    "run": (lambda e: e.handed.history is not None, "there is no training run", "pass the folder of a run"),
    "step_or_run": (
        lambda e: (e.handed.step is not None and e.subject.module is not None) or e.handed.history is not None,
        "there is neither a training step nor a run",
        "pass step=f, or the folder of a run",
    ),
    "batch_or_run": (
        lambda e: e.handed.batch is not None or e.handed.history is not None,
        "there is neither a batch nor a run",
        "pass batch=(ids, labels), or the folder of a run",
    ),
}

# What a model of this package or of transformers says itself: if it has none, there is nothing to hand over.
SAID_BY_THE_MODEL = frozenset(("causal", "window", "source", "documents", "prefix"))
