"""The slides on machine translation, which contain no listings: their examples of byte-pair encoding and of decoding.

byte_pair_merges(["BADD", "FAD", "FEEDE", "ADDEEF"], 3)       # AD, EE, ADD, and the words after each merge
model = next_token_model(probabilities)                       # decoding by a table of probabilities
model.generate(torch.tensor([[0]]), max_new_tokens=2, num_beams=2)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from monoblock.config.families import gpt
from monoblock.errors import InputError
from monoblock.nn.transformer import Transformer

Word = tuple[str, ...]  # its symbols: at first its characters


class Merge(NamedTuple):
    """One step of byte-pair encoding."""

    pair: tuple[str, str]  # the most frequent pair of neighbouring symbols
    frequency: int  # how often the pair occurs
    words: list[Word]  # all words after the pair was merged


def pair_counts(words: Sequence[Word]) -> Counter[tuple[str, str]]:
    """Count all pairs of neighbouring symbols."""
    return Counter(pair for word in words for pair in itertools.pairwise(word))


def merge_pair(word: Word, pair: tuple[str, str]) -> Word:
    """Return a word in which each occurrence of a pair, from left to right, is one symbol."""
    symbols: list[str] = []
    for symbol in word:
        if symbols and (symbols[-1], symbol) == pair:
            symbols[-1] = "".join(pair)
        else:
            symbols.append(symbol)
    return tuple(symbols)


def byte_pair_merges(words: Sequence[str], num_merges: int) -> list[Merge]:
    """Learn byte-pair encoding (Gage 1994; Sennrich et al. 2016) step by step, and return every step.

    Of several pairs that are equally frequent, the last in alphabetical order is merged: the choice of the slides and
    of the program subword-nmt.  The tokenizers library makes another, so `mb.Tokenizer` may merge in another order.
    """
    current = [tuple(word) for word in words]
    steps: list[Merge] = []
    for _ in range(num_merges):
        counts = pair_counts(current)
        if not counts:
            break
        pair = max(counts, key=lambda pair: (counts[pair], pair))
        current = [merge_pair(word, pair) for word in current]
        steps.append(Merge(pair, counts[pair], current))
    return steps


def next_token_model(probabilities: Sequence[Sequence[float]]) -> Transformer:
    """Return a language model in which the next token depends on the last token only, as given by a table.

    `probabilities` (V, V) has one row for each token, which sums to one.  The model is a Transformer whose blocks add
    nothing to the one-hot embedding of a token, and whose output matrix is the logarithm of the table.  So all
    decoding methods of monoblock can be tried on examples that are worked out by hand.
    """
    table = torch.tensor(probabilities, dtype=torch.float32)
    vocab = table.shape[0]
    if table.dim() != 2 or table.shape[1] != vocab or not torch.allclose(table.sum(-1), torch.ones(vocab)):
        raise InputError("the table needs one row and one column for each token, and every row must sum to one")
    model = Transformer(gpt(vocab=vocab, width=vocab, depth=1, heads=1, context=64, positions="none", tie="none"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        _set_one_hot(model, vocab)
        model.get_parameter("head.output.weight").copy_(table.log().clamp(min=-50).T)
    return model.eval()


def _set_one_hot(model: Transformer, vocab: int) -> None:
    """Set the embedding to one-hot vectors, and the final norm so that it returns them unchanged.

    A one-hot vector has mean 1/V and variance (1/V)(1 - 1/V); the norm subtracts the former and divides by the root of
    the latter, and its scale and shift undo this.
    """
    mean = 1 / vocab
    assert model.decoder is not None
    assert model.decoder.norm is not None
    eps = model.decoder.norm.config.eps
    model.get_parameter("input.token.weight").copy_(torch.eye(vocab))
    model.get_parameter("decoder.norm.weight").fill_((mean * (1 - mean) + eps) ** 0.5)
    model.get_parameter("decoder.norm.bias").fill_(mean)
