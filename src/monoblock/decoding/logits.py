"""Filters: pure functions from logits (B, V) to logits, what is ruled out becoming -inf.

A parameter is one number for all rows or a tensor (B, 1), a row each.  Filters that look back are given `Past`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

Each = float | Tensor  # one for all rows, or (B, 1)


class Past(NamedTuple):
    """What the rows have said: tokens (B, L) from the left, -1 beyond a row's length (B,)."""

    tokens: Tensor
    lengths: Tensor

    def spread(self, vocabulary: int) -> Tensor:
        """Which tokens have occurred: (B, V)."""
        known = torch.where(self.tokens < 0, vocabulary, self.tokens)
        marks = torch.zeros(known.shape[0], vocabulary + 1, dtype=torch.bool, device=known.device)
        return marks.scatter(1, known, True)[:, :vocabulary]

    def last(self, count: int) -> Tensor:
        """The last so many tokens of each row (B, count), -1 where there were fewer."""
        places = self.lengths[:, None] + torch.arange(-count, 0, device=self.lengths.device)
        return self.tokens.gather(1, places.clamp(min=0)).masked_fill(places < 0, -1)


# -- by shape of the distribution ---------------------------------------------------------------------------------


def temperature(logits: Tensor, degree: Each) -> Tensor:
    """Flatter above one, sharper below."""
    return logits / degree


def top_k(logits: Tensor, k: int | Tensor) -> Tensor:
    """The k best, and what ties with the last of them; 0 keeps all."""
    size = logits.shape[-1]
    if isinstance(k, Tensor):
        rank = torch.where(k <= 0, size, k).clamp(max=size).long() - 1
        least = logits.sort(dim=-1, descending=True).values.gather(-1, rank)
    else:
        least = logits.topk(min(int(k) or size, size), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -math.inf)


def top_p(logits: Tensor, p: Each) -> Tensor:
    """The smallest set of best tokens whose probability reaches p (Holtzman et al. 2020); never fewer than one."""
    ordered, places = logits.sort(dim=-1)
    beyond = ordered.softmax(-1).cumsum(-1) <= 1 - p
    beyond[..., -1] = False
    return logits.masked_fill(torch.zeros_like(beyond).scatter(-1, places, beyond), -math.inf)


def min_p(logits: Tensor, p: Each) -> Tensor:
    """Tokens at least p times as probable as the best (Nguyen et al. 2024)."""
    shares = logits.softmax(-1)
    return logits.masked_fill(shares < p * shares.amax(-1, keepdim=True), -math.inf)


def typical_p(logits: Tensor, mass: Each) -> Tensor:
    """Tokens whose surprise is nearest the expected one, until they make up the mass (Meister et al. 2023)."""
    surprise = -logits.log_softmax(-1)
    entropy = (surprise * (-surprise).exp()).nansum(-1, keepdim=True)
    distance, places = (surprise - entropy).abs().sort(dim=-1)
    reached = logits.gather(-1, places).softmax(-1).cumsum(-1) < mass
    last = reached.sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    beyond = distance > distance.gather(-1, last)
    beyond[..., 0] = False
    kept = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, places, beyond), -math.inf)
    return torch.where(torch.as_tensor(mass, device=logits.device) >= 1, logits, kept)


# -- by what was said before --------------------------------------------------------------------------------------


def repetition_penalty(logits: Tensor, penalty: Each, past: Past) -> Tensor:
    """Tokens that occurred are divided by the penalty when positive, multiplied when negative (Keskar et al. 2019)."""
    lowered = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(past.spread(logits.shape[-1]), lowered, logits)


def no_repeat_ngram_size(logits: Tensor, size: int | Tensor, past: Past) -> Tensor:
    """No n-gram twice: a token that would complete one that occurred is ruled out; 0 rules out nothing."""
    if isinstance(size, Tensor):
        for n in sorted({int(n) for n in size.flatten().tolist()} - {0}):
            logits = torch.where(size == n, no_repeat_ngram_size(logits, n, past), logits)
        return logits
    if size == 0 or past.tokens.shape[1] < size:
        return logits
    windows = past.tokens.unfold(1, size, 1)  # (B, L - n + 1, n)
    begun = (windows[..., :-1] == past.last(size - 1)[:, None]).all(-1) if size > 1 else windows[..., -1] >= 0
    completes = begun & (windows >= 0).all(-1)  # a prefix never meets itself: its successor is not there yet
    spare = logits.shape[-1]
    ruled = torch.zeros(len(logits), spare + 1, dtype=torch.bool, device=logits.device)
    ruled = ruled.scatter(1, torch.where(completes, windows[..., -1], spare), True)
    return logits.masked_fill(ruled[:, :spare], -math.inf)


def bad_words(logits: Tensor, words: tuple[tuple[int, ...], ...], past: Past) -> Tensor:
    """The last token of a word is ruled out where the tokens before it stand."""
    for *before, last in words:
        meant = torch.tensor(before, dtype=past.tokens.dtype, device=logits.device)
        stands = (
            (past.last(len(before)) == meant).all(-1) if before else torch.ones_like(logits[:, 0], dtype=torch.bool)
        )
        logits = logits.index_put(
            (stands.nonzero()[:, 0], torch.tensor(last, device=logits.device)), -logits.new_tensor(math.inf)
        )
    return logits


def without(logits: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """These tokens ruled out."""
    return logits.index_fill(-1, torch.tensor(tokens, dtype=torch.long, device=logits.device), -math.inf)


def only(logits: Tensor, token: int) -> Tensor:
    """One token left, with certainty."""
    forced = torch.full_like(logits, -math.inf)
    forced[:, token] = 0
    return forced
