"""Training data for token classification, in which each word has a label."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from monoblock.data.batching.encode import EncodedDataset, align_labels, encode_tagged
from monoblock.data.batching.plans import BatchIndices, BatchPlan
from monoblock.data.readers.records import TaggedSentence
from monoblock.tasks.input_template import InputTemplate, WordEncoder
from monoblock.tasks.labels import check_labels, label_to_id
from monoblock.tasks.special_tokens import special_token_ids
from monoblock.tasks.task_data import (
    Collate,
    TaskData,
    TaskInputs,
    batch_builder,
    build_bucket_plan,
    build_fixed_plan,
    iterate_evaluation_batches,
    truncation_note,
)
from monoblock.tasks.token_classification.augment import TaggedAugmenter, concatenate_rows, group_rows
from monoblock.tasks.token_classification.bio import is_iob1, to_bio
from monoblock.tasks.token_classification.section import TokenClassificationSection
from monoblock.training.collate import TensorBatch, collate_token_classification


def build_token_classification_data(inputs: TaskInputs) -> TaskData:
    """Build the training data of a recipe; the first token of each word has the label of the word.

    IOB1 labels are converted to BIO.
    """
    recipe, context, tokenizer = inputs.recipe, inputs.max_length, inputs.text_tokenizer
    train, valid, labels = inputs.train, inputs.valid, inputs.labels
    words = WordEncoder(tokenizer, InputTemplate(tokenizer, context))
    rows, validation_rows = train.rows, [] if valid is None else valid.rows
    note = ""
    if is_iob1(rows, labels):
        rows, validation_rows = [to_bio(row) for row in rows], [to_bio(row) for row in validation_rows]
        bio_labels = {label for row in (*rows, *validation_rows) for label in row.labels}
        # Keep the order of the labels if possible: a pretrained head may depend on it.
        labels = labels if bio_labels <= set(labels) else sorted(bio_labels | set(labels))
        note = "; labels converted from IOB1 to BIO"
    if valid is not None:
        check_labels(valid, (row.labels for row in validation_rows), labels)
    section, sampler = inputs.section(TokenClassificationSection), inputs.sampler
    samples = encode_tagged(rows, words, labels)
    num_truncated = sum(len(words(row.words).word_positions) < len(row.words) for row in rows)
    validation = None if valid is None else _encode_validation_rows(validation_rows, section.join_rows, words, labels)
    special = special_token_ids(tokenizer)
    collate = partial(collate_token_classification, special=special)
    build_batch, plan = batch_builder(samples, collate), _build_plan(inputs, samples, len(rows))
    if section.changes_rows or sampler is not None:
        augmenter = TaggedAugmenter(rows, words, section, sampler, recipe.train.seed)
        build_batch = _augmented_batch_builder(augmenter, labels, collate)
    return TaskData(
        tokenizer,
        special,
        plan,
        build_batch,
        None if validation is None else partial(iterate_evaluation_batches, validation, recipe.train.batch, collate),
        model_sizes={"classes": len(labels)},
        labels=labels,
        summary=f"{len(samples):,} samples of {len(labels)} classes to train on"
        f"{truncation_note(num_truncated, context)}{note}",
        validation_rows=validation_rows,
        unit="words",
    )


def _build_plan(inputs: TaskInputs, samples: EncodedDataset, num_rows: int) -> BatchPlan:
    """Return a plan that buckets rows by length; if rows are joined, their lengths vary, and the plan is fixed."""
    if inputs.section(TokenClassificationSection).join_rows > 1:
        return build_fixed_plan(inputs.recipe, num_rows)
    return build_bucket_plan(inputs.recipe, samples.lengths)


def _encode_validation_rows(
    rows: Sequence[TaggedSentence], join: int, words: WordEncoder, labels: list[str]
) -> EncodedDataset:
    """Encode validation rows, joining up to `join` neighbouring rows into one sample, as in prediction."""
    groups = group_rows([row.words for row in rows], join, words)
    encoded = iter([words.encode_rows([rows[index].words for index in group]) for group in groups])
    joined = [concatenate_rows(rows[group.start : group.stop]) for group in groups]
    return encode_tagged(joined, lambda _: next(encoded), labels)


def _augmented_batch_builder(
    augmenter: TaggedAugmenter, labels: list[str], collate: Collate
) -> Callable[[BatchIndices], TensorBatch]:
    """Return a function that builds batches of rows, augmented differently in every epoch."""
    label_ids = label_to_id(labels)

    def samples(batch: BatchIndices) -> Iterator[dict[str, Any]]:
        for index in batch.indices.tolist():
            row, encoded = augmenter(index, batch.epoch)
            ids, targets = align_labels(row, *encoded, label_ids)
            yield {"ids": np.array(ids, np.int64), "labels": np.array(targets, np.int64)}

    return lambda batch: TensorBatch(*collate(list(samples(batch))), batch.epoch, batch.indices.tolist())
