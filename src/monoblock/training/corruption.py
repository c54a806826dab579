"""What is hidden from a model that must restore it: masked tokens (BERT) and spans (T5).

Both are functions of a random generator that the caller keys by (seed, epoch, sample): new every epoch, the same again
after an interruption, whatever the workers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
IGNORE = -100


def generator(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """The random numbers of one sample in one epoch."""
    # As a plain list a large seed would become a float and lose its lower bits.
    key = np.array([seed & (2**64 - 1), (epoch << 40) ^ sample], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def mask_tokens(
    ids: Ids, draw: np.random.Generator, *, mask_id: int, vocab: int, special: frozenset[int], rate: float = 0.15
) -> tuple[Ids, Ids]:
    """Hide `rate` of the tokens: 80 % become the mask, 10 % a random token, 10 % stay (Devlin et al. 2019).

    Returns the input and the labels, which are IGNORE where nothing was hidden.  At least one token is hidden.
    """
    eligible = np.flatnonzero(~np.isin(ids, list(special)))
    count = min(len(eligible), max(1, round(rate * len(eligible))))
    chosen = draw.permutation(eligible)[:count]
    labels = np.full_like(ids, IGNORE)
    labels[chosen] = ids[chosen]
    hidden = ids.copy()
    dice = draw.random(count)
    hidden[chosen[dice < 0.8]] = mask_id
    swapped = chosen[(dice >= 0.8) & (dice < 0.9)]
    hidden[swapped] = draw.integers(0, vocab, len(swapped))
    return hidden, labels


def corrupt_spans(
    ids: Ids,
    draw: np.random.Generator,
    *,
    sentinels: list[int],
    eos: int | None = None,
    rate: float = 0.15,
    mean: float = 3.0,
) -> tuple[Ids, Ids]:
    """Replace random spans by sentinels; the target is each sentinel followed by its span (Raffel et al. 2020).

    `rate` of the tokens are hidden in spans of `mean` tokens on average; a last sentinel closes the target.
    """
    length = len(ids)
    hidden = min(max(1, round(rate * length)), max(1, length - 1))
    spans = min(max(1, round(hidden / mean)), hidden, max(1, length - hidden), len(sentinels) - 1)
    noise, kept = _cut(hidden, spans, draw), _cut(length - hidden, spans, draw)
    source: list[int] = []
    target: list[int] = []
    place = 0
    for number in range(spans):
        source += ids[place : place + kept[number]].tolist() + [sentinels[number]]
        place += kept[number]
        target += [sentinels[number]] + ids[place : place + noise[number]].tolist()
        place += noise[number]
    source += ids[place:].tolist()
    target.append(sentinels[spans])
    if eos is not None:
        source.append(eos)
        target.append(eos)
    return np.array(source, dtype=np.int64), np.array(target, dtype=np.int64)


def _cut(total: int, parts: int, draw: np.random.Generator) -> list[int]:
    """`total` in random parts of at least one each (none where there is not enough to go round)."""
    if total < parts:
        return [1] * total + [0] * (parts - total)
    places = np.sort(draw.permutation(total - 1)[: parts - 1]) + 1
    return np.diff(np.concatenate(([0], places, [total]))).tolist()
