"""Checks of whether model, tokenizer, head, task, context and decoding options belong together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn

from monoblock.doctor.checks.numerics import find_blocks
from monoblock.doctor.examination import Examination, check, fail, finding, warn
from monoblock.doctor.report import Evidence, Finding, NotChecked, Outcome, Verdict
from monoblock.inference.settings import COUNTS, HISTORY_OPTIONS, RANGES, SAMPLING_OPTIONS, Settings

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
FAMILY_NAMES = {
    "causal": "a decoder (GPT)",
    "bidirectional": "an encoder (BERT)",
    "encoder-decoder": "an encoder-decoder",
}


@check("the tokenizer fits the model", "tokens", "tokenizer", group="fit")
def check_tokenizer(exam: Examination) -> Finding | None:
    """Compare ids of the tokenizer with the rows of the embedding, and count unknown tokens."""
    tokenizer, vocab = exam.options.tokenizer, exam.subject.vocab
    size, kind = int(getattr(tokenizer, "vocab_size", 0)), getattr(tokenizer, "kind", "")
    if not hasattr(tokenizer, "kind") and hasattr(tokenizer, "__len__"):
        size = len(tokenizer)  # of transformers: with added tokens
    own = "give the tokenizer that the model was trained with; it lies in the folder of the model"
    sizes = {"tokens_of_the_tokenizer": size, "rows_of_the_embedding": vocab}
    if size > vocab:
        return fail(sizes, "the tokenizer has ids that the embedding has no row for", own)
    specials = {int(i) for i in getattr(tokenizer, "special_ids", getattr(tokenizer, "all_special_ids", ()))}
    if wrong := sorted(i for i in {*specials, exam.subject.pad_id} if i is not None and i >= vocab):
        return fail(
            {"special_id": wrong[0], "rows_of_the_embedding": vocab},
            "a special token has an id that the model does not know",
            "add rows with model.resize_token_embeddings, or " + own,
        )
    if vocab - size > MAX_UNUSED_ROWS and vocab - size > vocab // 3:
        reason = "a third of the embedding or more is never used: the tokenizer belongs to another model"
        return fail(sizes, reason, own)
    mask = getattr(tokenizer, "mask_id", getattr(tokenizer, "mask_token_id", None))
    if exam.options.objective == "masked_lm" and mask is None:
        reason = "a masked language model fills in a mask token, but the tokenizer has none"
        return fail({"mask_tokens": 0}, reason, "train or take a tokenizer with a mask token")
    if kind == "wordpiece" and exam.subject.kind == "causal":
        return warn(
            {"kind": kind},
            "WordPiece drops spaces, so a decoder cannot write text that reads well; BERT's models use it, GPTs do not",
            "use byte-level BPE for a decoder, or " + own,
        )
    return _check_texts(tokenizer, list(exam.options.texts)[:200], kind)


def _check_texts(tokenizer: Any, texts: Sequence[str], kind: str) -> Finding | None:
    """Encode the user's texts: few tokens may be unknown, and words must not be split into letters."""
    encoded = [tokenizer.encode(text) for text in texts]
    ids = [i for one in encoded for i in getattr(one, "ids", one)]
    unknown = getattr(tokenizer, "unk_id", getattr(tokenizer, "unk_token_id", None))
    rate = sum(i == unknown for i in ids) / max(1, len(ids)) if unknown is not None else 0.0
    if rate > MAX_UNKNOWN:
        return fail(
            {"unknown_share": rate, "tokens": len(ids)},
            f"{rate:.0%} of the tokens are unknown: the tokenizer was trained on other text (language, script or case)",
            "give the model's own tokenizer, or train one on text like yours",
        )
    fertility = len(ids) / max(1, sum(len(text.split()) for text in texts))
    if kind not in BY_CHARACTER and fertility > MAX_FERTILITY:
        return warn(
            {"tokens_per_word": fertility, "usual": 1.3},
            "words fall into many pieces: the tokenizer was trained on other text, and the context holds few words",
            "train a tokenizer on text like yours",
        )
    return None


@check("the head is trained and has as many outputs as there are classes", "module", group="fit")
def check_head(exam: Examination) -> Finding | None:
    """Compare the outputs with the classes, and look for a fresh head on a trained body."""
    outputs, given, declared = exam.output.shape[-1], exam.options, exam.subject.declared.num_labels
    is_classifier = not exam.subject.reads_tokens or outputs < exam.subject.vocab
    if given.labels and len(given.labels) != outputs:
        return fail(
            {"outputs": outputs, "labels": len(given.labels)},
            "the head has another number of outputs than there are labels",
            f"build the head with classes={len(given.labels)}",
        )
    if declared is not None and declared > 1 and declared != outputs:
        return fail(
            {"outputs": outputs, "declared": declared},
            "the head has another number of outputs than the configuration says",
            f"build the head with {declared} outputs",
        )
    if given.batch is not None and is_classifier and not given.batch[1].is_floating_point():
        highest = int(given.batch[1].max())
        if highest >= outputs:
            return fail(
                {"outputs": outputs, "highest_label": highest},
                "a label of the batch is outside the classes of the head",
                f"build the head with at least {highest + 1} outputs",
            )
    return _check_fresh(exam)


