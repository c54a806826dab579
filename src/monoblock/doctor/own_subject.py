"""The subject for models of this package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monoblock.config.model import EmbeddingConfig, Learned, ModelConfig, PatchConfig
from monoblock.config.parts import SEQUENCE_HEADS
from monoblock.doctor.subject import Declared, Subject, prime_length
from monoblock.errors import InputError
from monoblock.model import Transformer
from monoblock.nn.kv_cache.cache import Cache


class _PlainAttention:
    """A tap that wants the scores, so that attention is computed step by step."""

    def wants(self, name: str) -> bool:
        return name.endswith("scores")

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        return tensor


class OwnSubject(Subject):
    """A `Transformer` of any family."""

    takes_mask = True
    takes_source_mask = True

    def __init__(self, model: Transformer, *, pad_id: int | None = None, length: int | None = None) -> None:
        super().__init__()
        config = model.config
        self.module = self.model = model
        self.name = f"{config.family} Transformer"
        self.kind = _kind(config)
        self.pad_id = pad_id
        self.declared = declare(config)
        reader = config.target or config.input if self.kind == "encoder-decoder" else config.input
        if isinstance(reader, EmbeddingConfig):
            self.vocab = reader.vocab
        elif self.kind != "vision":
            raise InputError("the doctor reads tokens or pictures; a model of audio is not examined yet")
        limits = [n for n in (config.context, length, 13 if self.is_large else None) if n is not None]
        self.length = prime_length(min(limits, default=None), _sizes(config))
        self.has_cache = config.decoder is not None and not _is_prefix(config)
        self.masks_cache = True
        self.takes_documents = self.kind in ("causal", "bidirectional") and not _is_pooled(config)
        self.takes_prefix = _is_prefix(config)
        if self.kind == "encoder-decoder":
            assert isinstance(config.input, EmbeddingConfig)
            generator = torch.Generator().manual_seed(7)
            source = torch.randint(1, config.input.vocab, (3, self.length - 2), generator=generator)
            self.source = source.to(model.device)

    def probe(self, rows: int = 3, length: int | None = None, seed: int = 0) -> Tensor:
        patches = self.model.config.input
        if not isinstance(patches, PatchConfig):
            return super().probe(rows, length, seed)
        shape = (rows, patches.channels, patches.image, patches.image)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device, self.dtype)

    def logits(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        return self._run(ids, mask, None, **options)

    def recorded_logits(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        return self._run(ids, mask, _PlainAttention(), **options)

    def _run(
        self,
        ids: Tensor,
        mask: Tensor | None,
        tap: Any,
        *,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        documents: Tensor | None = None,
        prefix: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        options: dict[str, Any] = {"tap": tap, "cache": cache}
        if self.kind == "encoder-decoder":
            source = self.sources(ids.shape[0]) if source is None else source
            return self.model(source, ids, source_mask=source_mask, target_mask=mask, **options)
        if self.kind == "vision":
            return self.model(ids, tap=tap)
        if self.takes_prefix:
            options["flags"] = prefix
        return self.model(ids, attention_mask=mask, documents=documents, **options)

    def sources(self, rows: int) -> Tensor:
        assert self.source is not None
        return self.source[:1].expand(rows, -1) if rows > len(self.source) else self.source[:rows]

    def cached(
        self, ids: Tensor, state: Any, mask: Tensor | None = None, *, recorded: bool = False
    ) -> tuple[Tensor, Any]:
        cache = self.model.make_cache(ids.shape[0], self.length + 8) if state is None else state
        new = None if mask is None else mask[:, -ids.shape[1] :]
        if new is not None and bool(new.all()):
            new = None
        logits = self._run(ids, new, _PlainAttention() if recorded else None, cache=cache)
        cache.advance(ids.shape[1] if new is None else new.sum(-1))
        return logits, cache


def _kind(config: ModelConfig) -> Any:
    kinds = {"decoder-only": "causal", "encoder-only": "bidirectional"}
    if not isinstance(config.input, EmbeddingConfig) and config.family == "encoder-only":
        raise InputError("the doctor reads tokens or pictures; a model of audio is not examined yet")
    return kinds.get(config.family, config.family)


def _is_prefix(config: ModelConfig) -> bool:
    return config.decoder is not None and any(b.attention.mask == "prefix" for b in config.decoder.layers())


def _is_pooled(config: ModelConfig) -> bool:
    return config.head is not None and config.head.kind in SEQUENCE_HEADS


def _sizes(config: ModelConfig) -> tuple[int, ...]:
    stacks = [stack for stack in (config.encoder, config.decoder) if stack is not None]
    sizes = {config.width}
    for stack in stacks:
        for block in stack.layers():
            sizes |= {block.attention.key_size(config.width), block.attention.heads, block.feedforward.hidden}
    return tuple(sizes)


def declare(config: ModelConfig) -> Declared:
    """Return what a configuration says that checks compare with."""
    stack = config.decoder or config.encoder
    assert stack is not None
    blocks = list(stack.layers())
    every = [block for part in (config.encoder, config.decoder) if part is not None for block in part.layers()]
    attentions = [a for block in every for a in (block.attention, block.cross) if a is not None]
    reader = config.target or config.input
    learned = isinstance(getattr(reader, "positions", None), Learned)
    has_positions = getattr(reader, "positions", None) is not None or any(a.positions for a in attentions)
    plain_windows = not any(block.attention.sees_beyond_window for block in blocks)
    return Declared(
        windows=tuple(block.attention.window for block in blocks) if plain_windows else None,
        scales=tuple({a.scale if a.scale is not None else a.key_size(config.width) ** -0.5 for a in attentions}),
        tied=config.tie in ("output", "three_way"),
        positions=None if has_positions else "none",
        context=config.context,
        table_offset=reader.positions.offset if learned else None,  # type: ignore[union-attr]
        post_norm=any(block.norm_place == "post" for block in every),
        num_labels=None if config.head is None else config.head.classes,
        depth=len(blocks),
    )
