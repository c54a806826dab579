"""Samples with an end of their own as ground: pairs, labelled texts, tagged words, images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from monoblock.data.batches import Batch, BucketPlan, Plan
from monoblock.data.corpora import Corpus
from monoblock.data.order import permutation
from monoblock.data.pairs import Samples, encode_labelled, encode_pairs, encode_tagged
from monoblock.tasks.ground import EVALUATION_SEED, Ground, fixed_plan, per_update, special_of
from monoblock.tasks.recipe import Recipe
from monoblock.tasks.tags import Reader
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training import objectives
from monoblock.training.objectives import Prepared, Special


def pairs(recipe: Recipe, context: int | None, tokenizer: Tokenizer, train: Corpus, valid: Corpus | None) -> Ground:
    part, special = recipe.train, special_of(tokenizer)
    assert special.bos is not None
    longest = min((n for n in (context and context - 1, recipe.data.longest) if n is not None), default=None)
    width = None if part.compile != "graphs" or longest is None else longest + 1
    read = Reader(tokenizer)
    samples = encode_pairs(train.rows, read, read, longest=longest)
    start, dropout = special.bos, recipe.tokenizer.dropout

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
    evaluation = None if held is None else partial(_in_order, held, part.batch, prepare)
    said, rows = f"{len(samples):,} pairs to train on", [] if valid is None else valid.rows
    if len(samples) < len(train):
        said += f" ({len(train) - len(samples):,} empty or longer than {longest} tokens left out)"
    return Ground(tokenizer, special, plan, make, evaluation, said=said, held=rows)


def _in_order(
    samples: Samples, batch: int, prepare: Callable[..., tuple[dict[str, Tensor], Tensor]]
) -> Iterator[Prepared]:
    """All samples once, of like length together; the batches shuffled, so that the first few stand for all."""
    order = np.argsort([samples.length(n) for n in range(len(samples))], kind="stable").tolist()
    for number in permutation(EVALUATION_SEED, 0, -(-len(order) // batch)).tolist():
        chosen = order[number * batch : (number + 1) * batch]
        yield Prepared(*prepare([samples[n] for n in chosen]), 0, chosen)


def classify(
    recipe: Recipe,
    context: int | None,
    tokenizer: Tokenizer,
    train: Corpus,
    valid: Corpus | None,
    *,
    labels: list[str],
) -> Ground:

    def encode(text: str) -> list[int]:
        return [tokenizer.cls_id or 0, *tokenizer.encode(text)]

    held = None if valid is None else encode_labelled(valid.rows, encode, labels, longest=context)
    samples = encode_labelled(train.rows, encode, labels, longest=context)
    return _labelled_ground(recipe, tokenizer, samples, held, labels, _classified, "texts")


def _classified(rows: Sequence[dict[str, Any]], special: Special) -> tuple[dict[str, Tensor], Tensor]:
    return objectives.classified([{**row, "label": row["label"].item()} for row in rows], special)


def label(
    recipe: Recipe,
    context: int | None,
    tokenizer: Tokenizer,
    train: Corpus,
    valid: Corpus | None,
    *,
    labels: list[str],
) -> Ground:
    encode = lambda word: tokenizer.encode(f" {word}")
    held = None if valid is None else encode_tagged(valid.rows, encode, labels, longest=context)
    samples = encode_tagged(train.rows, encode, labels, longest=context)
    return _labelled_ground(recipe, tokenizer, samples, held, labels, objectives.labelled, "words")


def _labelled_ground(
    recipe: Recipe,
    tokenizer: Tokenizer,
    samples: Samples,
    held: Samples | None,
    labels: list[str],
    objective: Callable[..., tuple[dict[str, Tensor], Tensor]],
    unit: str,
) -> Ground:
    special = special_of(tokenizer)
    prepare = partial(objective, special=special)
    return Ground(
        tokenizer,
        special,
        BucketPlan(samples.lengths, seed=recipe.train.seed, batch=per_update(recipe)),
        lambda batch: Prepared(*prepare([samples[int(n)] for n in batch.samples]), batch.epoch, batch.samples.tolist()),
        None if held is None else partial(_in_order, held, recipe.train.batch, prepare),
        sizes={"classes": len(labels)},
        labels=labels,
        said=f"{len(samples):,} samples of {len(labels)} classes to train on",
        unit=unit,
    )


def images(recipe: Recipe, train: Corpus, valid: Corpus | None, labels: list[str]) -> Ground:
    special, shape = Special(), train.rows[0].pixels.shape

    def prepared(rows: list[Any], epoch: int, numbers: list[int]) -> Prepared:
        made = [{"pixels": 2 * row.pixels - 1, "label": row.label} for row in rows]
        return Prepared(*objectives.classified(made, special), epoch, numbers)

    def evaluation() -> Iterator[Prepared]:
        assert valid is not None
        for first in range(0, len(valid), recipe.train.batch):
            yield prepared(valid.rows[first : first + recipe.train.batch], 0, [])

    return Ground(
        None,
        special,
        fixed_plan(recipe, len(train)),
        lambda batch: prepared([train.rows[int(n)] for n in batch.samples], batch.epoch, batch.samples.tolist()),
        None if valid is None else evaluation,
        sizes={"classes": len(labels), "channels": shape[0], "image": shape[1]},
        labels=labels,
        said=f"{len(train):,} images of {shape[1]}×{shape[2]} to train on",
        unit="images",
    )
