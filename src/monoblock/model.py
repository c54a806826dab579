"""The Transformer: input -> encoder and/or decoder -> head.  Which of them exist makes the family."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from monoblock.cache import Cache
from monoblock.config import FramesConfig, ModelConfig, PatchConfig
from monoblock.embedding import Embedding, Frames, Patches, matrix_of
from monoblock.errors import ConfigError, InputError, with_article
from monoblock.heads import Head
from monoblock.initialize import initialize
from monoblock.masks import Where, run
from monoblock.reading import check_places, check_shape, memory_stands, one_of, where_stand
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
        if not isinstance(config, ModelConfig):
            raise ConfigError(f"a Transformer is built from a ModelConfig, not from {config!r:.60}; write mb.preset(…)")
        if config.quantize is not None:
            raise ConfigError(
                "weights are quantised once they are there: build with quantize=None, then mb.quantized(…)"
            )
        self.config = config
        width = config.width
        given = config.input
        self.input: Embedding | Patches | Frames
        if isinstance(given, FramesConfig):
            self.input = Frames(width, given)
        else:
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
            source_mask = one_of("source_mask", source_mask, "attention_mask", attention_mask)
            return self._both(source, target, source_mask, target_mask, positions, cache, memory, logits_at, tap)
        self._refuse(source_mask=source_mask, target_mask=target_mask, memory=memory)
        attention_mask = one_of("attention_mask", attention_mask, "a second argument", target)
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
            raise InputError(f"{with_article(self.config.family)} model decodes no memory; call model(ids)")
        where = where_stand(target, target_mask, positions, None, None, self._fitting(cache))
        memory_where = memory_stands(memory, source_mask, cache, self.config.width)
        if memory is not None and memory.shape[0] != target.shape[0]:
            raise InputError(
                f"{memory.shape[0]} sources and {target.shape[0]} targets do not go together; give as many"
            )
        x = self._embed(target, where, None, tap, side="target")
        x = self.decoder(x, where, memory=memory, memory_where=memory_where, cache=cache, tap=under(tap, "decoder"))
        return self._out(x, where, logits_at, tap)

    def make_cache(self, batch: int, capacity: int | None = None, *, chunk: int = 16) -> Cache:
        """An empty cache for `batch` rows of at most `capacity` tokens (the model's context when not given)."""
        if self.decoder is None:
            raise InputError(f"{with_article(self.config.family)} model has no decoder, so there is nothing to cache")
        capacity = capacity if capacity is not None else self.config.context
        if capacity is None:
            raise InputError("this model sets no length; say how many tokens the cache must hold: capacity=…")
        return Cache(self.decoder.config, batch=batch, capacity=capacity, chunk=chunk, device=self.device)

    @property
    def device(self) -> torch.device:
        """Where the weights are; a quantised model may hold nothing but buffers."""
        return next(itertools.chain(self.parameters(), self.buffers())).device

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
        if not isinstance(self.input, Embedding):
            self._refuse(attention_mask=mask, segments=segments, positions=positions, documents=documents)
            if isinstance(self.input, Patches):
                self.input.check(source, flags)
                x = self.input(source, flags, tap=under(tap, "input"))
            else:
                self._refuse(flags=flags)
                self.input.check(source)
                x = self.input(source, tap=under(tap, "input"))
            where = run(x.shape[1], device=x.device)
        else:
            where = where_stand(
                source, mask, positions, documents, flags, self._fitting(cache), heeds_flags=self._heeds_flags
            )
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
        if memory is not None and source is not None:
            raise InputError("source and memory were both given; memory stands for the source, so write model(None, …)")
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
        module = self.target if side == "target" and self.target is not None else self.input
        assert isinstance(module, Embedding)
        if not torch.compiler.is_compiling():
            check_shape("segments", segments, ids)
            module.check(ids, where, segments)
        shared = self.input.token if isinstance(self.input, Embedding) else None
        table = matrix_of(shared) if shared is not None else None
        return module(ids, where, segments=segments, table=table, tap=under(tap, side))

    def _refuse(self, **unheeded: Tensor | None) -> None:
        for name, given in unheeded.items():
            if given is not None:
                raise InputError(f"{name} was given, but this {self.config.family} model has no use for it; drop it")

    def _fitting(self, cache: Cache | None) -> Cache | None:
        if cache is not None and (self.decoder is None or cache.stack != self.decoder.config):
            raise InputError("this cache was made for another model; make one with model.make_cache(batch, capacity)")
        return cache

    @property
    def _heeds_flags(self) -> bool:
        blocks = [block.attention for stack in self.config.stacks.values() for block in stack.layers()]
        return any(a.mask == "prefix" or a.global_tokens for a in blocks)

    def _out(self, hidden: Tensor, where: Where, logits_at: Tensor | None, tap: Tap | None) -> Tensor:
        if logits_at is not None:
            if self.head is not None and self.head.config.kind in ("classifier", "pooled"):
                raise InputError("this head answers once for a whole sequence; leave logits_at=None")
            check_places(logits_at, hidden)
            rows = torch.arange(hidden.shape[0], device=hidden.device)[:, None]
            hidden = hidden[rows, logits_at]
        if self.head is None:
            return hidden
        return self.head(hidden, real=where.real, table=self.table, tap=under(tap, "head"))

    @property
    def table(self) -> Tensor | nn.Module | None:
        """The embedding that a tied output multiplies with."""
        owner = self.target if self.target is not None and self.target.token is not None else self.input
        return matrix_of(owner.token) if isinstance(owner, Embedding) and owner.token is not None else None

    # -- continuing a text ------------------------------------------------------------------------------------------

    def generate(
        self,
        ids: Tensor,
        *,
        max_new_tokens: int = 50,
        temperature: float = 0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        repetition_penalty: float = 1.0,
        no_repeat_ngram_size: int = 0,
        num_return_sequences: int = 1,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        attention_mask: Tensor | None = None,
        seed: int | None = None,
        use_cache: bool = True,
        **more: Any,
    ) -> Tensor:
        """The prompts and their continuations (B · num_return_sequences, T + new); greedy unless told otherwise.

        With an encoder, ids are the source and the target comes out, its start token first (`decoder_start_token_id`,
        else the padding token, else 0).  `more`: typical_p, min_new_tokens, bad_words_ids, suppress_tokens,
        begin_suppress_tokens, forced_bos_token_id, forced_eos_token_id, num_beam_groups, diversity_penalty,
        decoder_input_ids, draft (a smaller model that proposes tokens, or "8-bit": the model's own copy, on a CPU),
        prompt_lookup (so many tokens proposed from the text itself).
        """
        from monoblock.decoding.generate import generate

        given = {name: value for name, value in locals().items() if name not in ("self", "ids", "more", "generate")}
        return generate(self, ids, **given, **more)

    def stream(self, ids: Tensor, **options: Any) -> Iterator[Tensor]:
        """New tokens (B,), one step at a time; the options of `generate`."""
        from monoblock.decoding.generate import stream

        return stream(self, ids, **options)

    # -- folders --------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> Self:
        """The model in a folder: config.json and model.safetensors."""
        from monoblock.interop.folder import load_model

        return cast(Self, load_model(cls, folder, **options))

    def save_pretrained(self, folder: str | Path, *, largest: int = 5 * 10**9) -> None:
        """Write config.json and model.safetensors; what is larger than `largest` bytes in several files."""
        from monoblock.interop.folder import save_model

        save_model(self, folder, largest=largest)
