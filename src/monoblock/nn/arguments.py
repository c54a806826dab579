"""The arguments of a model: check them, and compute the positions of tokens from them.

Each failure is one line that says what to write instead.  The values of tensors are read only where that is possible
and costs little (see `can_read_values`).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from monoblock.config.model import HeadConfig, ModelConfig, StackConfig
from monoblock.config.parts import SEQUENCE_HEADS
from monoblock.errors import InputError, with_article
from monoblock.nn.cache import Cache
from monoblock.nn.masks import TokenPositions, arange_positions
from monoblock.nn.packed_documents import PackedDocuments

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
        for name, value in (("mask", mask), ("positions", positions), ("cache", cache)):
            if value is not None:
                raise InputError(f"{name} cannot be used with PackedDocuments; drop it, or give documents as a tensor")
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


# -- checks --------------------------------------------------------------------------------------------------------


INTEGER_DTYPES = (torch.int64, torch.int32)


def can_read_values(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be read at little cost: on a CPU, not compiled, not in torch.func."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not _is_transformed()


def _is_transformed() -> bool:
    """Return whether a transform of torch.func is active; vmap does not allow the values of a tensor to be read."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def reject_arguments(config: ModelConfig, **arguments: object) -> None:
    """Raise InputError if an argument is given that a model of this family does not use."""
    for name, value in arguments.items():
        if value is not None:
            raise InputError(f"{name} was given, but this {config.family} model does not take it; drop it")


def check_documents(
    source: Tensor | PackedDocuments | None, target: Tensor | PackedDocuments | None, cache: Cache | None
) -> None:
    """Check that both sides of an encoder-decoder are packed alike, and that packed documents are not cached."""
    if source is None and target is None:
        return
    if type(source) is not type(target):
        raise InputError(
            "an encoder-decoder needs the documents of both sides, both as a tensor or both as PackedDocuments; give "
            "source_documents and target_documents"
        )
    if isinstance(source, PackedDocuments) and isinstance(target, PackedDocuments):
        counts = source.num_documents(), target.num_documents()
        if counts[0] != counts[1]:
            raise InputError(f"there are {counts[0]} source documents but {counts[1]} target documents; give as many")
    if cache is not None:
        raise InputError("an encoder-decoder cannot cache packed documents; give each its own row, or cache=None")


def either_argument(name: str, value: Tensor | None, other_name: str, other_value: Tensor | None) -> Tensor | None:
    """Return whichever of two arguments with the same meaning was given, or None; raise InputError if both were."""
    if value is not None and other_value is not None:
        raise InputError(f"{name} and {other_name} mean the same; give only one of them")
    return value if value is not None else other_value


def check_target(source: Tensor | None, target: Tensor | None, memory: Tensor | None, is_cached: bool) -> Tensor:
    """Return the target of an encoder-decoder; raise InputError if the target or the source is missing.

    The source is given as ids, as encoded `memory` or by the cache, but not as both ids and memory.
    """
    if target is None:
        raise InputError(
            "an encoder-decoder needs a target; write model(source, target), or model.encode(source) to encode only"
        )
    if memory is not None and source is not None:
        raise InputError(
            "source and memory were both given, but memory is the encoded source; "
            "write model(source, target), or model(None, target, memory=memory)"
        )
    if memory is None and source is None and not is_cached:
        raise InputError(
            "an encoder-decoder needs a source; write model(source, target), "
            "or model(None, target, memory=model.encode(source))"
        )
    return target


def check_sources(memory: Tensor | None, target: Tensor) -> None:
    if memory is not None and memory.shape[0] != target.shape[0]:
        raise InputError(
            f"there are {memory.shape[0]} sources but {target.shape[0]} targets; give one source for each target"
        )


def check_cache(cache: Cache | None, stack_config: StackConfig) -> None:
    if cache is not None and cache.stack_config != stack_config:
        raise InputError("this cache was made for another model; make a new one with model.make_cache(batch, capacity)")


def check_ids(ids: Tensor) -> None:
    if not isinstance(ids, Tensor):
        raise InputError(f"ids must be a tensor, not {type(ids).__name__}; write torch.tensor(ids)")
    if ids.dtype not in INTEGER_DTYPES:
        raise InputError(f"ids have dtype {ids.dtype}, but token ids are integers; write ids.long()")
    if ids.dim() != 2 or not ids.numel():
        raise InputError(f"ids have shape {tuple(ids.shape)}; give (batch, length), with at least one token")


