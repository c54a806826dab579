"""Searches on a CPU: a step of all texts is one operator, and the search goes on in it until something else is asked.

Beams change places at every step.  The operator leaves what they remember where it was written and keeps note of it;
the cache, and the beams as `beam.py` has them, are brought in order when anything else wants to read them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from monoblock.attention import Attention
from monoblock.block import Block
from monoblock.config import Learned, Sinusoid
from monoblock.decoding.beam import Beams, Hypothesis
from monoblock.decoding.rows import Cached, Prompt, encoded, padded
from monoblock.decoding.step_cpu import MOST, StepStack, Whole, legible
from monoblock.embedding import Embedding
from monoblock.experts import Experts
from monoblock.masks import Where
from monoblock.model import Transformer
from monoblock.positions import sinusoid
from monoblock.reading import memory_stands, where_stand
from monoblock.stack import Stack

STOPS = {False: 0, True: 1, "never": 2}


class Operators(NamedTuple):
    searcher: Any  # takes the steps of searches
    embedding: Embedding | None  # what the searcher embeds like, None: tokens are embedded before
    encoder: Any  # what is read by one operator, None: as the stack does


MADE: WeakKeyDictionary[Transformer, Operators | None] = WeakKeyDictionary()


def operators(model: Transformer) -> Operators | None:
    """What takes whole steps of a search with this model, None where nothing does."""
    if model not in MADE:
        embedding = _embedding(model)
        searcher = _searcher(model, embedding)
        MADE[model] = None if searcher is None else Operators(searcher, embedding, _reader(model.encoder))
    return MADE[model]


def _embedding(model: Transformer) -> Embedding | None:
    """The embedding of what is written, where it is a table, scaled, with places added."""
    own = model.target if model.target is not None else model.input
    if not isinstance(own, Embedding) or _tokens(model, own) is None:
        return None
    return own if own.norm is None and own.projection is None and own.segment is None else None


def _tokens(model: Transformer, own: Embedding) -> Tensor | None:
    """The table that an embedding reads, its own or the source's; None where it is no plain one."""
    source = model.input.token if isinstance(model.input, Embedding) else None
    table = own.token if own.token is not None else source
    return table.weight.detach() if isinstance(table, nn.Embedding) and _fp32(table.weight) else None


def _fp32(t: Tensor) -> bool:
    return t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous()


def _places(embedding: Embedding, count: int, width: int) -> Tensor | None:
    """What an embedding adds to the tokens of the first `count` places (count, D)."""
    positions = embedding.config.positions
    if isinstance(positions, Sinusoid):
        return sinusoid(torch.arange(count), width, positions)
    if isinstance(positions, Learned) and embedding.position is not None:
        return embedding.position.weight.detach()[positions.offset :][:count]
    return None


def _searcher(model: Transformer, embedding: Embedding | None) -> Any:
    stack, head = model.decoder, model.head
    whole = stack.whole if isinstance(stack, StepStack) else None
    table = model.table if head is None or head.output is None else getattr(head.output, "weight", None)
    if whole is None or head is None or not isinstance(table, Tensor) or not _fp32(table):
        return None
    unusual = head.transform is not None or head.projection is not None or head.norm is not None
    if unusual or head.teacher is not None or head.config.softcap is not None:
        return None
    bias = head.bias if head.bias is not None else head.fixed_bias
    given = None if bias is None else bias.detach().flatten()
    if given is not None and not _fp32(given):
        return None
    tokens, scale = (None, 1.0) if embedding is None else (_tokens(model, embedding), embedding.scale)
    made = torch.classes.monoblock.Searcher(whole.plan, table.detach(), given, head.scale, tokens, scale)
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
    plain = all(_fp32(t) for t in (*block.parameters(), *block.buffers()))
    unusual = unusual or block.cross is not None or isinstance(block.feedforward, Experts)
    return plain and not unusual and legible(block)


