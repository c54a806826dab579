"""Labelled texts and labelled words as ground."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from monoblock.data.batches import Batch, BucketPlan, Plan
from monoblock.data.corpora import Corpus
from monoblock.data.pairs import Samples, encode_labelled, encode_tagged, tagged
from monoblock.data.readers import Tagged
from monoblock.tasks.classifying import unseen
from monoblock.tasks.entities import as_bio, is_iob1
from monoblock.tasks.framing import Frame, Framed, FramedWords, Words
from monoblock.tasks.ground import Ground, fixed_plan, per_update, special_of
from monoblock.tasks.recipe import Recipe, model_config
from monoblock.tasks.samples import in_order
from monoblock.tasks.varied import Varied, groups, together
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training import objectives
from monoblock.training.objectives import Prepared, Special


def classify(
    recipe: Recipe,
    context: int | None,
    tokenizer: Tokenizer,
    train: Corpus,
    valid: Corpus | None,
    *,
    labels: list[str],
) -> Ground:
    """One label a text, or a pair of texts; what does not fit is cut at its end, and said."""
    frame = Frame(tokenizer, context)
    segmented = _knows_segments(recipe, tokenizer, labels)
    cut = [0]

    def encode(text: str, pair: str | None) -> tuple[list[int], list[int]]:
        made: Framed = frame(tokenizer.encode(text), None if pair is None else tokenizer.encode(pair))
        cut[0] += made.cut > 0
        return made.ids, made.segments if segmented else [0] * len(made.ids)

    if valid is not None:
        _check_known(valid, ((row.label,) for row in valid.rows), labels)
    held = None if valid is None else encode_labelled(valid.rows, encode, labels)
    cut[0] = 0
    samples = encode_labelled(train.rows, encode, labels)
    special = special_of(tokenizer)
    prepare = partial(_classified, special=special)
    dropout, seed = recipe.tokenizer.dropout, recipe.train.seed

    def row(sample: int, epoch: int) -> dict[str, Any]:
        """A sample as it is read in an epoch: with merges left out, other pieces each time."""
        found, number = dict(samples[sample]), int(samples.numbers[sample])
        if not dropout or train.rows[number].pair is not None:
            return found
        cut = tokenizer.sample(train.rows[number].text, seed=seed, epoch=epoch, index=number, dropout=dropout)
        ids = np.array(frame(cut).ids, np.int64)
        return {**found, "ids": ids, **({"segments": np.zeros_like(ids)} if "segments" in found else {})}

    return Ground(
        tokenizer,
        special,
        BucketPlan(samples.lengths, seed=seed, batch=per_update(recipe)),
        lambda batch: Prepared(
            *prepare([row(int(n), batch.epoch) for n in batch.samples]), batch.epoch, batch.samples.tolist()
        ),
        None if held is None else partial(in_order, held, recipe.train.batch, prepare),
        sizes={"classes": len(labels)},
        labels=labels,
        said=f"{len(samples):,} samples of {len(labels)} classes to train on{_cut(cut[0], context)}",
        unit="texts",
    )


def _check_known(corpus: Corpus, rows: Iterable[Sequence[str]], labels: Sequence[str]) -> None:
    """One line for a label of the validation rows that no training row has."""
    for number, row in enumerate(rows, 1):
        strange = next((label for label in row if label not in labels), None)
        if strange is not None:
            raise unseen(corpus, f"row {number}", strange, labels)


def _knows_segments(recipe: Recipe, tokenizer: Tokenizer, labels: list[str]) -> bool:
    config = model_config(recipe, tokenizer.vocab_size, classes=len(labels))
    return getattr(getattr(config, "input", None), "segments", 0) > 1


def _classified(rows: Sequence[dict[str, Any]], special: Special) -> tuple[dict[str, Tensor], Tensor]:
    return objectives.classified([{**row, "label": row["label"].item()} for row in rows], special)


def _cut(count: int, context: int | None) -> str:
    return f" ({count:,} of them cut to {context} tokens)" if count else ""


# -- words ----------------------------------------------------------------------------------------------------------


def label(
    recipe: Recipe,
    context: int | None,
    tokenizer: Tokenizer,
    train: Corpus,
    valid: Corpus | None,
    *,
    labels: list[str],
) -> Ground:
    """One label a word, borne by its first piece; IOB1 is turned into BIO, and that is said."""
    words = Words(tokenizer, Frame(tokenizer, context))
    rows, kept = train.rows, [] if valid is None else valid.rows
    said = ""
    if is_iob1(rows, labels):
        rows, kept = [as_bio(row) for row in rows], [as_bio(row) for row in kept]
        made = {label for row in (*rows, *kept) for label in row.labels}
        labels = labels if made <= set(labels) else sorted(made | set(labels))  # a head keeps the order of its own
        said = "; labels turned from IOB1 into BIO"
    if valid is not None:
        _check_known(valid, (row.labels for row in kept), labels)
    part = recipe.data
    samples = encode_tagged(rows, words, labels)
    cut = sum(len(words(row.words).places) < len(row.words) for row in rows)
    held = None if valid is None else _held(kept, part.join, words, labels)
    special = special_of(tokenizer)
    prepare = partial(objectives.labelled, special=special)
    make, plan = _plain(samples, prepare), _plan(recipe, samples)
    if part.join > 1 or part.exchange or part.hide or part.capitals or recipe.tokenizer.dropout:
        make = _anew(Varied(rows, words, part, recipe.tokenizer.dropout, recipe.train.seed), labels, prepare)
        plan = fixed_plan(recipe, len(rows)) if part.join > 1 else plan
    return Ground(
        tokenizer,
        special,
        plan,
        make,
        None if held is None else partial(in_order, held, recipe.train.batch, prepare),
        sizes={"classes": len(labels)},
        labels=labels,
        said=f"{len(samples):,} samples of {len(labels)} classes to train on{_cut(cut, context)}{said}",
        held=kept,
        unit="words",
    )


def _held(rows: Sequence[Tagged], join: int, words: Words, labels: list[str]) -> Samples:
    """The rows to be measured on, read together as they will be."""
    some = groups([row.words for row in rows], join, words)
    framed = iter([words.among([rows[number].words for number in numbers]) for numbers in some])
    one = [together(rows[numbers.start : numbers.stop]) for numbers in some]
    return encode_tagged(one, lambda _: next(framed), labels)


Prepare = Callable[..., tuple[dict[str, Tensor], Tensor]]


def _plan(recipe: Recipe, samples: Samples) -> Plan:
    return BucketPlan(samples.lengths, seed=recipe.train.seed, batch=per_update(recipe))


def _plain(samples: Samples, prepare: Prepare) -> Callable[[Batch], Prepared]:
    return lambda batch: Prepared(
        *prepare([samples[int(n)] for n in batch.samples]), batch.epoch, batch.samples.tolist()
    )


def _anew(varied: Varied, labels: list[str], prepare: Prepare) -> Callable[[Batch], Prepared]:
    """Rows that are other in every epoch."""
    number = {label: place for place, label in enumerate(labels)}

    def samples(batch: Batch) -> Iterator[dict[str, Any]]:
        for sample in batch.samples.tolist():
            row: Tagged
            framed: FramedWords
            row, framed = varied(sample, batch.epoch)
            ids, asked = tagged(row, *framed, number)
            yield {"ids": np.array(ids, np.int64), "labels": np.array(asked, np.int64)}

    return lambda batch: Prepared(*prepare(list(samples(batch))), batch.epoch, batch.samples.tolist())
