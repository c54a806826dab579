"""Masked tokens a text at a time: every document framed as a classifier reads it, so that nothing is new to one later.

`[data] packing = "documents"` asks for it; with `tokenizer.dropout` a text is cut otherwise in every epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    texts = documents(train)
    framed = [frame(ids) for ids in tokenizer.encode_batch(texts)]
    plain, cut = [one.ids for one in framed], sum(one.cut > 0 for one in framed)
    if not plain:
        raise InputError("all documents are empty; give some text")

    def row(sample: int, epoch: int) -> dict[str, Any]:
        if not recipe.tokenizer.dropout:
            return {"ids": np.array(plain[sample], np.int64), "sample": sample}
        keys: dict[str, Any] = {"seed": part.seed, "epoch": epoch, "dropout": recipe.tokenizer.dropout}
        ids = tokenizer.sample(texts[sample], index=sample, **keys)
        return {"ids": np.array(frame(ids).ids, np.int64), "sample": sample}

    def prepared(rows: list[dict[str, Any]], epoch: int, seed: int) -> Prepared:
        made = objectives.masked(rows, special, seed=seed, epoch=epoch, rate=part.mask_rate)
        return Prepared(*made, epoch, [one["sample"] for one in rows])

    def make(batch: Batch) -> Prepared:
        return prepared([row(int(sample), batch.epoch) for sample in batch.samples], batch.epoch, part.seed)

    held = [] if valid is None else [frame(ids).ids for ids in tokenizer.encode_batch(documents(valid))]

    def evaluation() -> Iterator[Prepared]:
        for rows in in_batches(held, part.batch):
            yield prepared(rows, 0, EVALUATION_SEED)

    return Ground(
        tokenizer,
        special,
        BucketPlan([len(ids) for ids in plain], seed=part.seed, batch=per_update(recipe)),
        make,
        evaluation if held else None,
        said=f"{len(plain):,} texts to train on" + (f" ({cut:,} of them cut to {context} tokens)" if cut else ""),
    )


def documents(corpus: Corpus) -> list[str]:
    """The texts of a corpus of which something is left without spaces."""
    return [text for text in corpus.texts() if text.strip()]


def in_batches(texts: Sequence[Sequence[int]], batch: int) -> Iterator[list[dict[str, Any]]]:
    """All texts once, of like length together; the batches shuffled, so that the first few stand for all."""
    order = np.argsort([len(ids) for ids in texts], kind="stable").tolist()
    for number in permutation(EVALUATION_SEED, 0, -(-len(order) // batch)).tolist():
        chosen = order[number * batch : (number + 1) * batch]
        yield [{"ids": np.array(texts[n], np.int64), "sample": n} for n in chosen]
