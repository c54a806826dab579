"""The slides on machine translation, which contain no listings: their examples of byte-pair encoding and of decoding.

byte_pair_merges(["BADD", "FAD", "FEEDE", "ADDEEF"], 3)       # AD, EE, ADD, and the words after each merge
model = next_token_model([[0.5, 0.4, 0, 0, 0, 0], [0.1, 0.2, 0.3, 0.1, 0.1, 0.2], [0.1, 0.4, 0.2, 0.1, 0, 0]])
model.generate(torch.tensor([[0]]), max_new_tokens=2, num_beams=2)      # 0, the start, and the words 2 and 2
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from monoblock.config.families import gpt
from monoblock.errors import InputError
from monoblock.model import Transformer

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
    """Return a language model in which the next word depends on the last word only, as given by the tables of a slide.

    All decoding methods of monoblock can be tried with it on examples that are worked out by hand.

    Args:
        probabilities: the probabilities of the words 1 to C: in the first row those of the first word, in row r those
            of the word after word r.  A row may sum to less than one, and the last rows may be missing.

    The model has the tokens 0 to C + 1: 0 is the start, 1 to C are the words, and C + 1 stands for all words that the
    table leaves out: it has what a row leaves to one, and it follows itself and each word without a row.  It is a
    Transformer whose block adds nothing to the one-hot embedding of a token, and whose output matrix is the logarithm
    of the table.
    """
    count = len(probabilities[0]) if probabilities else 0
    if not count or len(probabilities) > count + 1 or any(len(row) != count for row in probabilities):
        shape = f"{len(probabilities)} rows of {', '.join(sorted({str(len(row)) for row in probabilities})) or 'no'}"
        raise InputError(
            f"the table has {shape} probabilities; write rows of one length, the first for the start and one for each "
            "word that is followed by others"
        )
    vocab = count + 2
    table = torch.zeros(vocab, vocab)
    table[: len(probabilities), 1:-1] = torch.tensor(probabilities)
    left = 1 - table.sum(-1)
    if not bool(((table >= 0).all(-1) & (left > -1e-5)).all()):
        row = int(((table < 0).any(-1) | ~(left > -1e-5)).nonzero()[0])
        raise InputError(
            f"row {row} of the table, {list(probabilities[row])}, holds no probabilities; write numbers from 0 to 1 "
            "that sum to at most one"
        )
    table[:, -1] = torch.where(left > 1e-5, left, 0)
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
