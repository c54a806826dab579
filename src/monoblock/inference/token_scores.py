"""The log-probabilities that a model gives to generated tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from monoblock.inference.evaluation_mode import evaluation_mode
from monoblock.inference.prompt import Prompt, pad_right
from monoblock.nn.tap import Tap
from monoblock.nn.transformer import Transformer

MAX_TOKENS = 8192  # tokens in one pass of the model


@torch.no_grad()
def score_tokens(
    model: Transformer, prompts: Sequence[Prompt], new: Sequence[Sequence[int]], tap: Tap | None = None
) -> list[list[float]]:
    """Return the log-probability of each new token after its prompt, one list for each prompt.

    It is the probability in the distribution of the model itself: temperature, filters and forced tokens do not count.
    One pass of the model over whole sequences computes it, so that every backend gives the same scores.
    """
    scores: list[list[float]] = []
    with evaluation_mode(model):
        lengths = [len(p.ids) + len(p.source or ()) + len(n) for p, n in zip(prompts, new, strict=True)]
        for first, last in _passes(lengths):
            scores += _score_rows(model, prompts[first:last], new[first:last], tap)
    return scores


def _passes(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of consecutive rows that have at most MAX_TOKENS tokens together, padding included."""
    first, longest = 0, 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        if row > first and longest * (row + 1 - first) > MAX_TOKENS:
            yield first, row
            first, longest = row, length
    if lengths:
        yield first, len(lengths)


def _score_rows(
    model: Transformer, prompts: Sequence[Prompt], new: Sequence[Sequence[int]], tap: Tap | None
) -> list[list[float]]:
    count = max(map(len, new))
    if not count:
        return [[] for _ in new]
    ids, mask = pad_right([(*p.ids, *n[:-1]) for p, n in zip(prompts, new, strict=True)], model.device)
    # The logits at the last token of the prompt predict the first new token.
    starts = torch.tensor([[len(prompt.ids) - 1] for prompt in prompts], device=model.device)
    at = (starts + torch.arange(count, device=model.device)).clamp(max=ids.shape[1] - 1)
    logits = _run(model, prompts, ids, mask, at, tap).float()
    labels, _ = pad_right([[*n, *[0] * (count - len(n))] for n in new], model.device)
    scores = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0].tolist()
    return [row[: len(n)] for row, n in zip(scores, new, strict=True)]


def _run(
    model: Transformer,
    prompts: Sequence[Prompt],
    ids: Tensor,
    mask: Tensor | None,
    at: Tensor,
    tap: Tap | None,
) -> Tensor:
    if model.encoder is None:
        return model(ids, mask, logits_at=at, tap=tap)
    source, source_mask = pad_right([prompt.source or () for prompt in prompts], model.device)
    return model(source, ids, source_mask, mask, logits_at=at, tap=tap)
