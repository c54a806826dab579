"""Reading what a model is given: ids, masks, documents and a cache become `Where` tokens stand, or one line says no.

Looks into tensors only where that stalls nothing: eagerly and on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monoblock.cache import Cache
from monoblock.errors import InputError
from monoblock.masks import Where, run


def where_stand(
    ids: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    documents: Tensor | None,
    flags: Tensor | None,
    cache: Cache | None,
    *,
    heeds_flags: bool = False,
) -> Where:
    """Where each id stands: counted over real tokens, from the cache's length on, anew in each document."""
    check_ids(ids)
    if cache is not None:
        check_cache(cache, ids)
    for name, given in (("positions", positions), ("documents", documents), ("flags", flags)):
        check_shape(name, given, ids)
    if flags is not None and not heeds_flags:
        raise InputError("flags mark a prefix or global tokens, but no block of this model heeds them; drop them")
    real = _real(mask, ids)
    start = 0 if cache is None else cache.start
    if cache is not None and (documents is not None or cache.documents):
        return _among_documents(ids, real, positions, documents, flags, cache)
    if real is None and positions is None and documents is None and start is not None:
        return Where(run(ids.shape[1], start, ids.device).at, flags=flags, start=start if flags is None else None)
    if positions is None:
        positions = _count(ids, real, documents)
        if cache is not None:
            positions = positions + cache.lengths[:, None]
    return Where(positions.expand(ids.shape[0], -1), documents, real, flags)


def _among_documents(
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


def memory_stands(memory: Tensor | None, mask: Tensor | None, cache: Cache | None, width: int) -> Where:
    if cache is not None and cache.memory is not None:
        return cache.memory
    if memory is None:
        raise InputError("a decoder beside an encoder looks at memory; give memory=model.encode(source)")
    if memory.dim() != 3 or memory.shape[-1] != width:
        raise InputError(f"memory of shape {tuple(memory.shape)} does not fit; give (batch, source, {width})")
    where = run(memory.shape[1], device=memory.device)
    if mask is not None:
        where = Where(where.at, real=_real(mask, memory[..., 0]))
    if cache is not None:
        cache.memory = where
    return where


def check_cache(cache: Cache, ids: Tensor) -> None:
    if cache.batch != ids.shape[0]:
        raise InputError(f"a batch of {ids.shape[0]} rows does not fit a cache made for {cache.batch}")


def check_ids(ids: Tensor) -> None:
    """One line for what cannot be token ids."""
    if not isinstance(ids, Tensor):
        raise InputError(f"ids must be a tensor, not {type(ids).__name__}; write torch.tensor(ids)")
    if ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"ids of {ids.dtype} are no token numbers; write ids.long()")
    if ids.dim() != 2 or not ids.numel():
        raise InputError(f"ids of shape {tuple(ids.shape)} cannot be read; give (batch, length), at least one token")


def one_of(name: str, given: Tensor | None, other: str, also: Tensor | None) -> Tensor | None:
    if given is not None and also is not None:
        raise InputError(f"{name} and {other} say the same thing twice; give one of them")
    return given if given is not None else also


def check_places(places: Tensor, hidden: Tensor) -> None:
    B, T, _ = hidden.shape
    if places.dim() != 2 or places.shape[0] != B or places.dtype not in (torch.int64, torch.int32):
        raise InputError(f"logits_at of shape {tuple(places.shape)} does not fit; give whole numbers (batch {B}, n)")
    if (
        places.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not -T <= int(places.min()) <= int(places.max()) < T
    ):
        raise InputError(f"logits_at names place {int(places.max())}, but there are {T}")


def check_shape(name: str, given: Tensor | None, ids: Tensor) -> None:
    if given is None:
        return
    if not isinstance(given, Tensor) or given.is_floating_point():
        raise InputError(f"{name} must be a tensor of whole numbers; write torch.tensor(…).long()")
    if given.shape != ids.shape:
        raise InputError(f"{name} of shape {tuple(given.shape)} do not fit tokens of shape {tuple(ids.shape)}")


def _real(mask: Tensor | None, ids: Tensor) -> Tensor | None:
    """The mask as booleans, or None where nothing is padding (looked at only where that stalls nothing)."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise InputError(f"a mask must be a tensor, not {type(mask).__name__}; write torch.tensor(mask)")
    if mask.shape != ids.shape:
        raise InputError(f"a mask of shape {tuple(mask.shape)} does not fit tokens of shape {tuple(ids.shape)}")
    eager = mask.device.type == "cpu" and not torch.compiler.is_compiling()
    # An additive mask would be read the wrong way round.
    if (eager or mask.is_floating_point()) and not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError("a mask says 1 or True for real tokens and 0 or False for padding; other numbers were given")
    real = mask.bool()
    if eager and bool(real.all()):
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
