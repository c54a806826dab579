"""Checks of whether model, tokenizer, head and task belong together."""

from __future__ import annotations

from typing import Any

from torch import nn

from monoblock.doctor.checks.numerics import find_blocks
from monoblock.doctor.examination import Examination, finding, not_applicable
from monoblock.doctor.report import Finding, NotChecked, Outcome

MAX_UNUSED_ROWS = 2048  # published models pad their vocabulary by up to about a thousand rows
MAX_UNKNOWN = 0.05  # share of unknown tokens; tokenizers on their own language have less than 1 %
MAX_FERTILITY = 5.0  # tokens per word; subword tokenizers need about 1.3 on their own language
BY_CHARACTER = ("char", "byte", "")
FAMILY_OF_TASK = {
    "causal_lm": ("causal",),
    "chat": ("causal",),
    "masked_lm": ("bidirectional",),
    "span_corruption": ("encoder-decoder",),
    "seq2seq": ("encoder-decoder", "causal"),
    "text_to_text": ("encoder-decoder", "causal"),
    "token_classification": ("bidirectional",),
    "question_answering": ("bidirectional",),
    "classification": ("bidirectional", "causal", "vision"),
}
SEES_THE_ANSWER = ("causal_lm", "masked_lm", "chat")  # tasks that the wrong kind of model solves without learning
TASKS_WITH_MASKS = ("masked_lm",)
FAMILY_NAMES = {
    "causal": "a decoder (GPT)",
    "bidirectional": "an encoder (BERT)",
    "encoder-decoder": "an encoder-decoder",
}


def check_tokenizer(exam: Examination) -> Finding | None:
    """Compare ids of the tokenizer with the rows of the embedding, and count unknown tokens."""
    tokenizer, vocab = exam.handed.tokenizer, exam.subject.vocab
    size = int(getattr(tokenizer, "vocab_size", 0))
    if not hasattr(tokenizer, "kind") and hasattr(tokenizer, "__len__"):
        size = len(tokenizer)  # of transformers: with added tokens
    own = "give the tokenizer that the model was trained with; it lies in the folder of the model"
    if size > vocab:
        evidence: dict[str, Any] = {"tokens_of_the_tokenizer": size, "rows_of_the_embedding": vocab}
        return finding("tokenizer", "fail", evidence, "the tokenizer has ids that the embedding has no row for", own)
    specials = {int(i) for i in getattr(tokenizer, "special_ids", getattr(tokenizer, "all_special_ids", ()))}
    wrong = sorted(i for i in specials | ({exam.subject.pad_id} - {None}) if i is not None and i >= vocab)
    if wrong:
        evidence = {"special_id": wrong[0], "rows_of_the_embedding": vocab}
        fix = "add rows with model.resize_token_embeddings, or " + own
        return finding("tokenizer", "fail", evidence, "a special token has an id that the model does not know", fix)
    if vocab - size > MAX_UNUSED_ROWS and vocab - size > vocab // 3:
        evidence = {"tokens_of_the_tokenizer": size, "rows_of_the_embedding": vocab}
        reason = "a third of the embedding or more is never used: the tokenizer belongs to another model"
        return finding("tokenizer", "fail", evidence, reason, own)
    mask = getattr(tokenizer, "mask_id", getattr(tokenizer, "mask_token_id", None))
    if exam.handed.objective in TASKS_WITH_MASKS and mask is None:
        evidence = {"mask_tokens": 0}
        reason = "a masked language model fills in a mask token, but the tokenizer has none"
        return finding("tokenizer", "fail", evidence, reason, "train or take a tokenizer with a mask token")
    kind = getattr(tokenizer, "kind", "")
    if kind == "wordpiece" and exam.subject.kind == "causal":
        reason = (
            "WordPiece drops spaces, so a decoder cannot write text that reads well; BERT's models use it, GPTs do not"
        )
        return finding("tokenizer", "warn", {"kind": kind}, reason, "use byte-level BPE for a decoder, or " + own)
    return _check_texts(exam, kind)


def _check_texts(exam: Examination, kind: str) -> Finding | None:
    """Encode the texts that were handed over: few tokens may be unknown, and words may not fall into letters."""
    tokenizer, texts = exam.handed.tokenizer, list(exam.handed.texts)[:200]
    if not texts:
        return None
    ids = [i for text in texts for i in _encode(tokenizer, text)]
    words = sum(len(text.split()) for text in texts)
    unknown = getattr(tokenizer, "unk_id", getattr(tokenizer, "unk_token_id", None))
    rate = sum(i == unknown for i in ids) / max(1, len(ids)) if unknown is not None else 0.0
    if rate > MAX_UNKNOWN:
        return finding(
            "tokenizer",
            "fail",
            {"unknown_share": rate, "tokens": len(ids)},
            f"{rate:.0%} of the tokens are unknown: the tokenizer was trained on other text (language, script or case)",
            "give the model's own tokenizer, or train one on text like yours",
        )
    fertility = len(ids) / max(1, words)
    if kind not in BY_CHARACTER and fertility > MAX_FERTILITY:
        return finding(
            "tokenizer",
            "warn",
            {"tokens_per_word": fertility, "usual": 1.3},
            "words fall into many pieces: the tokenizer was trained on other text, and the context holds few words",
            "train a tokenizer on text like yours",
        )
    return None


def _encode(tokenizer: Any, text: str) -> list[int]:
    encoded = tokenizer.encode(text)
    return list(getattr(encoded, "ids", encoded))


