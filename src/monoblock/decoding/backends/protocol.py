"""The protocols that the engine uses a backend through.

A `DecoderState` holds the rows that are decoded together: their key/value cache, or whatever the backend keeps instead.
Every backend has `prefill`, `step`, `reorder` and `release`.  BurstState, SearchState and RollbackState are optional;
`can_burst`, `can_search` and `can_roll_back` say which of them a state implements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from monoblock.decoding.beam import BeamSearch
from monoblock.decoding.prompt import Prompt

ChooseTokens = Callable[[Tensor, Tensor], Tensor]  # logits (rows, V), uniform numbers (rows,) -> tokens (rows,)


class DecoderState(Protocol):
    """Rows of tokens that a model continues together; each prompt has `rows_per_prompt` of them."""

    device: torch.device
    rows_per_prompt: int
    capabilities: frozenset[str]  # of "burst", "search" and "rollback"

    def prefill(self, prompts: Sequence[Prompt]) -> Tensor:
        """Append rows for new prompts to the batch; return the logits (new rows, V) after each prompt."""
        ...

    def step(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        """Append tokens (rows,) and return the logits (rows, V) after them; rows not `active` stay the same."""
        ...

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep the rows with these indices, in order; `sources` are the indices of the prompts kept, None for all."""
        ...

    def release(self) -> None:
        """End the batch, whose rows are all finished; its memory may be reused by the next state or freed."""
        ...


class BurstState(DecoderState, Protocol):
    """A state that runs several steps, the choice of tokens included, before Python reads the result."""

    def burst(
        self,
        tokens: Tensor,
        count: int,
        uniforms: Tensor | None,
        choose: ChooseTokens,
        key: object,
        active: Tensor | None = None,
    ) -> Tensor:
        """Run `count` steps from tokens (rows,), choosing a token in each, and return the tokens (rows, count).

        `uniforms` (rows, count) are the uniform numbers that sample the tokens, None if every row is greedy.
        `key` identifies `choose`: a recorded step is reused while the key stays the same.
        """
        ...


class SearchState(DecoderState, Protocol):
    """A state that runs whole steps of a beam search, the choice of beams included."""

    def begin_search(self, prompts: Sequence[Prompt]) -> bool:
        """Append rows for new prompts, which the first `step_search` runs; return False if this is not supported."""
        ...

    def step_search(self, searches: list[BeamSearch], suppressed: Sequence[int]) -> list[int] | None:
        """Advance unfinished searches by one token; return the indices of those that end here, None if unsupported."""
        ...

    def end_search(self) -> None:
        """Write the beams and their cache back, so that any other method may read them."""
        ...


class RollbackState(DecoderState, Protocol):
    """A state that can drop tokens again, as speculative decoding does with rejected proposals."""

    def score_tokens(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        """Run tokens (rows, T) and return the logits (rows, T, V) after each; `commit` then says how many are kept."""
        ...

    def commit(self, counts: int | Tensor) -> None:
        """Keep the first `counts` of the tokens scored last: one count for all rows, or one per row (rows,)."""
        ...


def can_burst(state: DecoderState | None) -> TypeGuard[BurstState]:
    return state is not None and "burst" in state.capabilities


def can_search(state: DecoderState | None) -> TypeGuard[SearchState]:
    return state is not None and "search" in state.capabilities


def can_roll_back(state: DecoderState | None) -> TypeGuard[RollbackState]:
    return state is not None and "rollback" in state.capabilities
