"""The rows of a search on a CPU: a step, its product with the output table and the ranking are one operator.

Beams change places at every step.  Here what they remember stays where it was written, and `origins` tells for each
token of a row in which row of the cache it lies; it is brought in order when something else wants to read the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from monoblock.attention import Attention
from monoblock.block import Block
from monoblock.decoding.beam import Beams, sums, wanted
from monoblock.decoding.rows import Cached, Prompt, encoded, padded
from monoblock.decoding.step_cpu import MOST, StepStack, Whole, legible
from monoblock.experts import Experts
from monoblock.masks import Where
from monoblock.model import Transformer
from monoblock.reading import memory_stands, where_stand
from monoblock.stack import Stack


class Operators(NamedTuple):
    best: Any  # a step of a search
    encoder: Any  # what is read by one operator, None: as the stack does


MADE: WeakKeyDictionary[Transformer, Operators | None] = WeakKeyDictionary()


def operators(model: Transformer) -> Operators | None:
    """What takes whole steps of a search with this model, None where nothing does."""
    if model not in MADE:
        best = _step(model)
        MADE[model] = None if best is None else Operators(best, _reader(model.encoder))
    return MADE[model]


def _step(model: Transformer) -> Any:
    stack, head = model.decoder, model.head
    whole = stack.whole if isinstance(stack, StepStack) else None
    table = model.table if head is None or head.output is None else getattr(head.output, "weight", None)
    if whole is None or head is None or not isinstance(table, Tensor):
        return None
    unusual = head.transform is not None or head.projection is not None or head.norm is not None
    if unusual or head.teacher is not None or head.config.softcap is not None:
        return None
    if table.dtype != torch.float32 or table.device.type != "cpu" or not table.is_contiguous():
        return None
    bias = head.bias if head.bias is not None else head.fixed_bias
    given = None if bias is None else bias.detach().flatten()
    made = torch.classes.monoblock.Wide(whole.plan, table.detach(), given, head.scale)
    return made if made.fits() else None


def _reader(encoder: Stack | None) -> Any:
    if encoder is None or not all(_sees_all(block) for block in encoder.blocks):
        return None
    plan = Whole(encoder).plan
    return plan if torch.ops.monoblock.sayable(plan) else None


def _sees_all(block: Block) -> bool:
    """Whether every token of a block sees every other, and its weights are plain ones."""
    own = block.config.attention
    unusual = own.mask != "full" or own.global_tokens or own.random_blocks or own.positions is not None
    weights = [*block.parameters(), *block.buffers()]
    plain = all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in weights)
    unusual = unusual or block.cross is not None or isinstance(block.feedforward, Experts)
    return plain and not unusual and legible(block)


class Searched(Cached):
    """Rows with a cache whose searches may go by the operator."""

    def __init__(
        self, model: Transformer, capacity: int, copies: int, chunk: int | None = None, *, by: Operators
    ) -> None:
        super().__init__(model, capacity, copies, chunk)
        self.by, self.vocabulary = by, model.config.output_input.vocab  # type: ignore[union-attr]
        self.origins: Tensor | None = None  # (B, capacity); None: everything lies in its own row
        self.first: Tensor | None = None  # what rows begin with that have read nothing yet

    def enter(self, prompts: Sequence[Prompt]) -> bool:
        """Take in texts that begin with one token each and let the operator read it; False where it cannot."""
        rows = len(prompts) * self.copies
        if rows <= MOST or self.cache is not None or any(len(prompt.ids) != 1 for prompt in prompts):
            return False
        cache = self.model.make_cache(rows, self.capacity)
        cache.copies = self.copies
        self.cache = cache
        if not self._plain():
            self.cache = None
            return False
        source = self._read_sources(prompts)
        assert self.model.decoder is not None
        if source is not None:
            memory_stands(*source, cache, self.model.config.width)
        for block, slot, cross in zip(self.model.decoder.blocks, cache.slots, cache.cross, strict=True):
            if source is not None and cross is not None and block.cross is not None:
                cross.fill(*_heads(block.cross, source[0]))
            config, width = block.config.attention, block.config.width
            room = (rows, config.groups, slot.capacity + 1)
            slot.keys = torch.empty(*room, config.key_size(width))
            slot.values = torch.empty(*room, config.value_size(width))
        self.first = torch.tensor([prompt.ids[0] for prompt in prompts])
        return True

    def _read_sources(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor | None] | None:
        """The memory of all sources; their tokens are read one after the other, without the padding between them."""
        if self.by.encoder is None:
            return encoded(self.model, prompts, self.device)
        _, mask = padded([prompt.source or () for prompt in prompts], self.device)
        ids = torch.tensor([token for prompt in prompts for token in prompt.source or ()])[None]
        lengths = [len(prompt.source or ()) for prompt in prompts]
        at = torch.cat([torch.arange(length) for length in lengths])[None]
        x = self.model._embed(ids, where_stand(ids, None, at, None, None, None), None, None, side="input")
        read = torch.ops.monoblock.read(self.by.encoder, x[0].contiguous(), torch.tensor(lengths))
        if mask is None:
            return read.view(len(prompts), lengths[0], -1), None
        memory = read.new_zeros(*mask.shape, read.shape[-1])
        memory[mask] = read
        return memory, mask

    def best(self, texts: list[Beams], running: Sequence[int], without: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """The newest tokens of the running texts read: their best continuations, as `ranking.best` finds them.

        `running` are their numbers among all.  None where the operator does not take these rows.
        """
        cache = self.cache
        if cache is None or cache.batch <= MOST or cache.longest >= cache.capacity or not self._plain():
            return None
        first, self.first = self.first, None
        going = torch.tensor(running)
        rows = (going[:, None] * self.copies + torch.arange(self.copies)).flatten()
        if self.origins is None:
            self.origins = torch.arange(cache.batch)[:, None].repeat(1, cache.capacity)
        tokens = torch.tensor([token for text in texts for token in text.tokens]) if first is None else first
        sources: list[Any] = [slot for slot in cache.cross if slot is not None]
        seen = None if cache.memory is None or cache.memory.real is None else cache.memory.real.contiguous()
        found = self.by.best.best(
            self._embedded(tokens, cache.lengths[rows]),
            cache.lengths,
            going,
            self.origins,
            [slot.keys for slot in cache.slots],
            [slot.values for slot in cache.slots],
            [slot.keys for slot in sources],
            [slot.values for slot in sources],
            seen,
            sums(texts, self.device),
            torch.tensor(without, dtype=torch.long),
            self.copies,
            self.copies if first is None else 1,  # all beams of a text begin alike
            min(wanted(texts), self.copies * self.vocabulary),
        )
        whole = len(rows) == cache.batch
        self.keep(1 if whole else torch.zeros_like(cache.lengths).index_fill_(0, rows, 1))
        return found

    def _embedded(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Tokens (rows,) that stand behind so many others."""
        place = lengths[: len(tokens), None]
        if bool((lengths == lengths[0]).all()):  # one place for all, which is soon looked up
            place = place[:1]
        return self.model._embed(tokens[:, None], Where(place), None, None, side="target")[:, 0].contiguous()

    def move(self, running: Sequence[int], origins: Sequence[int]) -> None:
        """Rows of the running texts go on from these, counted among the running ones."""
        if list(origins) == list(range(len(origins))):
            return
        assert self.origins is not None
        rows = (torch.tensor(running)[:, None] * self.copies + torch.arange(self.copies)).flatten()
        self.origins[rows] = self.origins[rows[torch.tensor(origins)]]

    def _plain(self) -> bool:
        """Whether tokens lie in their order, one column after the other."""
        assert self.cache is not None
        return not self.cache.fixed and all(places.plain for places in self.cache.places.values())

    # -- others who read the cache --------------------------------------------------------------------------------

    def begin(self, prompts: Sequence[Prompt]) -> Tensor:
        self.settle()
        return super().begin(prompts)

    def ahead(self, tokens: Tensor, live: Tensor | None = None) -> Tensor:
        self.settle()
        return super().ahead(tokens, live)

    def select(self, rows: Tensor, sources: Tensor | None = None) -> None:
        self.settle()
        super().select(rows, sources)

    def settle(self) -> None:
        """Bring everything into the row it belongs to, and note where it stands."""
        cache, origins = self.cache, self.origins
        if cache is None or origins is None:
            return
        self.origins, column = None, torch.arange(cache.capacity)
        beyond = (column >= cache.lengths[:, None])[:, None, :, None]  # where nothing was written yet
        for slot in cache.slots:
            for held in (slot.keys, slot.values):
                assert held is not None
                moved = held.transpose(1, 2)[origins, column].transpose(1, 2)
                held[:, :, : cache.capacity] = moved.masked_fill(beyond, 0)
        for places in cache.places.values():
            places.settle(cache.lengths)
        cache.written = torch.maximum(cache.written, cache.lengths)


def _heads(attention: Attention, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of a source."""
    groups = attention.config.groups
    keys = attention._heads(attention.key(memory), groups, attention.key_norm)
    return keys, attention._heads(attention.value(memory), groups)
