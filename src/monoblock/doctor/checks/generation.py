"""The check of decoding options: those of generation_config.json, of a model of transformers, or handed over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from monoblock.doctor.examination import Examination, finding
from monoblock.doctor.report import Finding, Verdict

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
                    f"{name}={token} is the default of the configuration class, and not an id of this model, which "
                    f"knows 0 to {vocab - 1}: set it before you generate"
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
    tokenizer, ends = exam.handed.tokenizer, list(_ids(options.get("eos_token_id")))
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
    """Look for options of sampling in a greedy or beam search, and the other way round."""
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
        what = "tokens that occurred are almost forbidden" if penalty > 1 else "repetition is rewarded"
        evidence = {"repetition_penalty": penalty, "usual": 1.2}
        return _generation(evidence, f"repetition_penalty={penalty:g}: {what}", "write 1 (none) to 1.5", "warn")
    return None


def _above(value: object, limit: float) -> bool:
    return isinstance(value, int | float) and value > limit


def _generation(evidence: dict[str, Any], reason: str, fix: str, verdict: Verdict = "fail") -> Finding:
    where = "in the decoding options (generation_config.json, model.generation_config, or generation=)"
    return finding("generation_defaults", verdict, evidence, reason, f"{fix} {where}")
