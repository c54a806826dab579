"""Beam search: keep the n best partial hypotheses of a request and extend them together.

A finished hypothesis is scored by the sum of its log-probabilities / `Settings.length_divisor`.  Each step considers
the 2n best continuations (more with several end tokens), so that n remain if some of them end.  In a diverse
beam search (Vijayakumar et al. 2018) the beams form groups that advance one after the other, and each group is
penalized for tokens that the earlier groups have chosen at the same step.

`BeamSearches` runs many searches together.  A step is two functions of tensors, `best_continuations` and
`advance_beams`, which read nothing on the host and keep all shapes, so that a CUDA graph can record them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.inference.settings import Settings
from monoblock.kernels.gpu_beams import best_tokens, supports_best_tokens

BLOCKED_SCORE = -1e9  # the score of a beam that must not be continued
NO_TOKEN = -1  # follows the last token of a hypothesis
MIN_CAPACITY = 32  # tokens of a hypothesis for which there is room at first
SEGMENT_SIZES = range(128, 31, -1)  # number of values of which only the maximum is compared at first


class BeamHypothesis(NamedTuple):
    tokens: tuple[int, ...]  # new tokens, including the end token if there is one
    score: float  # sum of log-probabilities / `Settings.length_divisor`


class BeamState(NamedTuple):
    """S searches of G groups of n beams: the running hypotheses and the best finished ones."""

    scores: Tensor  # (S, G, n) fp64: sum of log-probabilities of each running hypothesis, best first
    tokens: Tensor  # (S, G, 2 n, C + 1): of the running, then of the finished hypotheses; the last column is never read
    newest: Tensor  # (S, G, n): the last token of each beam
    origins: Tensor  # (S, G, n): the beam of the same group that each beam continued in the last step
    finished_scores: Tensor  # (S, G, n) fp64: best first, -inf if there are fewer
    lengths: Tensor  # (S,): the number of new tokens
    done: Tensor  # (S, G)


class BeamOptions(NamedTuple):
    """The settings of S searches as tensors."""

    max_new_tokens: Tensor  # (S,)
    eos_tokens: Tensor  # (S, E), filled up with NO_TOKEN
    divisors: Tensor  # (S, C + 1) fp64: `Settings.length_divisor` by length
    best_divisors: Tensor  # (S, C + 1) fp64: that of the length at which a running hypothesis may score best
    stops_early: Tensor  # (S,)
    diversity_penalty: Tensor  # (S,)


class Continuations(NamedTuple):
    """The best continuations of each group by one token, best first; each field is (S, G, count)."""

    scores: Tensor  # fp64
    beams: Tensor  # the beam of the group that each one continues
    tokens: Tensor


class BeamSearches:
    """The searches with `num_beams` beams in `num_beam_groups` groups that run together; search i has the rows
    i · num_beams … (i + 1) · num_beams - 1.

        searches = BeamSearches(num_beams=4, num_beam_groups=1, device=device)
        searches.add([settings], [max_new_tokens])          # further searches, of settings with these numbers of beams
        origins = searches.advance(logits)                  # logits (rows, V) after the newest token of each row
        rows = origins + 4 * torch.arange(len(searches))[:, None]     # the row that each row continues
        searches.last_tokens                                # the next input of each row
        searches.best_hypotheses(0)                         # when searches.is_done[0]
        searches.keep([1, 2])                               # only these searches, in this order

    The lists `last_tokens` (one for each row; 0 before the first step), `is_done` and `lengths` (one for each search)
    describe the present state; a later step makes new lists.  `tokens(i)` are the running hypotheses of search i.
    Every call replaces the attributes and changes none of their values, so `vars(searches).copy()` is a snapshot.
    `pack` and `load` exchange the state with buffers of fixed shapes, in which a recorded step advances it.
    """

    def __init__(self, num_beams: int, num_beam_groups: int, device: torch.device | str) -> None:
        self.num_beams, self.groups, self.size = num_beams, num_beam_groups, num_beams // num_beam_groups
        self.device = torch.device(device)
        self.settings: tuple[Settings, ...] = ()
        self.requests: tuple[Any, ...] = ()  # whatever `add` was given
        self.max_new_tokens: tuple[int, ...] = ()
        self.lengths: list[int] = []
        self.is_done: list[bool] = []
        self.last_tokens: list[int] = []
        self.state = first_state(0, num_beam_groups, self.size, MIN_CAPACITY, self.device)
        self.options: BeamOptions | None = None  # None if `settings` has changed
        self.hypotheses: dict[int, list[BeamHypothesis]] = {}  # those of finished searches that have been read

    def __len__(self) -> int:
        return len(self.settings)

    def add(self, settings: Sequence[Settings], max_new_tokens: Sequence[int], requests: Sequence[Any] = ()) -> None:
        """Append searches that end after these numbers of tokens, whatever their settings say of them."""
        count = len(settings)
        self.settings, self.max_new_tokens = (*self.settings, *settings), (*self.max_new_tokens, *max_new_tokens)
        self.requests, self.options = (*self.requests, *(requests or [None] * count)), None
        self.lengths, self.is_done = [*self.lengths, *[0] * count], [*self.is_done, *[False] * count]
        self.last_tokens = [*self.last_tokens, *[0] * (count * self.num_beams)]

    def keep(self, indices: Sequence[int]) -> None:
        """Keep only the searches with these indices, in this order."""
        if list(indices) == list(range(len(self))):
            return
        state, options = self.pack(self._capacity())
        index, n = torch.tensor(indices, dtype=torch.long, device=self.device), self.num_beams
        self.state = BeamState(*(field.index_select(0, index) for field in state))
        self.options = BeamOptions(*(field.index_select(0, index) for field in options))
        for name in ("settings", "requests", "max_new_tokens", "lengths", "is_done"):
            values = getattr(self, name)
            setattr(self, name, type(values)(values[i] for i in indices))
        self.last_tokens = [token for i in indices for token in self.last_tokens[i * n : (i + 1) * n]]
        self.hypotheses = {}

    @torch.no_grad()
    def advance(self, logits: Tensor, suppressed: Sequence[int] = (), normalized: bool = False) -> Tensor:
        """Advance every unfinished search by one token, given logits (rows, V) of all rows.

        suppressed: tokens that are not chosen; the probabilities of the others do not change.
        normalized: the logits are log-probabilities of which all constraints have taken their part; otherwise end
        tokens before `min_new_tokens` are not chosen.
        Return the origins (searches, num_beams) on the CPU: the beam of its search that each beam continues, which
        is itself in a finished search.  Of equal continuations the first is the better one, by beam and then by token.
        """
        if not len(self):
            return torch.empty(0, self.num_beams, dtype=torch.long)
        state, options = self.pack(self._capacity())
        if not normalized:
            early = [
                index
                for index, settings in enumerate(self.settings)
                if self.lengths[index] < settings.min_new_tokens and not set(settings.eos_token_id) <= set(suppressed)
            ]
            if early:
                log_probs = log_softmax(logits, suppressed).view(len(self), self.num_beams, -1)
                for index in early:
                    log_probs[index, :, list(self.settings[index].eos_token_id)] = -math.inf
                logits, suppressed, normalized = log_probs.view(logits.shape), (), True
        is_diverse = self.groups > 1 and any(settings.diversity_penalty for settings in self.settings)
        best = best_continuations(logits, state, options, suppressed, normalized=normalized, is_diverse=is_diverse)
        return self.load(advance_beams(state, options, best))

    def tokens(self, index: int) -> list[list[int]]:
        """Return the tokens of each running hypothesis of a search."""
        if self.lengths[index] == 0:
            return [[] for _ in range(self.num_beams)]
        rows: list[list[int]] = self.state.tokens[index, :, : self.size, : self.lengths[index]].flatten(0, 1).tolist()
        return rows

    def best_hypotheses(self, index: int) -> list[BeamHypothesis]:
        """Return the `num_return_sequences` best finished hypotheses of a search, best first; fewer if there are fewer.

        Those of all searches that are done are read together.
        """
        count = self.settings[index].num_return_sequences
        if not self.is_done[index]:
            return self._read_hypotheses([index])[index][:count] if self.lengths[index] else []
        if index not in self.hypotheses:
            unread = [i for i, is_done in enumerate(self.is_done) if is_done and i not in self.hypotheses]
            self.hypotheses = self.hypotheses | self._read_hypotheses(unread)
        return self.hypotheses[index][:count]

    def _read_hypotheses(self, indices: Sequence[int]) -> dict[int, list[BeamHypothesis]]:
        rows = torch.tensor(indices, dtype=torch.long, device=self.device)
        longest = max(self.lengths[index] for index in indices) + 1
        scores = self.state.finished_scores[rows].flatten(1).tolist()
        tokens = self.state.tokens[rows, :, self.size :, :longest].flatten(1, 2).tolist()
        read = {}
        for index, *columns in zip(indices, scores, tokens, strict=True):
            found = [(score, text) for score, text in zip(*columns, strict=True) if score > -math.inf]
            hypotheses = [BeamHypothesis(tuple(text[: text.index(NO_TOKEN)]), score) for score, text in found]
            read[index] = sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)
        return read

    # -- tensors --------------------------------------------------------------------------------------------------

    def _capacity(self) -> int:
        """Return the number of tokens of a hypothesis to have room for: a power of two, more than there are."""
        return max(MIN_CAPACITY, 1 << max(self.lengths, default=0).bit_length())

    def pack(self, capacity: int) -> tuple[BeamState, BeamOptions]:
        """Return the state and the options of the searches, with room for `capacity` tokens in a hypothesis."""
        state, missing = self.state, len(self) - len(self.state.lengths)
        extra = capacity + 1 - state.tokens.shape[-1]
        if extra:
            state = state._replace(tokens=F.pad(state.tokens, (0, extra), value=NO_TOKEN))
        if missing:
            new = first_state(missing, self.groups, self.size, capacity, self.device)
            state = BeamState(*map(torch.cat, zip(state, new, strict=True)))
        if extra or self.options is None:
            self.options = make_options(self.settings, self.max_new_tokens, capacity, self.device)
        self.state = state
        return state, self.options

    def load(self, state: BeamState) -> Tensor:
        """Replace the state of the searches, and read it; return the origins, as `advance` does."""
        S, G, n = state.scores.shape
        self.state = state
        columns = (state.newest, state.origins, state.done[..., None], state.lengths[:, None, None].expand(S, G, 1))
        read = torch.cat(columns, -1).cpu()
        self.last_tokens = read[..., :n].flatten().tolist()
        self.is_done = read[..., 2 * n].all(1).tolist()
        self.lengths = read[:, 0, 2 * n + 1].tolist()
        return (read[..., n : 2 * n] + n * torch.arange(G)[:, None]).flatten(1)


# -- one step ---------------------------------------------------------------------------------------------------------


def first_state(searches: int, groups: int, size: int, capacity: int, device: torch.device) -> BeamState:
    """Return the state of searches that have no tokens yet."""

    def zeros(*sizes: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.zeros(searches, *sizes, dtype=dtype, device=device)

    scores = zeros(groups, size, dtype=torch.double)
    scores[..., 1:] = BLOCKED_SCORE  # all beams are equal at first, so only one may be continued
    return BeamState(
        scores=scores,
        tokens=torch.full((searches, groups, 2 * size, capacity + 1), NO_TOKEN, dtype=torch.int, device=device),
        newest=zeros(groups, size),
        origins=zeros(groups, size),
        finished_scores=torch.full_like(scores, -math.inf),
        lengths=zeros(),
        done=zeros(groups, dtype=torch.bool),
    )


def make_options(
    settings: Sequence[Settings], max_new_tokens: Sequence[int], capacity: int, device: torch.device
) -> BeamOptions:
    """Return the options of searches with these settings that end after these numbers of tokens."""
    width = max((1, *(len(own.eos_token_id) for own in settings)))
    # A running hypothesis may score best at the length that it has or, if "never" and length is rewarded, at the end.
    is_longest_best = [own.early_stopping == "never" and own.length_penalty > 0 for own in settings]
    pairs = zip(settings, max_new_tokens, is_longest_best, strict=True)
    last = [own.length_divisor(limit) if is_best else 1.0 for own, limit, is_best in pairs]
    kinds: dict[tuple[str, float], int] = {}
    index = [kinds.setdefault((own.length_penalty_form, own.length_penalty), len(kinds)) for own in settings]
    rows = [_divisors(*kind, capacity) for kind in kinds] or [(1.0,) * (capacity + 1)]

    def tensor(values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    divisors = tensor(rows, torch.double)[tensor(index, torch.long)]
    is_last = tensor(is_longest_best, torch.bool)[:, None]
    eos_tokens = [[*own.eos_token_id, *[NO_TOKEN] * (width - len(own.eos_token_id))] for own in settings]
    return BeamOptions(
        max_new_tokens=tensor(max_new_tokens, torch.long),
        eos_tokens=tensor(eos_tokens, torch.long).view(-1, width),
        divisors=divisors,
        best_divisors=torch.where(is_last, tensor(last, torch.double)[:, None], divisors),
        stops_early=tensor([own.early_stopping is True for own in settings], torch.bool),
        diversity_penalty=tensor([own.diversity_penalty for own in settings], torch.double),
    )


@functools.lru_cache(64)
def _divisors(form: Any, penalty: float, capacity: int) -> tuple[float, ...]:
    """Return `Settings.length_divisor` by length, up to `capacity`."""
    settings = Settings(num_beams=2, length_penalty_form=form, length_penalty=penalty)
    return (1.0, *map(settings.length_divisor, range(1, capacity + 1)))


def advance_beams(state: BeamState, options: BeamOptions, best: Continuations) -> BeamState:
    """Extend the beams by one token with the best of the continuations; finished searches keep their hypotheses."""
    S, G, n = state.scores.shape
    frozen = state.done.all(1)
    lengths = state.lengths + ~frozen
    is_last = lengths >= options.max_new_tokens
    ends = find_ends(best, options) | is_last[:, None, None]
    running = rank_running(best, ends)
    # Continuations that end become finished hypotheses if they are among the best n.
    scores = best.scores[..., :n]
    is_finished = ends[..., :n] & (scores > BLOCKED_SCORE / 2) & ~state.done[..., None]
    divisors = options.divisors.gather(1, lengths[:, None])[..., None]
    final = torch.cat((state.finished_scores, torch.where(is_finished, scores / divisors, -math.inf)), -1)
    finished = final.sort(dim=-1, descending=True, stable=True)
    # The hypotheses after this step, among n finished ones, which get no token, and the continuations.
    chosen = torch.cat((running.indices[..., :n] + n, finished.indices[..., :n]), -1)
    own = torch.arange(2 * n, device=chosen.device)
    parents = torch.cat((own[n:].expand(S, G, n), best.beams), -1).gather(-1, chosen)
    newest = F.pad(best.tokens, (n, 0), value=NO_TOKEN).gather(-1, chosen)
    rows = parents + torch.arange(0, S * G * 2 * n, 2 * n, device=chosen.device).view(S, G, 1)
    tokens = state.tokens.flatten(0, 2).index_select(0, rows.flatten()).view_as(state.tokens)
    tokens.scatter_(-1, state.lengths.view(S, 1, 1, 1).expand(S, G, 2 * n, 1), newest[..., None].int())
    # A group can stop with n finished hypotheses, if no running one can score higher than the worst of them.
    worst, score = finished.values[..., n - 1], running.values[..., 0]
    cannot_improve = score / options.best_divisors.gather(1, lengths[:, None]) <= worst
    can_stop = (worst > -math.inf) & (options.stops_early[:, None] | cannot_improve)
    return BeamState(
        scores=running.values[..., :n],
        tokens=tokens,
        newest=newest[..., :n],
        origins=torch.where(frozen[:, None, None], own[:n], parents[..., :n]),
        finished_scores=finished.values[..., :n],
        lengths=lengths,
        done=state.done | is_last[:, None] | can_stop,
    )


def find_ends(best: Continuations, options: BeamOptions) -> Tensor:
    """Return which continuations have an end token."""
    return (best.tokens[..., None] == options.eos_tokens[:, None, None]).any(-1)


def rank_running(best: Continuations, ends: Tensor) -> torch.return_types.sort:
    """Return the values and indices of all continuations, sorted by score; those that end come last."""
    return best.scores.add(ends, alpha=BLOCKED_SCORE).sort(dim=-1, descending=True, stable=True)


def best_continuations(
    logits: Tensor,
    state: BeamState,
    options: BeamOptions,
    suppressed: Sequence[int] = (),
    *,
    normalized: bool = False,
    is_diverse: bool = False,
) -> Continuations:
    """Return the best continuations of each group, given logits (S · G · n, V) of its beams.

    There are so many that n remain without those that end.  For `suppressed` and `normalized` see
    `BeamSearches.advance`; with `is_diverse` the groups are penalized for the tokens of earlier groups.
    """
    (S, G, n), V = state.scores.shape, logits.shape[-1]
    count = min((1 + options.eos_tokens.shape[1]) * n, n * V)
    if not (normalized or is_diverse):
        groups = logits.view(S * G, n, V)
        if not suppressed and supports_best_tokens(groups, count):
            found = best_tokens(groups, state.scores.flatten(0, 1), count)
            return Continuations(*(field.view(S, G, count) for field in found))
        if _has_kernel(logits):
            tokens, scores = torch.tensor(suppressed, dtype=torch.long), state.scores.float().flatten()
            values, indices = torch.ops.monoblock.topk_continuations(
                logits.contiguous(), scores, tokens, rows_per_prompt=n, count=count
            )
            return _continuations(values.view(S, G, count), indices.view(S, G, count), V)
    log_probs = (logits if normalized else log_softmax(logits, suppressed)).view(S, G, n, V)
    scores = state.scores.to(log_probs.dtype)
    if not is_diverse:
        return top_sums(log_probs, scores, count)
    chosen_counts = log_probs.new_zeros(S, V)  # how often the earlier groups have chosen each token at this step
    penalties = options.diversity_penalty.to(log_probs.dtype)[:, None]
    is_last = (state.lengths + 1 >= options.max_new_tokens)[:, None, None]
    by_group = []
    for group in range(G):
        own = slice(group, group + 1)
        totals = log_probs[:, own] + scores[:, own, :, None] - (penalties * chosen_counts)[:, None, None]
        best = top_sums(totals, torch.zeros_like(scores[:, own]), count)
        order = rank_running(best, find_ends(best, options) | is_last).indices[..., :n]
        chosen = best.tokens.gather(-1, order)[:, 0]
        chosen_counts = chosen_counts.scatter_add(1, chosen, torch.ones_like(chosen, dtype=log_probs.dtype))
        by_group.append(best)
    return Continuations(*(torch.cat(fields, 1) for fields in zip(*by_group, strict=True)))


def _has_kernel(logits: Tensor) -> bool:
    """Return whether the compiled CPU kernel is loaded and supports these logits: fp32, on a CPU."""
    is_cpu_fp32 = logits.device.type == "cpu" and logits.dtype == torch.float32
    return is_cpu_fp32 and hasattr(torch.ops.monoblock, "topk_continuations")


def log_softmax(logits: Tensor, suppressed: Sequence[int] = ()) -> Tensor:
    """Return log-probabilities in fp32, or fp64 like the logits; those of `suppressed` are -inf."""
    log_probs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    if suppressed:
        log_probs[:, torch.tensor(suppressed, device=logits.device)] = -math.inf
    return log_probs


def top_sums(log_probs: Tensor, scores: Tensor, count: int) -> Continuations:
    """Return the `count` best continuations of each group, by the sum of log-probabilities in their dtype.

    log_probs: (S, G, n, V).
    scores: (S, G, n), the sum of log-probabilities of each beam so far.
    Each row of log-probabilities is divided into segments, and only the `count` segments with the largest maxima are
    searched, since a `topk` of all values takes several passes over them.  Of equal sums the first wins; which of
    those that equal the last one are found is left to `topk`.
    """
    S, G, n, V = log_probs.shape
    size = next((size for size in SEGMENT_SIZES if V % size == 0), None)
    if size is None and 64 * count <= V:
        size = 64
        log_probs = F.pad(log_probs, (0, -V % size), value=-math.inf)
    width = log_probs.shape[-1]
    if size is None or n * width // size <= 2 * count:
        top = (log_probs + scores[..., None]).flatten(2).topk(count)
        values, indices = top.values, top.indices
    else:
        segments = log_probs.reshape(S, G, n * width // size, size)
        maxima = segments.amax(-1).view(S, G, n, -1) + scores[..., None]
        selected = maxima.flatten(2).topk(count).indices.sort(-1).values
        origins = selected * size // width
        totals = segments.gather(2, selected[..., None].expand(-1, -1, -1, size)) + scores.gather(2, origins)[..., None]
        top = totals.flatten(2).topk(count)
        values, indices = top.values, selected.gather(2, top.indices // size) * size + top.indices % size
    ordered = indices.sort(-1)  # of equal values, the first wins
    ranked = values.gather(-1, ordered.indices).sort(dim=-1, descending=True, stable=True)
    best = _continuations(ranked.values, ordered.values.gather(-1, ranked.indices), width)
    # A padding token can only be among the best if too few tokens are allowed.
    return best if width == V else best._replace(tokens=best.tokens.clamp(max=V - 1))


def _continuations(scores: Tensor, indices: Tensor, width: int) -> Continuations:
    return Continuations(scores.double(), indices // width, indices % width)
