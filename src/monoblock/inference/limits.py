"""What a model accepts as a prompt, and how much fits into memory at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from monoblock.config.inputs import EmbeddingConfig
from monoblock.config.positions import Learned
from monoblock.errors import InputError, with_article
from monoblock.inference.prepared_model import GenerativeModel, PreparedModel
from monoblock.nn.arguments import check_model
from monoblock.nn.kv_cache.paged import PAGE_SIZE, token_bytes
from monoblock.nn.transformer import Transformer

MAX_CPU_BYTES = 8 << 30  # of the key/value cache
CPU_ROWS = 512  # each beam counts as one
MAX_GPU_ROWS = 2560  # of a small model, the fastest measured on an H200 with 5 beams; fewer leave the GPU idle
MEMORY_SHARE = 0.4  # of the free memory of the GPU, for caches and logits


def default_max_rows(model: Transformer, capacity: int) -> int:
    """Return how many sequences of at most `capacity` tokens to decode at the same time.

    On a GPU these are as many as fit into its free memory, at least one and at most MAX_GPU_ROWS.
    """
    if model.device.type != "cuda":
        return CPU_ROWS
    free, _ = torch.cuda.mem_get_info(model.device)
    free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    fitting = int(MEMORY_SHARE * free / row_bytes(model, capacity))
    return max(1, min(MAX_GPU_ROWS, fitting))


def row_bytes(model: Transformer, capacity: int) -> int:
    """Return an estimate of the memory of one row in bytes: its keys and values, and three copies of its logits."""
    assert model.decoder is not None
    vocab: int = model.config.target_input.vocab  # type: ignore[union-attr]
    return token_bytes(model.decoder.config, next(model.parameters()).element_size()) * capacity + 3 * 4 * vocab


def default_num_pages(models: Sequence[GenerativeModel], capacity: int, max_rows: int) -> int:
    """Return the number of pages with which `max_rows` rows of `capacity` tokens run, or as many as fit into memory.

    It is an upper limit: the memory of pages is taken when they are first used.  One full row always fits.
    """
    full = -(-capacity // PAGE_SIZE) + 2
    budget = MAX_CPU_BYTES
    if models[0].device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(models[0].device)
        budget = int(MEMORY_SHARE * free)
    plain = [model.plain if isinstance(model, PreparedModel) else model for model in models]
    size = sum(row_bytes(model, PAGE_SIZE) for model in plain)
    return 1 + max(full, min(max_rows * full, budget // size))


class ModelLimits(NamedTuple):
    """What a model, or several that decode together, accept as a prompt."""

    family: str  # such as "decoder-only", for error texts
    device: torch.device
    vocab_size: int
    context: int | None  # the most tokens of a sequence, None for no limit
    has_encoder: bool  # whether a prompt needs a source
    source_vocab_size: int | None  # None if there is no encoder, or if it does not read tokens
    max_source: int | None  # the most tokens of a source, None for no limit


def limits_of(model: GenerativeModel) -> ModelLimits:
    """Return the limits of a model that generates text."""
    if not isinstance(model, PreparedModel):
        check_model(model, Transformer, "Engine", also="what mb.optimize(model) returns")
    plain = model.plain if isinstance(model, PreparedModel) else model
    if plain.decoder is None or plain.head is None or plain.head.config.kind != "language_model":
        kind = with_article(model.config.family)
        raise InputError(f"{kind} model without a language-model head generates no text; use a model with one")
    config, has_encoder = plain.config, plain.encoder is not None
    source_vocab_size = max_source = None
    if has_encoder and isinstance(config.input, EmbeddingConfig):
        source_vocab_size = config.input.vocab
        max_source = config.input.context if isinstance(config.input.positions, Learned) else None
    vocab_size: int = config.target_input.vocab  # type: ignore[union-attr]
    limits = (vocab_size, config.context, has_encoder, source_vocab_size, max_source)
    return ModelLimits(config.family, plain.device, *limits)


def combine_limits(members: Sequence[ModelLimits]) -> ModelLimits:
    """Return the limits of models that decode the same rows."""
    first = members[0]
    for number, member in enumerate(members[1:], 2):
        for name, what in (("vocab_size", "a vocabulary of"), ("source_vocab_size", "a source vocabulary of")):
            if getattr(member, name) != getattr(first, name):
                raise InputError(
                    f"model {number} of the ensemble has {what} {getattr(member, name)} tokens and the first "
                    f"{getattr(first, name)}; give models that were trained with the same tokenizer"
                )
        if member.device != first.device:
            raise InputError(f"model {number} of the ensemble is on {member.device}, not on {first.device}; move it")
    contexts = [member.context for member in members if member.context is not None]
    sources = [member.max_source for member in members if member.max_source is not None]
    return first._replace(context=min(contexts, default=None), max_source=min(sources, default=None))
