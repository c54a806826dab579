"""Record a round of speculative decoding as a CUDA graph: tokens are proposed and checked, both on the device.

    proposals  p1 … pk      the draft's best tokens, one after the other; or tokens that are looked up in the row
    chosen     c0 … ck      the model's best tokens after the newest token and after each proposal, in one pass
    accepted   c0 … cn      n is the number of leading proposals with p(i+1) = c(i)

Several rounds run before Python reads the tokens.  Only greedy decoding is recorded; other rounds run as in
speculative.py.
"""

from __future__ import annotations

from typing import Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.inference.backends.cuda_graph import CudaGraphDecoderState
from monoblock.inference.backends.eager import CachedDecoderState
from monoblock.inference.backends.protocol import DecoderState
from monoblock.inference.backends.search.record import record
from monoblock.nn.kv_cache.cache import Cache
from monoblock.nn.transformer import Transformer

SPARE_TOKENS = 16  # columns of the cache for proposals beyond the last token of a row


class Proposals(Protocol):
    """What proposes tokens within a recorded round."""

    num_proposals: int
    states: tuple[SpeculativeGraphState, ...]  # whose caches the round changes, besides that of the model

    def fits(self, other: Proposals) -> bool:
        """Return whether a round that was recorded with these proposals can run with others."""
        ...

    def load(self, other: Proposals) -> None:
        """Copy the values of others that fit into the buffers of these."""
        ...

    def propose(self, newest: Tensor, lengths: Tensor) -> Tensor:
        """Return the next tokens of each row (rows, k).

        newest: the two newest tokens of each row (rows, 2).
        lengths: the number of tokens in each row without the newest.
        """
        ...

    def accept(self, lengths: Tensor, chosen: Tensor, counts: Tensor) -> None:
        """Append the first `counts` (rows,) of the chosen tokens (rows, k + 1) to each row."""
        ...


