"""Filter the logits of a batch in which each row may have its own settings, and choose the next tokens.

Constraints come first (repetition filters, forced and forbidden tokens), then the sampling filters (temperature, top-k,
top-p, min-p, typical-p).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inference.filters import (
    TokenHistory,
    bad_words,
    force_token,
    min_p,
    no_repeat_ngram_size,
    repetition_penalty,
    suppress_tokens,
    temperature,
    top_k,
    top_p,
    typical_p,
)
from monoblock.inference.request import Request, request_rows
from monoblock.inference.sampling import sample_tokens
from monoblock.inference.settings import Settings
from monoblock.kernels.gpu import argmax

FilterTable = dict[str, tuple[Callable[..., Tensor], float]]

# By the name of the field in Settings: the filter, and the value with which it leaves the logits unchanged.
HISTORY_FILTERS: FilterTable = {
    "repetition_penalty": (repetition_penalty, 1.0),
    "no_repeat_ngram_size": (no_repeat_ngram_size, 0),
}
SAMPLING_FILTERS: FilterTable = {
    "temperature": (temperature, 1.0),
    "top_k": (top_k, 0),
    "top_p": (top_p, 1.0),
    "min_p": (min_p, 0.0),
    "typical_p": (typical_p, 1.0),
}


class Filters:
    """The filters of one batch, built from the settings of each of its rows.

    The engine builds a new object when the rows of the batch change.  At every step it calls `apply_constraints`, then
    `choose`.
    """

    def __init__(self, settings: Sequence[Settings], device: torch.device) -> None:
        self.settings, self.device = tuple(settings), device
        distinct = set({id(row): row for row in self.settings}.values())  # most rows share one object
        self.distinct_settings = tuple(distinct)
        self.has_same_settings = len(distinct) <= 1
        self.history_filters = self._needed_filters(HISTORY_FILTERS)
        self.sampling_filters = self._needed_filters(SAMPLING_FILTERS)
        self.sampled_rows = torch.tensor([row.temperature > 0 for row in self.settings], device=device)
        self.has_sampling = any(row.temperature > 0 for row in distinct)
        self.has_constraints = any(
            row.bad_words_ids
            or row.suppress_tokens
            or row.begin_suppress_tokens
            or row.min_new_tokens
            or row.forced_bos_token_id is not None
            or row.forced_eos_token_id is not None
            for row in distinct
        )
        self.has_processors = any(row.logits_processor for row in self.settings)

    def _needed_filters(self, table: FilterTable) -> list[tuple[Callable[..., Tensor], Any]]:
        """Return (filter, value) for each filter of `table` that changes the logits of at least one row.

        The value is a single number if all rows have the same one, otherwise a tensor of shape (B, 1).
        """
        needed: list[tuple[Callable[..., Tensor], Any]] = []
        for name, (function, neutral) in table.items():
            if all(getattr(row, name) == neutral for row in self.distinct_settings):
                continue
            values = [getattr(row, name) for row in self.settings]
            if table is SAMPLING_FILTERS:  # greedy rows are not sampled, and their logits must not be divided by 0
                values = [neutral if row.temperature == 0 else v for row, v in zip(self.settings, values, strict=True)]
            if all(value == neutral for value in values):
                continue
            is_same = len(set(values)) == 1
            needed.append((function, values[0] if is_same else torch.tensor(values, device=self.device)[:, None]))
        return needed

    @property
    def needs_history(self) -> bool:
        has_bad_words = any(row.bad_words_ids for row in self.distinct_settings)
        return bool(self.history_filters or self.has_processors) or has_bad_words

    @property
    def is_stateless(self) -> bool:
        """Whether tokens are chosen from the logits and uniform random numbers alone, regardless of earlier tokens."""
        return not (self.history_filters or self.has_constraints or self.has_processors)

    @property
    def cache_key(self) -> object:
        """All settings that `choose` depends on; if two `Filters` have equal keys, their `choose` computes the same."""
        return tuple(tuple(getattr(row, name) for name in SAMPLING_FILTERS) for row in self.settings)

    def choose(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Choose the next tokens (B,) from logits (B, V).

        A greedy row takes its best token.  A sampled row takes the token that its number in `uniforms` (B,), a random
        number from [0, 1), selects from the filtered distribution (see `sample_tokens`).
        """
        best = argmax(logits)
        if not self.has_sampling:
            return best
        sampled = sample_tokens(self.apply_sampling_filters(logits.float()), uniforms)
        return torch.where(self.sampled_rows, sampled, best)

    def apply_sampling_filters(self, logits: Tensor) -> Tensor:
        """Apply temperature, top-k, top-p, min-p and typical-p to logits (B, V), by the settings of each row."""
        for function, value in self.sampling_filters:
            logits = function(logits, value)
        return logits

    def apply_constraints(self, logits: Tensor, history: TokenHistory | None, new_counts: Sequence[int]) -> Tensor:
        """Apply the repetition filters to logits (B, V), then force or rule out tokens.

        Sampling and beam search both use this.  `new_counts` is the number of tokens generated so far in each row.
        `history` may be None if `needs_history` is False.
        """
        for function, value in self.history_filters:
            logits = function(logits, value, history)
        return self._constrain(logits, history, new_counts) if self.has_constraints else logits

    def suppressed_tokens(self, new_counts: Sequence[int]) -> tuple[int, ...] | None:
        """Return the tokens that are ruled out in every row at this step, if that is all the constraints do.

        Return None if there is a repetition filter, a logits processor, a forced token or a bad word, or if the rows
        differ.
        """
        if self.history_filters or self.has_processors or not self.has_same_settings:
            return None
        if self.has_constraints and len(set(new_counts)) > 1:
            return None
        row = self.settings[0]
        is_forced = row.forced_bos_token_id is not None or row.forced_eos_token_id is not None
        if row.bad_words_ids or is_forced:
            return None
        too_early = row.eos_token_id if new_counts[0] < row.min_new_tokens else ()
        return (*row.suppress_tokens, *too_early, *(row.begin_suppress_tokens if new_counts[0] == 0 else ()))

    def _constrain(self, logits: Tensor, history: TokenHistory | None, new_counts: Sequence[int]) -> Tensor:
        if self.has_same_settings and len(set(new_counts)) == 1:
            return _constrain_rows(logits, self.settings[0], history, new_counts[0])
        rows = []
        for row, settings in enumerate(self.settings):
            one = slice(row, row + 1)
            row_history = None if history is None else TokenHistory(history.tokens[one], history.lengths[one])
            rows.append(_constrain_rows(logits[one], settings, row_history, new_counts[row]))
        return torch.cat(rows)


