"""Compute `TokenPositions` from the arguments of a model: ids, mask, positions, documents, flags and cache."""

from __future__ import annotations

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.nn.inputs.check_inputs import check_batch, check_ids, check_shape, reject_with_packed, valid_mask
from monoblock.nn.kv_cache.cache import Cache
from monoblock.nn.packed.documents import PackedDocuments
from monoblock.nn.token_positions import TokenPositions, arange_positions

Documents = Tensor | PackedDocuments  # the number of each token's document (B, T), or where documents begin in one row


def token_positions(
    ids: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    documents: Documents | None,
    flags: Tensor | None,
    cache: Cache | None,
    *,
    uses_flags: bool = False,
) -> TokenPositions:
    """Check the arguments, each (B, T), and return the position of every token.

    Unless `positions` are given, they count valid tokens, continue after the tokens in the cache, and start at 0 in
    each document.
    """
    check_ids(ids)
    if cache is not None:
        check_batch(cache, ids)
    numbers = documents.numbers if isinstance(documents, PackedDocuments) else documents
    for name, tensor in (("positions", positions), ("documents", numbers), ("flags", flags)):
        check_shape(name, tensor, ids)
    if flags is not None and not uses_flags:
        raise InputError("flags mark a prefix or global tokens, but no block of this model uses them; drop them")
    if isinstance(documents, PackedDocuments):
        reject_with_packed(mask=mask, positions=positions, cache=cache)
        return TokenPositions(documents.positions(), documents.numbers, prefix_or_global=flags, packed=documents)
    valid = valid_mask(mask, ids)
    start = 0 if cache is None else cache.common_length
    if cache is not None and (documents is not None or cache.has_documents):
        return _positions_in_documents(ids, valid, positions, documents, flags, cache)
    if valid is None and positions is None and documents is None and start is not None:
        return TokenPositions(
            arange_positions(ids.shape[1], start, ids.device).positions,
            prefix_or_global=flags,
            start=start if flags is None else None,
        )
    if positions is None:
        positions = _count_positions(ids, valid, documents)
        if cache is not None:
            positions = positions + cache.lengths[:, None]
    return TokenPositions(positions.expand(ids.shape[0], -1), documents, valid, flags)


def memory_positions(
    memory: Tensor | None, mask: Tensor | None, cache: Cache | None, width: int, documents: Documents | None = None
) -> TokenPositions:
    """Return the positions of the encoded source, `memory` (B, S, D); after the first pass they are in the cache."""
    if cache is not None and cache.memory_positions is not None:
        return cache.memory_positions
    if memory is None:
        raise InputError(
            "memory is missing: the decoder of an encoder-decoder attends to memory; give memory=model.encode(source)"
        )
    if memory.dim() != 3 or memory.shape[-1] != width:
        raise InputError(
            f"memory has shape {tuple(memory.shape)}; give an encoded source of shape (batch, source length, {width})"
        )
    positions = arange_positions(memory.shape[1], device=memory.device)
    packed, numbers = (documents, documents.numbers) if isinstance(documents, PackedDocuments) else (None, documents)
    if mask is not None or numbers is not None:
        check_shape("source_documents", numbers, memory[..., 0])
        valid = valid_mask(mask, memory[..., 0])
        positions = TokenPositions(positions.positions, numbers, valid, packed=packed)
    if cache is not None:
        cache.memory_positions = positions
    return positions


def _positions_in_documents(
    ids: Tensor,
    valid: Tensor | None,
    positions: Tensor | None,
    documents: Tensor | None,
    flags: Tensor | None,
    cache: Cache,
) -> TokenPositions:
    """Return positions in packed documents; the first of them may continue the last document in the cache."""
    last_position, last_document = cache.last_positions()
    last_document = torch.zeros_like(last_position) if last_document is None else last_document
    documents = last_document.expand(ids.shape) if documents is None else documents
    if positions is None:
        positions = _count_positions(ids, valid, documents)
        is_first = (documents != documents[:, :1]).cumsum(-1) == 0
        positions = positions + torch.where(is_first & (documents == last_document), last_position + 1, 0)
    return TokenPositions(positions, documents, valid, flags)


def _count_positions(ids: Tensor, valid: Tensor | None, documents: Tensor | None) -> Tensor:
    """Number the valid tokens of each row from 0, starting again at each document."""
    if valid is None and documents is None:
        return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    ones = torch.ones_like(ids) if valid is None else valid.long()
    counts = ones.cumsum(-1)
    if documents is not None:
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        before = torch.where(begins, counts - ones, 0)  # tokens of earlier documents
        counts = counts - before.cummax(-1).values
    return (counts - 1).clamp(min=0)
