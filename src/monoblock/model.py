"""The Transformer: input -> encoder and/or decoder -> head.  Which of them exist makes the family."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from monoblock.cache import Cache
from monoblock.config import ModelConfig, PatchConfig
from monoblock.embedding import Embedding, Patches
from monoblock.errors import InputError
from monoblock.heads import Head
from monoblock.initialize import initialize
from monoblock.masks import Where, run
from monoblock.stack import Stack
from monoblock.tap import Tap, under


class Transformer(nn.Module):
    """A plain nn.Module.  Everything a pass depends on is an argument.

    model(ids, attention_mask=None)                                      one stack
    model(source, target, source_mask=None, target_mask=None)            encoder-decoder
    model(pixels)                                                        vision
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        given = config.input
        self.input = Patches(width, given) if isinstance(given, PatchConfig) else Embedding(width, given)
        shares = config.tie in ("source_target", "three_way")
        self.target = None if config.target is None else Embedding(width, config.target, owns_tokens=not shares)
        self.encoder = Stack(config.encoder) if config.encoder is not None else None
        self.decoder = Stack(config.decoder) if config.decoder is not None else None
        self.head = Head(config) if config.head is not None else None
        initialize(self, config)

    def forward(
        self,
        source: Tensor | None,
        target: Tensor | None = None,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        flags: Tensor | None = None,
        cache: Cache | None = None,
        memory: Tensor | None = None,
        logits_at: Tensor | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Logits (B, T, V) by the head; without a head the hidden states (B, T, D).

        Masks are 1 or True for real tokens.  `documents` (B, T) numbers packed documents, `flags` marks a prefix or
        global tokens, `logits_at` (B, n) asks for some places only, `memory` (B, S, D) stands for an encoded source.
        """
        if self.encoder is not None and self.decoder is not None:
            self._refuse(segments=segments, documents=documents, flags=flags)
            source_mask = attention_mask if source_mask is None else source_mask
            return self._both(source, target, source_mask, target_mask, positions, cache, memory, logits_at, tap)
        if target is not None:  # model(ids, attention_mask)
            attention_mask = target
        if source is None:
            raise InputError("nothing was given to read; call model(ids)")
        hidden, where = self._one(source, attention_mask, segments, positions, documents, flags, cache, tap)
        return self._out(hidden, where, logits_at, tap)

    def encode(
        self,
        source: Tensor,
        attention_mask: Tensor | None = None,
        *,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        flags: Tensor | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """The encoder's hidden states (B, T, D)."""
        if self.encoder is None:
            raise InputError(f"a {self.config.family} model has no encoder; call model(ids)")
        return self._one(source, attention_mask, segments, positions, documents, flags, None, tap)[0]

    def decode(
        self,
        target: Tensor,
        memory: Tensor | None = None,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        logits_at: Tensor | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Logits of the target given an encoded source; a cache that has seen the source needs no memory."""
        if self.encoder is None or self.decoder is None:
            raise InputError(f"a {self.config.family} model decodes no memory; call model(ids)")
        where = self._where(target, target_mask, positions, None, None, cache)
        memory_where = self._memory_where(memory, source_mask, cache)
        x = self._embed(target, where, None, tap, side="target")
        x = self.decoder(x, where, memory=memory, memory_where=memory_where, cache=cache, tap=under(tap, "decoder"))
        return self._out(x, where, logits_at, tap)

    def make_cache(self, batch: int, capacity: int | None = None, *, chunk: int = 16) -> Cache:
        """An empty cache for `batch` rows of at most `capacity` tokens (the model's context when not given)."""
        if self.decoder is None:
            raise InputError(f"a {self.config.family} model has no decoder, so there is nothing to cache")
        capacity = capacity if capacity is not None else self.config.context
        if capacity is None:
            raise InputError("this model sets no length; say how many tokens the cache must hold: capacity=…")
        device = next(self.parameters()).device
        return Cache(self.decoder.config, batch=batch, capacity=capacity, chunk=chunk, device=device)

    def recompute(self, mode: bool = True) -> Self:
        """Activation checkpointing: in training, what is inside blocks is made again in backward instead of kept."""
        for stack in (self.encoder, self.decoder):
            if stack is not None:
                stack.recompute = mode
        return self

    # -- the parts of a pass --------------------------------------------------------------------------------------

    def _one(
        self,
        source: Tensor,
        mask: Tensor | None,
        segments: Tensor | None,
        positions: Tensor | None,
        documents: Tensor | None,
        flags: Tensor | None,
        cache: Cache | None,
        tap: Tap | None,
    ) -> tuple[Tensor, Where]:
        """Input and the first stack."""
        name = "encoder" if self.encoder is not None else "decoder"
        stack = self.encoder if self.encoder is not None else self.decoder
        assert stack is not None
        if cache is not None and name == "encoder":
            raise InputError("an encoder sees both sides at once and has nothing to cache; leave cache=None")
        if isinstance(self.input, Patches):
            self.input.check(source)
            x = self.input(source, tap=under(tap, "input"))
            where = run(x.shape[1], device=x.device)
        else:
            where = self._where(source, mask, positions, documents, flags, cache)
            x = self._embed(source, where, segments, tap, side="input")
        return stack(x, where, cache=cache, tap=under(tap, name)), where

    def _both(
        self,
        source: Tensor | None,
        target: Tensor | None,
        source_mask: Tensor | None,
        target_mask: Tensor | None,
        positions: Tensor | None,
        cache: Cache | None,
        memory: Tensor | None,
        logits_at: Tensor | None,
        tap: Tap | None,
    ) -> Tensor:
        if target is None:
            raise InputError(
                "an encoder-decoder needs a target: model(source, target); to read only, model.encode(source)"
            )
        seen = cache is not None and cache.memory is not None
        if memory is None and not seen:
            if source is None:
                raise InputError(
                    "an encoder-decoder needs a source: model(source, target), or memory=model.encode(source)"
                )
            memory = self.encode(source, source_mask, tap=tap)
        return self.decode(
            target, memory, source_mask, target_mask, positions=positions, cache=cache, logits_at=logits_at, tap=tap
        )

    def _embed(self, ids: Tensor, where: Where, segments: Tensor | None, tap: Tap | None, *, side: str) -> Tensor:
        assert isinstance(self.input, Embedding)
        module = self.target if side == "target" and self.target is not None else self.input
        if not torch.compiler.is_compiling():
            _check_shape("segments", segments, ids)
            module.check(ids, where, segments)
        table = self.input.token.weight if self.input.token is not None else None
        return module(ids, where, segments=segments, table=table, tap=under(tap, side))

    def _where(
        self,
        ids: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        documents: Tensor | None,
        flags: Tensor | None,
        cache: Cache | None,
    ) -> Where:
        """Where each id stands: counted over real tokens, from the cache's length on, anew in each document."""
        if ids.dim() != 2:
            raise InputError(f"ids of shape {tuple(ids.shape)} cannot be read; give (batch, length), e.g. ids[None]")
        if cache is not None and cache.batch != ids.shape[0]:
            raise InputError(f"a batch of {ids.shape[0]} rows does not fit a cache made for {cache.batch}")
        for name, given in (("positions", positions), ("documents", documents), ("flags", flags)):
            _check_shape(name, given, ids)
        if flags is not None and not self._heeds_flags:
            raise InputError("flags mark a prefix or global tokens, but no block of this model heeds them; drop them")
        real = _real(mask, ids)
        start = 0 if cache is None else cache.start
        if cache is not None and (documents is not None or cache.last()[1] is not None):
            return self._among_documents(ids, real, positions, documents, flags, cache)
        if real is None and positions is None and documents is None and start is not None:
            return Where(run(ids.shape[1], start, ids.device).at, flags=flags, start=start if flags is None else None)
        if positions is None:
            positions = _count(ids, real, documents)
            if cache is not None:
                positions = positions + cache.lengths[:, None]
        return Where(positions.expand(ids.shape[0], -1), documents, real, flags)

    def _among_documents(
        self,
        ids: Tensor,
        real: Tensor | None,
        positions: Tensor | None,
        documents: Tensor | None,
        flags: Tensor | None,
        cache: Cache,
    ) -> Where:
        """Places in documents some of which are cached: the first may go on where the cache stopped."""
        at, last = cache.last()
        last = torch.zeros_like(at) if last is None else last
        documents = last.expand(ids.shape) if documents is None else documents
        if positions is None:
            positions = _count(ids, real, documents)
            first = (documents != documents[:, :1]).cumsum(-1) == 0
            positions = positions + torch.where(first & (documents == last), at + 1, 0)
        return Where(positions, documents, real, flags)

    def _refuse(self, **unheeded: Tensor | None) -> None:
        for name, given in unheeded.items():
            if given is not None:
                raise InputError(f"an {self.config.family} model takes no {name}; drop it")

    @property
    def _heeds_flags(self) -> bool:
        blocks = [block.attention for stack in self.config.stacks.values() for block in stack.layers()]
        return any(a.mask == "prefix" or a.global_tokens for a in blocks)

    def _memory_where(self, memory: Tensor | None, mask: Tensor | None, cache: Cache | None) -> Where:
        if cache is not None and cache.memory is not None:
            return cache.memory
        if memory is None:
            raise InputError("a decoder beside an encoder looks at memory; give memory=model.encode(source)")
        where = run(memory.shape[1], device=memory.device)
        if mask is not None:
            where = Where(where.at, real=_real(mask, memory[..., 0]))
        if cache is not None:
            cache.memory = where
        return where

    def _out(self, hidden: Tensor, where: Where, logits_at: Tensor | None, tap: Tap | None) -> Tensor:
        if logits_at is not None:
            if self.head is not None and self.head.config.kind in ("classifier", "pooled"):
                raise InputError("this head answers once for a whole sequence; leave logits_at=None")
            rows = torch.arange(hidden.shape[0], device=hidden.device)[:, None]
            hidden = hidden[rows, logits_at]
        if self.head is None:
            return hidden
        owner = self.target if self.target is not None and self.target.token is not None else self.input
        table = owner.token.weight if isinstance(owner, Embedding) and owner.token is not None else None
        return self.head(hidden, real=where.real, table=table, tap=under(tap, "head"))

    # -- folders --------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> Self:
        """The model in a folder: config.json and model.safetensors."""
        from monoblock.interop.folder import load_model

        return cast(Self, load_model(cls, folder, **options))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors."""
        from monoblock.interop.folder import save_model

        save_model(self, folder)


def _check_shape(name: str, given: Tensor | None, ids: Tensor) -> None:
    if given is not None and given.shape != ids.shape:
        raise InputError(f"{name} of shape {tuple(given.shape)} do not fit tokens of shape {tuple(ids.shape)}")


def _real(mask: Tensor | None, ids: Tensor) -> Tensor | None:
    """The mask as booleans, or None where nothing is padding (looked at only where that stalls nothing)."""
    if mask is None:
        return None
    if mask.shape != ids.shape:
        raise InputError(f"a mask of shape {tuple(mask.shape)} does not fit tokens of shape {tuple(ids.shape)}")
    real = mask.bool()
    if real.device.type == "cpu" and not torch.compiler.is_compiling() and bool(real.all()):
        return None
    return real


def _count(ids: Tensor, real: Tensor | None, documents: Tensor | None) -> Tensor:
    """Places counted over real tokens, anew where a document begins."""
    ones = torch.ones_like(ids) if real is None else real.long()
    counted = ones.cumsum(-1)
    if documents is not None:
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        before = torch.where(begins, counted - ones, 0)  # tokens of earlier documents
        counted = counted - before.cummax(-1).values
    return (counted - 1).clamp(min=0)
