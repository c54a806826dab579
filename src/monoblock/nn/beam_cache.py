"""The cache of a beam search in which beams never move: a row holds the keys and values of all beams of one search.

A pass runs the n beams of each search as n tokens of one row, all at the same position, and writes them side by side:
the token of beam b at position p goes to slot p · n + b.  Instead of moving keys and values when beams change places,
the cache keeps, for each beam and position, which beam wrote the token that belongs to its hypothesis; a mask shows a
beam these slots only.  The tokens of the prompt are stored once, as those of beam 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monoblock.config.model import StackConfig
from monoblock.nn.cache import BeamSlots, Cache, CacheWrite, KeyValueStore
from monoblock.nn.masks import Mask, MaskTerm, TokenPositions

SAME_HYPOTHESIS = "same_hypothesis"  # the name of the mask of a beam search
MAX_BEAMS = 64  # the most beams of a search; attention computes n² · length scores


class BeamCache(Cache):
    """A cache of `searches` rows with `beams` beams each, of at most `max_tokens` tokens; all its shapes are fixed.

    `lengths` (searches,) is the number of tokens of each search, the same for all its beams.  A pass sees the first
    `num_positions` positions only.
    """

    def __init__(
        self,
        stack_config: StackConfig,
        *,
        searches: int,
        beams: int,
        max_tokens: int,
        source_length: int = 0,
        device: torch.device | None = None,
    ) -> None:
        slots = max_tokens * beams
        super().__init__(stack_config, batch=searches, capacity=slots, chunk=slots, device=device)
        self.common_length, self.max_length = None, slots - 1
        self.beams, self.max_tokens, self.num_positions = beams, max_tokens, max_tokens
        self.beam_index = torch.arange(beams, dtype=torch.uint8, device=device)
        # Which beam wrote the token that a beam sees at each position; `beams` where there is none.
        self.writers = torch.full((searches, beams, max_tokens), beams, dtype=torch.uint8, device=device)
        if source_length:
            valid = torch.zeros(searches, source_length, dtype=torch.bool, device=device)
            self.memory_positions = TokenPositions(torch.arange(source_length, device=device)[None], valid=valid)

    def prepare_write(self, new_positions: TokenPositions) -> list[CacheWrite]:
        """Prepare a pass over one new token of each beam; return one `CacheWrite` for each block."""
        S, n, seen = self.batch, self.beams, self.num_positions
        own = self.beam_index[None, :, None].expand(S, n, 1)
        self.writers.scatter_(2, self.lengths[:, None, None].expand(S, n, 1), own)
        mask = Mask((MaskTerm(SAME_HYPOTHESIS, lambda q, k: self._visible_slots()),))
        slot = torch.arange(seen * n, device=self.lengths.device)
        key_positions = TokenPositions((slot // n)[None])
        columns = self.lengths[:, None] * n + self.beam_index
        beams = BeamSlots(self.writers, self.lengths)
        write = CacheWrite(columns, key_positions, seen * n, False, mask=mask, beams=beams)
        return [write] * len(self.layers)

    def _visible_slots(self) -> Tensor:
        """Return which slots hold a token of each hypothesis, (searches, 1, beams, slots)."""
        writers = self.writers[:, :, : self.num_positions, None]
        return (writers == self.beam_index).flatten(2)[:, None]

    def reorder_beams(self, origins: Tensor) -> None:
        """Let each beam continue another one: `origins` (searches, beams) are the beams that they continue."""
        self.writers.copy_(self.writers.gather(1, origins[..., None].expand(-1, -1, self.max_tokens)))

    def copy_prompts(self, prompts: Cache, lengths: Tensor) -> None:
        """Copy the cached prompts, one row for each search, into the first rows; the other rows become empty.

        prompts: a cache whose columns hold tokens in order; `lengths` (prompts,) is the length of each prompt.
        """
        count, longest, memory, source = (
            prompts.batch,
            prompts.max_length,
            self.memory_positions,
            prompts.memory_positions,
        )
        self.lengths.zero_()
        self.lengths[:count] = lengths
        is_prompt = torch.arange(self.max_tokens, device=lengths.device) < self.lengths[:, None]
        self.writers.copy_(torch.where(is_prompt[:, None], 0, self.beams))
        for layer, prompt_layer in zip(self.layers, prompts.layers, strict=True):
            self._copy(prompt_layer, layer, longest, self.capacity + 1, step=self.beams)
        if memory is None or memory.valid is None or source is None:
            return
        memory.valid.zero_()
        memory.valid[:count, : source.length] = True if source.valid is None else source.valid
        for cross, prompt_cross in zip(self.cross_layers, prompts.cross_layers, strict=True):
            if cross is not None and prompt_cross is not None:
                self._copy(prompt_cross, cross, source.length, memory.length)

    def _copy(self, source: KeyValueStore, target: KeyValueStore, length: int, columns: int, *, step: int = 1) -> None:
        """Copy the first `length` keys and values to every `step`-th column; make the columns if there are none."""
        for name in ("keys", "values"):
            tokens = getattr(source, name)[:, :, :length]  # (prompts, G, length, size)
            if getattr(target, name) is None:
                setattr(target, name, tokens.new_zeros(self.batch, tokens.shape[1], columns, tokens.shape[3]))
            getattr(target, name)[: len(tokens), :, : length * step : step] = tokens
