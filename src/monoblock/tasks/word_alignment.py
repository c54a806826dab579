"""Word alignment of a source and its translation, from the weights of cross-attention.

The translation is run through the model once more to record the weights. They are averaged over the heads of the upper
half of the decoder (lower layers attend to the previous word) and summed over the tokens of each word. Each target word
is aligned to the source word with the largest weight. An LSTM has a single attention, whose weights are not averaged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monoblock.baselines.lstm import Recurrent
from monoblock.errors import InputError
from monoblock.inspection.trace import trace
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.translate import script_tag_for
from monoblock.tokenizers.tokenizer import Piece

Alignment = list[tuple[int, int]]  # (source word, target word), counted from 0, in the order of the target


def align(loaded: LoadedModel, source: str, target: str, to: str | None = None) -> Alignment:
    """Align the words of a source and its translation `target`; `to` is the script of the translation."""
    if not source.split() or not target.split():
        return []
    source = f"{script_tag_for(loaded, source, to)} {source}".strip()
    prompt = loaded.encode_prompt(source)
    if prompt.source is None:
        raise InputError("alignment needs an encoder, but this model has none; give an encoder-decoder model")
    untagged, num_tags = loaded.normalize_source(source)
    source_pieces, target_pieces = loaded.tokenizer.pieces(untagged), loaded.tokenizer.pieces(target)
    device = loaded.model.device
    target_ids = torch.tensor([[*prompt.ids, *(piece.id for piece in target_pieces)]], device=device)
    weights = cross_attention_weights(loaded, torch.tensor([prompt.source], device=device), target_ids)
    # Position t predicts target token t; tags and the end of the source belong to no word.
    weights = weights[: len(target_pieces), num_tags : num_tags + len(source_pieces)]
    return hard_alignment(weights, word_indices(untagged, source_pieces), word_indices(target, target_pieces))


@torch.inference_mode()
def cross_attention_weights(loaded: LoadedModel, source: Tensor, target: Tensor) -> Tensor:
    """Return the average attention weights of target tokens on source tokens, of shape (T, S).

    source, target: token ids of shape (1, S) and (1, T).
    """
    if isinstance(loaded.model, Recurrent):
        if not loaded.model.config.attention:
            raise InputError("an LSTM without attention aligns no words; give a model with attention")
        return trace(loaded.model, source, target, names="attention.weights")["attention.weights"][0]
    layers = list(trace(loaded.model, source, target, names="decoder.*.cross.weights").values())
    return torch.stack([weights[0].mean(0) for weights in layers[len(layers) // 2 :]]).mean(0)


def word_indices(text: str, pieces: Sequence[Piece]) -> list[int]:
    """Return for each piece the index of the word that contains its last character; -1 for white space."""
    word, words = -1, []
    for index, character in enumerate(text):
        if not character.isspace() and (not index or text[index - 1].isspace()):
            word += 1
        words.append(-1 if character.isspace() else word)
    return [words[piece.end - 1] if piece.end else -1 for piece in pieces]


def hard_alignment(weights: Tensor, source_words: Sequence[int], target_words: Sequence[int]) -> Alignment:
    """Align each target word to the source word that its tokens attend to most.

    weights: attention weights of target tokens on source tokens, of shape (T, S).
    source_words, target_words: the index of the word that each token belongs to, -1 for white space.
    """
    rows, columns = 1 + max(target_words, default=-1), 1 + max(source_words, default=-1)
    if not rows or not columns:
        return []
    totals = weights.new_zeros(rows + 1, columns + 1)  # the last row and column collect white space
    row = torch.tensor([[word % (rows + 1) for _ in source_words] for word in target_words], device=weights.device)
    column = torch.tensor(
        [[word % (columns + 1) for word in source_words] for _ in target_words], device=weights.device
    )
    totals.index_put_((row, column), weights, accumulate=True)
    best = totals[:rows, :columns].argmax(-1).tolist()
    return [(source, target) for target, source in enumerate(best)]


def format_pharaoh(alignment: Alignment) -> str:
    """Format an alignment as pairs "source-target" of word indices, such as "0-0 2-1" (the Pharaoh format)."""
    return " ".join(f"{source}-{target}" for source, target in alignment)