def check_head(exam: Examination) -> Finding | None:
    """Compare the outputs with the classes, and look for a fresh head on a trained body."""
    outputs, handed = exam.output.shape[-1], exam.handed
    is_classifier = not exam.subject.reads_tokens or outputs < exam.subject.vocab
    if handed.labels and len(handed.labels) != outputs:
        evidence: dict[str, Any] = {"outputs": outputs, "labels": len(handed.labels)}
        reason = "the head has another number of outputs than there are labels"
        return finding("head", "fail", evidence, reason, f"build the head with classes={len(handed.labels)}")
    declared = exam.subject.declared.num_labels
    if declared is not None and declared > 1 and declared != outputs:
        evidence = {"outputs": outputs, "declared": declared}
        reason = "the head has another number of outputs than the configuration says"
        return finding("head", "fail", evidence, reason, f"build the head with {declared} outputs")
    if handed.batch is not None and is_classifier and not handed.batch[1].is_floating_point():
        highest = int(handed.batch[1].max())
        if highest >= outputs:
            evidence = {"outputs": outputs, "highest_label": highest}
            reason = "a label of the batch is outside the classes of the head"
            return finding("head", "fail", evidence, reason, f"build the head with at least {highest + 1} outputs")
    return _check_fresh(exam)


def _check_fresh(exam: Examination) -> Finding | None:
    """Look for an output layer that has its initial values above blocks that are trained."""
    module = exam.subject.module
    assert module is not None
    blocks = find_blocks(module)
    inside = {id(p) for block in blocks for p in block.parameters()}
    outputs = exam.output.shape[-1]
    fresh = [
        p
        for name, p in module.named_parameters()
        if name.endswith("bias") and p.shape == (outputs,) and id(p) not in inside and not bool(p.detach().any())
    ]
    biases = [m.bias for b in blocks for m in b.modules() if isinstance(m, nn.Linear) and m.bias is not None]
    if not fresh or not biases or outputs >= exam.subject.vocab > 0 or not all(bool(b.detach().any()) for b in biases):
        return None
    scales = [
        p for b in blocks for name, p in b.named_parameters() if "norm" in name.lower() and name.endswith("weight")
    ]
    if not scales or all(float((p.detach() - p.detach().mean()).abs().max()) == 0 for p in scales):
        return None  # the blocks are fresh as well
    return finding(
        "head",
        "warn",
        {"largest_bias_of_the_head": 0.0, "outputs": outputs},
        "the blocks are trained, but the head has its initial weights: its probabilities mean nothing",
        "fine-tune the model on labelled examples before you use its predictions",
    )


def check_model_type(exam: Examination) -> Outcome:
    """Compare the kind of model with the task, and look for a decoder that is read at its first token."""
    kind, objective = exam.subject.kind, exam.handed.objective
    allowed = FAMILY_OF_TASK.get(objective or "", (kind,))
    if kind not in allowed:
        return finding(
            "model_type",
            "fail" if objective in SEES_THE_ANSWER else "warn",
            {"task": str(objective), "model": kind},
            f"{objective} needs {FAMILY_NAMES.get(allowed[0], allowed[0])}, but the model is "
            f"{FAMILY_NAMES.get(kind, kind)}: "
            + ("it sees the answer" if kind == "bidirectional" else "it sees only one side of a token"),
            f"use {FAMILY_NAMES.get(allowed[0], allowed[0])} for this task",
        )
    if kind != "causal" or exam.is_per_token:
        known = objective in FAMILY_OF_TASK
        task = "objective='causal_lm' (or 'classification', …)"
        return None if known else NotChecked("model_type", "the task is not known", f"pass {task}", task)
    changed = exam.ids.clone()
    changed[:, 1:] = exam.subject.other_tokens(exam.ids)[:, 1:]
    if exam.is_off(exam.run(changed), exam.output):
        return None
    return finding(
        "model_type",
        "fail",
        {"difference_when_all_but_the_first_token_change": 0.0},
        "a decoder is read at its first token, which sees no other: every text gets the same answer",
        "pool the last token of each row (pooling='last'), or use an encoder",
    )


def check_context(exam: Examination) -> Outcome:
    """Compare the lengths of batches, tokenizer and position table with the context."""
    context, handed = exam.subject.declared.context, exam.handed
    if context is None:
        return not_applicable("context", "the model states no context")
    if handed.batch is not None and handed.batch[0].dim() == 2 and handed.batch[0].shape[1] > context:
        return _context_finding("the batch", int(handed.batch[0].shape[1]), context, "fail")
    longest = getattr(handed.tokenizer, "model_max_length", None)
    if isinstance(longest, int) and context < longest < 1_000_000:
        return _context_finding("the tokenizer's limit", longest, context, "warn")
    module = exam.subject.module
    length = exam.ids.shape[1] if exam.subject.reads_tokens else 0
    for lookup in exam.recorded.lookups if module is not None and length else ():
        row = lookup.positions(length)
        if row is not None and bool((row.diff() == 1).all()) and lookup.rows < context:
            return _context_finding("the declared context", context, lookup.rows, "fail")
    return None


def _context_finding(what: str, length: int, context: int, verdict: Any) -> Finding:
    return finding(
        "context",
        verdict,
        {"length": length, "context": context},
        f"{what} has {length} tokens, but the model was built for {context}: positions beyond were never trained, or "
        "do not exist",
        f"cut texts to {context} tokens, or use a model with a longer context",
    )
