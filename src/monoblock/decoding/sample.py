"""Continue a text: one token at a time, greedily or by chance, with the cache.

Chance is a function of (seed, return number, step): one uniform number a step, turned into a token by the inverse of
the cumulative distribution, so that the rows around a row change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from monoblock.decoding.logits import min_p as keep_min_p, top_k as keep_top_k, top_p as keep_top_p, warm
from monoblock.model import Transformer


def uniform(seed: int, number: int, step: int) -> float:
    """The random number of one step of one returned sequence."""
    return float(np.random.Generator(np.random.Philox(key=[seed, (number << 40) ^ step])).random())


def choose(logits: Tensor, chance: float) -> Tensor:
    """The token at which the cumulative distribution of each row passes `chance`: (B, V) -> (B,)."""
    shares = logits.double().softmax(-1).cumsum(-1)
    mark = torch.full_like(shares[:, :1], chance) * shares[:, -1:]
    return torch.searchsorted(shares, mark, right=True).clamp(max=shares.shape[-1] - 1)[:, 0]


@torch.no_grad()
def continued(
    model: Transformer,
    ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    eos: int | None = None,
) -> Iterator[Tensor]:
    """New tokens (B,) one step at a time, until every row has met `eos` or the count is reached."""
    limit = model.config.context
    room = max_new_tokens if limit is None else min(max_new_tokens, limit - ids.shape[1])
    if room < 1:
        return
    cache = model.make_cache(ids.shape[0], ids.shape[1] + room)
    last = torch.full((ids.shape[0], 1), ids.shape[1] - 1, device=ids.device)
    done = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    for step in range(room):
        logits = model(ids, cache=cache, logits_at=last)[:, -1].float()
        cache.advance(ids.shape[1])
        if temperature == 0:
            new = logits.argmax(-1)
        else:
            logits = warm(logits, temperature)
            logits = keep_top_k(logits, top_k) if top_k else logits
            logits = keep_top_p(logits, top_p) if top_p < 1 else logits
            logits = keep_min_p(logits, min_p) if min_p else logits
            new = choose(logits, uniform(seed, 0, step))
        yield new
        if eos is not None:
            done |= new == eos
            if bool(done.all()):
                return
        ids, last = new[:, None], torch.zeros_like(last)
