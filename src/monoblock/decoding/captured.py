"""Steps on a GPU recorded once and replayed: starting a hundred small kernels one by one would take longer than they.

The cache has one shape for all steps (`Cache.fix`), tokens and lengths lie in fixed places, and a CUDA graph does the
rest.  A burst replays several steps, the choice of the token among them, before anybody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from monoblock.decoding.rows import Cached, Prompt
from monoblock.model import Transformer

Choose = Callable[[Tensor, Tensor], Tensor]  # logits (rows, V), chances (rows,) -> tokens (rows,)


def capturable(model: Transformer) -> bool:
    """Whether steps can be recorded: on a GPU, and nothing in them depends on which expert a token goes to."""
    blocks = [] if model.decoder is None else model.decoder.config.layers()
    return model.device.type == "cuda" and all(block.feedforward.experts is None for block in blocks)


class Captured(Cached):
    """Rows whose steps are a CUDA graph."""

    def __init__(self, model: Transformer, capacity: int, copies: int = 1, chunk: int | None = None) -> None:
        super().__init__(model, -(-capacity // 64) * 64, copies, chunk)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.choice: Choose | None = None
        self.key: object = None  # what the recorded choice depends on
        self.idle = False

    def begin(self, prompts: Sequence[Prompt]) -> Tensor:
        recorded = self.cache if self.idle and self.graph is not None else None
        if self.idle:
            self.cache = None  # of rows that are over
        else:
            self._release()
        logits = super().begin(prompts)
        if recorded is not None and self.cache is not None and recorded.take(self.cache):
            self.cache = recorded  # the same shapes again: what was recorded serves
        elif recorded is not None:
            self.graph = None
        self.idle = False
        return logits

    def rest(self) -> None:
        """All rows are over; what was recorded may serve the next ones."""
        self.idle = True

    def _release(self) -> None:
        """Back to a cache that may change its shape."""
        self.graph = None
        if self.cache is not None and self.cache.fixed:
            self.cache.loosen()

    def step(self, tokens: Tensor, live: Tensor | None = None) -> Tensor:
        self._ready(None, None)
        assert self.graph is not None
        self.tokens.copy_(tokens)
        self.live.fill_(1) if live is None else self.live.copy_(live)
        self.graph.replay()
        return self.logits

    def burst(
        self,
        tokens: Tensor,
        count: int,
        chances: Tensor | None,
        choose: Choose,
        key: object,
        live: Tensor | None = None,
    ) -> Tensor:
        """So many steps, each choosing its token, perhaps by chances (rows, count): the tokens (rows, count).

        `key` says what the choice depends on: with the same key, the same recording serves.
        """
        self._ready(choose, key)
        assert self.graph is not None
        self.tokens.copy_(tokens)
        self.live.fill_(1) if live is None else self.live.copy_(live)
        said = torch.empty(len(tokens), count, dtype=torch.long, device=self.device)
        for step in range(count):
            if chances is not None:
                self.chances.copy_(chances[:, step])
            self.graph.replay()
            said[:, step] = self.tokens
        return said

    def select(self, rows: Tensor, sources: Tensor | None = None) -> None:
        self._release()
        super().select(rows, sources)

    def _ready(self, choose: Choose | None, key: object) -> None:
        """See that what is recorded is what is wanted."""
        if self.graph is not None and self.key == key:
            return
        assert self.cache is not None
        rows = self.cache.batch
        self.cache.fix()
        self.choice, self.key = choose, key
        self.tokens = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.live = torch.ones(rows, dtype=torch.long, device=self.device)
        self.chances = torch.zeros(rows, dtype=torch.double, device=self.device)
        before = self.cache.lengths.clone()
        self.graph = self._recorded()
        self.cache.lengths.copy_(before)

    def _recorded(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels are compiled and chosen before anything is recorded
                self._once()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._once()
        return graph

    def _once(self) -> None:
        """What is recorded: a pass, the lengths moved on, perhaps the next token."""
        assert self.cache is not None
        self.logits = self.ahead(self.tokens[:, None])[:, -1]
        self.cache.lengths.add_(self.live)
        if self.choice is not None:
            self.tokens.copy_(self.choice(self.logits, self.chances))
