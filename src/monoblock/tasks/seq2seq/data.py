"""Samples with an end of their own as ground: pairs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from monoblock.data.batching.encode import encode_pairs
from monoblock.data.batching.plans import BatchIndices, BatchPlan, BucketBatchPlan
from monoblock.data.corpora.load import Corpus
from monoblock.recipes.schema import Recipe
from monoblock.tasks.special_tokens import special_token_ids
from monoblock.tasks.tags import TagAwareEncoder
from monoblock.tasks.task_data import TaskData, build_fixed_plan, iterate_evaluation_batches, samples_per_step
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.collate import TensorBatch, collate_seq2seq


def build_seq2seq_data(
    recipe: Recipe,
    context: int | None,
    tokenizer: Tokenizer,
    train: Corpus,
    valid: Corpus | None,
    *,
    start_id: int | None = None,
) -> TaskData:
    """Targets of sources; one begins with the start token, with padding where there is none, or with `begins`."""
    part, special = recipe.train, special_token_ids(tokenizer)
    longest = min((n for n in (context and context - 1, recipe.data.longest) if n is not None), default=None)
    width = None if part.compile != "graphs" or longest is None else longest + 1
    read = TagAwareEncoder(tokenizer)
    samples = encode_pairs(train.rows, read, read, longest=longest)
    start = start_id if start_id is not None else special.bos_id if special.bos_id is not None else special.pad_id
    dropout = recipe.tokenizer.dropout

    def row(sample: int, epoch: int) -> dict[str, Any]:
        if not dropout:
            return dict(samples[sample])
        number = int(samples.row_numbers[sample])
        keys: dict[str, Any] = {"seed": part.seed, "epoch": epoch, "dropout": dropout}
        texts = (train.rows[number].source, train.rows[number].target)
        cut = [
            read.encode_with(text, partial(tokenizer.sample, index=2 * number + side, **keys))
            for side, text in enumerate(texts)
        ]
        return {"source": np.array(cut[0][:longest], np.int64), "target": np.array(cut[1][:longest], np.int64)}

    def make(batch: BatchIndices) -> TensorBatch:
        rows = [row(int(sample), batch.epoch) for sample in batch.indices]
        made = collate_seq2seq(rows, special, start=start, pad_to=width)
        return TensorBatch(*made, batch.epoch, batch.indices.tolist())

    size = None if part.tokens else samples_per_step(recipe)
    plan: BatchPlan = BucketBatchPlan(samples.lengths, seed=part.seed, max_tokens=part.tokens, batch=size)
    if width is not None:
        plan = build_fixed_plan(recipe, len(samples))  # batches of one shape
    held = None if valid is None else encode_pairs(valid.rows, read, read, longest=longest)
    prepare = partial(collate_seq2seq, special=special, start=start)
    evaluation = None if held is None else partial(iterate_evaluation_batches, held, part.batch, prepare)
    said, rows = f"{len(samples):,} pairs to train on", [] if valid is None else valid.rows
    if len(samples) < len(train):
        said += f" ({len(train) - len(samples):,} empty or longer than {longest} tokens left out)"
    return TaskData(tokenizer, special, plan, make, evaluation, summary=said, validation_rows=rows)
