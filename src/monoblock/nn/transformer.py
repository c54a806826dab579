"""The Transformer: an input, an encoder or a decoder or both, and a head; the stacks it has decide its family."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from monoblock.config.model import ModelConfig
from monoblock.config.parts import SEQUENCE_HEADS, CheckpointMode
from monoblock.errors import ConfigError, InputError, with_article
from monoblock.nn.arguments import (
    Documents,
    check_cache,
    check_documents,
    check_shape,
    check_sources,
    check_target,
    either_argument,
    memory_positions,
    reject_arguments,
    select_tokens,
    token_positions,
)
from monoblock.nn.block import Block
from monoblock.nn.cache import Cache
from monoblock.nn.embedding import Embedding, PatchEmbedding, build_input, tied_table
from monoblock.nn.heads import Head, OutputLinear
from monoblock.nn.initialize import initialize
from monoblock.nn.masks import TokenPositions, arange_positions
from monoblock.nn.packed_documents import DocumentRows
from monoblock.nn.stack import Stack
from monoblock.nn.tap import Tap, prefix_tap


class Transformer(nn.Module):
    """A Transformer of any family; a forward pass depends on its arguments and the weights only.

    model(ids, attention_mask=None)                                      one stack
    model(source, target, source_mask=None, target_mask=None)            encoder-decoder
    model(pixels)                                                        vision
    """

    block_class: type[Block] = Block  # a subclass of Transformer may build its stacks from another block
    loaded_from: Path | None = None  # the folder or file of a loaded model; what lies there is saved with the model
    # None in a family without this part; Any, because the caller knows the family: `model.decoder.blocks`
    encoder: Stack | Any
    decoder: Stack | Any
    head: Head | Any

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise ConfigError(
                f"a Transformer is built from a ModelConfig, not from {config!r:.60}; get one with mb.preset(name)"
            )
        if config.quantize is not None:
            raise ConfigError(
                "a model is quantized after it is built; build it with quantize=None, then call mb.quantize(…)"
            )
        self.config = config
        width = config.width
        self.input = build_input(width, config.input)
        is_tied = config.tie in ("source_target", "three_way")
        self.target = None if config.target is None else Embedding(width, config.target, owns_tokens=not is_tied)
        self.encoder = Stack(config.encoder, self.block_class) if config.encoder is not None else None
        self.decoder = Stack(config.decoder, self.block_class) if config.decoder is not None else None
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
        documents: Documents | None = None,
        source_documents: Documents | None = None,
        target_documents: Documents | None = None,
        flags: Tensor | None = None,
        cache: Cache | None = None,
        memory: Tensor | None = None,
        logits_at: Tensor | None = None,
        output_linear: OutputLinear | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Return the logits of the head, (B, T, V) for a language model, or the hidden states (B, T, D) without a head.

        Masks are 1 or True for real tokens and 0 or False for padding.  `documents` (B, T) numbers packed documents, or
        is a `PackedDocuments`; an encoder-decoder has them for the source and the target.  `flags` (B, T) marks a
        prefix or global tokens, `logits_at` (B, n) selects the tokens to compute logits for, and `memory` (B, S, D) is
        an encoded source.  `output_linear` replaces the last matrix product (see `Head.forward`).
        """
        if self.encoder is not None and self.decoder is not None:
            reject_arguments(self.config, segments=segments, flags=flags)
            if documents is not None:
                raise InputError(
                    "an encoder-decoder has two texts; give source_documents and target_documents, not documents"
                )
            source_mask = either_argument("source_mask", source_mask, "attention_mask", attention_mask)
            is_cached = cache is not None and cache.memory_positions is not None
            target = check_target(source, target, memory, is_cached)
            if source is not None and not is_cached:
                memory = self.encode(source, source_mask, documents=source_documents, tap=tap)
            options: dict[str, Any] = {"positions": positions, "cache": cache, "logits_at": logits_at, "tap": tap}
            options |= {"source_documents": source_documents, "target_documents": target_documents}
            return self.decode(target, memory, source_mask, target_mask, output_linear=output_linear, **options)
        unused: dict[str, Any] = {"source_mask": source_mask, "target_mask": target_mask, "memory": memory}
        unused |= {"source_documents": source_documents, "target_documents": target_documents}
        reject_arguments(self.config, **unused)
        attention_mask = either_argument("attention_mask", attention_mask, "a second argument", target)
        if source is None:
            raise InputError("ids are missing; call model(ids)")
        arguments = {"segments": segments, "positions": positions, "documents": documents, "flags": flags}
        hidden, input_positions = self._run_stack(source, attention_mask, cache, tap, **arguments)
        return self._apply_head(hidden, input_positions, logits_at, tap, output_linear=output_linear)

    if TYPE_CHECKING:  # nn.Module types a call as Any
        __call__ = forward

    def encode(
        self,
        source: Tensor,
        attention_mask: Tensor | None = None,
        *,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        flags: Tensor | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Return the hidden states (B, T, D) of the encoder or, in a decoder-only model, of the decoder."""
        arguments = {"segments": segments, "positions": positions, "documents": documents, "flags": flags}
        return self._run_stack(source, attention_mask, None, tap, **arguments)[0]

    def decode(
        self,
        target: Tensor,
        memory: Tensor | None = None,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        source_documents: Documents | None = None,
        target_documents: Documents | None = None,
        cache: Cache | None = None,
        logits_at: Tensor | None = None,
        output_linear: OutputLinear | None = None,
        tap: Tap | None = None,
    ) -> Tensor:
        """Return the logits of a target (B, T), given the encoded source.

        It is given as `memory` (B, S, D), or by a cache that was used with it before.
        """
        if self.encoder is None or self.decoder is None:
            raise InputError(f"{with_article(self.config.family)} model has no decode method; call model(ids)")
        check_cache(cache, self.decoder.config)
        check_documents(source_documents, target_documents, cache)
        target_positions = token_positions(target, target_mask, positions, target_documents, None, cache)
        source_positions = memory_positions(memory, source_mask, cache, self.config.width, source_documents)
        check_sources(memory, target)
        x = self._embed(target, target_positions, None, tap, side="target")
        x = self.decoder(
            x,
            target_positions,
            memory=memory,
            memory_positions=source_positions,
            cache=cache,
            tap=prefix_tap(tap, "decoder"),
        )
        return self._apply_head(x, target_positions, logits_at, tap, output_linear=output_linear)

    def make_cache(self, batch: int, capacity: int | None = None, *, chunk: int = 16) -> Cache:
        """Make an empty cache for `batch` rows of at most `capacity` tokens, by default the model's context."""
        if self.decoder is None:
            raise InputError(f"{with_article(self.config.family)} model has no decoder, so there is nothing to cache")
        capacity = capacity if capacity is not None else self.config.context
        if capacity is None:
            raise InputError("this model has no context length; give the number of tokens to cache: capacity=…")
        return Cache(self.decoder.config, batch=batch, capacity=capacity, chunk=chunk, device=self.device)

    @property
    def device(self) -> torch.device:
        """The device of the weights; a quantized model may have no parameters, only buffers."""
        return next(itertools.chain(self.parameters(), self.buffers())).device

    def recompute(self, mode: CheckpointMode = True) -> Self:
        """Choose activation checkpointing: how much of each block training recomputes in the backward pass."""
        for stack in self._stacks:
            stack.recompute = mode
        return self

    @property
    def _stacks(self) -> list[Stack]:
        return [stack for stack in (self.encoder, self.decoder) if stack is not None]

    # -- steps of a forward pass ----------------------------------------------------------------------------------

    def _run_stack(
        self, source: Tensor, mask: Tensor | None, cache: Cache | None, tap: Tap | None, **arguments: Any
    ) -> tuple[Tensor, TokenPositions]:
        """Run the input embedding and the first stack; return the hidden states (B, T, D) and token positions."""
        stack, name = self._stacks[0], "encoder" if self.encoder is not None else "decoder"
        if cache is not None and name == "encoder":
            raise InputError("an encoder reads all tokens at once and has nothing to cache; leave cache=None")
        check_cache(cache, stack.config)
        x, input_positions = self._embed_source(source, mask, cache=cache, tap=tap, **arguments)
        return stack(x, input_positions, cache=cache, tap=prefix_tap(tap, name)), input_positions

    def _embed_source(
        self,
        source: Tensor,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        flags: Tensor | None = None,
        cache: Cache | None = None,
        tap: Tap | None = None,
    ) -> tuple[Tensor, TokenPositions]:
        """Run the input embedding; return the first hidden states (B, T, D) and the token positions."""
        if isinstance(self.input, Embedding):
            input_positions = token_positions(
                source, mask, positions, documents, flags, cache, uses_flags=any(s.uses_flags for s in self._stacks)
            )
            return self._embed(source, input_positions, segments, tap, side="input"), input_positions
        unused = {"attention_mask": mask, "segments": segments, "positions": positions, "documents": documents}
        reject_arguments(self.config, **unused)
        if isinstance(self.input, PatchEmbedding):
            self.input.check_inputs(source, flags)
            x = self.input(source, flags, tap=prefix_tap(tap, "input"))
        else:
            reject_arguments(self.config, flags=flags)
            self.input.check_inputs(source)
            x = self.input(source, tap=prefix_tap(tap, "input"))
        return x, arange_positions(x.shape[1], device=x.device)

    def _embed(
        self, ids: Tensor, positions: TokenPositions, segments: Tensor | None, tap: Tap | None, *, side: str
    ) -> Tensor:
        module = self.target if side == "target" and self.target is not None else self.input
        assert isinstance(module, Embedding)
        if not torch.compiler.is_compiling():
            check_shape("segments", segments, ids)
            module.check_inputs(ids, positions, segments)
        tied_token = self.input.token if isinstance(self.input, Embedding) else None
        return module(ids, positions, segments=segments, tied_token=tied_token, tap=prefix_tap(tap, side))

    def _apply_head(
        self, hidden: Tensor, positions: TokenPositions, logits_at: Tensor | None, tap: Tap | None, **options: Any
    ) -> Tensor:
        if logits_at is not None:
            hidden = select_tokens(hidden, logits_at, self.config.head)
        if self.head is None:
            return hidden
        if positions.packed is not None and self.head.config.kind in SEQUENCE_HEADS:
            hidden = DocumentRows(positions.packed).to_rows(hidden.squeeze(0))
            positions = positions.as_rows()
        options = {name: value for name, value in options.items() if value is not None}  # a head need not have them
        return self.head(
            hidden, valid=positions.valid, table=self.output_embedding, tap=prefix_tap(tap, "head"), **options
        )

    @property
    def output_embedding(self) -> Tensor | nn.Module | None:
        """The token embedding that a tied output uses as its matrix, or None if the model reads no tokens."""
        owner = self.target if self.target is not None and self.target.token is not None else self.input
        return tied_table(owner.token) if isinstance(owner, Embedding) and owner.token is not None else None
