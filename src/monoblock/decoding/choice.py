"""One token for each row of some lanes: what the filters look at, the chances that point at it, the choice itself."""

from __future__ import annotations

import torch
from torch import Tensor

from monoblock.decoding.filters import Filters
from monoblock.decoding.lanes import Lane
from monoblock.decoding.logits import Past


def each(lanes: list[Lane]) -> list[tuple[Lane, int]]:
    """The rows of the lanes, in the order they lie in."""
    return [(lane, row) for lane in lanes for row in range(lane.settings.rows)]


def live(lanes: list[Lane], device: torch.device) -> Tensor | None:
    """Which rows go on, or None when all do."""
    if not any(lane.beams is None for lane in lanes) and not any(lane.done for lane in lanes):
        return None
    going = [not lane.over(row) for lane, row in each(lanes)]
    return None if all(going) else torch.tensor(going, device=device)


def chance(lane: Lane, row: int, ahead: int = 0) -> float:
    """The random number of a row's next token, or of one further on."""
    noise = lane.rows[row].noise
    return 0.0 if noise is None else noise[len(lane.rows[row].new) + ahead]


def past(lanes: list[Lane], filters: Filters) -> Past | None:
    """What the rows have said, where a filter asks."""
    if not filters.looks_back:
        return None
    texts = [lane.text(row) for lane, row in each(lanes)]
    longest = max(len(text) for text in texts)
    tokens = torch.tensor([text + [-1] * (longest - len(text)) for text in texts], device=filters.device)
    return Past(tokens, torch.tensor([len(text) for text in texts], device=filters.device))


def chosen(lanes: list[Lane], logits: Tensor, filters: Filters) -> list[int]:
    """One token a row, from logits (rows, V)."""
    new = [len(lane.rows[row].new) for lane, row in each(lanes)]
    logits = filters.rules(logits, past(lanes, filters), new)
    chances = [chance(lane, row) for lane, row in each(lanes)] if filters.draws else [0.0] * len(logits)
    return filters.choose(logits, torch.tensor(chances, device=logits.device, dtype=torch.double)).tolist()
