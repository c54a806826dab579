"""What a model that talks is worth on conversations: loss and perplexity of the answers, each after all before it."""

from __future__ import annotations

from functools import partial

import torch

from monoblock.tasks import scores
from monoblock.tasks.chatting import answered, samples_of
from monoblock.tasks.ground import special_of
from monoblock.tasks.measured import Asked, Measured, read
from monoblock.tasks.pipeline import Pipeline
from monoblock.tasks.samples import in_order
from monoblock.training.objectives import IGNORE, Loss


@torch.inference_mode()
def conversations(pipe: Pipeline, asked: Asked) -> Measured:
    """Over the tokens that training asks for: the answers with the ends of their turns."""
    corpus, limit = read(asked, "chat"), asked.context or pipe.model.config.context
    samples, cut = samples_of(corpus.rows, pipe.tokenizer, limit)
    prepare, loss = partial(answered, special=special_of(pipe.tokenizer)), Loss()
    total, right, count = 0.0, 0, 0
    for batch in in_order(samples, max(1, asked.batch // 8), prepare):
        part = batch.to(pipe.model.device)
        logits = pipe.model(**part.inputs)
        total += float(loss.of(logits, part.labels))
        right += int(((logits.argmax(-1) == part.labels) & (part.labels != IGNORE)).sum())
        count += batch.asked
    mean = total / count
    figures = {
        "loss": mean,
        "perplexity": scores.perplexity(mean),
        "accuracy": 100 * right / count,
        "tokens": count,
        "sources": len(samples),
        "split": corpus.split,
    }
    notes = ["of the tokens of the answers, the end of a turn included"]
    notes += [f"{cut:,} of {len(corpus):,} conversations were cut to {limit} tokens"] if cut else []
    left = len(corpus) - len(samples)
    notes += [f"{left:,} without an answer in their first {limit} tokens were left out"] if left else []
    return Measured(figures, notes=notes)