def _check_fresh(exam: Examination) -> Finding | None:
    """Look for an output layer that has its initial values above blocks that are trained."""
    blocks, outputs = find_blocks(exam.module), exam.output.shape[-1]
    weights = [(name, p.detach()) for block in blocks for name, p in block.named_parameters()]
    inside = {id(p) for block in blocks for p in block.parameters()}
    biases = [m.bias for b in blocks for m in b.modules() if isinstance(m, nn.Linear) and m.bias is not None]
    scales = [w for name, w in weights if "norm" in name.lower() and name.endswith("weight")]
    is_trained = (
        biases
        and all(bool(bias.detach().any()) for bias in biases)
        and any(float((scale - scale.mean()).abs().max()) > 0 for scale in scales)
    )
    has_fresh_head = any(
        name.endswith("bias") and p.shape == (outputs,) and id(p) not in inside and not bool(p.detach().any())
        for name, p in exam.module.named_parameters()
    )
    if not is_trained or not has_fresh_head or outputs >= exam.subject.vocab > 0:
        return None
    return warn(
        {"largest_bias_of_the_head": 0.0, "outputs": outputs},
        "the blocks are trained, but the head has its initial weights: its probabilities mean nothing",
        "fine-tune the model on labelled examples before you use its predictions",
    )


@check("the kind of model fits the task", "tokens", group="fit")
def check_model_type(exam: Examination) -> Outcome:
    """Compare the kind of model with the task, and look for a decoder that is read at its first token."""
    kind, objective = exam.subject.kind, exam.options.objective
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
    context, given = exam.subject.declared.context, exam.options
    if context is None:
        return NotChecked("the model states no context")
    if given.batch is not None and given.batch[0].dim() == 2 and given.batch[0].shape[1] > context:
        return _context_finding("the batch", int(given.batch[0].shape[1]), context, "fail")
    longest = getattr(given.tokenizer, "model_max_length", None)
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
# The neutral values of what sampling reads; top_k is 50 in many files, because transformers writes its default there.
SAMPLING_FIELDS = {
    "temperature": 1.0,
    **{name: getattr(Settings, name) for name in SAMPLING_OPTIONS if name != "top_k"},
}
MAX_REPETITION_PENALTY = 2.0  # Keskar et al. (2019) use 1.2
LIMITED = ("temperature", *SAMPLING_OPTIONS, *HISTORY_OPTIONS, "num_beams", "max_new_tokens")


@check("the decoding options are possible", "tokens", "generation", group="fit")
def check_generation_defaults(exam: Examination) -> Finding | None:
    """Look for decoding options that cannot be right; the first problem is reported."""
    options = {name: value for name, value in (exam.generation or {}).items() if value is not None}
    problems = chain(_wrong_tokens(exam, options), _wrong_numbers(exam, options), _wrong_search(options))
    for verdict, evidence, reason, fix in problems:
        where = "in the decoding options (generation_config.json, model.generation_config, or generation=)"
        return finding(verdict, evidence, reason, f"{fix} {where}")
    return None


Problem = tuple[Verdict, Evidence, str, str]  # verdict, evidence, reason, fix


