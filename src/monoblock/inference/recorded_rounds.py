"""Run recorded rounds of speculative decoding (backends/speculative_graph.py) for the requests of a batch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from monoblock.inference.backends.protocol import RollbackState
from monoblock.inference.backends.speculative_graph import Proposals, SpeculativeGraphState, records_rounds
from monoblock.inference.batch_filters import Filters
from monoblock.inference.request import Request, RequestOutput, request_rows, tokens_left

MAX_ROUNDS = 8  # recorded rounds that run before tokens are read: after an end token, the rest is in vain


def run_recorded_rounds(
    state: RollbackState,
    requests: list[Request],
    num_proposals: int,
    make_proposals: Callable[[SpeculativeGraphState], Proposals],
) -> tuple[list[RequestOutput], list[list[int]]] | None:
    """Run rounds and append their tokens; return the outputs and the number of tokens of each row and round.

    Return None if rounds of these requests cannot be recorded.
    """
    if not records_rounds(state) or not state.can_run_rounds(num_proposals):
        return None
    pairs = request_rows(requests)
    filters = Filters([request.settings for request, _ in pairs], state.device)
    if filters.has_sampling or not filters.is_stateless:
        return None
    newest = torch.tensor([request.row_tokens(row)[-2:] for request, row in pairs], device=state.device)
    limits = [0 if request.is_row_done(row) else request.max_length for request, row in pairs]
    left = max(tokens_left(*pair) for pair in pairs if not pair[0].is_row_done(pair[1]))
    count = min(MAX_ROUNDS, -(-left // (num_proposals + 1)))
    chosen, counts = state.run_rounds(make_proposals(state), newest, torch.tensor(limits, device=state.device), count)
    gained: list[list[int]] = counts.tolist()
    return _append_rounds(pairs, chosen.tolist(), gained), gained


def _append_rounds(
    pairs: list[tuple[Request, int]], chosen: list[list[list[int]]], counts: list[list[int]]
) -> list[RequestOutput]:
    """Append the tokens of several rounds: the first `counts` (rows, rounds) of each round of `chosen`."""
    outputs = []
    for (request, row), row_chosen, row_counts in zip(pairs, chosen, counts, strict=True):
        tokens = [t for found, n in zip(row_chosen, row_counts, strict=True) for t in found[:n]]
        output = request.append_tokens(row, tokens) if tokens else None
        if output is not None:
            outputs.append(output)
    return outputs
