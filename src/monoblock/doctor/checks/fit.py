"""Checks of whether model, tokenizer, head, task, context and decoding options belong together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from monoblock.doctor.checks.numerics import find_blocks
from monoblock.doctor.examination import Examination, check, fail, finding, warn
from monoblock.doctor.report import Finding, NotChecked, Outcome, Verdict

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


@check("the tokenizer fits the model", "tokens", "tokenizer", group="fit")
def check_tokenizer(exam: Examination) -> Finding | None:
    """Compare ids of the tokenizer with the rows of the embedding, and count unknown tokens."""
    tokenizer, vocab = exam.extras.tokenizer, exam.subject.vocab
    size = int(getattr(tokenizer, "vocab_size", 0))
    if not hasattr(tokenizer, "kind") and hasattr(tokenizer, "__len__"):
        size = len(tokenizer)  # of transformers: with added tokens
    own = "give the tokenizer that the model was trained with; it lies in the folder of the model"
    if size > vocab:
        evidence: dict[str, Any] = {"tokens_of_the_tokenizer": size, "rows_of_the_embedding": vocab}
        return fail(evidence, "the tokenizer has ids that the embedding has no row for", own)
    specials = {int(i) for i in getattr(tokenizer, "special_ids", getattr(tokenizer, "all_special_ids", ()))}
    wrong = sorted(i for i in specials | ({exam.subject.pad_id} - {None}) if i is not None and i >= vocab)
    if wrong:
        evidence = {"special_id": wrong[0], "rows_of_the_embedding": vocab}
        fix = "add rows with model.resize_token_embeddings, or " + own
        return fail(evidence, "a special token has an id that the model does not know", fix)
    if vocab - size > MAX_UNUSED_ROWS and vocab - size > vocab // 3:
        evidence = {"tokens_of_the_tokenizer": size, "rows_of_the_embedding": vocab}
        reason = "a third of the embedding or more is never used: the tokenizer belongs to another model"
        return fail(evidence, reason, own)
    mask = getattr(tokenizer, "mask_id", getattr(tokenizer, "mask_token_id", None))
    if exam.extras.objective in TASKS_WITH_MASKS and mask is None:
        evidence = {"mask_tokens": 0}
        reason = "a masked language model fills in a mask token, but the tokenizer has none"
        return fail(evidence, reason, "train or take a tokenizer with a mask token")
    kind = getattr(tokenizer, "kind", "")
    if kind == "wordpiece" and exam.subject.kind == "causal":
        reason = (
            "WordPiece drops spaces, so a decoder cannot write text that reads well; BERT's models use it, GPTs do not"
        )
        return warn({"kind": kind}, reason, "use byte-level BPE for a decoder, or " + own)
    return _check_texts(exam, kind)


def _check_texts(exam: Examination, kind: str) -> Finding | None:
    """Encode the user's texts: few tokens may be unknown, and words must not be split into letters."""
    tokenizer, texts = exam.extras.tokenizer, list(exam.extras.texts)[:200]
    if not texts:
        return None
    ids = [i for text in texts for i in _encode(tokenizer, text)]
    words = sum(len(text.split()) for text in texts)
    unknown = getattr(tokenizer, "unk_id", getattr(tokenizer, "unk_token_id", None))
    rate = sum(i == unknown for i in ids) / max(1, len(ids)) if unknown is not None else 0.0
    if rate > MAX_UNKNOWN:
        return fail(
            {"unknown_share": rate, "tokens": len(ids)},
            f"{rate:.0%} of the tokens are unknown: the tokenizer was trained on other text (language, script or case)",
            "give the model's own tokenizer, or train one on text like yours",
        )
    fertility = len(ids) / max(1, words)
    if kind not in BY_CHARACTER and fertility > MAX_FERTILITY:
        return warn(
            {"tokens_per_word": fertility, "usual": 1.3},
            "words fall into many pieces: the tokenizer was trained on other text, and the context holds few words",
            "train a tokenizer on text like yours",
        )
    return None


def _encode(tokenizer: Any, text: str) -> list[int]:
    encoded = tokenizer.encode(text)
    return list(getattr(encoded, "ids", encoded))


