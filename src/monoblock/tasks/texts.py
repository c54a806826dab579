"""Running text as ground: blocks to continue, and blocks in which tokens or spans are hidden."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from monoblock.config import ModelConfig, RecurrentConfig
from monoblock.data import corpora
from monoblock.data.batches import Batch, FixedPlan
from monoblock.data.blocks import Blocks, Window, evaluation_blocks
from monoblock.data.corpora import Corpus
from monoblock.data.shards import Tokens
from monoblock.errors import ConfigError
from monoblock.tasks.ground import EVALUATION_SEED, Ground, fixed_plan, special_of
from monoblock.tasks.recipe import Recipe
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training import objectives
from monoblock.training.corruption import IGNORE
from monoblock.training.objectives import Prepared


def tokens_of(corpus: Corpus, tokenizer: Tokenizer) -> Tokens:
    ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    documents = (ids + ends for ids in tokenizer.encode_batch(list(corpus.texts())))
    return Tokens.from_documents(documents, tokenizer.vocab_size, fingerprint=tokenizer.fingerprint)


def causal(recipe: Recipe, context: int | None, tokenizer: Tokenizer, train: Corpus, valid: Corpus | None) -> Ground:
    context = _length(context)
    tokens, special = tokens_of(train, tokenizer), special_of(tokenizer)
    blocks = Blocks(tokens, context, packing=recipe.data.packing)
    seed = recipe.train.seed

    def make(batch: Batch) -> Prepared:
        samples = [blocks.get(int(sample), batch.epoch, seed) for sample in batch.samples]
        return Prepared(*objectives.causal(samples, special), batch.epoch, batch.samples.tolist())

    held, ratio = None, None
    if valid is not None:
        held = tokens_of(valid, tokenizer)
        ratio = sum(len(text.encode()) for text in valid.texts()) / len(held)
    evaluation = None if held is None else partial(windows, held, context, recipe.train.batch)
    said = f"{len(tokens):,} tokens to train on, {0 if held is None else len(held):,} to validate"
    plan = fixed_plan(recipe, len(blocks))
    baselines = {} if held is None else _baselines(tokens, held)
    return Ground(tokenizer, special, plan, make, evaluation, said=said, bytes_per_token=ratio, baselines=baselines)


def _baselines(train: Tokens, held: Tokens) -> dict[str, float]:
    """The loss of guessing evenly, and of knowing how often each token occurs (one added to every count)."""
    counts = 1 + np.bincount(train.read(0, len(train)), minlength=train.vocab)
    surprise = math.log(counts.sum()) - np.log(counts)
    return {"uniform": math.log(train.vocab), "unigram": float(surprise[held.read(0, len(held))].mean())}


def _length(context: int | None) -> int:
    if context is None:
        raise ConfigError("a language model is trained on blocks of one length; write model.context=…")
    return context


def held_out(
    recipe: Recipe, config: ModelConfig | RecurrentConfig, tokenizer: Tokenizer, data: Path | None, stride: int | None
) -> Ground:
    """The test split to be evaluated, in blocks or in windows that move on by `stride`."""
    tokens = tokens_of(corpora.load(recipe.data.corpus, "test", folder=data), tokenizer)
    context = config.context if isinstance(config, ModelConfig) else int(recipe.model.get("context", 64))
    evaluation = partial(windows, tokens, _length(context), recipe.train.batch, stride)
    return Ground(tokenizer, special_of(tokenizer), FixedPlan(1, 1, 0), _nothing, evaluation)


def _nothing(batch: Batch) -> Prepared:
    raise AssertionError("a test split is not trained on")


def windows(tokens: Tokens, context: int, batch: int, stride: int | None = None) -> Iterator[Prepared]:
    """The whole split, every token asked once."""
    waiting: list[Window] = []
    for window in evaluation_blocks(tokens, context, stride):
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


def hidden(recipe: Recipe, context: int | None, tokenizer: Tokenizer, train: Corpus, valid: Corpus | None) -> Ground:
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

    blocks = Blocks(tokens_of(train, tokenizer), context)
    held = None
    if valid is not None:
        tokens = tokens_of(valid, tokenizer)
        held = Blocks(tokens, min(context, max(1, len(tokens) - 1)))  # a short validation text is one shorter block

    def evaluation() -> Iterator[Prepared]:
        assert held is not None
        for first in range(0, len(held), part.batch):
            yield prepared(held, range(first, min(first + part.batch, len(held))), 0, EVALUATION_SEED)

    return Ground(
        tokenizer,
        special,
        fixed_plan(recipe, len(blocks)),
        lambda batch: prepared(blocks, batch.samples.tolist(), batch.epoch, part.seed),
        None if held is None else evaluation,
        said=f"{len(blocks):,} blocks of {context} tokens to train on",
    )
