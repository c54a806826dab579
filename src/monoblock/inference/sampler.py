"""Choose the next tokens of a batch in which each row may have its own settings.

Constraints come first (penalties, forced and forbidden tokens), then the user's processors, then the sampling filters
(temperature, top-k, top-p, min-p, typical-p), then the choice: the best token, or the one that the random number of
this step selects.  With proposals of speculative decoding, several tokens of a row are chosen at once.

A filter is a function from logits (B, V) to logits (B, V), with -inf for the tokens that are ruled out.  It has the
name of its field in `Settings`; its parameter is one number for all rows or a tensor (B, 1).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inference.scheduler import Row, TokenScores, end_of_text, pad_right
from monoblock.inference.settings import Settings
from monoblock.kernels.gpu import argmax

MAX_KNOWN = 8  # batches whose filters are kept
Filter = Callable[..., Tensor]
FilterTable = tuple[Filter, ...]
PerRow = float | Tensor  # one number for all rows, or one per row as a tensor (B, 1)


class TokenHistory(NamedTuple):
    """The tokens (B, L) of each row so far, padded with -1 on the right, the length (B,) of each row and its prompt."""

    tokens: Tensor
    lengths: Tensor
    prompts: Tensor  # (B,) how many of the tokens are the prompt

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], prompts: Sequence[int], device: torch.device) -> TokenHistory:
        """Return the history of rows of tokens, of which the first `prompts` are the prompt."""
        sizes = torch.tensor([list(map(len, rows)), prompts], device=device)
        return cls(pad_right(rows, device, -1)[0], *sizes)

    def row(self, index: int) -> TokenHistory:
        return TokenHistory(*(field[index : index + 1] for field in self))

    def counts(self, vocabulary: int, first: int | Tensor = 0) -> Tensor:
        """Return how often each token (B, V) occurs from position `first` of its row, one number or (B, 1)."""
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        tokens = torch.where((self.tokens >= 0) & (places >= first), self.tokens, vocabulary)  # an extra column
        counts = torch.zeros(tokens.shape[0], vocabulary + 1, device=tokens.device)
        return counts.scatter_add(1, tokens, torch.ones_like(tokens, dtype=counts.dtype))[:, :vocabulary]

    def last_tokens(self, count: int) -> Tensor:
        """Return the last `count` tokens (B, count) of each row; a shorter row starts with -1."""
        index = self.lengths[:, None] + torch.arange(-count, 0, device=self.lengths.device)
        return self.tokens.gather(1, index.clamp(min=0)).masked_fill(index < 0, -1)


# -- filters that depend only on the logits -------------------------------------------------------------------------


def temperature(logits: Tensor, value: PerRow) -> Tensor:
    """Divide the logits by `value`; a value above 1 makes the distribution flatter, a value below 1 sharper."""
    return logits / value


def top_k(logits: Tensor, k: int | Tensor) -> Tensor:
    """Keep the k best tokens and any that tie with the last of them; k = 0 keeps all tokens."""
    size = logits.shape[-1]
    if isinstance(k, Tensor):
        rank = torch.where(k <= 0, size, k).clamp(max=size).long() - 1
        threshold = logits.sort(dim=-1, descending=True).values.gather(-1, rank)
    else:
        threshold = logits.topk(min(int(k) or size, size), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < threshold, -math.inf)


def top_p(logits: Tensor, p: PerRow) -> Tensor:
    """Keep the best tokens, as few as reach a total probability of p (nucleus sampling, Holtzman et al. 2020)."""
    ascending, order = logits.sort(dim=-1)
    removed = ascending.softmax(-1).cumsum(-1) <= 1 - p
    removed[..., -1] = False
    return logits.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), -math.inf)


def min_p(logits: Tensor, p: PerRow) -> Tensor:
    """Keep tokens at least p times as probable as the best one (Nguyen et al. 2024)."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(-1, keepdim=True), -math.inf)


def typical_p(logits: Tensor, mass: PerRow) -> Tensor:
    """Keep tokens whose -log p is nearest the entropy, up to a total probability of `mass` (Meister et al. 2023)."""
    information = -logits.log_softmax(-1)
    entropy = (information * (-information).exp()).nansum(-1, keepdim=True)
    distance, order = (information - entropy).abs().sort(dim=-1)
    below_mass = logits.gather(-1, order).softmax(-1).cumsum(-1) < mass
    last = below_mass.sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    removed = distance > distance.gather(-1, last)
    removed[..., 0] = False
    filtered = logits.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), -math.inf)
    return torch.where(torch.as_tensor(mass, device=logits.device) >= 1, logits, filtered)


