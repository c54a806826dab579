"""What a recipe stands on: its tokenizer, its training batches and its evaluation, by objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from monoblock.data import corpora
from monoblock.data.batches import Batch, BucketPlan, FixedPlan, Plan
from monoblock.data.blocks import Blocks, Window, evaluation_blocks
from monoblock.data.corpora import Corpus
from monoblock.data.pairs import Samples, encode_labelled, encode_pairs, encode_tagged
from monoblock.data.shards import Tokens
from monoblock.errors import ConfigError, FileError
from monoblock.tasks.recipe import Recipe
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training import objectives
from monoblock.training.corruption import IGNORE
from monoblock.training.objectives import Prepared, Special

EVALUATION_SEED = 0  # hidden tokens of an evaluation are the same in every run
KINDS = {"causal": "text", "masked": "text", "spans": "text", "pairs": "pairs", "label": "tagged"}


@dataclass(frozen=True)
class Ground:
    tokenizer: Tokenizer | None
    special: Special
    plan: Plan
    make: Callable[[Batch], Prepared]
    evaluation: Callable[[], Iterable[Prepared]] | None
    sizes: dict[str, Any] = field(default_factory=dict)  # what the data say about the model: classes, image …
    labels: list[str] = field(default_factory=list)
    said: str = ""  # how much there is, for the user
    bytes_per_token: float | None = None  # of the validation text


# -- tokenizer ----------------------------------------------------------------------------------------------------


def find_tokenizer(recipe: Recipe, train: Corpus, folder: Path | None) -> Tokenizer:
    """The run folder's own, the one the recipe names, or a new one trained on the training split."""
    for place in (folder, Path(recipe.tokenizer.folder) if recipe.tokenizer.folder else None):
        if place is not None and (place / "tokenizer.json").is_file():
            return Tokenizer.from_pretrained(place)
    if recipe.tokenizer.folder:
        raise FileError(f"tokenizer.folder={recipe.tokenizer.folder} has no tokenizer.json")
    part = recipe.tokenizer
    return Tokenizer.train(
        part.kind,
        train.texts(),
        part.vocab,
        marker=part.marker,
        specials=_specials(recipe, train),
        lowercase=part.lowercase,
    )


def _specials(recipe: Recipe, train: Corpus) -> list[str]:
    """The special tokens an objective needs; one endless text needs none."""
    objective = recipe.train.objective
    if objective == "causal":
        return ["eos"] if len(train) > 1 else []
    needs = {
        "masked": ["pad", "cls", "sep", "mask"],
        "spans": ["pad", "eos", "sentinels=100"],
        "pairs": ["pad", "bos", "eos"],
        "classify": ["pad", "cls", "sep"],
        "label": ["pad", "cls", "sep"],
    }
    return needs[objective]


def special_of(tokenizer: Tokenizer) -> Special:
    return Special(
        pad=tokenizer.pad_id or 0,
        bos=tokenizer.bos_id,
        eos=tokenizer.eos_id,
        mask=tokenizer.mask_id,
        sentinels=tuple(tokenizer.sentinel_ids),
        never_masked=tokenizer.special_ids,
        vocab=tokenizer.vocab_size,
    )


# -- by objective -------------------------------------------------------------------------------------------------


def lay(recipe: Recipe, context: int | None, *, data: Path | None = None, folder: Path | None = None) -> Ground:
    """Read the corpus and prepare training and evaluation."""
    kind: Any = KINDS.get(recipe.train.objective)
    load = partial(corpora.load, recipe.data.corpus, folder=data, kind=kind if _is_path(recipe) else None)
    train = load("train")
    if recipe.data.limit is not None:
        train = Corpus(train.name, train.kind, train.split, train.rows[: recipe.data.limit])
    wanted = {"causal": "text", "masked": "text", "spans": "text", "pairs": "pairs", "label": "tagged"}
    if train.kind != wanted.get(recipe.train.objective, train.kind):
        asked = recipe.train.objective
        raise ConfigError(f"objective={asked!r} needs {wanted[asked]}, but {train.name} is {train.kind}")
    try:
        valid: Corpus | None = load("valid")
    except FileError:
        valid = None
    if train.kind == "images":
        return _images(recipe, train, valid)
    tokenizer = find_tokenizer(recipe, train, folder)
    build = {
        "causal": _causal,
        "masked": _hidden,
        "spans": _hidden,
        "pairs": _pairs,
        "classify": _classify,
        "label": _label,
    }[recipe.train.objective]
    return build(recipe, context, tokenizer, train, valid)


def _is_path(recipe: Recipe) -> bool:
    return recipe.data.corpus not in corpora.CORPORA


