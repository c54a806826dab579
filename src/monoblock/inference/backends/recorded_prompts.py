"""Record the pass over prompts as a CUDA graph, since launching its kernels takes longer than running them.

A graph has one shape: it fits calls with as many prompts of the same length.  So a pass is recorded when a shape comes
a second time in a row, and only without padding.  It fills a cache of its own, which is then copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.inference.backends.search.record import record
from monoblock.inference.prompt import Prompt
from monoblock.nn.experts import Experts
from monoblock.nn.kv_cache.cache import Cache
from monoblock.nn.transformer import Transformer

MAX_CACHE_BYTES = 2 << 30  # of the cache that a recording keeps


class PromptShape(NamedTuple):
    """What a recorded pass depends on; `capacity` and `chunk` are those of the cache."""

    rows: int
    length: int
    capacity: int
    chunk: int


def can_record_prompts(model: Transformer) -> bool:
    """Return whether a pass over prompts has fixed shapes: with experts, they depend on the tokens."""
    return model.encoder is None and not any(isinstance(module, Experts) for module in model.modules())


def prompts_have_one_length(prompts: Sequence[Prompt]) -> bool:
    return len({len(prompt.ids) for prompt in prompts}) == 1


class RecordedPrompts:
    """A recorded pass over prompts of one shape through a decoder."""

    def __init__(self, model: Transformer, shape: PromptShape) -> None:
        self.model, self.shape = model, shape
        self.ids = torch.zeros(shape.rows, shape.length, dtype=torch.long, device=model.device)
        self.last = torch.full((shape.rows, 1), shape.length - 1, device=model.device)
        self.cache: Cache
        self.logits: Tensor
        self.recording = record(self._run_once, model.device)

    def _run_once(self) -> None:
        rows, length, capacity, chunk = self.shape
        self.cache = self.model.make_cache(rows, capacity, chunk=chunk)
        self.logits = self.model(self.ids, cache=self.cache, logits_at=self.last)[:, 0]
        self.cache.advance(length)

    def run(self, prompts: Sequence[Prompt]) -> Tensor:
        """Fill the cache with the prompts; return the logits (rows, V) after their last tokens."""
        self.ids.copy_(torch.tensor([prompt.ids for prompt in prompts]))
        self.recording.replay()
        return self.logits.clone()