# -- filters that depend on earlier tokens --------------------------------------------------------------------------


def repetition_penalty(logits: Tensor, penalty: PerRow, history: TokenHistory) -> Tensor:
    """Make tokens that already occur in the row less likely (Keskar et al. 2019).

    Their logits are divided by `penalty` if they are positive and multiplied by it if they are negative.
    """
    lowered = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(history.counts(logits.shape[-1]) > 0, lowered, logits)


def presence_penalty(logits: Tensor, penalty: PerRow, history: TokenHistory) -> Tensor:
    """Subtract `penalty` from the logits of tokens that occur after the prompt."""
    return logits - penalty * (history.counts(logits.shape[-1], history.prompts[:, None]) > 0).to(logits)


def frequency_penalty(logits: Tensor, penalty: PerRow, history: TokenHistory) -> Tensor:
    """Subtract `penalty` from the logit of a token for each time that it occurs after the prompt."""
    return logits - penalty * history.counts(logits.shape[-1], history.prompts[:, None]).to(logits)


def no_repeat_ngram_size(logits: Tensor, size: int | Tensor, history: TokenHistory) -> Tensor:
    """Rule out tokens that would repeat an n-gram of `size` tokens in the same row; 0 rules out nothing."""
    if isinstance(size, Tensor):
        for n in sorted({int(n) for n in size.flatten().tolist()} - {0}):
            logits = torch.where(size == n, no_repeat_ngram_size(logits, n, history), logits)
        return logits
    if history.tokens.shape[1] < size:
        return logits
    ngrams = history.tokens.unfold(1, size, 1)  # (B, L - n + 1, n)
    matches = (ngrams[..., :-1] == history.last_tokens(size - 1)[:, None]).all(-1)
    matches &= (ngrams >= 0).all(-1)  # the last tokens have no successor yet, so they never match themselves
    rows, places = matches.nonzero(as_tuple=True)
    return logits.index_put((rows, ngrams[rows, places, -1]), -logits.new_tensor(math.inf))


HISTORY_FILTERS: FilterTable = (repetition_penalty, presence_penalty, frequency_penalty, no_repeat_ngram_size)
SAMPLING_FILTERS: FilterTable = (temperature, top_k, top_p, min_p, typical_p)
NEUTRAL = Settings(temperature=1.0)  # with these, no filter changes the logits
CONSTRAINTS = (
    *("bad_words_ids", "logit_bias", "suppress_tokens", "begin_suppress_tokens"),
    *("min_new_tokens", "forced_bos_token_id", "forced_eos_token_id"),
)


def _constrain(logits: Tensor, settings: Settings, history: TokenHistory | None, new_count: int) -> Tensor:
    """Rule out or force tokens in rows with the same settings and the same number of new tokens."""
    if settings.logit_bias:
        tokens, biases = zip(*settings.logit_bias.items(), strict=True)
        index = torch.tensor(tokens, device=logits.device)
        logits = logits.index_add(-1, index, logits.new_tensor(biases).expand(len(logits), -1))
    if settings.bad_words_ids:
        assert history is not None
        logits = _rule_out_words(logits, settings.bad_words_ids, history)
    if new_count < settings.min_new_tokens:
        logits = _rule_out(logits, settings.eos_token_id)
    last = settings.max_new_tokens - 1
    for forced, place in ((settings.forced_bos_token_id, 0), (settings.forced_eos_token_id, last)):
        if forced is not None and new_count == place:
            logits = torch.full_like(logits, -math.inf)
            logits[:, forced] = 0
    return _rule_out(logits, settings.suppress_tokens + settings.begin_suppress_tokens * (new_count == 0))


def _rule_out(logits: Tensor, tokens: tuple[int, ...]) -> Tensor:
    return logits.index_fill(-1, torch.tensor(tokens, device=logits.device), -math.inf) if tokens else logits


def _rule_out_words(logits: Tensor, words: tuple[tuple[int, ...], ...], history: TokenHistory) -> Tensor:
    """Rule out the last token of each word in rows that end with all of its other tokens."""
    for *prefix, last in words:
        tokens = torch.tensor(prefix, dtype=history.tokens.dtype, device=logits.device)
        matches = (history.last_tokens(len(prefix)) == tokens).all(-1)
        index = (matches.nonzero()[:, 0], torch.tensor(last, device=logits.device))
        logits = logits.index_put(index, -logits.new_tensor(math.inf))
    return logits


