"""The prompt of a request, how prompts are padded to one length, and what is checked before decoding."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inference.settings import show


class Prompt(NamedTuple):
    """The token ids that a sequence starts with and, for an encoder-decoder, the token ids of the encoder's input."""

    ids: tuple[int, ...]
    source: tuple[int, ...] | None = None


def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Pad rows of token ids on the right to one tensor (B, T); return it and the mask (B, T) of valid tokens.

    The mask is None if no row had to be padded.
    """
    lengths = [len(row) for row in rows]
    longest = max(lengths)
    ids = torch.tensor([[*row, *([0] * (longest - len(row)))] for row in rows], device=device)
    if min(lengths) == longest:
        return ids, None
    return ids, torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]


class PromptLimits(Protocol):
    """What a model accepts as a prompt (see limits.py)."""

    @property
    def family(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def has_encoder(self) -> bool: ...
    @property
    def source_vocab_size(self) -> int | None: ...
    @property
    def max_source(self) -> int | None: ...


def parse_prompt(ids: Sequence[int], source: Sequence[int] | None = None) -> Prompt:
    """Build a prompt from sequences of token ids; raise InputError if an element is not a whole number."""
    return Prompt(_token_ids(ids, "the prompt"), None if source is None else _token_ids(source, "the source"))


def _token_ids(ids: Sequence[int], name: str) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, ids))
    except (TypeError, ValueError):
        raise InputError(f"{name} must be a sequence of token ids, which are whole numbers: [5, 7, 11]") from None


def check_prompt(prompt: Prompt, limits: PromptLimits, capacity: int) -> None:
    """Raise InputError if a model cannot continue a prompt.

    capacity: the maximum number of tokens in a sequence, prompt included.
    """
    if not prompt.ids:
        raise InputError("the prompt is empty; give at least one token, such as the start token")
    if len(prompt.ids) >= capacity:
        raise InputError(
            f"a prompt of {len(prompt.ids)} tokens leaves no room for new tokens in a context of {capacity} tokens; "
            f"shorten the prompt"
        )
    if (prompt.source is not None) != limits.has_encoder:
        what = (
            "needs a source for its encoder; give its token ids as `source`"
            if prompt.source is None
            else "has no encoder to read a source; leave out `source`"
        )
        raise InputError(f"this {limits.family} model {what}")
    if prompt.source is not None and not prompt.source:
        raise InputError("the source is empty, so the encoder has nothing to read; give at least one token")
    if prompt.source is not None and limits.max_source is not None and len(prompt.source) > limits.max_source:
        raise InputError(
            f"a source of {len(prompt.source)} tokens is longer than the encoder's {limits.max_source} positions; "
            f"shorten the source"
        )
    _check_ids(prompt.ids, limits.vocab_size, "prompt")
    if prompt.source is not None and limits.source_vocab_size is not None:
        _check_ids(prompt.source, limits.source_vocab_size, "source")


def _check_ids(ids: tuple[int, ...], vocab_size: int, name: str) -> None:
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InputError(
            f"token id {show(wrong)} is outside the vocabulary of {vocab_size} tokens; "
            f"encode the {name} with the tokenizer of this model"
        )
