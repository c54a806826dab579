"""Training data for masked language modelling with `data.packing = "documents"`: one document per row.

Documents have the same special tokens as the inputs of a classifier, so that fine-tuning does not change the format.
With `tokenizer.dropout` or `tokenizer.alpha` a document is segmented anew in every epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from monoblock.data.batching.plans import BatchIndices
from monoblock.data.corpora.load import Corpus
from monoblock.errors import InputError
from monoblock.tasks.input_template import InputTemplate
from monoblock.tasks.masked_lm.section import CorruptionSection
from monoblock.tasks.special_tokens import special_token_ids
from monoblock.tasks.task_data import (
    EVALUATION_SEED,
    TaskData,
    TaskInputs,
    build_bucket_plan,
    group_for_evaluation,
    truncation_note,
)
from monoblock.training.collate import TensorBatch, collate_masked_lm


def build_masked_document_data(inputs: TaskInputs) -> TaskData:
    """Build the training data of a recipe: each row is a document, truncated to the context."""
    recipe, context, tokenizer = inputs.recipe, inputs.max_length, inputs.text_tokenizer
    mask_rate, valid = inputs.section(CorruptionSection).mask_rate, inputs.valid
    section, special, template = recipe.train, special_token_ids(tokenizer), InputTemplate(tokenizer, context)
    texts, sampler = nonempty_texts(inputs.train), inputs.sampler
    encoded = [template(ids) for ids in tokenizer.encode_batch(texts)]
    documents, num_truncated = [row.ids for row in encoded], sum(row.num_truncated > 0 for row in encoded)
    if not documents:
        raise InputError("all documents of the corpus are empty; give a corpus that contains text")

    def sample(index: int, epoch: int) -> dict[str, Any]:
        ids = documents[index]
        if sampler is not None:
            ids = template(sampler(texts[index], epoch=epoch, index=index)).ids
        return {"ids": np.array(ids, np.int64), "sample": index}

    def collate(rows: list[dict[str, Any]], epoch: int, seed: int) -> TensorBatch:
        inputs, labels = collate_masked_lm(rows, special, seed=seed, epoch=epoch, rate=mask_rate)
        return TensorBatch(inputs, labels, epoch, [row["sample"] for row in rows])

    def build_batch(batch: BatchIndices) -> TensorBatch:
        return collate([sample(int(index), batch.epoch) for index in batch.indices], batch.epoch, section.seed)

    validation = [] if valid is None else [template(ids).ids for ids in tokenizer.encode_batch(nonempty_texts(valid))]

    def evaluation_batches() -> Iterator[TensorBatch]:
        for rows in iterate_evaluation_rows(validation, section.batch):
            yield collate(rows, 0, EVALUATION_SEED)

    return TaskData(
        tokenizer,
        special,
        build_bucket_plan(recipe, [len(ids) for ids in documents]),
        build_batch,
        evaluation_batches if validation else None,
        summary=f"{len(documents):,} texts to train on{truncation_note(num_truncated, context)}",
    )


def nonempty_texts(corpus: Corpus) -> list[str]:
    """Return the texts of a corpus that are not only white space."""
    return [text for text in corpus.texts() if text.strip()]


def iterate_evaluation_rows(texts: Sequence[Sequence[int]], batch: int) -> Iterator[list[dict[str, Any]]]:
    """Yield batches of texts, given as token ids, of similar length.

    The batches are in random order, so that the first few are representative of all.
    """
    for indices in group_for_evaluation([len(ids) for ids in texts], batch):
        yield [{"ids": np.array(texts[index], np.int64), "sample": index} for index in indices]
