"""Evaluate a language model by its loss, perplexity and bits per byte on a text."""

from __future__ import annotations

import torch

from monoblock.data.batching.encode import IGNORE_INDEX
from monoblock.metrics.text import bits_per_byte, perplexity
from monoblock.tasks.batching import run_model
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest, read_corpus
from monoblock.tasks.language_modeling.data import count_bytes, iterate_windows, tokenize_corpus
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.training.loss import CrossEntropyLoss

DEFAULT_CONTEXT = 256  # tokens in a window, for models without a maximum context


@torch.inference_mode()
def evaluate_language_model(loaded: LoadedModel, request: EvaluationRequest) -> Evaluation:
    """Compute the mean loss over all tokens but the first, in windows of `request.context` tokens.

    Windows begin `request.stride` tokens apart; by default they do not overlap.
    """
    corpus = read_corpus(request, ("text", "tokens"))
    context = request.context or loaded.model.config.context or DEFAULT_CONTEXT
    tokens, device = tokenize_corpus(corpus, loaded.tokenizer), loaded.model.device
    loss, total, count = CrossEntropyLoss(), 0.0, 0
    for batch in iterate_windows(tokens, context, max(1, request.batch_size // 8), request.stride):
        batch = batch.to(device)
        total += float(loss.from_logits(run_model(loaded, batch.inputs), batch.labels))
        count += int((batch.labels != IGNORE_INDEX).sum())
    mean, num_bytes = total / max(1, count), count_bytes(corpus)
    metrics = {
        "loss": mean,
        "perplexity": perplexity(mean),
        "bits_per_byte": bits_per_byte(mean, len(tokens), num_bytes),
        "tokens": count,
        "split": corpus.split,
    }
    return Evaluation(metrics)
