"""Speculative decoding (Leviathan et al. 2023): a fast proposer proposes tokens, the model checks them in one pass.

A proposal is accepted if it is exactly the token that the model would have chosen there: the best one or, in sampling,
the one that the uniform random number of this step selects (sampling.py).  So the text is the one that the model alone
would generate; only the number of passes differs.  A draft model samples with the same uniform numbers, so that it
often proposes the model's token if the two distributions are similar.

    DraftModel(small_model)   proposes with a second model of the same vocabulary, such as a quantized copy of the first
    PromptLookup()            proposes the tokens that followed when the last few tokens occurred before (Saxena 2023)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from monoblock.inference.backends.protocol import RollbackState
from monoblock.inference.backends.speculative_graph import SPARE_TOKENS, LookupProposals, SpeculativeGraphState
from monoblock.inference.batch_filters import Filters, choose_tokens
from monoblock.inference.prompt import Prompt
from monoblock.inference.recorded_rounds import run_recorded_rounds
from monoblock.inference.request import Request, RequestOutput, active_mask, request_rows, tokens_left
from monoblock.inference.settings import check_count


class Proposer(Protocol):
    """An object that proposes the next tokens of every row in a batch."""

    def reset(self, capacity: int, rows_per_prompt: int) -> None:
        """Begin a new batch, whose rows have at most `capacity` tokens each."""
        ...

    def check_prompt(self, length: int) -> None:
        """Raise InputError if the proposer cannot propose tokens for a prompt of this length."""
        ...

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        """Append rows for new prompts to the batch."""
        ...

    def run_rounds(self, state: RollbackState, requests: list[Request]) -> list[RequestOutput] | None:
        """Run several recorded rounds on a GPU, and append their tokens; None if these cannot be recorded."""
        ...

    def propose(
        self, rows: Sequence[Sequence[int]], requests: list[Request], max_tokens: int, active: Tensor | None
    ) -> Tensor:
        """Propose the next tokens of each row and return them as (rows, count), where count is at most `max_tokens`.

        rows: all tokens of each row so far, including the prompt.
        active: a mask (rows,) of the rows that are not finished; None if no row is finished.
        """
        ...

    def commit(self, counts: Tensor) -> None:
        """Update the proposer after a step in which the rows have gained `counts` (rows,) tokens.

        These are the accepted proposals of each row and one more token, which the model has chosen.
        """
        ...

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep only the rows with these indices, and put them in this order.

        `sources` are the indices of the prompts that are kept; None keeps all.
        """
        ...

    def release(self) -> None:
        """End the batch when all its rows are finished."""
        ...


def speculate(state: RollbackState, proposer: Proposer, requests: list[Request], capacity: int) -> list[RequestOutput]:
    """Let the proposer propose tokens, check them in one pass of the model, and append the accepted ones.

    On a GPU, several rounds run before the tokens are read.
    """
    if (recorded := proposer.run_rounds(state, requests)) is not None:
        return recorded
    pairs = request_rows(requests)
    rows = [request.row_tokens(row) for request, row in pairs]
    running = {index for index, (request, row) in enumerate(pairs) if not request.is_row_done(row)}
    left = max(tokens_left(*pairs[index]) for index in running)
    room = min(capacity - len(rows[index]) for index in running)
    max_tokens = min(left - 1, room, state.max_droppable - 1)  # the newest token of each row is checked too
    active = active_mask(requests, state.device)
    proposed = proposer.propose(rows, requests, max_tokens, active)  # (rows, count)
    last_tokens = torch.tensor([tokens[-1:] for tokens in rows], device=state.device)
    logits = state.score_tokens(torch.cat((last_tokens, proposed.to(state.device)), 1), active).float()
    outputs = _accept(requests, running, proposed.tolist(), logits)
    counts = [0] * len(pairs)
    for index, _ in outputs:
        counts[index] += 1
    accepted = torch.tensor(counts, device=state.device)
    state.commit(accepted)
    proposer.commit(accepted)
    return [output for _, output in outputs]


def _accept(
    requests: list[Request], running: set[int], proposed: list[list[int]], logits: Tensor
) -> list[tuple[int, RequestOutput]]:
    """Append the model's tokens to each running row, up to and including the first that differs from its proposal.

    running: the indices of the rows that are not finished.
    proposed: `count` tokens for each row.
    logits: (rows, count + 1, V), the model's logits after the newest token and after each proposal.
    Return (row index, output) for each appended token.
    """
    pairs, running = request_rows(requests), set(running)
    filters = Filters([request.settings for request, _ in pairs], logits.device)
    best = logits.argmax(-1).T.tolist() if filters.is_stateless and not filters.has_sampling else None
    outputs: list[tuple[int, RequestOutput]] = []
    for position in range(logits.shape[1]):
        tokens = best[position] if best is not None else choose_tokens(requests, logits[:, position], filters)
        for index in sorted(running):
            request, row = pairs[index]
            output = request.append_tokens(row, tokens[index : index + 1])
            if output is None:  # a logits processor has failed
                running.discard(index)
                continue
            outputs.append((index, output))
            if output.finish_reason or proposed[index][position : position + 1] != tokens[index : index + 1]:
                running.discard(index)
        if not running:
            break
    return outputs


class PromptLookup:
    """Propose the tokens that followed when the last few tokens of a row occurred before, in the prompt or later.

    This is useful for texts that quote their prompt.  At most `max_ngram` of the last tokens are compared.
    """

    def __init__(self, num_proposals: int = 8, max_ngram: int = 3) -> None:
        check_count("num_proposals", num_proposals, 1)
        check_count("max_ngram", max_ngram, 1)
        self.num_proposals, self.max_ngram = num_proposals, max_ngram

    def reset(self, capacity: int, rows_per_prompt: int) -> None:
        """Do nothing: a prompt lookup keeps no state."""

    def check_prompt(self, length: int) -> None:
        """Do nothing."""

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        """Do nothing."""

    def commit(self, counts: Tensor) -> None:
        """Do nothing."""

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""

    def run_rounds(self, state: RollbackState, requests: list[Request]) -> list[RequestOutput] | None:
        """Run recorded rounds, in which the tokens are looked up on the device."""

        def make_proposals(state: SpeculativeGraphState) -> LookupProposals:
            columns = state.capacity + SPARE_TOKENS
            rows = [request.row_tokens(row) for request, row in request_rows(requests)]
            padded = [[*tokens, *[0] * (columns - len(tokens))] for tokens in rows]
            return LookupProposals(torch.tensor(padded, device=state.device), self.num_proposals, self.max_ngram)

        found = run_recorded_rounds(state, requests, self.num_proposals, make_proposals)
        return None if found is None else found[0]

    def propose(
        self, rows: Sequence[Sequence[int]], requests: list[Request], max_tokens: int, active: Tensor | None
    ) -> Tensor:
        count = min(self.num_proposals, max_tokens)
        proposals = [self._find_continuation(list(tokens), count) for tokens in rows]
        return torch.tensor(proposals, dtype=torch.long).view(len(rows), count)

    def _find_continuation(self, tokens: list[int], count: int) -> list[int]:
        """Return the `count` tokens that followed when the last n tokens occurred before, most recently.

        A larger n is preferred.  If fewer than `count` tokens follow, the last token of the row is repeated.
        """
        for size in range(min(self.max_ngram, len(tokens) - 1), 0, -1):
            ngram = tokens[-size:]
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == ngram:
                    continuation = tokens[start + size : start + size + count]
                    return (continuation + [tokens[-1]] * count)[:count]
        return [tokens[-1]] * count