def sample_tokens(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Sample one token per row from softmax(logits) by inverting its cumulative distribution.

    Each of the returned tokens (B,) is the first whose cumulative probability exceeds the row's number in `uniforms`.

    logits: (B, V).
    uniforms: (B,), numbers in [0, 1).
    """
    cumulative = logits.double().softmax(-1).cumsum(-1)
    threshold = uniforms[:, None].to(cumulative) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).clamp(max=cumulative.shape[-1] - 1)[:, 0]


class Filters:
    """The filters of one batch, built from the settings of each of its rows; `Sampler` keeps those of the last ones.

    has_sampling: whether a row is sampled.
    needs_history: whether a choice depends on earlier tokens.
    is_stateless: whether tokens are chosen from the logits and random numbers alone, whatever their place.
    """

    def __init__(self, settings: Sequence[Settings], device: torch.device) -> None:
        self.settings, self.device = tuple(settings), device
        distinct = set({id(row): row for row in settings}.values())  # most rows share one object
        self.has_same_settings = len(distinct) <= 1
        self.has_sampling = any(row.temperature > 0 for row in distinct)
        self.sampled_rows = torch.tensor([row.temperature > 0 for row in settings], device=device)
        self.has_processors = any(row.logits_processor for row in settings)
        self.has_constraints = any(
            getattr(row, name) != getattr(NEUTRAL, name) for row in distinct for name in CONSTRAINTS
        )
        self.history_filters = self._needed_filters(HISTORY_FILTERS, settings)
        # Greedy rows are not sampled, and their logits must not be divided by 0.
        sampled = [row if row.temperature > 0 else NEUTRAL for row in settings]
        self.sampling_filters = self._needed_filters(SAMPLING_FILTERS, sampled)
        depends = bool(self.history_filters) or self.has_processors
        self.needs_history = depends or any(row.bad_words_ids for row in distinct)
        self.is_stateless = not (depends or self.has_constraints)

    def _needed_filters(self, table: FilterTable, settings: Sequence[Settings]) -> list[tuple[Filter, Any]]:
        """Return (filter, value) for each filter that changes the logits of at least one row.

        The value is a single number if all rows have the same one, otherwise a tensor of shape (B, 1).
        """
        needed: list[tuple[Filter, Any]] = []
        for function in table:
            values = [getattr(row, function.__name__) for row in settings]
            distinct = set(values)
            if distinct - {getattr(NEUTRAL, function.__name__)}:
                is_same = len(distinct) == 1
                needed.append((function, values[0] if is_same else torch.tensor(values, device=self.device)[:, None]))
        return needed

    @cached_property
    def cache_key(self) -> object:
        """All settings that `choose` depends on; if two `Filters` have equal keys, their `choose` computes the same."""
        names = [function.__name__ for function in SAMPLING_FILTERS]
        return tuple(tuple(getattr(row, name) for name in names) for row in self.settings)

    def choose(self, logits: Tensor, uniforms: Tensor | None = None) -> Tensor:
        """Choose the next tokens (B,) from logits (B, V).

        A greedy row takes its best token.  A sampled row takes the token that its number in `uniforms` (B,), a random
        number from [0, 1), selects from the filtered distribution (see `sample_tokens`).  Without them, all are greedy.
        """
        best = argmax(logits) if logits.is_cuda else logits.argmax(-1)
        if uniforms is None or not self.has_sampling:
            return best
        sampled = sample_tokens(self.apply_sampling_filters(logits.float()), uniforms)
        return torch.where(self.sampled_rows, sampled, best)

    def apply_sampling_filters(self, logits: Tensor) -> Tensor:
        """Apply the sampling filters to logits (B, V), by the settings of each row."""
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
        if not self.has_constraints:
            return logits
        if self.has_same_settings and len(set(new_counts)) == 1:
            return _constrain(logits, self.settings[0], history, new_counts[0])
        rows = zip(logits.split(1), self.settings, new_counts, strict=True)
        return torch.cat(
            [_constrain(one, own, history and history.row(n), count) for n, (one, own, count) in enumerate(rows)]
        )

    def suppressed_tokens(self, new_counts: Sequence[int]) -> tuple[int, ...] | None:
        """Return the tokens that are ruled out in every row at this step, if that is all the constraints do.

        Return None if there is a repetition filter, a logits processor, a forced token or a bad word, or if the rows
        differ.
        """
        row, count = self.settings[0], new_counts[0]
        differs = not self.has_same_settings or (self.has_constraints and len(set(new_counts)) > 1)
        is_forced = row.forced_bos_token_id is not None or row.forced_eos_token_id is not None
        if differs or self.needs_history or row.logit_bias or is_forced:
            return None
        too_early = row.eos_token_id if count < row.min_new_tokens else ()
        return (*row.suppress_tokens, *too_early, *(row.begin_suppress_tokens if count == 0 else ()))


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
        self, rows: Sequence[Row], logits: Tensor, proposed: Sequence[Sequence[int]] = ()
    ) -> tuple[list[int], dict[int, Exception]]:
        """Return the next token of every row, and what went wrong in rows whose logits processors have failed.

        logits: (rows, V).
        proposed: tokens of each row, after its own, that the logits have seen as well.
        """
        filters, failed, uniforms = self.filters_of(rows), dict[int, Exception](), None
        if not filters.is_stateless:
            logits, failed = self.constrain(rows, logits, proposed)
        if filters.has_sampling:
            ahead = map(len, proposed) if proposed else [0] * len(rows)
            numbers = [row.uniform(offset) for row, offset in zip(rows, ahead, strict=True)]
            uniforms = torch.tensor(numbers, device=filters.device, dtype=torch.double)
        return filters.choose(logits, uniforms).tolist(), failed

    def accept(
        self, rows: Sequence[Row], proposed: Sequence[Sequence[int]], logits: Tensor
    ) -> tuple[list[list[int]], dict[int, Exception]]:
        """Return the model's next tokens of each row, up to and including the first that differs from its proposal.

        Without a proposal that is one token.

        logits: those after the newest token of each row and after each of its proposals, one row after the other.
        A row whose logits processor has failed is in the second result, with the error.
        """
        if len(logits) == len(rows):
            tokens, failed = self.choose(rows, logits)
            return [[] if index in failed else [token] for index, token in enumerate(tokens)], failed
        first = [0, *itertools.accumulate(1 + len(more) for more in proposed)]
        chosen, failed = [list[int]() for _ in rows], {}
        filters, alive, position = self.filters_of(rows), list(range(len(rows))), 0
        best = filters.choose(logits).tolist() if filters.is_stateless and not filters.has_sampling else None
        while alive:
            places = [first[index] + position for index in alive]
            if best is not None:
                tokens = [best[place] for place in places]
            else:
                ahead = [proposed[index][:position] for index in alive]
                tokens, problems = self.choose([rows[index] for index in alive], logits[places], ahead)
                failed |= {alive[number]: problem for number, problem in problems.items()}
            for index, token in zip(alive, tokens, strict=True):
                if index not in failed:
                    chosen[index].append(token)
            alive = [
                index
                for index, token in zip(alive, tokens, strict=True)
                if index not in failed
                and proposed[index][position : position + 1] == [token]
                and end_of_text(rows[index], chosen[index])[1] is None
            ]
            position += 1
        return chosen, failed

    def constrain(
        self, rows: Sequence[Row], logits: Tensor, proposed: Sequence[Sequence[int]] = ()
    ) -> tuple[Tensor, dict[int, Exception]]:
        """Apply the constraints and the logits processors of every row to logits (rows, V); see `choose`."""
        filters, failed, history = self.filters_of(rows), dict[int, Exception](), None
        ahead = proposed or [()] * len(rows)
        if filters.needs_history:
            tokens = [[*row.tokens, *more] for row, more in zip(rows, ahead, strict=True)]
            history = TokenHistory.of(tokens, [len(row.request.prompt.ids) for row in rows], filters.device)
        counts = [row.num_new + len(more) for row, more in zip(rows, ahead, strict=True)]
        logits = filters.apply_constraints(logits, history, counts)
        if not filters.has_processors:
            return logits, failed
        processed = list(logits.clone().split(1))  # a processor may change what it is given
        for index, row in enumerate(rows):
            try:
                if row.request.settings.logits_processor:
                    ids = torch.tensor([tokens[index]], device=filters.device)
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


def score_tokens(logits: Tensor, tokens: Sequence[int], top: int = 0) -> list[TokenScores]:
    """Return the log-probability of each token, given the logits (tokens, V) before it, and of the `top` best ones."""
    scores = logits.float().log_softmax(-1)
    chosen = scores.gather(1, torch.tensor(tokens, dtype=torch.long, device=logits.device)[:, None])[:, 0].tolist()
    if not top:
        return [TokenScores(score) for score in chosen]
    best = scores.topk(min(top, scores.shape[-1]))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenScores(score, tuple(zip(*row, strict=True))) for score, row in zip(chosen, rows, strict=True)]
