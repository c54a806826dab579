"""What a model that restores hidden tokens is worth on a text: loss, perplexity and accuracy of what was hidden."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from monoblock.data.blocks import Blocks
from monoblock.data.corpora import Corpus
from monoblock.errors import InputError
from monoblock.tasks import scores
from monoblock.tasks.ground import EVALUATION_SEED, special_of
from monoblock.tasks.lay import KINDS
from monoblock.tasks.measured import Asked, Measured, read
from monoblock.tasks.passing import by_documents, frame_of
from monoblock.tasks.pipeline import Pipeline
from monoblock.tasks.sentences import documents, in_batches
from monoblock.tasks.texts import tokens_of
from monoblock.training import objectives
from monoblock.training.objectives import IGNORE, Loss

RATE = 0.15


@torch.inference_mode()
def masked_lm(pipe: Pipeline, asked: Asked) -> Measured:
    """15 % of the tokens are hidden, the same in every evaluation, 80/10/10 as in training (Devlin et al. 2019).

    Of labelled and tagged rows the text alone is read; in blocks, or a text at a time as training read it.
    """
    corpus = read(asked, KINDS["masked"])
    special, device, batch = special_of(pipe.tokenizer), pipe.model.device, max(1, asked.batch // 4)
    total, right, count, loss = 0.0, 0, 0, Loss()
    for rows in _texts(pipe, corpus, asked, batch) if by_documents(pipe) else _blocks(pipe, corpus, asked, batch):
        inputs, labels = objectives.masked(rows, special, seed=EVALUATION_SEED, epoch=0, rate=RATE)
        logits, labels = pipe.model(**{name: one.to(device) for name, one in inputs.items()}), labels.to(device)
        total += float(loss.of(logits, labels))
        right += int(((logits.argmax(-1) == labels) & (labels != IGNORE)).sum())
        count += int((labels != IGNORE).sum())
    mean = total / max(1, count)
    figures = {
        "loss": mean,
        "perplexity": scores.perplexity(mean),
        "accuracy": 100 * right / max(1, count),
        "tokens": count,
        "split": corpus.split,
    }
    if not count:
        raise InputError(f"{corpus.name} is so short that nothing of it is hidden; give more text")
    return Measured(figures, notes=[f"of the {RATE:.0%} of the tokens that are hidden, the same ones every time"])


def _blocks(pipe: Pipeline, corpus: Corpus, asked: Asked, batch: int) -> Iterator[list[dict[str, Any]]]:
    """Running text in blocks of one length."""
    tokens = tokens_of(corpus, pipe.tokenizer)
    blocks = Blocks(tokens, min(asked.context or pipe.model.config.context or 256, max(1, len(tokens) - 1)))
    for first in range(0, len(blocks), batch):
        numbers = range(first, min(first + batch, len(blocks)))
        yield [{"ids": blocks.get(n, 0, EVALUATION_SEED)["ids"][:-1], "sample": n} for n in numbers]


def _texts(pipe: Pipeline, corpus: Corpus, asked: Asked, batch: int) -> Iterator[list[dict[str, Any]]]:
    """Every text by itself, framed and cut as in training."""
    trained = None if pipe.part is None else pipe.part.longest
    limits = (asked.context or pipe.model.config.context, trained)
    frame = frame_of(pipe, min((n for n in limits if n is not None), default=None))
    return in_batches([frame(ids).ids for ids in pipe.tokenizer.encode_batch(documents(corpus))], batch)
