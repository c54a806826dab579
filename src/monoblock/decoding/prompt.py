"""The prompt of a request, how prompts are padded to one length, and what is checked before decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.errors import InputError


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


def check_prompt(prompt: Prompt, vocab_size: int, capacity: int, family: str, *, has_encoder: bool) -> None:
    """Raise InputError if a model cannot continue a prompt.

    vocab_size: the size of the model's vocabulary.
    capacity: the maximum number of tokens in a sequence, prompt included.
    family: the kind of model, such as "decoder-only", for the error text.
    has_encoder: whether the model has an encoder, so that a prompt needs a source.
    """
    if not prompt.ids:
        raise InputError("the prompt is empty; give at least one token, such as the start token")
    if len(prompt.ids) >= capacity:
        raise InputError(
            f"a prompt of {len(prompt.ids)} tokens leaves no room for new tokens in a context of {capacity} tokens; "
            f"shorten the prompt"
        )
    if (prompt.source is not None) != has_encoder:
        what = (
            "needs a source for its encoder; give its token ids as `source`"
            if prompt.source is None
            else "has no encoder to read a source; leave out `source`"
        )
        raise InputError(f"this {family} model {what}")
    if prompt.source is not None and not prompt.source:
        raise InputError("the source is empty, so the encoder has nothing to read; give at least one token")
    wrong = next((token for token in prompt.ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InputError(
            f"token id {wrong} is outside the vocabulary of {vocab_size} tokens; "
            f"encode the prompt with the tokenizer of this model"
        )
