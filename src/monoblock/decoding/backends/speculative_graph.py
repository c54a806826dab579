"""Record a round of speculative decoding as a CUDA graph: the draft proposes, the model checks, both on the device.

    proposals  p1 … pk      the draft's best tokens, one after the other
    chosen     c0 … ck      the model's best tokens after the newest token and after each proposal, in one pass
    accepted   c0 … cn      n is the number of leading proposals with p(i+1) = c(i)

Several rounds run before Python reads the tokens.  A draft has not seen the newest token or, if all proposals were
accepted, the two newest: so every round gives it two, and all rounds have the same shapes.  Only greedy decoding is
recorded; other rounds run as in speculative.py.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from monoblock.decoding.backends.cuda_graph import CudaGraphDecoderState
from monoblock.decoding.backends.eager import CachedDecoderState
from monoblock.decoding.backends.protocol import DecoderState
from monoblock.decoding.backends.search.record import record
from monoblock.nn.kv_cache.cache import Cache
from monoblock.nn.transformer import Transformer

SPARE_TOKENS = 16  # columns of the cache for proposals beyond the last token of a row


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

    def run_rounds(
        self, draft: SpeculativeGraphState, tokens: Tensor, limits: Tensor, num_proposals: int, count: int
    ) -> tuple[Tensor, Tensor]:
        """Run `count` rounds; return the chosen tokens (rows, count, k + 1) and how many of each count (rows, count).

        tokens: the two newest tokens of each row (rows, 2), of which the last is not in the cache.
        limits: (rows,), a row stops when it has so many tokens, the prompt included.
        """
        self._record_round_if_needed(draft, num_proposals)
        assert self.round is not None
        assert self.graph is not None
        self.round.tokens.copy_(tokens)
        self.round.limits.copy_(limits)
        rows = len(tokens)
        chosen = torch.empty(rows, count, num_proposals + 1, dtype=torch.long, device=self.device)
        counts = torch.empty(rows, count, dtype=torch.long, device=self.device)
        for number in range(count):
            self.graph.replay()
            chosen[:, number] = self.round.chosen
            counts[:, number] = self.round.counts
        return chosen, counts

    def _record_round_if_needed(self, draft: SpeculativeGraphState, num_proposals: int) -> None:
        assert self.cache is not None
        assert draft.cache is not None
        is_recorded = self.graph is not None and self.graph is draft.graph and self.round is not None
        if is_recorded and self.round.fits(self.cache, draft.cache, num_proposals):  # type: ignore[union-attr]
            return
        for cache in (self.cache, draft.cache):
            cache.make_static(num_proposals + 1)
        self.round = SpeculativeRound(self.model, draft.model, self.cache, draft.cache, num_proposals)
        lengths = [(cache.lengths, cache.lengths.clone()) for cache in (self.cache, draft.cache)]
        self.graph = draft.graph = record(self.round.run, self.device)
        for changed, before in lengths:
            changed.copy_(before)


class SpeculativeRound:
    """The buffers of a round, and the round itself."""

    def __init__(
        self, model: Transformer, draft: Transformer, cache: Cache, draft_cache: Cache, num_proposals: int
    ) -> None:
        self.model, self.draft, self.cache, self.draft_cache = model, draft, cache, draft_cache
        self.num_proposals = num_proposals
        rows, device = cache.batch, model.device
        self.tokens = torch.zeros(rows, 2, dtype=torch.long, device=device)  # the two newest of each row
        self.limits = torch.zeros(rows, dtype=torch.long, device=device)
        self.chosen = torch.zeros(rows, num_proposals + 1, dtype=torch.long, device=device)
        self.counts = torch.zeros(rows, dtype=torch.long, device=device)

    def fits(self, cache: Cache, draft_cache: Cache, num_proposals: int) -> bool:
        return (self.cache, self.draft_cache, self.num_proposals) == (cache, draft_cache, num_proposals)

    def run(self) -> None:
        """Propose, check, and append the accepted tokens to every row that is below its limit."""
        lengths = self.cache.lengths.clone()  # without the newest token
        proposed = self._propose(lengths)
        checked = torch.cat((self.tokens[:, 1:], proposed), 1)
        chosen = _run(self.model, self.cache, checked, lengths).argmax(-1)  # (rows, k + 1)
        num_accepted = (chosen[:, :-1] == proposed).long().cumprod(1).sum(1)
        counts = torch.where(lengths + 1 < self.limits, num_accepted + 1, 0)
        row = torch.cat((self.tokens, chosen), 1)  # so that the two newest tokens are at `counts` and the next place
        self.tokens.copy_(row.gather(1, counts[:, None] + torch.arange(2, device=counts.device)))
        self.chosen.copy_(chosen)
        self.counts.copy_(counts)
        self.cache.lengths.copy_(lengths + counts)
        self.draft_cache.lengths.copy_((lengths + counts - 1).clamp(min=0))

    def _propose(self, lengths: Tensor) -> Tensor:
        """Return the draft's proposals (rows, k); its cache then has all tokens but the last proposal."""
        tokens, start, proposed = self.tokens, lengths - 1, list[Tensor]()
        for _ in range(self.num_proposals):
            self.draft_cache.lengths.copy_(start)
            proposed.append(_run(self.draft, self.draft_cache, tokens, start)[:, -1].argmax(-1))
            tokens, start = proposed[-1][:, None], start + tokens.shape[1]
        return torch.stack(proposed, 1)


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
