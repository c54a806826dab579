"""Filters: pure functions from logits (B, V) to logits (B, V), with -inf for the tokens that are ruled out.

A parameter is one number for all rows or a tensor (B, 1).  Filters that depend on earlier tokens take a `TokenHistory`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

PerRow = float | Tensor  # one number for all rows, or one per row as a tensor (B, 1)


class TokenHistory(NamedTuple):
    """The tokens (B, L) of each row so far, padded with -1 on the right, the length (B,) of each row and its prompt."""

    tokens: Tensor
    lengths: Tensor
    prompts: Tensor  # (B,) how many of the tokens are the prompt

    def rows(self, rows: slice) -> TokenHistory:
        return TokenHistory(self.tokens[rows], self.lengths[rows], self.prompts[rows])

    def new_counts(self, vocabulary: int) -> Tensor:
        """Return how often each token (B, V) occurs after the prompt."""
        is_new = torch.arange(self.tokens.shape[1], device=self.tokens.device) >= self.prompts[:, None]
        tokens = torch.where(is_new & (self.tokens >= 0), self.tokens, vocabulary)
        counts = torch.zeros(tokens.shape[0], vocabulary + 1, device=tokens.device)
        return counts.scatter_add(1, tokens, torch.ones_like(tokens, dtype=counts.dtype))[:, :vocabulary]

    def occurrence_mask(self, vocabulary: int) -> Tensor:
        """Return a boolean mask (B, V) that is True for tokens that occur in the row."""
        tokens = torch.where(self.tokens < 0, vocabulary, self.tokens)  # padding goes to an extra column
        mask = torch.zeros(tokens.shape[0], vocabulary + 1, dtype=torch.bool, device=tokens.device)
        return mask.scatter(1, tokens, True)[:, :vocabulary]

    def last_tokens(self, count: int) -> Tensor:
        """Return the last `count` tokens (B, count) of each row; a shorter row starts with -1."""
        index = self.lengths[:, None] + torch.arange(-count, 0, device=self.lengths.device)
        return self.tokens.gather(1, index.clamp(min=0)).masked_fill(index < 0, -1)


# -- filters that depend only on the logits -----------------------------------------------------------------------


def temperature(logits: Tensor, value: PerRow) -> Tensor:
    """Divide the logits by `value`; a value above 1 makes the distribution flatter, a value below 1 sharper."""
    return logits / value


def top_k(logits: Tensor, k: int | Tensor) -> Tensor:
    """Keep the k best tokens and any that tie with the last of them; k = 0 keeps all tokens."""
    size = logits.shape[-1]
    if isinstance(k, Tensor):
        rank = torch.where(k <= 0, size, k).clamp(max=size).long() - 1
        threshold = logits.sort(dim=-1, descending=True).values.gather(-1, rank)
    else:
        threshold = logits.topk(min(int(k) or size, size), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < threshold, -math.inf)


def top_p(logits: Tensor, p: PerRow) -> Tensor:
    """Keep the best tokens, as few as reach a total probability of p (nucleus sampling, Holtzman et al. 2020)."""
    ascending, order = logits.sort(dim=-1)
    removed = ascending.softmax(-1).cumsum(-1) <= 1 - p
    removed[..., -1] = False
    return logits.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), -math.inf)


def min_p(logits: Tensor, p: PerRow) -> Tensor:
    """Keep tokens at least p times as probable as the best one (Nguyen et al. 2024)."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(-1, keepdim=True), -math.inf)


def typical_p(logits: Tensor, mass: PerRow) -> Tensor:
    """Keep tokens whose -log p is nearest the entropy, up to a total probability of `mass` (Meister et al. 2023)."""
    information = -logits.log_softmax(-1)
    entropy = (information * (-information).exp()).nansum(-1, keepdim=True)
    distance, order = (information - entropy).abs().sort(dim=-1)
    below_mass = logits.gather(-1, order).softmax(-1).cumsum(-1) < mass
    last = below_mass.sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    removed = distance > distance.gather(-1, last)
    removed[..., 0] = False
    filtered = logits.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), -math.inf)
    return torch.where(torch.as_tensor(mass, device=logits.device) >= 1, logits, filtered)


