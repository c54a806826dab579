"""The methods through which the engine uses a backend.

A `DecoderState` holds the rows that are decoded together: their key/value cache, or whatever the backend keeps instead.
Every backend has `prefill`, `step`, `reorder` and `release`.  BurstState, SearchState and RollbackState are optional;
`can_burst`, `can_search` and `can_roll_back` return whether a state implements them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from monoblock.inference.beam import BeamSearch
from monoblock.inference.prompt import Prompt

ChooseTokens = Callable[[Tensor, Tensor], Tensor]  # logits (rows, V), uniform numbers (rows,) -> tokens (rows,)


class DecoderState(Protocol):
    """Rows of tokens that a model continues together; each prompt has `rows_per_prompt` of them."""

    device: torch.device
    rows_per_prompt: int
    capabilities: frozenset[str]  # a subset of {"burst", "search", "rollback"}

    def prefill(self, prompts: Sequence[Prompt]) -> Tensor:
        """Append rows for new prompts to the batch; return the logits (new rows, V) after each prompt."""
        ...

    def step(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        """Append tokens (rows,), one to each `active` row, and return the logits (rows, V) after them."""
        ...

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep only the rows with these indices, and put them in this order.

        `sources` are the indices of the prompts that are kept; None keeps all.
        """
        ...

    def release(self) -> None:
        """End the batch when all its rows are finished; its memory is freed, or kept for the next batch."""
        ...


class BurstState(DecoderState, Protocol):
    """A state that can run several steps, including the choice of tokens, before Python reads the result."""

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

        `uniforms` (rows, count) are the uniform random numbers with which tokens are sampled, None if every row is
        greedy.  `choose` chooses the tokens of a step; `key` identifies it: a recorded step is reused while `key` is
        the same.
        """
        ...


class SearchState(DecoderState, Protocol):
    """A state that can run whole steps of a beam search, including the choice of beams."""

    @property
    def is_closed(self) -> bool:
        """Whether a search runs to which no prompts can be added before all its searches are done."""
        ...

    def begin_search(self, prompts: Sequence[Prompt]) -> bool:
        """Append rows for new prompts; the first `step_search` runs their tokens.

        Return False if the state does not support the prompts.
        """
        ...

    def step_search(self, searches: list[BeamSearch], suppressed: Sequence[int]) -> list[int] | None:
        """Advance the unfinished searches by one token or more, without the tokens in `suppressed`.

        Return the indices of the searches that end with these tokens, or None if the state does not support them.
        """
        ...

    def end_search(self) -> None:
        """Write the beams back to their `BeamSearch` objects and to the cache, so that other methods can be called."""
        ...


class RollbackState(DecoderState, Protocol):
    """A state that can drop tokens again, as speculative decoding does with rejected proposals."""

    @property
    def max_droppable(self) -> int:
        """The largest number of tokens per row that `score_tokens` may run if some are to be dropped again."""
        ...

    def score_tokens(self, tokens: Tensor, active: Tensor | None = None) -> Tensor:
        """Run tokens (rows, T) and return the logits (rows, T, V) after each; then call `commit` to keep some."""
        ...

    def commit(self, counts: int | Tensor) -> None:
        """Keep the first `counts` of the tokens scored last: one number for all rows, or a tensor (rows,)."""
        ...


def can_burst(state: DecoderState | None) -> TypeGuard[BurstState]:
    return state is not None and "burst" in state.capabilities


def can_search(state: DecoderState | None) -> TypeGuard[SearchState]:
    return state is not None and "search" in state.capabilities


def can_roll_back(state: DecoderState | None) -> TypeGuard[RollbackState]:
    return state is not None and "rollback" in state.capabilities