def _constrain_rows(logits: Tensor, settings: Settings, history: TokenHistory | None, new_count: int) -> Tensor:
    """Rule out or force tokens in rows with the same settings and the same number of new tokens."""
    if settings.bad_words_ids:
        assert history is not None
        logits = bad_words(logits, settings.bad_words_ids, history)
    if settings.eos_token_id and new_count < settings.min_new_tokens:
        logits = suppress_tokens(logits, settings.eos_token_id)
    if settings.forced_bos_token_id is not None and new_count == 0:
        logits = force_token(logits, settings.forced_bos_token_id)
    if settings.forced_eos_token_id is not None and new_count == settings.max_new_tokens - 1:
        logits = force_token(logits, settings.forced_eos_token_id)
    if settings.suppress_tokens:
        logits = suppress_tokens(logits, settings.suppress_tokens)
    if settings.begin_suppress_tokens and new_count == 0:
        logits = suppress_tokens(logits, settings.begin_suppress_tokens)
    return logits


# -- filters of requests ----------------------------------------------------------------------------------------------


def choose_tokens(requests: list[Request], logits: Tensor, filters: Filters) -> list[int]:
    """Apply the filters to logits (rows, V) and return the next token of every row of the requests."""
    logits = constrain_logits(requests, logits, filters)
    return filters.choose(logits, uniform_numbers(requests, filters)).tolist()


def constrain_logits(requests: list[Request], logits: Tensor, filters: Filters) -> Tensor:
    """Apply the constraints and the logits processors of every row to logits (rows, V)."""
    history, rows = token_history(requests, filters), request_rows(requests)
    logits = filters.apply_constraints(logits, history, [request.num_row_tokens(row) for request, row in rows])
    if not filters.has_processors:
        return logits
    assert history is not None
    processed = []
    for index, (request, row) in enumerate(rows):
        row_logits = logits[index : index + 1]
        if request.settings.logits_processor and not request.is_row_done(row):
            ids = history.tokens[index : index + 1, : int(history.lengths[index])]
            try:
                row_logits = run_processors(request.settings, ids, row_logits)
            except Exception as problem:  # the other requests go on
                request.unreported_errors += request.fail(problem)
        processed.append(row_logits)
    return torch.cat(processed)


def run_processors(settings: Settings, ids: Tensor, logits: Tensor) -> Tensor:
    """Call the logits processors with the tokens (1, T) and the logits (1, V) of a row, and return the last result."""
    for processor in settings.logits_processor:
        result = processor(ids, logits)
        if not isinstance(result, Tensor) or result.shape != logits.shape:
            shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise InputError(
                f"a logits processor takes ids (1, T) and logits (1, V) and returns logits (1, V), "
                f"here {list(logits.shape)}, but it returned {shape}"
            )
        logits = result.to(logits)
    if logits.isnan().any() or bool((logits == -torch.inf).all()):
        raise InputError(
            "after the logits processors, a logit is NaN or no token is allowed; leave one token a finite logit"
        )
    return logits


def token_history(requests: list[Request], filters: Filters) -> TokenHistory | None:
    """Return all tokens of each row so far, including its prompt, or None if no filter needs them."""
    if not filters.needs_history:
        return None
    rows = [request.row_tokens(row) for request, row in request_rows(requests)]
    longest = max(len(tokens) for tokens in rows)
    padded = torch.tensor([tokens + [-1] * (longest - len(tokens)) for tokens in rows], device=filters.device)
    return TokenHistory(padded, torch.tensor([len(tokens) for tokens in rows], device=filters.device))


def uniform_numbers(requests: list[Request], filters: Filters, offset: int = 0) -> Tensor:
    """Return the uniform random numbers (rows,) with which each row samples its next token.

    With an `offset`, they are the numbers for the token that many steps later.  Without sampling they are 0.
    """
    rows = request_rows(requests)
    numbers = [request.uniform(row, offset) for request, row in rows] if filters.has_sampling else [0.0] * len(rows)
    return torch.tensor(numbers, device=filters.device, dtype=torch.double)