# -- filters that depend on earlier tokens, and tokens ruled out or forced ----------------------------------------


def repetition_penalty(logits: Tensor, penalty: PerRow, history: TokenHistory) -> Tensor:
    """Make tokens that already occur in the row less likely (Keskar et al. 2019).

    Their logits are divided by `penalty` if they are positive and multiplied by it if they are negative.
    """
    lowered = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(history.occurrence_mask(logits.shape[-1]), lowered, logits)


def presence_penalty(logits: Tensor, penalty: PerRow, history: TokenHistory) -> Tensor:
    """Subtract `penalty` from the logits of tokens that occur after the prompt."""
    return logits - penalty * (history.new_counts(logits.shape[-1]) > 0).to(logits)


def frequency_penalty(logits: Tensor, penalty: PerRow, history: TokenHistory) -> Tensor:
    """Subtract `penalty` from the logit of a token for each time that it occurs after the prompt."""
    return logits - penalty * history.new_counts(logits.shape[-1]).to(logits)


def no_repeat_ngram_size(logits: Tensor, size: int | Tensor, history: TokenHistory) -> Tensor:
    """Rule out tokens that would repeat an n-gram of `size` tokens in the same row; 0 rules out nothing."""
    if isinstance(size, Tensor):
        for n in sorted({int(n) for n in size.flatten().tolist()} - {0}):
            logits = torch.where(size == n, no_repeat_ngram_size(logits, n, history), logits)
        return logits
    if size == 0 or history.tokens.shape[1] < size:
        return logits
    ngrams = history.tokens.unfold(1, size, 1)  # (B, L - n + 1, n)
    if size > 1:
        matches = (ngrams[..., :-1] == history.last_tokens(size - 1)[:, None]).all(-1)
    else:
        matches = ngrams[..., -1] >= 0
    matches = matches & (ngrams >= 0).all(-1)  # the last tokens have no successor yet, so they never match themselves
    vocabulary = logits.shape[-1]
    mask = torch.zeros(len(logits), vocabulary + 1, dtype=torch.bool, device=logits.device)
    mask = mask.scatter(1, torch.where(matches, ngrams[..., -1], vocabulary), True)  # no match: an extra column is set
    return logits.masked_fill(mask[:, :vocabulary], -math.inf)


def bad_words(logits: Tensor, words: tuple[tuple[int, ...], ...], history: TokenHistory) -> Tensor:
    """Rule out words, each given as a tuple of tokens.

    In a row that ends with all tokens of a word but the last, the last one is ruled out.
    """
    for *prefix, last in words:
        if prefix:
            tokens = torch.tensor(prefix, dtype=history.tokens.dtype, device=logits.device)
            matches = (history.last_tokens(len(prefix)) == tokens).all(-1)
        else:
            matches = torch.ones_like(logits[:, 0], dtype=torch.bool)
        index = (matches.nonzero()[:, 0], torch.tensor(last, device=logits.device))
        logits = logits.index_put(index, -logits.new_tensor(math.inf))
    return logits


def logit_bias(logits: Tensor, biases: Mapping[int, float]) -> Tensor:
    """Add a number to the logits of some tokens."""
    index = torch.tensor([*biases], device=logits.device)
    return logits.index_add(-1, index, logits.new_tensor([*biases.values()]).expand(len(logits), -1))


def suppress_tokens(logits: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """Rule out these tokens in every row."""
    return logits.index_fill(-1, torch.tensor(tokens, dtype=torch.long, device=logits.device), -math.inf)


def force_token(logits: Tensor, token: int) -> Tensor:
    """Rule out every token except `token`."""
    forced = torch.full_like(logits, -math.inf)
    forced[:, token] = 0
    return forced