def _wrong_tokens(exam: Examination, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Look for ids that the model does not have, and for an end token that is missing or not the tokenizer's."""
    vocab, unset = exam.subject.vocab, exam.subject.unset_tokens
    for name, token in [(field, token) for field in TOKEN_FIELDS for token in _ids(options.get(field))]:
        if not 0 <= token < vocab and token in unset.get(name, ()):
            exam.notes.append(
                f"{name}={token} is the default of the configuration class, and not an id of this model, whose "
                f"ids are 0 to {vocab - 1}: set it before you generate"
            )
        elif not 0 <= token < vocab:
            reason = f"{name}={token} is not an id of the model"
            yield "fail", {name: token, "vocabulary": vocab}, reason, "write an id of the tokenizer"
    ends, write = list(_ids(options.get("eos_token_id"))), "write eos_token_id = "
    own = getattr(exam.options.tokenizer, "eos_id", getattr(exam.options.tokenizer, "eos_token_id", None))
    if own is not None and not ends:
        reason = "there is no end token, so every text is written up to the limit; the tokenizer has one"
        yield "warn", {"of_the_tokenizer": own}, reason, f"{write}{own}"
    elif own is not None and own not in ends:
        reason = "the end token of generation is not that of the tokenizer, so generation does not stop where texts end"
        listed = ", ".join(str(token) for token in ends)
        yield "fail", {"eos_token_id": listed, "of_the_tokenizer": own}, reason, f"{write}{own}"
    if exam.subject.kind == "encoder-decoder" and not {"decoder_start_token_id", "bos_token_id"} & set(options):
        exam.notes.append("neither decoder_start_token_id nor bos_token_id is set: set one before you generate")
    if ends and "pad_token_id" not in options:
        exam.notes.append(
            "no pad_token_id is set in the decoding options: rows of a batch that end early are filled with the end "
            "token, or batches are refused"
        )


def _ids(value: Any) -> Iterator[int]:
    for token in value if isinstance(value, list | tuple) else [value]:
        if isinstance(token, int) and not isinstance(token, bool):
            yield token


def _wrong_numbers(exam: Examination, options: Mapping[str, Any]) -> Iterator[Problem]:
    """Look for numbers that an option cannot have, and compare the limits with the context and with each other."""
    counts = {name: (*ends, f"write a whole number, {ends[0]} or more,") for name, ends in COUNTS.items()}
    limits = {name: {**counts, **RANGES}[name] for name in LIMITED}
    for name, (least, most, advice) in (limits | {"max_length": counts["max_new_tokens"]}).items():
        value = options.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and not least <= value <= most:
            yield "fail", {name: value}, f"{name}={value:g} is not possible", advice
    context, longest, new = exam.subject.declared.context, options.get("max_length"), options.get("max_new_tokens")
    if isinstance(new, int) and context is not None and new > context:
        reason = "more new tokens are asked for than fit into the context"
        yield "fail", {"max_new_tokens": new, "context": context}, reason, f"write at most {context}"
    for low, high in (("min_length", longest), ("min_new_tokens", new)):
        if isinstance(options.get(low), int) and isinstance(high, int) and options[low] > high:
            evidence = {low: options[low], low.replace("min", "max"): high}
            yield "fail", evidence, "the least length is more than the greatest", f"write {low} below {high}"
    if not isinstance(longest, int) or new is not None:
        return  # max_new_tokens takes precedence
    if context is not None and longest > context:
        reason = f"max_length={longest} is beyond the context of {context} tokens"
        yield "warn", {"max_length": longest, "context": context}, reason, f"write at most {context}"
    if longest <= SHORT and exam.subject.kind == "causal":
        reason = f"max_length={longest} counts the prompt too: a prompt of so many tokens leaves no room for an answer"
        yield "warn", {"max_length": longest}, reason, "write max_new_tokens in place of it"


def _wrong_search(options: Mapping[str, Any]) -> Iterator[Problem]:
    """Look for options of sampling in a greedy or beam search, and vice versa, and for penalties that forbid a text."""
    beams, temperature = options.get("num_beams", 1), options.get("temperature", math.nan)
    samples, rows = options.get("do_sample", True), options.get("num_return_sequences", 1)
    if _above(beams, 1) and _above(temperature, 0) and samples:
        reason, fix = "beam search and sampling exclude each other", "write temperature = 0, or num_beams = 1"
        yield "fail", {"num_beams": beams, "temperature": temperature}, reason, fix
    ignored = {n: options[n] for n, neutral in SAMPLING_FIELDS.items() if options.get(n, neutral) != neutral}
    if not samples and temperature != 0 and ignored:  # a temperature of 0 says the same as do_sample = false
        reason = f"do_sample is false, so {', '.join(ignored)} change nothing: the text is the greedy one"
        yield "warn", {"do_sample": "false", **ignored}, reason, "write do_sample = true"
    if temperature == 0 and options.get("do_sample"):
        reason = "sampling divides by a temperature of 0"
        yield "fail", {"do_sample": "true", "temperature": 0}, reason, "write do_sample = false"
    if not samples and _above(rows, 1) and rows > beams:
        reason = "without sampling there are as many different texts as beams"
        fix = f"write num_beams = {rows}, or do_sample = true"
        yield "fail", {"num_return_sequences": rows, "num_beams": beams}, reason, fix
    if options.get("no_repeat_ngram_size") == 1:
        reason = "no token may occur twice in a text, not even a space or a comma"
        yield "warn", {"no_repeat_ngram_size": 1}, reason, "write 3 or more, or 0"
    penalty = options.get("repetition_penalty", 1.0)
    if _above(penalty, MAX_REPETITION_PENALTY) or (isinstance(penalty, float) and penalty < 1):
        effect = "tokens that occurred are almost forbidden" if penalty > 1 else "repetition is rewarded"
        evidence = {"repetition_penalty": penalty, "usual": 1.2}
        yield "warn", evidence, f"repetition_penalty={penalty:g}: {effect}", "write 1 (none) to 1.5"


def _above(value: object, limit: float) -> bool:
    return isinstance(value, int | float) and value > limit
