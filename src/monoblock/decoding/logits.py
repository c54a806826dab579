"""Filters: pure functions from logits (…, V) to logits, what is ruled out becoming -inf."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def warm(logits: Tensor, temperature: float) -> Tensor:
    """Flatter above one, sharper below."""
    return logits / temperature


def top_k(logits: Tensor, k: int) -> Tensor:
    """The k best, and what ties with the last of them."""
    least = logits.topk(min(k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -math.inf)


def top_p(logits: Tensor, p: float) -> Tensor:
    """The smallest set of best tokens whose probability reaches p (Holtzman et al. 2020); never fewer than one."""
    ordered, places = logits.sort(dim=-1, descending=True)
    shares = ordered.softmax(-1)
    beyond = shares.cumsum(-1) - shares >= p
    beyond[..., 0] = False
    return logits.masked_fill(torch.zeros_like(beyond).scatter(-1, places, beyond), -math.inf)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Tokens at least p times as probable as the best (Nguyen et al. 2024)."""
    shares = logits.softmax(-1)
    return logits.masked_fill(shares < p * shares.amax(-1, keepdim=True), -math.inf)
