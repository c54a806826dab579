"""What quantisation costs: bytes before and after, and the perplexity of both models on the same text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.data.blocks import Window, evaluation_blocks
from monoblock.data.shards import Tokens
from monoblock.model import Transformer

TOGETHER = 4096  # tokens read in one pass
LONGEST = 1024  # tokens of a window, where the model would take more


class Loss(NamedTuple):
    nats: float  # a token
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats, 700.0))


def tensor_bytes(model: nn.Module) -> int:
    """Bytes of everything that is stored."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())


@torch.no_grad()
def loss(
    model: Transformer,
    documents: Sequence[Sequence[int]],
    *,
    most: int | None = None,
    watch: Callable[[int], None] | None = None,
) -> Loss:
    """The mean loss of a language model over the tokens of a text, of at most the first `most`.

    `watch(tokens)` is called after each pass with the tokens counted so far.
    """
    assert model.config.input.kind == "tokens"
    tokens = Tokens.from_documents(documents, model.config.input.vocab)
    context = min(model.config.context or LONGEST, LONGEST)
    device, total, counted = model.make_cache(1, 1).lengths.device, 0.0, 0
    model.eval()
    for batch in _batches(evaluation_blocks(tokens, context), max(1, TOGETHER // context)):
        ids = torch.from_numpy(np.stack([window.ids for window in batch])).to(device)
        logits = model(ids[:, :-1])
        labels = _labels(ids, batch)
        total += float(F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), reduction="sum"))
        counted += int((labels >= 0).sum())
        if watch is not None:
            watch(counted)
        if most is not None and counted >= most:
            break
    return Loss(total / max(counted, 1), counted)


def _labels(ids: Tensor, batch: list[Window]) -> Tensor:
    labels = ids[:, 1:].clone()
    for row, window in enumerate(batch):
        labels[row, : labels.shape[1] - window.targets] = -100
    return labels


def _batches(windows: Iterator[Window], size: int) -> Iterator[list[Window]]:
    """Windows of one length together."""
    for _, same in itertools.groupby(windows, key=lambda window: len(window.ids)):
        while batch := list(itertools.islice(same, size)):
            yield batch
