"""Which head resolves a pronoun: a score over pairs of sentences that differ in one word.

In "The animal didn't cross the street because it was too tired", `it` is the animal; with "wide" it is the street.  A
head resolves a sentence if its weight from `it` is larger on the right noun than on the other one.  Both nouns stay
where they are, so a head that knows only positions resolves one sentence of each pair: 50 %.  The best of many heads is
above that by chance, so the result also has the score that the best head reaches if the two sentences of each pair
are swapped at random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inspection.trace import trace
from monoblock.nn.transformer import Transformer
from monoblock.tokenizers.tokenizer import Tokenizer

PRONOUNS = ("it", "he", "she", "they")
CHANCE_DRAWS = 1000
CHANCE_QUANTILE = 0.95


class CoreferencePair(NamedTuple):
    """A sentence with a gap `{}`: with the first word the pronoun is the first noun, with the second the second."""

    sentence: str
    first_noun: str
    second_noun: str
    first_word: str
    second_word: str


_ROWS = (
    ("The animal didn't cross the street because it was too {}.", "animal", "street", "tired", "wide"),
    ("The trophy doesn't fit in the suitcase because it is too {}.", "trophy", "suitcase", "big", "small"),
    ("The truck could not pass the bridge because it was too {}.", "truck", "bridge", "heavy", "weak"),
    ("The ball broke the window because it was so {}.", "ball", "window", "hard", "thin"),
    ("The boat could not enter the harbor because it was too {}.", "boat", "harbor", "large", "shallow"),
    ("The dog could not reach the shelf because it was too {}.", "dog", "shelf", "short", "high"),
    ("The knife could not cut the bread because it was too {}.", "knife", "bread", "blunt", "hard"),
    ("The horse refused to enter the stable because it was too {}.", "horse", "stable", "afraid", "dark"),
    ("The letter did not fit in the envelope because it was too {}.", "letter", "envelope", "long", "narrow"),
    ("The child could not lift the box because it was too {}.", "child", "box", "young", "full"),
    ("The plane could not land on the runway because it was too {}.", "plane", "runway", "fast", "icy"),
    ("The cat could not climb the wall because it was too {}.", "cat", "wall", "fat", "smooth"),
    ("The lamp did not light the cellar because it was too {}.", "lamp", "cellar", "dim", "deep"),
    ("The army could not cross the river because it was too {}.", "army", "river", "exhausted", "cold"),
    ("The student could not finish the book because it was too {}.", "student", "book", "lazy", "thick"),
    ("The key would not open the lock because it was too {}.", "key", "lock", "bent", "rusty"),
    ("The bird would not eat the seed because it was too {}.", "bird", "seed", "sick", "bitter"),
    ("The car could not climb the hill because it was too {}.", "car", "hill", "slow", "steep"),
    ("The table would not go through the door because it was too {}.", "table", "door", "broad", "tight"),
    ("The fish did not swim in the pond because it was too {}.", "fish", "pond", "ill", "dirty"),
)
PAIRS = tuple(CoreferencePair(*row) for row in _ROWS)


class CoreferenceRow(NamedTuple):
    """One sentence, read by one head."""

    sentence: str
    referent: str  # the noun that the pronoun stands for
    other: str
    referent_weight: float  # from the pronoun to the tokens of the noun
    other_weight: float

    @property
    def is_resolved(self) -> bool:
        return self.referent_weight > self.other_weight


class CoreferenceResult(NamedTuple):
    layer: str  # of the best head
    head: int
    rows: list[CoreferenceRow]  # two for each pair
    num_heads: int
    chance: float  # the share that the best head reaches in 95 % of random swaps at most

    @property
    def score(self) -> float:
        """The share of sentences that the head resolves."""
        return sum(row.is_resolved for row in self.rows) / len(self.rows)

    @property
    def pair_score(self) -> float:
        """The share of pairs of which it resolves both sentences."""
        pairs = zip(self.rows[::2], self.rows[1::2], strict=True)
        return sum(one.is_resolved and two.is_resolved for one, two in pairs) / (len(self.rows) // 2)

    @property
    def misses(self) -> list[CoreferenceRow]:
        return [row for row in self.rows if not row.is_resolved]


Encode = Callable[[str], Sequence[int]]  # of a text, special tokens included


@torch.no_grad()
def find_coreference_head(
    model: Transformer, tokenizer: Tokenizer, encode: Encode, pairs: Sequence[CoreferencePair] = PAIRS
) -> CoreferenceResult:
    """Return the head of an encoder that resolves the most sentences, and what it does in each."""
    if model.encoder is None or model.config.family != "encoder-only":
        raise InputError(
            "coreference is measured in an encoder: in a decoder, the pronoun cannot attend to the word that decides it"
        )
    weights = []  # of each sentence: (heads of all layers, 2)
    rows = []
    for pair in pairs:
        for word, nouns in ((pair.first_word, (1, 2)), (pair.second_word, (2, 1))):
            sentence, referent, other = pair.sentence.format(word), pair[nouns[0]], pair[nouns[1]]
            ids = encode(sentence)
            seen = trace(model, torch.tensor([ids], device=model.device), names="encoder.*.attention.weights")
            pronoun = next(place for name in PRONOUNS if (place := find_word(tokenizer, ids, name)))
            places = [find_word(tokenizer, ids, noun) for noun in (referent, other)]
            maps = torch.cat([layer[0, :, pronoun].mean(1) for layer in seen.values()])  # (all heads, T)
            weights.append(torch.stack([maps[:, place].sum(-1) for place in places], -1).cpu())
            rows.append((sentence, referent, other))
            layers = {name.removesuffix(".weights"): layer.shape[1] for name, layer in seen.items()}
    table = torch.stack(weights, 1)  # (all heads, sentences, 2)
    resolved = table[..., 0] > table[..., 1]
    best = int(resolved.double().mean(1).argmax())
    names = [(layer, head) for layer, count in layers.items() for head in range(count)]
    return CoreferenceResult(
        *names[best],
        [CoreferenceRow(*row, *table[best, index].tolist()) for index, row in enumerate(rows)],
        len(names),
        _chance(table),
    )


def _chance(table: Tensor, seed: int = 0) -> float:
    """Return the share that the best head reaches in 95 % of draws, if sentences of pairs are swapped at random.

    A swap of both sentences of a pair exchanges the roles of the two nouns.
    """
    generator = torch.Generator().manual_seed(seed)
    right = table[..., 0] > table[..., 1]
    wrong = table[..., 0] < table[..., 1]
    swapped = torch.rand(CHANCE_DRAWS, table.shape[1] // 2, generator=generator) < 0.5
    swapped = swapped.repeat_interleave(2, 1)  # (draws, sentences)
    correct = swapped.double() @ wrong.double().T + (~swapped).double() @ right.double().T  # (draws, heads)
    return float((correct.amax(1) / table.shape[1]).quantile(CHANCE_QUANTILE))


def find_word(tokenizer: Tokenizer, ids: Sequence[int], word: str) -> list[int]:
    """Return the indices of the tokens of the first occurrence of a word; [] if it is not in the text."""
    texts = [tokenizer.decode([number]).strip().lower() for number in ids]
    for start in range(len(ids)):
        joined = ""
        for end in range(start, len(ids)):
            joined += texts[end].removeprefix("##")
            if joined == word and (end + 1 == len(ids) or not _continues(tokenizer, ids[end + 1])):
                return list(range(start, end + 1))
            if not word.startswith(joined):
                break
    return []


def _continues(tokenizer: Tokenizer, number: int) -> bool:
    """Return whether a token continues the word before it."""
    return tokenizer.token(number).startswith("##")
