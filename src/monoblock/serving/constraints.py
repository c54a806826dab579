"""Texts that follow a JSON schema, a regular expression, a grammar or a list of choices (llguidance).

A constraint is a logits processor: it lets only tokens through with which the text can still be completed.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.tokenizers.tokenizer import Tokenizer

if find_spec("llguidance") is not None:  # only requests with a constraint need it
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MAX_GRAMMAR = 64 * 1024  # characters
MAX_CHOICES = 1000
KINDS = ("json", "regex", "choice", "grammar", "json_object")


class ConstraintTokenizer:
    """What llguidance reads of a tokenizer, made once for a model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        if find_spec("llguidance") is None:
            raise InputError("constraints need the package llguidance; write pip install llguidance")
        if tokenizer.eos_id is None:
            raise InputError("the tokenizer of this model has no end token, so no constraint can end a text")
        self.eos_id = tokenizer.eos_id
        self.native = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer)), n_vocab=vocab_size)


class _Vocabulary:
    """The attributes that llguidance asks a tokenizer for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_id, tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [
            # llguidance marks tokens that are not text by their first byte
            b"\xff<%d>" % number if number in tokenizer.special_ids else spell(tokenizer, number)
            for number in range(tokenizer.vocab_size)
        ]

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode() if isinstance(text, bytes) else text)


def spell(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes of a token in the middle of a text."""
    raw = tokenizer.token_bytes(token)
    return raw if raw is not None else tokenizer.token(token).replace("▁", " ").encode()


class Constraint:
    """A logits processor that lets only tokens through that continue a text of a grammar."""

    def __init__(self, tokenizer: ConstraintTokenizer, kind: str, value: Any) -> None:
        self.prompt_length = 0
        limits = LLParserLimits(max_items_in_row=2000, initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000)
        first = LLMatcher(tokenizer.native, _grammar(kind, value), log_level=0, limits=limits)
        if first.is_error():
            raise InputError(f"this {kind} cannot be followed: {' '.join(first.get_error().split())}")
        begins = torch.frombuffer(bytearray(first.deep_copy().compute_logit_bias()), dtype=torch.uint8).clone()
        begins[tokenizer.eos_id] = 0
        if not begins.any():
            raise InputError(f"this {kind} allows only the empty text; change it, or leave it out")
        self._first = first
        self._matchers: dict[tuple[int, ...], Any] = {}  # by the new tokens that each has read

    def after(self, prompt_length: int) -> Constraint:
        """Return the same constraint for the text after a prompt of this many tokens."""
        constraint = copy.copy(self)
        constraint.prompt_length, constraint._matchers = prompt_length, {}
        return constraint

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        new = tuple(ids[0, self.prompt_length :].tolist())
        matcher = self._matchers.pop(new[:-1], None)
        if matcher is None or not new:  # of a row that has begun, or is run again
            matcher = self._first.deep_copy()
            matcher.consume_tokens(list(new))
        else:
            matcher.consume_token(new[-1])
        allowed = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        if matcher.is_error():
            raise InputError(f"the text has left its grammar: {' '.join(matcher.get_error().split())}")
        self._matchers[new] = matcher
        while len(self._matchers) > 64:
            self._matchers.pop(next(iter(self._matchers)))
        allowed = torch.nn.functional.pad(allowed, (0, max(0, logits.shape[-1] - len(allowed))))[: logits.shape[-1]]
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)


def _grammar(kind: str, value: Any) -> str:
    """Return the grammar of a constraint in the notation of llguidance."""
    if kind == "json_object":
        return str(LLMatcher.grammar_from_json_schema({"type": "object"}))
    if kind == "choice":
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(one, str) for one in value):
            raise InputError("choice is not a list of texts; write ['yes', 'no']")
        if not 1 <= len(value) <= MAX_CHOICES or "" in value:
            raise InputError(f"choice has {len(value)} texts; give 1 to {MAX_CHOICES} that are not empty")
        kind, value = "regex", "|".join(map(re.escape, value))
    text = json.dumps(value) if kind == "json" else value
    if kind == "json" and not isinstance(value, Mapping | bool):
        raise InputError("the JSON schema is not an object; write {'type': 'object', …}")
    if not isinstance(text, str) or len(text) > MAX_GRAMMAR:
        raise InputError(f"{kind} is not a text of at most {MAX_GRAMMAR:,} characters; shorten it")
    try:
        return str(
            LLMatcher.grammar_from_json_schema(text)
            if kind == "json"
            else LLMatcher.grammar_from_regex(text)
            if kind == "regex"
            else LLMatcher.grammar_from_lark(text)
        )
    except ValueError as problem:
        raise InputError(f"this {kind} cannot be followed: {problem}") from None
