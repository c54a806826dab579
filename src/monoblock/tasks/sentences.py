"""Masked tokens a text at a time: every document framed as a classifier reads it, so that nothing is new to one later.

`[data] packing = "documents"` asks for it; with `tokenizer.dropout` a text is cut otherwise in every epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from monoblock.data.batches import Batch, BucketPlan
from monoblock.data.corpora import Corpus
from monoblock.data.order import permutation
from monoblock.errors import InputError
from monoblock.tasks.framing import Frame
from monoblock.tasks.ground import EVALUATION_SEED, Ground, per_update, special_of
from monoblock.tasks.recipe import Recipe
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training import objectives
from monoblock.training.objectives import Prepared


def sentences(recipe: Recipe, context: int | None, tokenizer: Tokenizer, train: Corpus, valid: Corpus | None) -> Ground:
    """A row is a document, cut to the context."""
    part, special, frame = recipe.train, special_of(tokenizer), Frame(tokenizer, context)
    texts = [text for text in train.rows if text.strip()]
    plain = [frame(ids).ids for ids in tokenizer.encode_batch(texts)]
    if not plain:
        raise InputError("all documents are empty; give some text")

    def row(sample: int, epoch: int) -> dict[str, Any]:
        if not recipe.tokenizer.dropout:
            return {"ids": np.array(plain[sample], np.int64), "sample": sample}
        keys: dict[str, Any] = {"seed": part.seed, "epoch": epoch, "dropout": recipe.tokenizer.dropout}
        cut = tokenizer.sample(texts[sample], index=sample, **keys)
        return {"ids": np.array(frame(cut).ids, np.int64), "sample": sample}

    def prepared(rows: list[dict[str, Any]], epoch: int, seed: int) -> Prepared:
        made = objectives.masked(rows, special, seed=seed, epoch=epoch, rate=part.mask_rate)
        return Prepared(*made, epoch, [one["sample"] for one in rows])

    def make(batch: Batch) -> Prepared:
        return prepared([row(int(sample), batch.epoch) for sample in batch.samples], batch.epoch, part.seed)

    held = [] if valid is None else [frame(ids).ids for ids in tokenizer.encode_batch(list(valid.rows))]

    def evaluation() -> Iterator[Prepared]:
        order = np.argsort([len(ids) for ids in held], kind="stable").tolist()
        for number in permutation(EVALUATION_SEED, 0, -(-len(order) // part.batch)).tolist():
            chosen = order[number * part.batch : (number + 1) * part.batch]
            rows = [{"ids": np.array(held[n], np.int64), "sample": n} for n in chosen]
            yield prepared(rows, 0, EVALUATION_SEED)

    return Ground(
        tokenizer,
        special,
        BucketPlan([len(ids) for ids in plain], seed=part.seed, batch=per_update(recipe)),
        make,
        evaluation if held else None,
        said=f"{len(plain):,} texts to train on",
    )
