"""Embed texts and images as the pooled hidden states of an encoder or decoder, and find nearest neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.errors import InputError, did_you_mean
from monoblock.inference.scheduler import check_ids
from monoblock.model import Transformer
from monoblock.nn.heads import pool
from monoblock.tasks.batching import (
    LongTextMode,
    ProgressCallback,
    average_parts,
    check_long_mode,
    enumerate_lines,
    fit_to_context,
    run_batches,
    run_image_batches,
)
from monoblock.tasks.images import Image
from monoblock.tasks.loaded_model import LoadedModel

POOLINGS = ("mean", "cls", "last")
NEAREST_BATCH = 1024  # vectors that are compared with all candidates at once


def embed_texts(
    loaded: LoadedModel,
    texts: Sequence[str | Sequence[int]],
    *,
    pooling: str | None = None,
    normalize: bool = True,
    batch: int = 64,
    long: LongTextMode = "refuse",
    lines: Sequence[int] | None = None,
    progress: ProgressCallback | None = None,
) -> Tensor:
    """Return the embeddings of texts, or of texts that are token ids already, of shape (texts, D).

    pooling: "mean" of the token vectors, or "cls" or "last", the vector of the first or last token; None uses the
        model's default. Only the last token of a decoder-only model has attended to the whole text.
    normalize: scale embeddings to length one.
    long: "refuse", "cut" or "split" a text that is longer than the context; a split text gets the mean of its parts.
    lines: the line numbers of the texts for error messages, counted from 0.
    """
    kind, model = _resolve_pooling(loaded, pooling), loaded.model
    if not isinstance(model, Transformer):
        raise InputError("an LSTM gives no embeddings; give a Transformer")
    check_long_mode(long)

    def encode(text: str | Sequence[int]) -> list[int]:
        if isinstance(text, str):
            return loaded.tokenizer.encode(text)
        check_ids(text, loaded.tokenizer.vocab_size, "text")
        return list(text)

    texts_in_parts = [fit_to_context(loaded, line, text, encode, long) for line, text in enumerate_lines(texts, lines)]

    def forward(source: Tensor, **inputs: Any) -> Tensor:
        return pool(model.encode(source, **inputs), inputs.get("attention_mask"), kind)

    rows = [row for parts in texts_in_parts for row in parts]
    outputs = iter(run_batches(loaded, rows, batch, forward, progress=progress))
    vectors = torch.stack([average_parts(parts, [next(outputs) for _ in parts]) for parts in texts_in_parts])
    return F.normalize(vectors, dim=-1) if normalize else vectors


def embed_images(
    loaded: LoadedModel, images: Sequence[Image], *, pooling: str | None = None, normalize: bool = True, batch: int = 64
) -> Tensor:
    """Return the embeddings of images, of shape (images, D); the arguments are those of `embed_texts`."""
    kind, encode = _resolve_pooling(loaded, pooling), cast(Any, loaded.model.encode)
    vectors = torch.cat(run_image_batches(loaded, images, batch, lambda pixels: pool(encode(pixels), None, kind)))
    return F.normalize(vectors, dim=-1) if normalize else vectors


def _resolve_pooling(loaded: LoadedModel, requested: str | None) -> str:
    """Return the kind of pooling for `monoblock.nn.heads.pool`; requested=None uses the kind stored with the model."""
    pooling = requested or loaded.pooling or ("mean" if loaded.model.encoder is not None else "last")
    if pooling not in POOLINGS:
        raise InputError(f"pooling={pooling!r} is not one of {', '.join(POOLINGS)}{did_you_mean(pooling, POOLINGS)}")
    return "first" if pooling == "cls" else pooling


class Neighbour(NamedTuple):
    row: int  # the index of the neighbour among the candidates
    cosine: float


def find_nearest(vectors: Tensor, candidates: Tensor, count: int) -> list[list[Neighbour]]:
    """Find the `count` candidates nearest to each vector, nearest first; ties keep the order of the candidates.

    The shape of `vectors` is (N, D), and that of `candidates` is (M, D).
    """
    queries, keys = F.normalize(vectors, dim=-1), F.normalize(candidates, dim=-1)
    neighbours = []
    for batch in queries.split(NEAREST_BATCH):
        cosines = batch @ keys.T  # (batch, M)
        order = cosines.argsort(dim=-1, descending=True, stable=True)[:, :count]
        for row, indices in zip(cosines, order.tolist(), strict=True):
            neighbours.append([Neighbour(index, row[index].item()) for index in indices])
    return neighbours
