"""What the engine asks of a backend.

A `DecoderState` holds the rows that are decoded together: their key/value cache, or whatever the backend keeps instead.
Every backend has `prefill`, `step`, `reorder` and `release`.  What only some can do is a protocol of its own;
`can_burst`, `can_search` and `can_roll_back` tell which of them a state implements.
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
        """Add the rows of new prompts below the present ones and return the logits (rows, V) after each."""
        ...

    def step(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        """Append one token to each row and return the logits (rows, V) after it; rows that are not active stay."""
        ...

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows in this order; `sources` are the prompts that are left, None if all are."""
        ...

    def release(self) -> None:
        """End: all rows are finished.  Memory may be reused by the next state or freed."""
        ...


class BurstState(DecoderState, Protocol):
    """A state that takes several steps without returning to Python."""

    def burst(
        self,
        tokens: Tensor,
        count: int,
        uniforms: Tensor | None,
        choose: ChooseTokens,
        key: object,
        active: Tensor | None = None,
    ) -> Tensor:
        """Take `count` steps, choosing a token in each, and return the tokens (rows, count).

        `uniforms` (rows, count) are the random numbers of sampling.  `key` identifies `choose`: a recorded step is
        reused as long as it stays the same.
        """
        ...


class SearchState(DecoderState, Protocol):
    """A state that takes whole steps of a beam search."""

    def begin_search(self, prompts: Sequence[Prompt]) -> bool:
        """Add the rows of new prompts for `step_search` to start from; False if this state cannot."""
        ...

    def step_search(self, searches: list[BeamSearch], suppressed: Sequence[int]) -> list[int] | None:
        """Advance all beam searches by one token; the indices of those now done, None if this state cannot."""
        ...

    def end_search(self) -> None:
        """Write the beams and their cache back, so that any other method may read them."""
        ...


class RollbackState(DecoderState, Protocol):
    """A state that takes tokens back, as speculative decoding does with wrong proposals."""

    def score_tokens(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        """Return the logits (rows, T, V) after each of several tokens (rows, T) without committing to them."""
        ...

    def commit(self, counts: int | Tensor) -> None:
        """Keep the first `counts` of the tokens that were scored last."""
        ...


def can_burst(state: DecoderState | None) -> TypeGuard[BurstState]:
    return state is not None and "burst" in state.capabilities


def can_search(state: DecoderState | None) -> TypeGuard[SearchState]:
    return state is not None and "search" in state.capabilities


def can_roll_back(state: DecoderState | None) -> TypeGuard[RollbackState]:
    return state is not None and "rollback" in state.capabilities