def check_batch(cache: Cache, ids: Tensor) -> None:
    if len(cache.lengths) != ids.shape[0]:
        raise InputError(
            f"a batch of {ids.shape[0]} rows does not fit a cache made for {len(cache.lengths)}; "
            f"make another cache with model.make_cache(batch={ids.shape[0]})"
        )


def check_shape(name: str, tensor: Tensor | None, ids: Tensor) -> None:
    """Check that an optional tensor, such as positions, has whole numbers and the shape of ids (B, T)."""
    if tensor is None:
        return
    if not isinstance(tensor, Tensor) or tensor.is_floating_point():
        raise InputError(f"{name} must be a tensor of whole numbers; write torch.tensor(…).long()")
    if tensor.shape != ids.shape:
        raise InputError(
            f"{name} of shape {tuple(tensor.shape)} do not fit ids of shape {tuple(ids.shape)}; give one for each id"
        )


def select_tokens(hidden: Tensor, logits_at: Tensor, head: HeadConfig | None) -> Tensor:
    """Return the hidden states (B, n, D) of the tokens with the indices `logits_at` (B, n), after checking these."""
    if head is not None and head.kind in SEQUENCE_HEADS:
        raise InputError("the head of this model gives one output for a sequence; leave logits_at=None")
    B, T, _ = hidden.shape
    if logits_at.dim() != 2 or logits_at.shape[0] != B or logits_at.dtype not in INTEGER_DTYPES:
        raise InputError(
            f"logits_at has shape {tuple(logits_at.shape)} and dtype {logits_at.dtype}; give whole numbers of shape "
            f"({B}, n), the indices of n tokens in each row"
        )
    if can_read_values(logits_at):
        low, high = int(logits_at.min()), int(logits_at.max())
        if not -T <= low <= high < T:
            wrong = low if low < -T else high
            raise InputError(f"logits_at holds {wrong}, but there are {T} tokens; give indices from {-T} to {T - 1}")
    return hidden[torch.arange(B, device=hidden.device)[:, None], logits_at]


def valid_mask(mask: Tensor | None, ids: Tensor) -> Tensor | None:
    """Check a padding mask (B, T) and return it as booleans, or None if it is on a CPU and masks nothing."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise InputError(f"a mask must be a tensor, not {type(mask).__name__}; write torch.tensor(mask)")
    if mask.shape != ids.shape:
        raise InputError(
            f"a mask of shape {tuple(mask.shape)} does not fit ids of shape {tuple(ids.shape)}; "
            "give a 1 or 0 for each id"
        )
    readable = can_read_values(mask)
    # An additive mask (0 for tokens, -inf for padding) would be understood the wrong way round.
    is_checked = readable or (mask.is_floating_point() and not _is_transformed())
    if is_checked and not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError("the mask has values other than 0 and 1; write 1 for real tokens and 0 for padding")
    valid = mask.bool()
    return None if readable and bool(valid.all()) else valid


# -- models --------------------------------------------------------------------------------------------------------


WRAPPERS = ("model", "module", "_orig_mod")  # where a pipeline, DistributedDataParallel and torch.compile keep a model
ADVICE = "give mb.load(folder).model or mb.Transformer(config)"


def check_model(
    value: object, kinds: type[nn.Module] | tuple[type[nn.Module], ...], function: str, *, also: str = ""
) -> None:
    """Raise InputError unless `value` is a model of one of `kinds`; the message says which `function` takes.

    also: what else the function takes, such as "the name of a preset".
    """
    if isinstance(value, kinds):
        return
    names = [with_article(kind.__name__) for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
    names += [also] * bool(also)
    raise InputError(f"{function} takes {' or '.join(names)}, but got {describe(value)}; {_advice(value, kinds)}")


def describe(value: object) -> str:
    """Say what an argument is, in a few words: "the text 'gpt2'", "the class Transformer", "a Linear", "None"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str | Path):
        return f"the text {str(value)!r:.60}"
    return with_article(type(value).__name__)


def _advice(value: object, kinds: type[nn.Module] | tuple[type[nn.Module], ...]) -> str:
    if isinstance(value, type):
        return f"give an instance, such as {value.__name__}(…)"
    if isinstance(value, str | Path):
        return f"load it first: mb.load({str(value)!r:.60}).model"
    if isinstance(value, ModelConfig):
        return "build the model first: mb.Transformer(config)"
    if hasattr(value, "to_monoblock"):
        return "write model.to_monoblock()"
    inner = next((name for name in WRAPPERS if isinstance(getattr(value, name, None), kinds)), None)
    return ADVICE if inner is None else f"write its attribute .{inner}"
