"""Encode a question and its context as a pair, in several windows if the context is too long for one.

A window knows which characters of the context each of its tokens covers, so that a predicted answer is always an exact
slice of the context.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from monoblock.errors import ConfigError
from monoblock.tasks.input_template import InputTemplate
from monoblock.tokenizers.tokenizer import Tokenizer

NO_ANSWER = 0  # the token position that means "no answer": the first, where encoders have [CLS]
Span = tuple[int, int]


class ContextWindow(NamedTuple):
    """An encoded question with a part of its context; the tokens of the context begin at index `context_start`."""

    ids: list[int]
    segments: list[int]
    context_start: int
    offsets: list[Span]  # characters of the context that each token covers; (n, n) for white space

    def token_span(self, start: int, end: int) -> Span:
        """Return the indices of the first and last token of context[start:end].

        Both are NO_ANSWER if that span is not completely inside the window.
        """
        tokens = [(index, first, stop) for index, (first, stop) in enumerate(self.offsets) if first < stop]
        inside = [index for index, first, stop in tokens if first < end and stop > start]
        if not inside or tokens[0][1] > start or tokens[-1][2] < end:
            return NO_ANSWER, NO_ANSWER
        return self.context_start + inside[0], self.context_start + inside[-1]


class QuestionEncoder:
    """Encode a question and its context in windows of at most `max_length` tokens.

    A question longer than half a window is truncated. Each window starts `stride` context tokens after the last one;
    None means half the number of context tokens in a window.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int | None = None, stride: int | None = None) -> None:
        self.tokenizer, self.max_length, self.stride = tokenizer, max_length, stride
        self.num_truncated = 0  # questions truncated so far
        self.template = InputTemplate(tokenizer)
        self.num_special_tokens = sum(token is not None for token, _ in self.template.pair)
        self.question_index = next(index for index, (token, _) in enumerate(self.template.pair) if token is None)
        minimum = self.num_special_tokens + 4
        if max_length is not None and max_length < minimum:
            raise ConfigError(
                f"{max_length} tokens are too few for a question and its context; allow {minimum} tokens or more"
            )

    def __call__(self, question: str, context: str) -> list[ContextWindow]:
        question_ids, pieces = self.tokenizer.encode(question), self.tokenizer.pieces(context)
        ids = [piece.id for piece in pieces]
        offsets = [trim_spaces(context, piece.start, piece.end) for piece in pieces]
        size = len(ids)
        if self.max_length is not None:
            max_question = (self.max_length - self.num_special_tokens) // 2
            self.num_truncated += len(question_ids) > max_question
            question_ids = question_ids[:max_question]
            size = self.max_length - self.num_special_tokens - len(question_ids)
        return [
            self._encode_window(question_ids, ids[start:end], offsets[start:end])
            for start, end in _window_bounds(len(ids), size, self.stride)
        ]

    def _encode_window(self, question_ids: list[int], ids: list[int], offsets: list[Span]) -> ContextWindow:
        encoded = self.template(question_ids, ids)
        gap = next(
            index for index, (token, _) in enumerate(self.template.pair[self.question_index + 1 :]) if token is None
        )
        return ContextWindow(encoded.ids, encoded.segments, self.question_index + len(question_ids) + gap, offsets)


def _window_bounds(length: int, size: int, stride: int | None) -> Iterator[Span]:
    """Yield the (start, end) of windows of at most `size` tokens that cover `length` tokens.

    Each window starts `stride` tokens after the last one; None means half of `size`.
    """
    step = min(size, stride) if stride is not None else max(1, size // 2)
    start = 0
    while start + size < length:
        yield start, start + size
        start += step
    yield start, length


def trim_spaces(text: str, start: int, end: int) -> Span:
    """Return the span text[start:end] without the white space at its ends, which some tokens include."""
    part = text[start:end]
    start += len(part) - len(part.lstrip())
    return start, max(start, start + len(part.strip()))
