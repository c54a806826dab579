"""Prompts and their padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.errors import InputError


class Prompt(NamedTuple):
    """The token ids a sequence starts with and, for an encoder-decoder, the ids of its source."""

    ids: tuple[int, ...]
    source: tuple[int, ...] | None = None


def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Pad rows on the right to (B, T); also return the mask of valid tokens, or None if no row is padded."""
    lengths = [len(row) for row in rows]
    longest = max(lengths)
    ids = torch.tensor([[*row, *([0] * (longest - len(row)))] for row in rows], device=device)
    if min(lengths) == longest:
        return ids, None
    return ids, torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]


def check_prompt(prompt: Prompt, vocab_size: int, capacity: int, family: str, *, has_encoder: bool) -> None:
    """Raise unless a model of this vocabulary and `capacity` (tokens per sequence) can continue a prompt."""
    if not prompt.ids:
        raise InputError("the prompt is empty; give at least one token, such as the start token")
    if len(prompt.ids) >= capacity:
        raise InputError(f"a prompt of {len(prompt.ids)} tokens leaves no room in a context of {capacity}; shorten it")
    if (prompt.source is not None) != has_encoder:
        what = (
            "needs a source; give its tokens as `source`"
            if prompt.source is None
            else "has no encoder for a source; leave it out"
        )
        raise InputError(f"this {family} model {what}")
    if prompt.source is not None and not prompt.source:
        raise InputError("the source is empty; give at least one token")
    wrong = next((token for token in prompt.ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InputError(f"id {wrong} is outside the vocabulary of {vocab_size}; is this the model's own tokenizer?")