@check("the head is trained and has as many outputs as there are classes", "module", group="fit")
def check_head(exam: Examination) -> Finding | None:
    """Compare the outputs with the classes, and look for a fresh head on a trained body."""
    outputs, extras = exam.output.shape[-1], exam.extras
    is_classifier = not exam.subject.reads_tokens or outputs < exam.subject.vocab
    if extras.labels and len(extras.labels) != outputs:
        evidence: dict[str, Any] = {"outputs": outputs, "labels": len(extras.labels)}
        reason = "the head has another number of outputs than there are labels"
        return fail(evidence, reason, f"build the head with classes={len(extras.labels)}")
    declared = exam.subject.declared.num_labels
    if declared is not None and declared > 1 and declared != outputs:
        evidence = {"outputs": outputs, "declared": declared}
        reason = "the head has another number of outputs than the configuration says"
        return fail(evidence, reason, f"build the head with {declared} outputs")
    if extras.batch is not None and is_classifier and not extras.batch[1].is_floating_point():
        highest = int(extras.batch[1].max())
        if highest >= outputs:
            evidence = {"outputs": outputs, "highest_label": highest}
            reason = "a label of the batch is outside the classes of the head"
            return fail(evidence, reason, f"build the head with at least {highest + 1} outputs")
    return _check_fresh(exam)


def _check_fresh(exam: Examination) -> Finding | None:
    """Look for an output layer that has its initial values above blocks that are trained."""
    module = exam.module
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
    return warn(
        {"largest_bias_of_the_head": 0.0, "outputs": outputs},
        "the blocks are trained, but the head has its initial weights: its probabilities mean nothing",
        "fine-tune the model on labelled examples before you use its predictions",
    )


@check("the kind of model fits the task", "tokens", group="fit")
def check_model_type(exam: Examination) -> Outcome:
    """Compare the kind of model with the task, and look for a decoder that is read at its first token."""
    kind, objective = exam.subject.kind, exam.extras.objective
    allowed = FAMILY_OF_TASK.get(objective or "", (kind,))
    if kind not in allowed:
        return finding(
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
        return None if known else NotChecked("the task is not known", f"pass {task}", task)
    changed = exam.ids.clone()
    changed[:, 1:] = exam.subject.other_tokens(exam.ids)[:, 1:]
    if exam.is_off(exam.run(changed), exam.output):
        return None
    return fail(
        {"difference_when_all_but_the_first_token_change": 0.0},
        "a decoder is read at its first token, which sees no other: every text gets the same answer",
        "pool the last token of each row (pooling='last'), or use an encoder",
    )


@check("texts fit into the context", "tokens", group="fit")
def check_context(exam: Examination) -> Outcome:
    """Compare the lengths of batches, tokenizer and position table with the context."""
    context, extras = exam.subject.declared.context, exam.extras
    if context is None:
        return NotChecked("the model states no context")
    if extras.batch is not None and extras.batch[0].dim() == 2 and extras.batch[0].shape[1] > context:
        return _context_finding("the batch", int(extras.batch[0].shape[1]), context, "fail")
    longest = getattr(extras.tokenizer, "model_max_length", None)
    if isinstance(longest, int) and context < longest < 1_000_000:
        return _context_finding("the tokenizer's limit", longest, context, "warn")
    module = exam.subject.module
    length = exam.ids.shape[1] if exam.subject.reads_tokens else 0
    for lookup in exam.recorded.lookups if module is not None and length else ():
        row = lookup.positions(length)
        if row is not None and bool((row.diff() == 1).all()) and lookup.rows < context:
            return _context_finding("the declared context", context, lookup.rows, "fail")
    return None


def _context_finding(name: str, length: int, context: int, verdict: Any) -> Finding:
    return finding(
        verdict,
        {"length": length, "context": context},
        f"{name} has {length} tokens, but the model was built for {context}: positions beyond were never trained, or "
        "do not exist",
        f"cut texts to {context} tokens, or use a model with a longer context",
    )


TOKEN_FIELDS = (
    "eos_token_id",
    "pad_token_id",
    "bos_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
)
SHORT = 20  # tokens; the limit that transformers takes where none is given, prompt included
SAMPLING_FIELDS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}  # and their neutral values
MAX_REPETITION_PENALTY = 2.0  # Keskar et al. (2019) use 1.2
# Field -> (is a value possible, what is)
RANGES: dict[str, tuple[Any, str]] = {
    "temperature": (lambda x: x >= 0, "0 (greedy) or more"),
    "top_p": (lambda x: 0 < x <= 1, "more than 0, at most 1"),
    "top_k": (lambda x: x >= 0, "0 or more"),
    "min_p": (lambda x: 0 <= x <= 1, "0 to 1"),
    "typical_p": (lambda x: 0 < x <= 1, "more than 0, at most 1"),
    "repetition_penalty": (lambda x: x > 0, "more than 0; 1 changes nothing"),
    "no_repeat_ngram_size": (lambda x: x >= 0, "0 or more"),
    "num_beams": (lambda x: x >= 1, "1 or more"),
    "max_new_tokens": (lambda x: x >= 1, "1 or more"),
    "max_length": (lambda x: x >= 1, "1 or more"),
}


