"""Which word of a source a word of its translation comes from: a hard alignment read off cross-attention.

The target is read once more with a tap on the attention over the source.  Weights are averaged over the heads of the
upper half of the decoder (what lower layers look at is the word before), tokens are put together to words, and each
target word takes the source word that is looked at most.  An LSTM has one attention, which is taken as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inspection.trace import trace
from monoblock.recurrent import Recurrent
from monoblock.tasks.translating import tag_for
from monoblock.tokenizers.tokenizer import Piece

if TYPE_CHECKING:
    from monoblock.tasks.pipeline import Pipeline

Alignment = list[tuple[int, int]]  # (source word, target word), counted from 0, in the order of the target


def align(pipe: Pipeline, source: str, target: str, to: str | None = None) -> Alignment:
    """The alignment of a source and a translation of it; `to` is the script that was asked for."""
    if not source.split() or not target.split():
        return []
    source = f"{tag_for(pipe, source, to)} {source}".strip()
    prompt = pipe.prompt(source)
    if prompt.source is None:
        raise InputError("an alignment is between a source and a target; this model has no encoder")
    plain, lead = pipe.plain(source)
    left, right = pipe.tokenizer.pieces(plain), pipe.tokenizer.pieces(target)
    ids = torch.tensor([[*prompt.ids, *(piece.id for piece in right)]], device=pipe.model.device)
    weights = attention(pipe, torch.tensor([prompt.source], device=pipe.model.device), ids)
    weights = weights[
        : len(right), lead : lead + len(left)
    ]  # place t asks for token t; the end of the source is no word
    return hard(weights, words_of(plain, left), words_of(target, right))


@torch.inference_mode()
def attention(pipe: Pipeline, source: Tensor, target: Tensor) -> Tensor:
    """What the places of a target (1, T) look at in its source (1, S): (T, S)."""
    if isinstance(pipe.model, Recurrent):
        return trace(pipe.model, source, target, names="attention.weights")["attention.weights"][0]
    seen = trace(pipe.model, source, target, names="decoder.*.cross.weights")
    layers = list(seen.values())
    return torch.stack([layer[0].mean(0) for layer in layers[len(layers) // 2 :]]).mean(0)


def words_of(text: str, pieces: Sequence[Piece]) -> list[int]:
    """For each piece the number of the word its last letter belongs to; -1 for one that is only space."""
    number, words = -1, []
    for place, sign in enumerate(text):
        if not sign.isspace() and (not place or text[place - 1].isspace()):
            number += 1
        words.append(-1 if sign.isspace() else number)
    return [words[piece.end - 1] if piece.end else -1 for piece in pieces]


def hard(weights: Tensor, left: Sequence[int], right: Sequence[int]) -> Alignment:
    """For each target word the source word that its tokens look at most; weights (T, S), words by token."""
    rows, columns = 1 + max(right, default=-1), 1 + max(left, default=-1)
    if not rows or not columns:
        return []
    table = weights.new_zeros(rows + 1, columns + 1)  # the last row and column take what is only space
    at = torch.tensor([[r % (rows + 1) for _ in left] for r in right], device=weights.device)
    to = torch.tensor([[c % (columns + 1) for c in left] for _ in right], device=weights.device)
    table.index_put_((at, to), weights, accumulate=True)
    best = table[:rows, :columns].argmax(-1).tolist()
    return [(source, target) for target, source in enumerate(best)]


def pharaoh(alignment: Alignment) -> str:
    """As alignment tools write it: "0-0 2-1"."""
    return " ".join(f"{source}-{target}" for source, target in alignment)
