"""What a model that restores hidden tokens is worth on a text: loss, perplexity and accuracy of what was hidden."""

from __future__ import annotations

import torch

from monoblock.data.blocks import Blocks
from monoblock.tasks import scores
from monoblock.tasks.ground import EVALUATION_SEED, special_of
from monoblock.tasks.measured import Asked, Measured, read
from monoblock.tasks.pipeline import Pipeline
from monoblock.tasks.texts import tokens_of
from monoblock.training import objectives
from monoblock.training.objectives import IGNORE, Loss

RATE = 0.15


@torch.inference_mode()
def masked_lm(pipe: Pipeline, asked: Asked) -> Measured:
    """15 % of the tokens are hidden, the same in every evaluation, 80/10/10 as in training (Devlin et al. 2019)."""
    corpus = read(asked, "text")
    tokens, special, device = tokens_of(corpus, pipe.tokenizer), special_of(pipe.tokenizer), pipe.model.device
    context = min(asked.context or pipe.model.config.context or 256, max(1, len(tokens) - 1))
    blocks, loss = Blocks(tokens, context), Loss()
    total, right, count, batch = 0.0, 0, 0, max(1, asked.batch // 4)
    for first in range(0, len(blocks), batch):
        numbers = range(first, min(first + batch, len(blocks)))
        rows = [{"ids": blocks.get(n, 0, EVALUATION_SEED)["ids"][:-1], "sample": n} for n in numbers]
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
    return Measured(figures, notes=[f"of the {RATE:.0%} of the tokens that are hidden, the same ones every time"])
