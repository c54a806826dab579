"""Samples with an end of their own as ground: pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from monoblock.data.batches import Batch, BucketPlan, Plan
from monoblock.data.corpora import Corpus
from monoblock.data.order import permutation
from monoblock.data.pairs import Samples, encode_pairs
from monoblock.tasks.ground import EVALUATION_SEED, Ground, fixed_plan, per_update, special_of
from monoblock.tasks.recipe import Recipe
from monoblock.tasks.tags import Reader
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training import objectives
from monoblock.training.objectives import Prepared


def pairs(
    recipe: Recipe,
    context: int | None,
    tokenizer: Tokenizer,
    train: Corpus,
    valid: Corpus | None,
    *,
    begins: int | None = None,
) -> Ground:
    """Targets of sources; one begins with the start token, with padding where there is none, or with `begins`."""
    part, special = recipe.train, special_of(tokenizer)
    longest = min((n for n in (context and context - 1, recipe.data.longest) if n is not None), default=None)
    width = None if part.compile != "graphs" or longest is None else longest + 1
    read = Reader(tokenizer)
    samples = encode_pairs(train.rows, read, read, longest=longest)
    start = begins if begins is not None else special.bos if special.bos is not None else special.pad
    dropout = recipe.tokenizer.dropout

    def row(sample: int, epoch: int) -> dict[str, Any]:
        if not dropout:
            return dict(samples[sample])
        number = int(samples.numbers[sample])
        keys: dict[str, Any] = {"seed": part.seed, "epoch": epoch, "dropout": dropout}
        texts = (train.rows[number].source, train.rows[number].target)
        cut = [
            read.cut(text, partial(tokenizer.sample, index=2 * number + side, **keys))
            for side, text in enumerate(texts)
        ]
        return {"source": np.array(cut[0][:longest], np.int64), "target": np.array(cut[1][:longest], np.int64)}

    def make(batch: Batch) -> Prepared:
        rows = [row(int(sample), batch.epoch) for sample in batch.samples]
        made = objectives.pairs(rows, special, start=start, width=width)
        return Prepared(*made, batch.epoch, batch.samples.tolist())

    size = None if part.tokens else per_update(recipe)
    plan: Plan = BucketPlan(samples.lengths, seed=part.seed, max_tokens=part.tokens, batch=size)
    if width is not None:
        plan = fixed_plan(recipe, len(samples))  # batches of one shape
    held = None if valid is None else encode_pairs(valid.rows, read, read, longest=longest)
    prepare = partial(objectives.pairs, special=special, start=start)
    evaluation = None if held is None else partial(in_order, held, part.batch, prepare)
    said, rows = f"{len(samples):,} pairs to train on", [] if valid is None else valid.rows
    if len(samples) < len(train):
        said += f" ({len(train) - len(samples):,} empty or longer than {longest} tokens left out)"
    return Ground(tokenizer, special, plan, make, evaluation, said=said, held=rows)


def in_order(
    samples: Samples, batch: int, prepare: Callable[..., tuple[dict[str, Tensor], Tensor]]
) -> Iterator[Prepared]:
    """All samples once, of like length together; the batches shuffled, so that the first few stand for all."""
    order = np.argsort([samples.length(n) for n in range(len(samples))], kind="stable").tolist()
    for number in permutation(EVALUATION_SEED, 0, -(-len(order) // batch)).tolist():
        chosen = order[number * batch : (number + 1) * batch]
        yield Prepared(*prepare([samples[n] for n in chosen]), 0, chosen)
