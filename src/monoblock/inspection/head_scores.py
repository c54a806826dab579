"""Scores of what a head does: induction, previous, duplicate, positional and rare tokens.

Induction and duplicate-token heads are found on random tokens that are repeated (Olsson et al. 2022): in
A B C … A B C …, an induction head at the second A attends to the token after the first A, a duplicate-token head to the
first A itself.  Positional and rare-token heads are those of Voita et al. (2019).

The best of many heads has a score above zero by chance alone.  The level of chance is what the best head reaches in
95 % of draws in which each token puts the weights that it has on random keys among those that it sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inspection.trace import trace
from monoblock.nn.transformer import Transformer

DRAWS, LEVEL = 200, 0.95


@dataclass(frozen=True)
class HeadScores:
    """Each score is between 0 and 1; None if it was not measured."""

    layer: str
    head: int
    induction: float | None = None  # mean weight on the token after the former occurrence of the same token
    duplicate: float | None = None  # mean weight on the former occurrence
    previous: float | None = None  # mean weight on the token before, in random text
    positional: float | None = None  # share of tokens whose largest weight is at one offset: -1 or +1
    rare: float | None = None  # share of tokens whose largest weight is on the rarest token they can see

    def to_json(self) -> dict[str, Any]:
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}


def repeated_token_scores(model: Transformer, *, length: int = 48, batch: int = 4, seed: int = 0) -> list[HeadScores]:
    """Score the heads of a decoder or an encoder on `length` random tokens that are repeated once."""
    return score_repeated_tokens(model, length=length, batch=batch, seed=seed)[0]


@torch.no_grad()
def score_repeated_tokens(
    model: Transformer, *, length: int = 48, batch: int = 4, seed: int = 0
) -> tuple[list[HeadScores], float]:
    """Return the scores of `repeated_token_scores` and their level of chance."""
    embedding = model.config.input
    if model.config.family not in ("decoder-only", "encoder-only") or not hasattr(embedding, "vocab"):
        raise InputError(f"repeated tokens are read by models of one stack, but this is {model.config.family}")
    length = min(length, (model.config.context or 2 * length) // 2)
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(embedding.vocab, (batch, length), generator=generator)
    seen = trace(model, torch.cat((half, half), 1).to(model.device), names="*.attention.weights")
    queries = torch.arange(length + 1, 2 * length, device=model.device)  # not the first: its induction token is its own
    result, best = [], torch.zeros(DRAWS)
    for name, weights in seen.items():

        def mean_weight(offset: int, weights: Tensor = weights) -> list[float]:
            return weights[:, :, queries, queries + offset].mean((0, 2)).tolist()

        scores = zip(mean_weight(1 - length), mean_weight(-length), mean_weight(-1), strict=True)
        layer = name.removesuffix(".weights")
        result += [
            HeadScores(layer, head, induction=one, duplicate=two, previous=three)
            for head, (one, two, three) in enumerate(scores)
        ]
        rows = weights[:, :, queries].float().cpu()  # (B, H, Q, S)
        keys = _draw_keys((rows > 0).any(1), DRAWS, seed)  # (B, Q, draws)
        drawn = rows.gather(-1, keys[:, None].expand(-1, rows.shape[1], -1, -1))
        best = torch.maximum(best, drawn.mean((0, 2)).amax(0))
    return result, float(best.quantile(LEVEL))


@torch.no_grad()
def text_chance(
    model: Transformer, ids: Sequence[int], *, special_ids: frozenset[int] = frozenset(), seed: int = 0
) -> dict[str, float]:
    """Return the level of chance of the positional and the rare-token scores on a text."""
    seen = trace(model, torch.tensor([list(ids)], device=model.device), names="*.attention.weights")
    counts = Counter(ids)
    frequencies = torch.tensor([_frequency(token, counts, special_ids) for token in ids])
    T, best = len(ids), torch.zeros(2, DRAWS)
    queries = torch.arange(1, T - 1)
    for weights in seen.values():
        visible, heads = (weights[0] > 0).any(0)[1:-1].cpu(), weights.shape[1]  # (queries, T)
        keys = _draw_keys(visible, DRAWS * heads, seed).T.unflatten(0, (DRAWS, heads))  # (draws, heads, queries)
        rarest = frequencies.expand(T - 2, T).masked_fill(~visible, float("inf")).amin(-1)
        beside = torch.maximum(*((keys == queries + step).double().mean(-1) for step in (-1, 1)))
        rare = (frequencies[keys] == rarest).double().mean(-1)
        best = torch.maximum(best, torch.stack((beside, rare)).amax(-1))
    return dict(zip(("positional", "rare"), best.double().quantile(LEVEL, -1).tolist(), strict=True))


def _draw_keys(visible: Tensor, draws: int, seed: int) -> Tensor:
    """Draw keys at random among the visible ones of each query; visible is (*, S), and the result (*, draws)."""
    chances = visible.float().flatten(0, -2)
    chances[~chances.any(-1)] = 1.0  # a query that sees nothing
    keys = torch.multinomial(chances, draws, replacement=True, generator=torch.Generator().manual_seed(seed))
    return keys.view(*visible.shape[:-1], draws)


@torch.no_grad()
def text_scores(
    model: Transformer, texts: Sequence[Sequence[int]], *, special_ids: frozenset[int] = frozenset()
) -> list[HeadScores]:
    """Score heads on texts, given as token ids: positional, and rare tokens by their frequency in these texts."""
    counts = Counter(token for ids in texts for token in ids)
    totals: dict[str, Tensor] = {}
    queries = 0
    for ids in texts:
        if len(ids) < 3:
            continue
        seen = trace(model, torch.tensor([list(ids)], device=model.device), names="*.attention.weights")
        frequencies = torch.tensor([_frequency(token, counts, special_ids) for token in ids], device=model.device)
        for name, weights in seen.items():
            hits = _count_hits(weights[0], frequencies)
            totals[name] = totals.get(name, 0) + hits
        queries += len(ids) - 2
    if not queries:
        raise InputError("the texts are too short to score heads; give at least one of three tokens")
    return [
        HeadScores(name.removesuffix(".weights"), head, positional=max(before, after), rare=rare)
        for name, hits in totals.items()
        for head, (before, after, rare) in enumerate((hits / queries).tolist())
    ]


def _frequency(token: int, counts: Mapping[int, int], special_ids: frozenset[int]) -> float:
    return float("inf") if token in special_ids else float(counts[token])


def _count_hits(weights: Tensor, frequencies: Tensor) -> Tensor:
    """Count the queries of each head whose largest weight is on the previous, the next and the rarest token, (H, 3).

    weights: (H, T, T); the first and the last query are left out, since they lack a neighbour.
    """
    T = weights.shape[-1]
    queries = torch.arange(1, T - 1, device=weights.device)
    best = weights[:, 1:-1].argmax(-1)  # (H, queries)
    visible = (weights > 0).any(0)[1:-1]  # (queries, T)
    seen = frequencies.expand(T - 2, T).masked_fill(~visible, float("inf"))
    is_rarest = frequencies[best] == seen.amin(-1)
    return torch.stack(((best == queries - 1).sum(-1), (best == queries + 1).sum(-1), is_rarest.sum(-1)), -1).double()
