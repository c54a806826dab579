"""Training data for translation and transliteration: batches of encoded pairs of similar length."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from monoblock.data.batching.encode import encode_pairs
from monoblock.data.batching.plans import BatchIndices, BatchPlan, BucketBatchPlan
from monoblock.tasks.special_tokens import special_token_ids
from monoblock.tasks.tags import TagAwareEncoder
from monoblock.tasks.task_data import (
    TaskData,
    TaskInputs,
    build_fixed_plan,
    iterate_evaluation_batches,
    samples_per_step,
)
from monoblock.training.collate import TensorBatch, collate_seq2seq


def build_seq2seq_data(inputs: TaskInputs) -> TaskData:
    """Build the training data of a recipe: encoded pairs of at most the context and data.max_length tokens."""
    recipe, context, tokenizer = inputs.recipe, inputs.context, inputs.text_tokenizer
    train, valid, start_id = inputs.train, inputs.valid, inputs.decoder_start_id
    section, special = recipe.train, special_token_ids(tokenizer)
    longest = min((n for n in (context and context - 1, recipe.data.max_length) if n is not None), default=None)
    pad_to = None if section.compile != "graphs" or longest is None else longest + 1
    encode = TagAwareEncoder(tokenizer)
    samples = encode_pairs(train.rows, encode, encode, longest=longest)
    start = start_id if start_id is not None else special.bos_id if special.bos_id is not None else special.pad_id
    sampler = inputs.sampler

    def load_sample(index: int, epoch: int) -> dict[str, Any]:
        if sampler is None:
            return dict(samples[index])
        number = int(samples.row_numbers[index])
        source, target = (
            encode.encode_with(text, partial(sampler, epoch=epoch, index=2 * number + side))[:longest]
            for side, text in enumerate((train.rows[number].source, train.rows[number].target))
        )
        return {"source": np.array(source, np.int64), "target": np.array(target, np.int64)}

    def build_batch(batch: BatchIndices) -> TensorBatch:
        rows = [load_sample(int(index), batch.epoch) for index in batch.indices]
        inputs, labels = collate_seq2seq(rows, special, start=start, pad_to=pad_to)
        return TensorBatch(inputs, labels, batch.epoch, batch.indices.tolist())

    max_tokens = section.batch_tokens
    batch_size = None if max_tokens else samples_per_step(recipe)
    plan: BatchPlan = BucketBatchPlan(samples.lengths, seed=section.seed, max_tokens=max_tokens, batch=batch_size)
    if pad_to is not None:
        plan = build_fixed_plan(recipe, len(samples))  # batches of one shape
    evaluation = None
    if valid is not None:
        validation = encode_pairs(valid.rows, encode, encode, longest=longest)
        collate = partial(collate_seq2seq, special=special, start=start)
        evaluation = partial(iterate_evaluation_batches, validation, section.batch, collate)
    summary = f"{len(samples):,} pairs to train on"
    if len(samples) < len(train):
        summary += f" ({len(train) - len(samples):,} empty or longer than {longest} tokens left out)"
    rows = [] if valid is None else valid.rows
    return TaskData(tokenizer, special, plan, build_batch, evaluation, summary=summary, validation_rows=rows)