@check("the decoding options are possible", "tokens", "generation", group="fit")
def check_generation_defaults(exam: Examination) -> Finding | None:
    """Look for decoding options that cannot be right."""
    options = {name: value for name, value in (exam.generation or {}).items() if value is not None}
    checks = (_check_tokens, _check_end, _check_ranges, _check_lengths, _check_search, _check_repetition)
    return next((result for check in checks if (result := check(exam, options)) is not None), None)


def _check_tokens(exam: Examination, options: Mapping[str, Any]) -> Finding | None:
    """Look for ids that the model does not have."""
    vocab, unset = exam.subject.vocab, exam.subject.unset_tokens
    for name in TOKEN_FIELDS:
        for token in _ids(options.get(name)):
            if 0 <= token < vocab:
                continue
            if token in unset.get(name, ()):
                exam.notes.append(
                    f"{name}={token} is the default of the configuration class, and not an id of this model, whose "
                    f"ids are 0 to {vocab - 1}: set it before you generate"
                )
                continue
            reason = f"{name}={token} is not an id of the model"
            return _generation({name: token, "vocabulary": vocab}, reason, "write an id of the tokenizer")
    return None


def _ids(value: Any) -> Iterator[int]:
    for token in value if isinstance(value, list | tuple) else [value]:
        if isinstance(token, int) and not isinstance(token, bool):
            yield token


def _check_end(exam: Examination, options: Mapping[str, Any]) -> Finding | None:
    """Compare the end token with that of the tokenizer, and look for tokens that are missing."""
    tokenizer, ends = exam.extras.tokenizer, list(_ids(options.get("eos_token_id")))
    own = getattr(tokenizer, "eos_id", getattr(tokenizer, "eos_token_id", None))
    if own is not None and ends and own not in ends:
        evidence = {"eos_token_id": ", ".join(str(token) for token in ends), "of_the_tokenizer": own}
        reason = "the end token of generation is not that of the tokenizer, so generation does not stop where texts end"
        return _generation(evidence, reason, f"write eos_token_id = {own}")
    if own is not None and not ends:
        reason = "there is no end token, so every text is written up to the limit; the tokenizer has one"
        return _generation({"of_the_tokenizer": own}, reason, f"write eos_token_id = {own}", "warn")
    if exam.subject.kind == "encoder-decoder" and not {"decoder_start_token_id", "bos_token_id"} & set(options):
        exam.notes.append("neither decoder_start_token_id nor bos_token_id is set: set one before you generate")
    if ends and "pad_token_id" not in options:
        exam.notes.append(
            "no pad_token_id is set in the decoding options: rows of a batch that end early are filled with the end "
            "token, or batches are refused"
        )
    return None


def _check_ranges(exam: Examination, options: Mapping[str, Any]) -> Finding | None:
    """Look for numbers that an option cannot have."""
    for name, (is_possible, words) in RANGES.items():
        value = options.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and not is_possible(value):
            return _generation({name: value}, f"{name}={value:g} is not possible", f"write a number: {words},")
    return None


