"""Training data for classification: texts, pairs of texts, or images (images.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from monoblock.data.batching.encode import encode_labelled
from monoblock.errors import ConfigError
from monoblock.tasks.classification.images import build_image_data
from monoblock.tasks.classification.section import ClassificationSection
from monoblock.tasks.input_template import InputTemplate
from monoblock.tasks.labels import check_labels
from monoblock.tasks.special_tokens import special_token_ids
from monoblock.tasks.task_data import (
    TaskData,
    TaskInputs,
    build_bucket_plan,
    iterate_evaluation_batches,
    truncation_note,
)
from monoblock.training.collate import SpecialTokenIds, TensorBatch, collate_classification


def build_classification_data(inputs: TaskInputs) -> TaskData:
    """Build training data with one label for each image, text or pair of texts; texts are truncated to the context."""
    recipe, context, train, valid, labels = inputs.recipe, inputs.max_length, inputs.train, inputs.valid, inputs.labels
    section = inputs.section(ClassificationSection)
    if train.kind == "images":
        return build_image_data(recipe, section, train, valid, labels)
    if section != ClassificationSection():
        raise ConfigError(f"classification.augment is for images, but the corpus {train.name} is text; leave it out")
    tokenizer = inputs.text_tokenizer
    template, with_segments, num_truncated = InputTemplate(tokenizer, context), inputs.has_segments, 0

    def encode(text: str, pair: str | None) -> tuple[list[int], list[int]]:
        nonlocal num_truncated
        encoded = template(tokenizer.encode(text), None if pair is None else tokenizer.encode(pair))
        num_truncated += encoded.num_truncated > 0
        return encoded.ids, encoded.segments if with_segments else [0] * len(encoded.ids)

    if valid is not None:
        check_labels(valid, ((row.label,) for row in valid.rows), labels)
    validation = None if valid is None else encode_labelled(valid.rows, encode, labels)
    num_truncated = 0
    samples = encode_labelled(train.rows, encode, labels)
    special = special_token_ids(tokenizer)
    collate = partial(_collate_labelled, special=special)
    sampler = inputs.sampler

    def sample(index: int, epoch: int) -> dict[str, Any]:
        """Return a sample; a text is segmented differently in every epoch, if the recipe asks for it."""
        encoded, number = dict(samples[index]), int(samples.row_numbers[index])
        if sampler is None:
            return encoded
        texts = [text for text in (train.rows[number].text, train.rows[number].text_pair) if text is not None]
        row = template(*(sampler(text, epoch=epoch, index=number) for text in texts))
        fields = {"ids": row.ids, "segments": row.segments}
        return {**encoded, **{name: np.array(fields[name], np.int64) for name in fields if name in encoded}}

    return TaskData(
        tokenizer,
        special,
        build_bucket_plan(recipe, samples.lengths),
        lambda batch: TensorBatch(
            *collate([sample(int(index), batch.epoch) for index in batch.indices]), batch.epoch, batch.indices.tolist()
        ),
        None if validation is None else partial(iterate_evaluation_batches, validation, recipe.train.batch, collate),
        model_sizes={"classes": len(labels)},
        labels=labels,
        summary=f"{len(samples):,} samples of {len(labels)} classes to train on"
        f"{truncation_note(num_truncated, context)}",
        unit="texts",
    )


def _collate_labelled(rows: Sequence[dict[str, Any]], special: SpecialTokenIds) -> tuple[dict[str, Tensor], Tensor]:
    return collate_classification([{**row, "label": row["label"].item()} for row in rows], special)