class SpeculativeGraphState(CudaGraphDecoderState):
    """A decoder state whose rounds of speculative decoding are recorded; its single passes run as they are.

    The model and its draft have one state each.
    """

    capabilities = frozenset({"rollback"})
    round: SpeculativeRound | None = None

    def step(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        self._discard_graph()
        return CachedDecoderState.step(self, tokens, active)

    def score_tokens(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        self._discard_graph()
        return super().score_tokens(tokens, active)

    def can_run_rounds(self, num_proposals: int) -> bool:
        """Return whether rounds with so many proposals can be recorded with this state."""
        return self.model.encoder is None and self.rows_per_prompt == 1 and num_proposals < SPARE_TOKENS

    def run_rounds(self, proposals: Proposals, tokens: Tensor, limits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Run `count` rounds; return the chosen tokens (rows, count, k + 1) and how many of each count (rows, count).

        tokens: the two newest tokens of each row (rows, 2), of which the last is not in the cache.
        limits: (rows,), a row stops when it has so many tokens, the prompt included.
        """
        current = self._recorded_round(proposals)
        assert self.graph is not None
        current.proposals.load(proposals)
        current.tokens.copy_(tokens)
        current.limits.copy_(limits)
        rows = len(tokens)
        chosen = torch.empty(rows, count, proposals.num_proposals + 1, dtype=torch.long, device=self.device)
        counts = torch.empty(rows, count, dtype=torch.long, device=self.device)
        for number in range(count):
            self.graph.replay()
            chosen[:, number] = current.chosen
            counts[:, number] = current.counts
        return chosen, counts

    def _recorded_round(self, proposals: Proposals) -> SpeculativeRound:
        """Return the recorded round, after recording it if these proposals do not fit the last one."""
        assert self.cache is not None
        current = self.round
        is_recorded = self.graph is not None and all(state.graph is self.graph for state in proposals.states)
        if is_recorded and current is not None and current.cache is self.cache and current.proposals.fits(proposals):
            return current
        states = (self, *proposals.states)
        caches = [state.cache for state in states if state.cache is not None]
        for cache in caches:
            cache.make_static(proposals.num_proposals + 1)
        current = self.round = SpeculativeRound(self.model, self.cache, proposals)
        lengths = [(cache.lengths, cache.lengths.clone()) for cache in caches]
        graph = record(current.run, self.device)
        for state in states:
            state.graph = graph
        for changed, before in lengths:
            changed.copy_(before)
        return current


class SpeculativeRound:
    """The buffers of a round, and the round itself."""

    def __init__(self, model: Transformer, cache: Cache, proposals: Proposals) -> None:
        self.model, self.cache, self.proposals = model, cache, proposals
        rows, device = cache.batch, model.device
        self.tokens = torch.zeros(rows, 2, dtype=torch.long, device=device)  # the two newest of each row
        self.limits = torch.zeros(rows, dtype=torch.long, device=device)
        self.chosen = torch.zeros(rows, proposals.num_proposals + 1, dtype=torch.long, device=device)
        self.counts = torch.zeros(rows, dtype=torch.long, device=device)

    def run(self) -> None:
        """Propose, check, and append the accepted tokens to every row that is below its limit."""
        lengths = self.cache.lengths.clone()  # without the newest token
        proposed = self.proposals.propose(self.tokens, lengths)
        checked = torch.cat((self.tokens[:, 1:], proposed), 1)
        chosen = _run(self.model, self.cache, checked, lengths).argmax(-1)  # (rows, k + 1)
        num_accepted = (chosen[:, :-1] == proposed).long().cumprod(1).sum(1)
        counts = torch.where(lengths + 1 < self.limits, num_accepted + 1, 0)
        row = torch.cat((self.tokens, chosen), 1)  # so that the two newest tokens are at `counts` and the next place
        self.tokens.copy_(row.gather(1, counts[:, None] + torch.arange(2, device=counts.device)))
        self.chosen.copy_(chosen)
        self.counts.copy_(counts)
        self.cache.lengths.copy_(lengths + counts)
        self.proposals.accept(lengths, chosen, counts)


class DraftProposals:
    """The best tokens of a draft model.

    A draft has not seen the newest token or, if all proposals were accepted, the two newest: so every round gives it
    two, and all rounds have the same shapes.
    """

    def __init__(self, state: SpeculativeGraphState, num_proposals: int) -> None:
        assert state.cache is not None
        self.states: tuple[SpeculativeGraphState, ...] = (state,)
        self.num_proposals, self.model, self.cache = num_proposals, state.model, state.cache

    def fits(self, other: Proposals) -> bool:
        return (
            isinstance(other, DraftProposals)
            and other.cache is self.cache
            and (other.states, other.num_proposals) == (self.states, self.num_proposals)
        )

    def load(self, other: Proposals) -> None:
        """Do nothing: the values are in the cache of the draft."""

    def propose(self, newest: Tensor, lengths: Tensor) -> Tensor:
        """Return the draft's proposals; its cache then has all tokens but the last proposal."""
        tokens, start, proposed = newest, lengths - 1, list[Tensor]()
        for _ in range(self.num_proposals):
            self.cache.lengths.copy_(start)
            proposed.append(_run(self.model, self.cache, tokens, start)[:, -1].argmax(-1))
            tokens, start = proposed[-1][:, None], start + tokens.shape[1]
        return torch.stack(proposed, 1)

    def accept(self, lengths: Tensor, chosen: Tensor, counts: Tensor) -> None:
        self.cache.lengths.copy_((lengths + counts - 1).clamp(min=0))


class LookupProposals:
    """The tokens that followed when the last few tokens of a row occurred before, as PromptLookup finds them."""

    states: tuple[SpeculativeGraphState, ...] = ()

    def __init__(self, tokens: Tensor, num_proposals: int, max_ngram: int) -> None:
        self.tokens = tokens  # (rows, columns), all tokens of each row, with room for those that follow
        self.num_proposals, self.max_ngram = num_proposals, max_ngram

    def fits(self, other: Proposals) -> bool:
        return (
            isinstance(other, LookupProposals)
            and other.tokens.shape == self.tokens.shape
            and (other.num_proposals, other.max_ngram) == (self.num_proposals, self.max_ngram)
        )

    def load(self, other: Proposals) -> None:
        assert isinstance(other, LookupProposals)
        if other is not self:
            self.tokens.copy_(other.tokens)

    def propose(self, newest: Tensor, lengths: Tensor) -> Tensor:
        ends, is_found = self._find_last_tokens(lengths[:, None])
        places = ends[:, None] + 1 + torch.arange(self.num_proposals, device=lengths.device)
        is_known = is_found[:, None] & (places <= lengths[:, None])
        found = self.tokens.gather(1, places.clamp(max=self.tokens.shape[1] - 1))
        return torch.where(is_known, found, newest[:, 1:])

    def _find_last_tokens(self, last: Tensor) -> tuple[Tensor, Tensor]:
        """Return the column where the last tokens of each row occur before, most recently, and whether they do.

        More tokens in common are preferred.  `last` (rows, 1) is the column of the newest token.
        """
        num_columns = self.tokens.shape[1]
        columns = torch.arange(num_columns, device=last.device)
        is_equal = columns < last
        num_equal = torch.zeros_like(self.tokens)  # how many tokens up to this column are the last ones of the row
        for back in range(self.max_ngram):
            wanted = self.tokens.gather(1, (last - back).clamp(min=0))
            is_equal = is_equal & (F.pad(self.tokens, (back, 0), value=-1)[:, :num_columns] == wanted)
            num_equal = num_equal + is_equal
        best, ends = (num_equal * num_columns + columns).masked_fill(num_equal == 0, -1).max(1)
        return ends, best >= 0

    def accept(self, lengths: Tensor, chosen: Tensor, counts: Tensor) -> None:
        places = lengths[:, None] + 1 + torch.arange(chosen.shape[1], device=chosen.device)
        self.tokens.scatter_(1, places.clamp(max=self.tokens.shape[1] - 1), chosen)


def _run(model: Transformer, cache: Cache, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Run tokens (rows, T) after the first `lengths` tokens of each row.

    Proposals may lie beyond the context; they are never accepted, so any position will do for them.
    """
    positions = lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    if model.config.context is not None:
        positions = positions.clamp(max=model.config.context - 1)
    return model(tokens, positions=positions, cache=cache)


def records_rounds(state: DecoderState | None) -> TypeGuard[SpeculativeGraphState]:
    return isinstance(state, SpeculativeGraphState)
