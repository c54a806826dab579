"""Predict a label for every word of a text, and from the labels its entities or its punctuation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from monoblock.data.corpora.punctuation import LABELS, restore_punctuation, strip_punctuation
from monoblock.errors import InputError
from monoblock.tasks.batching import (
    LongTextMode,
    ProgressCallback,
    check_long_mode,
    enumerate_lines,
    run_batches,
    too_long_error,
)
from monoblock.tasks.bio import build_transitions, extract_entities, viterbi_decode
from monoblock.tasks.input_template import EncodedInput, WordEncoder
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.tag_augmentation import group_rows

# A punctuation mark is a separate word; 1,000.5 and well-known are single words.
WORD_PATTERN = re.compile(r"\w+(?:[.,]\d+|[-'’]\w+)*|[^\w\s]")


class TaggedWord(NamedTuple):
    word: str
    label: str
    probability: float


class PredictedEntity(NamedTuple):
    """An entity, which consists of words[start:end]; its probability is the lowest among those of its labels."""

    text: str
    label: str
    start: int
    end: int
    probability: float


class TaggedText(NamedTuple):
    words: list[TaggedWord]
    entities: list[PredictedEntity]  # empty if the labels are not a chunking scheme
    restored_text: str | None = None  # the text with punctuation, if the model restores punctuation


def has_punctuation_labels(labels: Sequence[str]) -> bool:
    """Return whether a model with these labels restores punctuation and capitals."""
    return set(labels) <= set(LABELS) and len(labels) > 1


def split_words(loaded: LoadedModel, text: str | Sequence[str], split_punctuation: bool = True) -> list[str]:
    """Split a text into the words that the model labels.

    For a model that restores punctuation, these are lowercase words without punctuation. For other models, punctuation
    marks are separate words; with split_punctuation=False, the text is split at spaces only. A list of words is
    returned unchanged.
    """
    if not isinstance(text, str):
        empty = next((word for word in text if not word.strip()), None)
        if empty is not None:
            raise InputError(f"the word {empty!r} is empty or white space; leave it out")
        return list(text)
    if has_punctuation_labels(loaded.labels):
        return list(strip_punctuation(text).words)
    return WORD_PATTERN.findall(text) if split_punctuation else text.split()


def tag_words(
    loaded: LoadedModel,
    rows: Sequence[Sequence[str]],
    *,
    batch: int = 64,
    long: LongTextMode = "refuse",
    lines: Sequence[int] | None = None,
    progress: ProgressCallback | None = None,
) -> list[TaggedText]:
    """Predict the label of each word in rows of words, and from the labels the entities or the punctuation.

    The arguments are those of `predict_word_probabilities`.
    """
    row_probabilities = predict_word_probabilities(loaded, rows, batch=batch, long=long, lines=lines, progress=progress)
    return [
        _tag_row(loaded.labels, words, probabilities)
        for words, probabilities in zip(rows, row_probabilities, strict=True)
    ]


def _tag_row(class_names: Sequence[str], words: Sequence[str], probabilities: Tensor) -> TaggedText:
    label_ids = decode_labels(class_names, probabilities)
    labels = [class_names[label] for label in label_ids]
    chosen = [probabilities[index, label].item() for index, label in enumerate(label_ids)]
    words = list(words[: len(labels)])
    entities = [
        PredictedEntity(" ".join(words[start:end]), kind, start, end, min(chosen[start:end]))
        for kind, start, end in extract_entities(labels)
    ]
    restored = restore_punctuation(words, labels) if has_punctuation_labels(class_names) else None
    return TaggedText([TaggedWord(*word) for word in zip(words, labels, chosen, strict=True)], entities, restored)


def decode_labels(labels: Sequence[str], probabilities: Tensor) -> list[int]:
    """Return the class indices of the most probable valid sequence of labels.

    probabilities: class probabilities of shape (words, classes).
    """
    return viterbi_decode(np.log(np.maximum(probabilities.double().numpy(), 1e-300)), build_transitions(labels))


def predict_word_probabilities(
    loaded: LoadedModel,
    rows: Sequence[Sequence[str]],
    *,
    batch: int = 64,
    long: LongTextMode = "refuse",
    lines: Sequence[int] | None = None,
    join: int = 1,
    progress: ProgressCallback | None = None,
) -> list[Tensor]:
    """Return the class probabilities of each row of words, of shape (words, classes), at the first tokens of words.

    long: "refuse", "cut" or "split" (between words) a row that is longer than the context.
    lines: the line numbers of the rows for error messages, counted from 0.
    join: encode up to this many neighbouring rows together.
    """
    loaded.check_head("tagger")
    check_long_mode(long)
    encoder = WordEncoder(loaded.tokenizer, loaded.input_template(loaded.model.config.context))
    parts = [
        (index, part)
        for index, (line, row) in enumerate(enumerate_lines(rows, lines))
        for part in _split_row(encoder, line, row, long)
    ]
    groups = group_rows([part for _, part in parts], join, encoder)
    encoded = [encoder.encode_rows([part for _, part in parts[group.start : group.stop]]) for group in groups]
    inputs = [EncodedInput(words.ids, [0] * len(words.ids)) for words in encoded]
    outputs = run_batches(loaded, inputs, batch, loaded.model, progress=progress)
    results: list[list[Tensor]] = [[] for _ in rows]
    for group, words, logits in zip(groups, encoded, outputs, strict=True):
        start = 0
        for index, part in parts[group.start : group.stop]:
            positions = words.word_positions[start : start + len(part)]
            results[index].append(logits[positions].softmax(-1))
            start += len(part)
    return [torch.cat(parts_of_row) if parts_of_row else torch.empty(0, len(loaded.labels)) for parts_of_row in results]


def _split_row(encoder: WordEncoder, line: int, row: Sequence[str], long: str) -> list[Sequence[str]]:
    """Return the parts of a row, each of which fits into the context.

    If the row is longer than the context, long="split" returns several parts, "cut" returns the first part only, and
    "refuse" raises InputError.
    """
    if not row:
        return []
    limit, length = encoder.template.max_length, encoder.encoded_length(row)
    if limit is None or length <= limit:
        return [row]
    if long == "refuse":
        raise too_long_error(line, length, limit)
    groups = group_rows([[word] for word in row], len(row), encoder, separator_length=0)
    parts = [row[group.start : group.stop] for group in groups]
    return parts[:1] if long == "cut" else parts
