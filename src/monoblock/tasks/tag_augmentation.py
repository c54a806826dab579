"""Augment tagged sentences differently in every epoch.

Entities are replaced by others of the same type, words are masked, sentences are written in capitals, words are
segmented at random, and neighbouring sentences are joined. The result depends only on (seed, epoch, row), so that
a resumed run sees the same data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from monoblock.config.schema import check_at_least, check_fraction, check_types
from monoblock.data.readers.records import TaggedSentence
from monoblock.tasks.bio import extract_entities
from monoblock.tasks.input_template import EncodedWords, WordEncoder

if TYPE_CHECKING:
    import numpy as np

    from monoblock.tasks.tokenizer_checks import SubwordSampler

NUM_SEGMENTATIONS = 32  # how many random segmentations of a word there are


@dataclass(frozen=True, kw_only=True)
class TokenClassificationSection:
    """How training rows are augmented and joined."""

    replace_entities: float = 0.0  # training: replace this fraction of the entities by others of the same type
    mask_words: float = 0.0  # training: replace this fraction of the words by the mask token
    uppercase_rows: float = 0.0  # training: write this fraction of the rows in capitals, like headlines
    join_rows: int = 1  # join up to this many neighbouring rows into one sample, also in evaluation

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "join_rows")
        check_fraction(self, "replace_entities", "mask_words", "uppercase_rows")

    @property
    def changes_rows(self) -> bool:
        """Whether training rows are joined or augmented."""
        return self.join_rows > 1 or bool(self.replace_entities or self.mask_words or self.uppercase_rows)


class TaggedAugmenter:
    """Augment the rows of a corpus: called with a row index and an epoch, return an augmented sentence, encoded too."""

    def __init__(
        self,
        rows: Sequence[TaggedSentence],
        words: WordEncoder,
        section: TokenClassificationSection,
        sampler: SubwordSampler | None,
        seed: int,
    ) -> None:
        self.rows, self.words, self.section, self.sampler, self.seed = rows, words, section, sampler, seed
        self.mentions = collect_mentions(rows) if section.replace_entities else {}
        self.segmentations: dict[tuple[str, int], list[int]] = {}
        tokenizer = words.tokenizer
        self.mask_id = tokenizer.mask_id if tokenizer.mask_id is not None else words.fallback_ids[0]

    def __call__(self, index: int, epoch: int) -> tuple[TaggedSentence, EncodedWords]:
        from monoblock.training.collate import sample_generator

        rng = sample_generator(self.seed, epoch, index)
        count = int(rng.integers(1, self.section.join_rows + 1)) if self.section.join_rows > 1 else 1
        rows = replace_mentions(self.rows[index : index + count], self.mentions, self.section.replace_entities, rng)
        rows = [
            uppercase_row(row) if self.section.uppercase_rows and rng.random() < self.section.uppercase_rows else row
            for row in rows
        ]
        pieces = [[self._encode_word(word, rng) for word in row.words] for row in rows]
        return concatenate_rows(rows), self.words.encode_pieces(self.words.join_rows(pieces))

    def _encode_word(self, word: str, rng: np.random.Generator) -> list[int]:
        if self.section.mask_words and rng.random() < self.section.mask_words:
            return [self.mask_id]
        if self.sampler is None:
            return self.words.encode_word(word)
        return self._sample_segmentation(word, int(rng.integers(NUM_SEGMENTATIONS)), self.sampler)

    def _sample_segmentation(self, word: str, index: int, sampler: SubwordSampler) -> list[int]:
        """Return the ids of a word in its `index`-th random segmentation; cached, because sampling is slow."""
        key = (word, index)
        if key not in self.segmentations:
            self.segmentations[key] = sampler(f" {word}", epoch=0, index=index) or self.words.fallback_ids
        return self.segmentations[key]


def collect_mentions(rows: Sequence[TaggedSentence]) -> dict[str, list[TaggedSentence]]:
    """Return the distinct entities of each type; each entity is given by its words and their labels."""
    mentions: dict[str, dict[TaggedSentence, None]] = {}
    for row in rows:
        for kind, start, end in extract_entities(row.labels):
            mentions.setdefault(kind, {})[TaggedSentence(row.words[start:end], row.labels[start:end])] = None
    return {kind: list(entities) for kind, entities in mentions.items()}


def replace_mentions(
    rows: Sequence[TaggedSentence], mentions: dict[str, list[TaggedSentence]], rate: float, rng: np.random.Generator
) -> list[TaggedSentence]:
    """Replace entities by others of the same type, with probability `rate` (mention replacement, Dai and Adel 2020).

    If an entity occurs several times in `rows`, all its occurrences are replaced by the same entity, so that the text
    stays consistent.

    mentions: the entities of each type to choose from, from `collect_mentions`.
    """
    if not rate:
        return list(rows)
    replacements: dict[tuple[str, TaggedSentence], TaggedSentence] = {}

    def replacement(kind: str, mention: TaggedSentence) -> TaggedSentence:
        candidates, key = mentions.get(kind, []), (kind, mention)
        if key not in replacements:
            replaced = candidates and rng.random() < rate
            replacements[key] = candidates[int(rng.integers(len(candidates)))] if replaced else mention
        return replacements[key]

    result = []
    for row in rows:
        parts: list[TaggedSentence] = []
        done = 0
        for kind, start, end in extract_entities(row.labels):
            parts.append(TaggedSentence(row.words[done:start], row.labels[done:start]))
            parts.append(replacement(kind, TaggedSentence(row.words[start:end], row.labels[start:end])))
            done = end
        result.append(concatenate_rows([*parts, TaggedSentence(row.words[done:], row.labels[done:])]))
    return result


def uppercase_row(row: TaggedSentence) -> TaggedSentence:
    """Return the sentence in capitals, like a headline, with the same labels."""
    return TaggedSentence(tuple(word.upper() for word in row.words), row.labels)


def concatenate_rows(rows: Sequence[TaggedSentence]) -> TaggedSentence:
    """Join tagged sentences into one."""
    words = tuple(word for row in rows for word in row.words)
    return TaggedSentence(words, tuple(label for row in rows for label in row.labels))


def group_rows(
    rows: Sequence[Sequence[str]], max_rows: int, words: WordEncoder, separator_length: int = 1
) -> list[range]:
    """Group neighbouring rows of words, so that each group can be encoded as one input; return ranges of row indices.

    A group has at most `max_rows` rows, and fits into the maximum length of the template of `words`.

    separator_length: the number of tokens between two rows of a group.
    """
    groups: list[range] = []
    start, length = 0, 0
    num_special, limit = words.encoded_length(()), words.template.max_length
    for index, row in enumerate(rows):
        added = words.encoded_length(row) - num_special + separator_length
        too_long = limit is not None and num_special + length + added - separator_length > limit
        if index > start and (index - start == max_rows or too_long):
            groups.append(range(start, index))
            start, length = index, 0
        length += added
    return [*groups, range(start, len(rows))] if rows else []