class Searched(Cached):
    """Rows with a cache whose searches may go by the operator."""

    def __init__(
        self, model: Transformer, capacity: int, copies: int, chunk: int | None = None, *, by: Operators
    ) -> None:
        super().__init__(model, capacity, copies, chunk)
        self.by = by
        self.search: Any = None  # the operator while it searches
        self.embeds = False  # whether it embeds tokens by itself
        self.texts: list[Beams] = []  # what it searches for
        self.firsts: list[int] | None = None  # what texts begin with that have read nothing yet

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
        for block, cross in zip(self.model.decoder.blocks, cache.cross, strict=True):
            if source is not None and cross is not None and block.cross is not None:
                cross.fill(*_heads(block.cross, source[0]))
        self._make_room(rows)
        self.firsts = [prompt.ids[0] for prompt in prompts]
        return True

    def _make_room(self, rows: int) -> None:
        """Keys and values yet to be written: what is written in one step lies side by side."""
        assert self.cache is not None
        assert self.model.decoder is not None
        wanted: list[tuple[Any, str, tuple[int, ...]]] = []
        for block, slot in zip(self.model.decoder.blocks, self.cache.slots, strict=True):
            config, width = block.config.attention, block.config.width
            for name, size in (("keys", config.key_size(width)), ("values", config.value_size(width))):
                wanted.append((slot, name, (slot.capacity + 1, rows, config.groups, size)))
        sizes = [math.prod(shape) for *_, shape in wanted]
        parts = self.by.searcher.room(sum(sizes))[: sum(sizes)].split(sizes)
        for (slot, name, shape), part in zip(wanted, parts, strict=True):
            setattr(slot, name, part.view(shape).permute(1, 2, 0, 3))

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

    def advance(self, texts: list[Beams], without: Sequence[int]) -> list[int] | None:
        """The newest tokens of all texts that are not done read, and their beams continued; the texts now done.

        None where the operator does not take these rows.
        """
        if self.search is None and not self._begun(texts):
            return None
        x = None if self.embeds else self._embedded(*self.search.newest())
        over: list[int] = self.search.step(x, without)
        for text in texts:
            text.length += not text.done
        for number in over:
            group = texts[number].groups[0]
            group.running, group.ended = (_hypotheses(*some) for some in self.search.text(number))
            group.done = True
        return over

    def _begun(self, texts: list[Beams]) -> bool:
        """Hand the search over to the operator."""
        cache = self.cache
        if cache is None or cache.batch <= MOST or cache.longest >= cache.capacity or not self._plain():
            return False
        sources: list[Any] = [slot for slot in cache.cross if slot is not None]
        memory, asked = cache.memory, texts[0].settings
        own, places = self.by.embedding, None
        if own is not None:
            places = _places(own, cache.capacity, self.model.config.width)
        self.embeds = own is not None and (places is None or len(places) == cache.capacity)
        self.search = torch.classes.monoblock.Search(
            self.by.searcher,
            [slot.keys for slot in cache.slots],
            [slot.values for slot in cache.slots],
            [slot.keys for slot in sources],
            [slot.values for slot in sources],
            None if memory is None or memory.real is None else memory.real.contiguous(),
            cache.lengths,
            places if self.embeds else None,
            [self.copies, asked.max_new_tokens, STOPS[asked.early_stopping], *asked.eos_token_id],
            float(asked.length_penalty),
        )
        firsts, self.firsts = self.firsts or [0] * len(texts), None
        for first, text in zip(firsts, texts, strict=True):
            running, ended = text.groups[0].running, text.groups[0].ended
            self.search.add(
                first,
                [beam.score for beam in running],
                torch.tensor([beam.tokens for beam in running], dtype=torch.long),
                [beam.score for beam in ended],
                [torch.tensor(beam.tokens) for beam in ended],
                text.done,
            )
        self.texts = texts
        return True

    def _embedded(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Tokens (rows,) that stand behind so many others."""
        return self.model._embed(tokens[:, None], Where(lengths[:, None]), None, None, side="target")[:, 0].contiguous()

    def _plain(self) -> bool:
        """Whether tokens lie in their order, one column after the other."""
        assert self.cache is not None
        return not self.cache.fixed and all(places.plain for places in self.cache.places.values())

    # -- others who read the cache and the beams ------------------------------------------------------------------

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
        """Take the search back from the operator: every key and value into the row it belongs to, and the beams."""
        cache, search = self.cache, self.search
        if cache is None or search is None:
            return
        self.search = None
        for number, text in enumerate(self.texts):
            if not text.done:
                running, ended = search.text(number)
                text.groups[0].running, text.groups[0].ended = _hypotheses(*running), _hypotheses(*ended)
        cache.advance(search.lengths() - cache.lengths)
        origins, column = search.origins(), torch.arange(cache.capacity)
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


def _hypotheses(scores: list[float], texts: list[Tensor]) -> list[Hypothesis]:
    return [Hypothesis(tuple(text.tolist()), score) for score, text in zip(scores, texts, strict=True)]