def _tokens(corpus: Corpus, tokenizer: Tokenizer) -> Tokens:
    ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    documents = (ids + ends for ids in tokenizer.encode_batch(list(corpus.texts())))
    return Tokens.from_documents(documents, tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)


def _per_update(recipe: Recipe) -> int:
    return recipe.train.batch * recipe.train.accumulate


def _fixed(recipe: Recipe, count: int) -> FixedPlan:
    size = _per_update(recipe)
    return FixedPlan(count, min(size, count), recipe.train.seed, last="drop")


def _causal(recipe: Recipe, context: int | None, tokenizer: Tokenizer, train: Corpus, valid: Corpus | None) -> Ground:
    context = _length(context)
    tokens, special = _tokens(train, tokenizer), special_of(tokenizer)
    blocks = Blocks(tokens, context, packing=recipe.data.packing)
    seed = recipe.train.seed

    def make(batch: Batch) -> Prepared:
        samples = [blocks.get(int(sample), batch.epoch, seed) for sample in batch.samples]
        return Prepared(*objectives.causal(samples, special), batch.epoch, batch.samples.tolist())

    held, ratio = None, None
    if valid is not None:
        held = _tokens(valid, tokenizer)
        ratio = sum(len(text.encode()) for text in valid.texts()) / len(held)
    evaluation = None if held is None else partial(_windows, held, context, recipe.train.batch)
    said = f"{len(tokens):,} tokens to train on, {0 if held is None else len(held):,} to validate"
    plan = _fixed(recipe, len(blocks))
    return Ground(tokenizer, special, plan, make, evaluation, said=said, bytes_per_token=ratio)


def _length(context: int | None) -> int:
    if context is None:
        raise ConfigError("a language model is trained on blocks of one length; write model.context=…")
    return context


def _windows(tokens: Tokens, context: int, batch: int) -> Iterator[Prepared]:
    """The whole split, every token asked once."""
    waiting: list[Window] = []
    for window in evaluation_blocks(tokens, context):
        if waiting and (len(waiting) == batch or len(window.ids) != len(waiting[0].ids)):
            yield _window_batch(waiting)
            waiting = []
        waiting.append(window)
    if waiting:
        yield _window_batch(waiting)


def _window_batch(windows: list[Window]) -> Prepared:
    ids = torch.from_numpy(np.stack([window.ids for window in windows]))
    labels = ids[:, 1:].clone()
    for row, window in enumerate(windows):
        labels[row, : labels.shape[1] - window.targets] = IGNORE
    return Prepared({"source": ids[:, :-1].contiguous()}, labels, 0, [])


def _hidden(recipe: Recipe, context: int | None, tokenizer: Tokenizer, train: Corpus, valid: Corpus | None) -> Ground:
    """Masked tokens or spans of fixed-length blocks."""
    context, special, part = _length(context), special_of(tokenizer), recipe.train
    start = special.pad  # T5 starts decoding from its padding token

    def prepared(blocks: Blocks, samples: Iterable[int], epoch: int, seed: int) -> Prepared:
        rows = [{"ids": blocks.get(n, epoch, seed)["ids"][:-1], "sample": n} for n in samples]
        if part.objective == "masked":
            made = objectives.masked(rows, special, seed=seed, epoch=epoch, rate=part.mask_rate)
        else:
            made = objectives.spans(rows, special, seed=seed, epoch=epoch, start=start, rate=part.mask_rate)
        return Prepared(*made, epoch, list(samples))

    blocks = Blocks(_tokens(train, tokenizer), context)
    held = None if valid is None else Blocks(_tokens(valid, tokenizer), context)

    def evaluation() -> Iterator[Prepared]:
        assert held is not None
        for first in range(0, len(held), part.batch):
            yield prepared(held, range(first, min(first + part.batch, len(held))), 0, EVALUATION_SEED)

    return Ground(
        tokenizer,
        special,
        _fixed(recipe, len(blocks)),
        lambda batch: prepared(blocks, batch.samples.tolist(), batch.epoch, part.seed),
        None if held is None else evaluation,
        said=f"{len(blocks):,} blocks of {context} tokens to train on",
    )


