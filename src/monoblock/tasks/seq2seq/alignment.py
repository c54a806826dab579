"""Which word of a source a word of its translation comes from: a hard alignment read off cross-attention.

The target is read once more with a tap on the attention over the source.  Weights are averaged over the heads of the
upper half of the decoder (what lower layers look at is the word before), tokens are put together to words, and each
target word takes the source word that is looked at most.  An LSTM has one attention, which is taken as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inspection.trace import trace
from monoblock.nn.lstm import Recurrent
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.seq2seq.predict import script_tag_for
from monoblock.tokenizers.tokenizer import Piece

Alignment = list[tuple[int, int]]  # (source word, target word), counted from 0, in the order of the target


def align(loaded: LoadedModel, source: str, target: str, to: str | None = None) -> Alignment:
    """The alignment of a source and a translation of it; `to` is the script that was asked for."""
    if not source.split() or not target.split():
        return []
    source = f"{script_tag_for(loaded, source, to)} {source}".strip()
    prompt = loaded.encode_prompt(source)
    if prompt.source is None:
        raise InputError("an alignment is between a source and a target; this model has no encoder")
    plain, lead = loaded.normalize_source(source)
    left, right = loaded.tokenizer.pieces(plain), loaded.tokenizer.pieces(target)
    ids = torch.tensor([[*prompt.ids, *(piece.id for piece in right)]], device=loaded.model.device)
    weights = cross_attention_weights(loaded, torch.tensor([prompt.source], device=loaded.model.device), ids)
    weights = weights[
        : len(right), lead : lead + len(left)
    ]  # place t asks for token t; the end of the source is no word
    return hard_alignment(weights, word_indices(plain, left), word_indices(target, right))


@torch.inference_mode()
def cross_attention_weights(loaded: LoadedModel, source: Tensor, target: Tensor) -> Tensor:
    """What the places of a target (1, T) look at in its source (1, S): (T, S)."""
    if isinstance(loaded.model, Recurrent):
        return trace(loaded.model, source, target, names="attention.weights")["attention.weights"][0]
    seen = trace(loaded.model, source, target, names="decoder.*.cross.weights")
    layers = list(seen.values())
    return torch.stack([layer[0].mean(0) for layer in layers[len(layers) // 2 :]]).mean(0)


def word_indices(text: str, pieces: Sequence[Piece]) -> list[int]:
    """For each piece the number of the word its last letter belongs to; -1 for one that is only space."""
    number, words = -1, []
    for place, sign in enumerate(text):
        if not sign.isspace() and (not place or text[place - 1].isspace()):
            number += 1
        words.append(-1 if sign.isspace() else number)
    return [words[piece.end - 1] if piece.end else -1 for piece in pieces]


def hard_alignment(weights: Tensor, source_words: Sequence[int], target_words: Sequence[int]) -> Alignment:
    """For each target word the source word that its tokens look at most; weights (T, S), words by token."""
    rows, columns = 1 + max(target_words, default=-1), 1 + max(source_words, default=-1)
    if not rows or not columns:
        return []
    table = weights.new_zeros(rows + 1, columns + 1)  # the last row and column take what is only space
    at = torch.tensor([[r % (rows + 1) for _ in source_words] for r in target_words], device=weights.device)
    to = torch.tensor([[c % (columns + 1) for c in source_words] for _ in target_words], device=weights.device)
    table.index_put_((at, to), weights, accumulate=True)
    best = table[:rows, :columns].argmax(-1).tolist()
    return [(source, target) for target, source in enumerate(best)]


def format_pharaoh(alignment: Alignment) -> str:
    """As alignment tools write it: "0-0 2-1"."""
    return " ".join(f"{source}-{target}" for source, target in alignment)