def _check_lengths(exam: Examination, options: Mapping[str, Any]) -> Finding | None:
    """Compare the limits with the context, and with each other."""
    context, longest, new = exam.subject.declared.context, options.get("max_length"), options.get("max_new_tokens")
    if isinstance(new, int) and context is not None and new > context:
        evidence = {"max_new_tokens": new, "context": context}
        reason = "more new tokens are asked for than fit into the context"
        return _generation(evidence, reason, f"write at most {context}")
    for low, high in (("min_length", longest), ("min_new_tokens", new)):
        if isinstance(options.get(low), int) and isinstance(high, int) and options[low] > high:
            evidence = {low: options[low], low.replace("min", "max"): high}
            return _generation(evidence, "the least length is more than the greatest", f"write {low} below {high}")
    if not isinstance(longest, int) or new is not None:
        return None  # max_new_tokens takes precedence
    evidence = {"max_length": longest}
    if context is not None and longest > context:
        reason = f"max_length={longest} is beyond the context of {context} tokens"
        return _generation({**evidence, "context": context}, reason, f"write at most {context}", "warn")
    if longest <= SHORT and exam.subject.kind == "causal":
        reason = f"max_length={longest} counts the prompt too: a prompt of so many tokens leaves no room for an answer"
        return _generation(evidence, reason, "write max_new_tokens in place of it", "warn")
    return None


def _check_search(exam: Examination, options: Mapping[str, Any]) -> Finding | None:
    """Look for options of sampling in a greedy or beam search, and vice versa."""
    beams, temperature = options.get("num_beams", 1), options.get("temperature")
    samples = options.get("do_sample", True)
    if _above(beams, 1) and _above(temperature, 0) and samples:
        evidence = {"num_beams": beams, "temperature": temperature}
        reason = "beam search and sampling exclude each other"
        return _generation(evidence, reason, "write temperature = 0, or num_beams = 1")
    if not samples and temperature != 0:  # a temperature of 0 says the same as do_sample = false
        ignored = {n: options[n] for n, neutral in SAMPLING_FIELDS.items() if options.get(n, neutral) != neutral}
        if ignored:
            reason = f"do_sample is false, so {', '.join(ignored)} change nothing: the text is the greedy one"
            return _generation({"do_sample": "false", **ignored}, reason, "write do_sample = true", "warn")
    if samples and temperature == 0 and options.get("do_sample"):
        evidence = {"do_sample": "true", "temperature": 0}
        return _generation(evidence, "sampling divides by a temperature of 0", "write do_sample = false")
    rows = options.get("num_return_sequences", 1)
    if not samples and _above(rows, 1) and rows > beams:
        evidence = {"num_return_sequences": rows, "num_beams": beams}
        reason = "without sampling there are as many different texts as beams"
        return _generation(evidence, reason, f"write num_beams = {rows}, or do_sample = true")
    return None


def _check_repetition(exam: Examination, options: Mapping[str, Any]) -> Finding | None:
    """Look for penalties of repetition with which no text can be written."""
    if options.get("no_repeat_ngram_size") == 1:
        reason = "no token may occur twice in a text, not even a space or a comma"
        return _generation({"no_repeat_ngram_size": 1}, reason, "write 3 or more, or 0", "warn")
    penalty = options.get("repetition_penalty", 1.0)
    if _above(penalty, MAX_REPETITION_PENALTY) or (isinstance(penalty, float) and penalty < 1):
        effect = "tokens that occurred are almost forbidden" if penalty > 1 else "repetition is rewarded"
        evidence = {"repetition_penalty": penalty, "usual": 1.2}
        return _generation(evidence, f"repetition_penalty={penalty:g}: {effect}", "write 1 (none) to 1.5", "warn")
    return None


def _above(value: object, limit: float) -> bool:
    return isinstance(value, int | float) and value > limit


def _generation(evidence: dict[str, Any], reason: str, fix: str, verdict: Verdict = "fail") -> Finding:
    where = "in the decoding options (generation_config.json, model.generation_config, or generation=)"
    return finding(verdict, evidence, reason, f"{fix} {where}")