def _pairs(recipe: Recipe, context: int | None, tokenizer: Tokenizer, train: Corpus, valid: Corpus | None) -> Ground:
    part, special = recipe.train, special_of(tokenizer)
    assert special.bos is not None
    longest = None if context is None else context - 1
    samples = encode_pairs(train.rows, tokenizer.encode, tokenizer.encode, longest=longest)
    start, dropout = special.bos, recipe.tokenizer.dropout

    def row(sample: int, epoch: int) -> dict[str, Any]:
        if not dropout:
            return dict(samples[sample])
        number = int(samples.numbers[sample])
        keys: dict[str, Any] = {"seed": part.seed, "epoch": epoch, "dropout": dropout}
        source, target = train.rows[number].source, train.rows[number].target
        cut = [tokenizer.sample(text, index=2 * number + side, **keys) for side, text in enumerate((source, target))]
        return {"source": np.array(cut[0][:longest], np.int64), "target": np.array(cut[1][:longest], np.int64)}

    def make(batch: Batch) -> Prepared:
        rows = [row(int(sample), batch.epoch) for sample in batch.samples]
        return Prepared(*objectives.pairs(rows, special, start=start), batch.epoch, batch.samples.tolist())

    plan = BucketPlan(
        samples.lengths, seed=part.seed, max_tokens=part.tokens, batch=None if part.tokens else _per_update(recipe)
    )
    held = None if valid is None else encode_pairs(valid.rows, tokenizer.encode, tokenizer.encode, longest=longest)
    prepare = partial(objectives.pairs, special=special, start=start)
    evaluation = None if held is None else partial(_in_order, held, part.batch, prepare)
    return Ground(tokenizer, special, plan, make, evaluation, said=f"{len(samples):,} pairs to train on")


def _in_order(
    samples: Samples, batch: int, prepare: Callable[..., tuple[dict[str, Tensor], Tensor]]
) -> Iterator[Prepared]:
    """All samples once, of like length together."""
    order = np.argsort([samples.length(n) for n in range(len(samples))], kind="stable").tolist()
    for first in range(0, len(order), batch):
        chosen = order[first : first + batch]
        yield Prepared(*prepare([samples[n] for n in chosen]), 0, chosen)


def _classify(recipe: Recipe, context: int | None, tokenizer: Tokenizer, train: Corpus, valid: Corpus | None) -> Ground:
    labels = train.labels()

    def encode(text: str) -> list[int]:
        return [tokenizer.cls_id or 0, *tokenizer.encode(text)]

    held = None if valid is None else encode_labelled(valid.rows, encode, labels, longest=context)
    samples = encode_labelled(train.rows, encode, labels, longest=context)
    return _labelled_ground(recipe, tokenizer, samples, held, labels, objectives.classified)


def _label(recipe: Recipe, context: int | None, tokenizer: Tokenizer, train: Corpus, valid: Corpus | None) -> Ground:
    labels = train.labels()
    encode = lambda word: tokenizer.encode(f" {word}")
    held = None if valid is None else encode_tagged(valid.rows, encode, labels, longest=context)
    samples = encode_tagged(train.rows, encode, labels, longest=context)
    return _labelled_ground(recipe, tokenizer, samples, held, labels, objectives.labelled)


def _labelled_ground(
    recipe: Recipe,
    tokenizer: Tokenizer,
    samples: Samples,
    held: Samples | None,
    labels: list[str],
    objective: Callable[..., tuple[dict[str, Tensor], Tensor]],
) -> Ground:
    special = special_of(tokenizer)
    prepare = partial(objective, special=special)
    return Ground(
        tokenizer,
        special,
        BucketPlan(samples.lengths, seed=recipe.train.seed, batch=_per_update(recipe)),
        lambda batch: Prepared(*prepare([samples[int(n)] for n in batch.samples]), batch.epoch, batch.samples.tolist()),
        None if held is None else partial(_in_order, held, recipe.train.batch, prepare),
        sizes={"classes": len(labels)},
        labels=labels,
        said=f"{len(samples):,} samples of {len(labels)} classes to train on",
    )


def _images(recipe: Recipe, train: Corpus, valid: Corpus | None) -> Ground:
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
        _fixed(recipe, len(train)),
        lambda batch: prepared([train.rows[int(n)] for n in batch.samples], batch.epoch, batch.samples.tolist()),
        None if valid is None else evaluation,
        sizes={"classes": len(train.labels()), "channels": shape[0], "image": shape[1]},
        labels=train.labels(),
        said=f"{len(train):,} images of {shape[1]}×{shape[2]} to train on",
    )


# -- evaluation ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(
    model: nn.Module, ground: Ground, loss: Any, device: torch.device, *, batches: int = 0
) -> dict[str, float]:
    """Loss over the validation split, every asked place counted once; accuracy too."""
    total, asked, right = 0.0, 0, 0
    assert ground.evaluation is not None
    for number, batch in enumerate(ground.evaluation()):
        if batches and number >= batches:
            break
        part = batch.to(device)
        logits = model(**part.inputs)
        total += float(loss.of(logits, part.labels))
        asked += batch.asked
        right += int(((logits.argmax(-1) == part.labels) & (part.labels != IGNORE)).sum())
    mean = total / max(asked, 1)
    found = {"val_loss": mean, "val_accuracy": right / max(asked, 1), "val_tokens": asked}
    if ground.bytes_per_token is not None:
        found["val_bits_per_byte"] = mean / math.log(2) / ground.bytes_per_token
    return found
