"""Segment training texts at random, differently in every epoch (Kudo 2018; Provilkov et al. 2020).

A segmentation depends only on the seed, the epoch, the index of the row and the text, so that a resumed run sees the
same tokens.
"""

from __future__ import annotations

from monoblock.errors import ConfigError
from monoblock.recipes.schema import TokenizerSection
from monoblock.tokenizers.tokenizer import Tokenizer

KEY_BY_KIND = {"bpe": "dropout", "unigram": "alpha"}  # the key of [tokenizer] that each kind of tokenizer samples with


class SubwordSampler:
    """Called with a text, an epoch and the index of the row, return the ids of a random segmentation of the text."""

    def __init__(self, tokenizer: Tokenizer, section: TokenizerSection, seed: int) -> None:
        _check_kind(tokenizer.kind, section)
        self.tokenizer, self.seed = tokenizer, seed
        self.dropout, self.alpha = section.dropout or None, section.alpha
        self("", epoch=0, index=0)  # a tokenizer that cannot be sampled raises here, and not in the first batch

    def __call__(self, text: str, *, epoch: int, index: int) -> list[int]:
        return self.tokenizer.sample(
            text, seed=self.seed, epoch=epoch, index=index, dropout=self.dropout, alpha=self.alpha
        )


def requested_key(section: TokenizerSection) -> str | None:
    """Return the key that asks for random segmentations, "tokenizer.dropout" or "tokenizer.alpha"; None if neither."""
    if section.dropout:
        return "tokenizer.dropout"
    return None if section.alpha is None else "tokenizer.alpha"


def _check_kind(kind: str, section: TokenizerSection) -> None:
    """Raise ConfigError unless the tokenizer can be sampled with the key that is set."""
    key = KEY_BY_KIND.get(kind)
    for name, is_set in (("dropout", bool(section.dropout)), ("alpha", section.alpha is not None)):
        if is_set and name != key:
            advice = "leave it out" if key is None else f"write tokenizer.{key}=0.1 instead"
            reason = "has only one segmentation of a text" if key is None else f"is sampled with tokenizer.{key}"
            raise ConfigError(f"tokenizer.{name} does not apply: a {kind} tokenizer {reason}; {advice}")
