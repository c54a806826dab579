"""Token masking (BERT) and span corruption (T5).

Both use a random generator that depends only on (seed, epoch, sample). So a sample is corrupted differently in every
epoch, but in the same way after an interruption and with any number of workers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from monoblock.data.batching.encode import IGNORE_INDEX

Ids = NDArray[np.int64]


def sample_generator(seed: int, epoch: int, sample: int) -> np.random.Generator:
    """Return the random generator of one sample in one epoch."""
    # NumPy would convert a plain list with a large seed to float and lose its lower bits.
    key = np.array([seed & (2**64 - 1), (epoch << 40) ^ sample], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def mask_tokens(
    ids: Ids, rng: np.random.Generator, *, mask_id: int, vocab: int, special: frozenset[int], rate: float = 0.15
) -> tuple[Ids, Ids]:
    """Mask a random selection of tokens (Devlin et al. 2019); return the masked ids and the labels.

    The fraction `rate` of the tokens is selected, at least one, but never a token in `special`. Of the selected tokens,
    80 % become the mask token, 10 % a random token, and 10 % stay. The labels are the original ids of the selected
    tokens, and IGNORE_INDEX elsewhere.
    """
    eligible = np.flatnonzero(~np.isin(ids, list(special)))
    count = min(len(eligible), max(1, round(rate * len(eligible))))
    chosen = rng.permutation(eligible)[:count]
    labels = np.full_like(ids, IGNORE_INDEX)
    labels[chosen] = ids[chosen]
    masked = ids.copy()
    draws = rng.random(count)
    masked[chosen[draws < 0.8]] = mask_id
    swapped = chosen[(draws >= 0.8) & (draws < 0.9)]
    masked[swapped] = rng.integers(0, vocab, len(swapped))
    return masked, labels


def corrupt_spans(
    ids: Ids,
    rng: np.random.Generator,
    *,
    sentinels: list[int],
    eos: int | None = None,
    rate: float = 0.15,
    mean: float = 3.0,
) -> tuple[Ids, Ids]:
    """Return a source with random spans replaced by sentinels, and a target of these spans (Raffel et al. 2020).

    The target has each sentinel followed by the span it replaces, and one more sentinel at the end. Together, the spans
    have the fraction `rate` of all tokens; a span has `mean` tokens on average.
    """
    length = len(ids)
    num_noise = min(max(1, round(rate * length)), max(1, length - 1))
    num_spans = min(max(1, round(num_noise / mean)), num_noise, max(1, length - num_noise), len(sentinels) - 1)
    noise_lengths = _random_partition(num_noise, num_spans, rng)
    kept_lengths = _random_partition(length - num_noise, num_spans, rng)
    source: list[int] = []
    target: list[int] = []
    position = 0
    for sentinel, kept, noise in zip(sentinels, kept_lengths, noise_lengths, strict=False):
        source += [*ids[position : position + kept].tolist(), sentinel]
        position += kept
        target += [sentinel, *ids[position : position + noise].tolist()]
        position += noise
    source += ids[position:].tolist()
    target.append(sentinels[num_spans])
    if eos is not None:
        source.append(eos)
        target.append(eos)
    return np.array(source, dtype=np.int64), np.array(target, dtype=np.int64)


def _random_partition(total: int, parts: int, rng: np.random.Generator) -> list[int]:
    """Return `parts` random positive integers with the sum `total`; if `total` < `parts`, the last ones are 0."""
    if total < parts:
        return [1] * total + [0] * (parts - total)
    bounds = np.sort(rng.permutation(total - 1)[: parts - 1]) + 1
    return np.diff(np.concatenate(([0], bounds, [total]))).tolist()
