"""Where each head attends to (Clark et al. 2019): entropy, distance, and shares on single tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

FIXED_SHARE = 0.5  # a head attends to a fixed token, such as the previous one, if this share of its weight is on it
LOCAL_DISTANCE = 0.5  # a head is local if its mean distance is below this fraction of that of uniform attention
FIXED_TOKENS = ("previous", "next", "first", "own")


@dataclass(frozen=True)
class HeadStatistics:
    """Means over the queries of a text. A query that has a single visible key tells nothing and is left out."""

    layer: str  # such as "decoder.3.attention"
    head: int
    entropy: float  # in nats; 0: all weight on one token
    max_entropy: float  # of uniform attention to the visible tokens
    distance: float  # between a token and those it attends to, weighted; special tokens are left out
    uniform_distance: float  # the same for uniform attention
    previous: float  # the share of the weight on the token before
    next: float
    first: float  # on the first token of the text
    own: float

    @property
    def scope(self) -> str:
        """ "local" or "global", by the distance relative to that of uniform attention."""
        return "local" if self.distance < LOCAL_DISTANCE * self.uniform_distance else "global"

    @property
    def fixed_token(self) -> str:
        """The token that has at least half of the weight: "previous", "next", "first", "own", or "" for none."""
        token = max(FIXED_TOKENS, key=lambda name: float(getattr(self, name)))
        return token if getattr(self, token) >= FIXED_SHARE else ""

    def describe(self) -> str:
        """Return the fixed token with its share, as "first 84 %", or else the scope."""
        token = self.fixed_token
        return f"{token} {getattr(self, token):.0%}".replace("%", " %") if token else self.scope

    def to_json(self) -> dict[str, Any]:
        numbers = {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}
        return numbers | {"scope": self.scope, "fixed_token": self.fixed_token}


def head_statistics(
    weights: Mapping[str, Tensor], valid: Tensor | None = None, special: Tensor | None = None
) -> list[HeadStatistics]:
    """Return the statistics of every head of self-attention.

    weights: attention weights (B, H, T, T) by name, as `trace(model, ids, names="*.attention.weights")` returns them.
    valid: True for real tokens (B, T); None means all.
    special: True for special tokens (B, T), such as [CLS] and [SEP]. Many heads rest on them if they have nothing to
        do, so the weight on them does not count for the distance.
    """
    result = []
    for name, tensor in weights.items():
        layer = name.removesuffix(".weights")
        rows = _statistics(tensor.double(), valid, special)
        for head in range(tensor.shape[1]):
            values = {key: float(value[head]) for key, value in rows.items()}
            result.append(HeadStatistics(layer=layer, head=head, **values))
    return result


def _statistics(weights: Tensor, valid: Tensor | None, special: Tensor | None) -> dict[str, Tensor]:
    """Return each statistic for the heads of one layer, (H,)."""
    B, H, T, S = weights.shape
    if T != S:
        raise ValueError("statistics are defined for self-attention over a whole text")
    positions = torch.arange(T, device=weights.device)
    distance = (positions[:, None] - positions).abs().double()
    visible = (weights > 0).any(1)  # (B, T, S); a key that no head of the layer gives weight to is masked
    queries = visible.sum(-1) > 1
    if valid is not None:
        queries = queries & valid
    uniform = visible.double() / visible.sum(-1, keepdim=True).clamp(min=1)  # (B, T, S)

    def mean(values: Tensor) -> Tensor:
        """Average values (B, H, T) or (B, 1, T) over the queries."""
        selected = queries[:, None].expand(B, values.shape[1], T)
        return ((values * selected).sum((0, 2)) / selected.sum((0, 2)).clamp(min=1)).expand(H)

    def share(offset: int) -> Tensor:
        """Return the weight (B, H, T) on the token at an offset; 0 if there is none."""
        diagonal = weights.diagonal(offset, -2, -1)
        padding = (-offset, 0) if offset < 0 else (0, offset)
        return torch.nn.functional.pad(diagonal, padding)

    def mean_distance(shares: Tensor) -> Tensor:
        """Return the mean distance (B, H or 1, T) by shares on the keys, leaving out special tokens."""
        shares = shares if special is None else shares.masked_fill(special[:, None, None, :], 0)
        return (shares * distance).sum(-1) / shares.sum(-1).clamp(min=1e-12)

    return {
        "entropy": mean(-torch.special.xlogy(weights, weights).sum(-1)),
        "max_entropy": mean(-torch.special.xlogy(uniform, uniform).sum(-1)[:, None]),
        "distance": mean(mean_distance(weights)),
        "uniform_distance": mean(mean_distance(uniform[:, None])),
        "previous": mean(share(-1)),
        "next": mean(share(1)),
        "first": mean(weights[..., 0]),
        "own": mean(share(0)),
    }
