"""Measure what quantization saves and costs: the size of a model in bytes, and its perplexity on a text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.data.batching.blocks import EvaluationWindow, evaluation_windows
from monoblock.data.batching.shards import TokenDataset
from monoblock.nn.transformer import Transformer

TOKENS_PER_BATCH = 4096
MAX_WINDOW = 1024  # the most tokens evaluated in one window, even if the context is longer


class TokenLoss(NamedTuple):
    """The mean cross-entropy, and the number of tokens it is averaged over."""

    nats_per_token: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats_per_token, 700.0))


def state_dict_bytes(model: nn.Module) -> int:
    """Return the size in bytes of all tensors in the state_dict of a model."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())


@torch.no_grad()
def evaluate_loss(
    model: Transformer,
    documents: Sequence[Sequence[int]],
    *,
    max_tokens: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> TokenLoss:
    """Compute the mean loss of a language model over tokenized documents, up to about `max_tokens` tokens.

    `progress(tokens)` is called after each batch with the number of tokens so far.
    """
    assert model.config.input.kind == "tokens"
    tokens = TokenDataset.from_documents(documents, model.config.input.vocab)
    context = min(model.config.context or MAX_WINDOW, MAX_WINDOW)
    device, total, count = model.make_cache(1, 1).lengths.device, 0.0, 0
    model.eval()
    for batch in _batch_windows(evaluation_windows(tokens, context), max(1, TOKENS_PER_BATCH // context)):
        ids = torch.from_numpy(np.stack([window.ids for window in batch])).to(device)
        logits = model(ids[:, :-1])
        labels = _build_labels(ids, batch)
        total += float(F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), reduction="sum"))
        count += int((labels >= 0).sum())
        if progress is not None:
            progress(count)
        if max_tokens is not None and count >= max_tokens:
            break
    return TokenLoss(total / max(count, 1), count)


def _build_labels(ids: Tensor, batch: list[EvaluationWindow]) -> Tensor:
    """Shift ids (B, T + 1) to labels (B, T); tokens that an earlier window has scored get the label -100."""
    labels = ids[:, 1:].clone()
    for row, window in enumerate(batch):
        labels[row, : labels.shape[1] - window.num_targets] = -100
    return labels


def _batch_windows(windows: Iterator[EvaluationWindow], size: int) -> Iterator[list[EvaluationWindow]]:
    """Group windows of equal length into batches of at most `size`."""
    for _, group in itertools.groupby(windows, key=lambda window: len(window.ids)):
        while batch := list(itertools.islice(group, size)):
            yield batch
