"""Choose the next tokens of a batch in which each row may have its own settings.

Constraints come first (penalties, forced and forbidden tokens), then the user's processors, then the sampling filters
(temperature, top-k, top-p, min-p, typical-p), then the choice: the best token, or the one that the random number of
this step selects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inference.filters import (
    TokenHistory,
    bad_words,
    force_token,
    frequency_penalty,
    logit_bias,
    min_p,
    no_repeat_ngram_size,
    presence_penalty,
    repetition_penalty,
    suppress_tokens,
    temperature,
    top_k,
    top_p,
    typical_p,
)
from monoblock.inference.request import Row, TokenScores
from monoblock.inference.sampling import sample_tokens
from monoblock.inference.settings import Settings
from monoblock.kernels.gpu import argmax

MAX_KNOWN = 8  # batches whose filters are kept
FilterTable = dict[str, tuple[Callable[..., Tensor], float]]

# By the name of the field in Settings: the filter, and the value with which it leaves the logits unchanged.
HISTORY_FILTERS: FilterTable = {
    "repetition_penalty": (repetition_penalty, 1.0),
    "presence_penalty": (presence_penalty, 0.0),
    "frequency_penalty": (frequency_penalty, 0.0),
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
    """The filters of one batch, built from the settings of each of its rows; `Sampler` keeps those of the last ones."""

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
            or row.logit_bias
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

    @cached_property
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
        if row.bad_words_ids or row.logit_bias or is_forced:
            return None
        too_early = row.eos_token_id if new_counts[0] < row.min_new_tokens else ()
        return (*row.suppress_tokens, *too_early, *(row.begin_suppress_tokens if new_counts[0] == 0 else ()))

    def _constrain(self, logits: Tensor, history: TokenHistory | None, new_counts: Sequence[int]) -> Tensor:
        if self.has_same_settings and len(set(new_counts)) == 1:
            return _constrain_rows(logits, self.settings[0], history, new_counts[0])
        rows = []
        for row, settings in enumerate(self.settings):
            one = slice(row, row + 1)
            row_history = None if history is None else history.rows(one)
            rows.append(_constrain_rows(logits[one], settings, row_history, new_counts[row]))
        return torch.cat(rows)


def _constrain_rows(logits: Tensor, settings: Settings, history: TokenHistory | None, new_count: int) -> Tensor:
    """Rule out or force tokens in rows with the same settings and the same number of new tokens."""
    if settings.logit_bias:
        logits = logit_bias(logits, settings.logit_bias)
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


class Sampler:
    """Chooses tokens for rows of requests."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known: dict[tuple[int, ...], Filters] = {}  # by the settings of the rows, those of the last batches

    def filters_of(self, rows: Sequence[Row]) -> Filters:
        """Return the filters of these rows; those of an earlier call if the settings are the same objects."""
        settings = [row.request.settings for row in rows]
        key = tuple(map(id, settings))
        if key not in self.known:
            if len(self.known) >= MAX_KNOWN:
                self.known.clear()
            self.known[key] = Filters(settings, self.device)
        return self.known[key]

    def choose(
        self, rows: Sequence[Row], logits: Tensor, proposed: Sequence[Sequence[int]] | None = None
    ) -> tuple[list[int], dict[int, Exception]]:
        """Return the next token of every row, and what went wrong in rows whose logits processors have failed.

        logits: (rows, V).
        proposed: tokens of each row, after its own, that the logits have seen as well.
        """
        filters = self.filters_of(rows)
        logits, failed = self.constrain(rows, logits, proposed)
        numbers = [0.0] * len(rows)
        if filters.has_sampling:
            ahead = [0] * len(rows) if proposed is None else map(len, proposed)
            numbers = [row.uniform(offset) for row, offset in zip(rows, ahead, strict=True)]
        uniforms = torch.tensor(numbers, device=filters.device, dtype=torch.double)
        return filters.choose(logits, uniforms).tolist(), failed

    def constrain(
        self, rows: Sequence[Row], logits: Tensor, proposed: Sequence[Sequence[int]] | None = None
    ) -> tuple[Tensor, dict[int, Exception]]:
        """Apply the constraints and the logits processors of every row to logits (rows, V); see `choose`."""
        filters, failed = self.filters_of(rows), dict[int, Exception]()
        ahead = proposed or [()] * len(rows)
        history = _token_history(rows, ahead, filters.device) if filters.needs_history else None
        counts = [row.num_new + len(more) for row, more in zip(rows, ahead, strict=True)]
        logits = filters.apply_constraints(logits, history, counts)
        if not filters.has_processors:
            return logits, failed
        assert history is not None
        processed = [logits[index : index + 1] for index in range(len(rows))]
        for index, row in enumerate(rows):
            if row.request.settings.logits_processor:
                ids = history.tokens[index : index + 1, : int(history.lengths[index])]
                try:
                    processed[index] = run_processors(row.request.settings, ids, processed[index])
                except Exception as problem:  # the other requests go on
                    failed[index] = problem
        return torch.cat(processed), failed


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


def _token_history(rows: Sequence[Row], proposed: Sequence[Sequence[int]], device: torch.device) -> TokenHistory:
    tokens = [[*row.tokens, *more] for row, more in zip(rows, proposed, strict=True)]
    longest = max(map(len, tokens))
    padded = torch.tensor([row + [-1] * (longest - len(row)) for row in tokens], device=device)
    sizes = [list(map(len, tokens)), [len(row.request.prompt.ids) for row in rows]]
    return TokenHistory(padded, *torch.tensor(sizes, device=device))


def score_tokens(logits: Tensor, tokens: Sequence[int], top: int = 0) -> list[TokenScores]:
    """Return the log-probability of each token, given the logits (tokens, V) before it, and of the `top` best ones."""
    scores = logits.float().log_softmax(-1)
    chosen = scores.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    if not top:
        return [TokenScores(score) for score in chosen]
    best = scores.topk(min(top, scores.shape[-1]))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenScores(score, tuple(zip(*row, strict=True))) for score, row in zip(chosen, rows, strict=True)]
