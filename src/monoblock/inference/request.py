"""A request while it is decoded: its prompt and settings, the tokens generated so far, and why each sequence ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.inference.beam import BeamHypothesis, BeamSearch
from monoblock.inference.prompt import Prompt
from monoblock.inference.sampling import RandomStream, fresh_seed
from monoblock.inference.settings import Settings

FINISH_REASONS = {
    "stop": "an end token or a stop string",
    "length": "max_new_tokens is reached",
    "context": "the context of the model is full",
    "no_hypothesis": "beam search has found fewer hypotheses than num_return_sequences",
    "error": "the request has failed",
}


class RequestOutput(NamedTuple):
    """The new tokens of one sequence of a request."""

    request_id: int
    sequence_index: int  # below num_return_sequences
    tokens: tuple[int, ...]  # those since the last output; a beam search has only one output, at its end
    finish_reason: str | None = None  # see FINISH_REASONS; None while the sequence goes on
    score: float | None = None  # beam search: sum of log-probabilities / length ** length_penalty
    error: Exception | None = None  # what ended the request, if finish_reason is "error"


@dataclass
class SequenceState:
    """One sequence that is not part of a beam search."""

    random_stream: RandomStream | None = None  # None if decoding is greedy
    new_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    returned: tuple[int, str | None] = (0, None)  # number of new tokens and finish reason after the last whole step


class Request:
    """A prompt and its `rows_per_prompt` rows in the batch: the sequences to return or, in beam search, the beams."""

    def __init__(
        self, request_id: int, prompt: Prompt, settings: Settings, token_budget: int, limit_reason: str = "length"
    ) -> None:
        self.id, self.prompt, self.settings = request_id, prompt, settings
        self.token_budget = token_budget  # maximum number of new tokens, by max_new_tokens and the context
        self.limit_reason = limit_reason  # the finish reason of a sequence that reaches the budget
        self.seed = fresh_seed() if settings.seed is None and settings.temperature > 0 else settings.seed or 0
        self.error: Exception | None
        self.unreported_errors: list[RequestOutput]
        self.sequences = [SequenceState() for _ in range(settings.rows_per_prompt)]
        self.restart()

    def mark_returned(self) -> None:
        """Note that a whole step has returned the tokens so far."""
        for sequence in self.sequences:
            sequence.returned = len(sequence.new_tokens), sequence.finish_reason

    def restart(self) -> None:
        """Go back to the last whole step: to the tokens that it has returned, or to the prompt of a beam search."""
        self.beam_search = BeamSearch(self.settings) if self.settings.num_beams > 1 else None
        self.error, self.unreported_errors = None, []
        is_sampled = self.settings.temperature > 0
        for row, sequence in enumerate(self.sequences):
            sequence.random_stream = RandomStream(self.seed, row) if is_sampled else None
            count, sequence.finish_reason = sequence.returned
            del sequence.new_tokens[count:]

    @property
    def started_prompt(self) -> Prompt:
        """The prompt and, if the request has a single row, the tokens that it has got before a restart."""
        if len(self.sequences) > 1:
            return self.prompt
        return Prompt((*self.prompt.ids, *self.sequences[0].new_tokens), self.prompt.source)

    @property
    def max_length(self) -> int:
        """The largest number of tokens that a row may reach, prompt included."""
        return len(self.prompt.ids) + self.token_budget

    def fail(self, error: Exception) -> list[RequestOutput]:
        """End the sequences that are not finished, because of an error, and return their last outputs."""
        self.error = error
        if self.beam_search is not None:
            self.beam_search.stop()
            unfinished = list(range(self.settings.num_return_sequences))
        else:
            unfinished = [row for row, sequence in enumerate(self.sequences) if sequence.finish_reason is None]
        for row in unfinished:
            self.sequences[row].finish_reason = "error"
        return [RequestOutput(self.id, row, (), "error", error=error) for row in unfinished]

    @property
    def is_done(self) -> bool:
        if self.beam_search is not None:
            return self.beam_search.is_done
        return all(sequence.finish_reason for sequence in self.sequences)

    def is_row_done(self, row: int) -> bool:
        """Return whether a row is finished; other rows of the request may still be running."""
        return self.is_done or (self.beam_search is None and self.sequences[row].finish_reason is not None)

    @property
    def num_new_tokens(self) -> int:
        """The number of new tokens in the longest row."""
        if self.beam_search is not None:
            return self.beam_search.length
        return max(len(sequence.new_tokens) for sequence in self.sequences)

    def num_row_tokens(self, row: int) -> int:
        """Return the number of new tokens in one row."""
        return self.beam_search.length if self.beam_search is not None else len(self.sequences[row].new_tokens)

    def row_tokens(self, row: int) -> list[int]:
        """Return all tokens of one row, including the prompt."""
        new = self.beam_search.running_tokens(row) if self.beam_search is not None else self.sequences[row].new_tokens
        return [*self.prompt.ids, *new]

    def last_token(self, row: int) -> int:
        """Return the newest token of a row, which is the next input; 0 if the row has no new token."""
        if self.beam_search is not None:
            return self.beam_search.last_tokens[row]
        return self.sequences[row].new_tokens[-1] if self.sequences[row].new_tokens else 0

    @property
    def last_tokens(self) -> list[int]:
        """The newest token of every row, which is the next input."""
        if self.beam_search is not None:
            return self.beam_search.last_tokens
        return [self.last_token(row) for row in range(len(self.sequences))]

    def uniform(self, row: int, offset: int = 0) -> float:
        """Return the uniform random number with which a row samples its next token; 0 if decoding is greedy.

        With an `offset`, it is the number for the token that many steps later.
        """
        sequence = self.sequences[row]
        return 0.0 if sequence.random_stream is None else sequence.random_stream[len(sequence.new_tokens) + offset]

    def append_tokens(self, row: int, tokens: Sequence[int]) -> RequestOutput | None:
        """Append tokens to a row, up to the one that ends it, and return them as an output.

        Return None if the row had ended before.
        """
        sequence = self.sequences[row]
        if sequence.finish_reason:
            return None
        new = tokens[: self.token_budget - len(sequence.new_tokens)]
        ends = [index for index, token in enumerate(new) if token in self.settings.eos_token_id]
        if ends:
            new, sequence.finish_reason = new[: ends[0] + 1], "stop"
        sequence.new_tokens.extend(new)
        if not sequence.finish_reason and len(sequence.new_tokens) >= self.token_budget:
            sequence.finish_reason = self.limit_reason
        return RequestOutput(self.id, row, tuple(new), sequence.finish_reason)

    def beam_outputs(self) -> list[RequestOutput]:
        """Return the outputs of a finished beam search: the best hypotheses, and empty ones if there are too few."""
        assert self.beam_search is not None
        outputs = [self._beam_output(*item) for item in enumerate(self.beam_search.best_hypotheses())]
        missing = range(len(outputs), self.settings.num_return_sequences)
        return outputs + [RequestOutput(self.id, index, (), "no_hypothesis") for index in missing]

    def _beam_output(self, sequence_index: int, hypothesis: BeamHypothesis) -> RequestOutput:
        tokens = hypothesis.tokens
        finish_reason = "stop" if tokens and tokens[-1] in self.settings.eos_token_id else self.limit_reason
        return RequestOutput(self.id, sequence_index, tokens, finish_reason, hypothesis.score)


def request_rows(requests: list[Request]) -> list[tuple[Request, int]]:
    """Return (request, row within the request) for every row, in the order of the batch."""
    return [(request, row) for request in requests for row in range(request.settings.rows_per_prompt)]


def tokens_left(request: Request, row: int) -> int:
    """Return how many more tokens a row may get."""
    return request.token_budget - len(request.sequences[row].new_tokens)


def error_outputs(requests: list[Request]) -> list[RequestOutput]:
    """Return the outputs of requests that have failed since the last call."""
    outputs = [output for request in requests for output in request.unreported_errors]
    for request in requests:
        request.unreported_errors = []
    return outputs


def active_mask(requests: list[Request], device: torch.device) -> Tensor | None:
    """Return a boolean mask (rows,), True for rows that are not finished; None if no row is finished."""
    if all(request.beam_search is not None and not request.is_done for request in requests):
        return None
    is_active = [not request.is_row_done(row) for request, row in request_rows(requests)]
    return None if all(is_active) else torch.tensor(is_active, device=device)
