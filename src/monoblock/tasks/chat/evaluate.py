"""Evaluate a chat model by its loss, perplexity and accuracy over the tokens of the answers."""

from __future__ import annotations

from functools import partial

import torch

from monoblock.data.batching.encode import IGNORE_INDEX
from monoblock.metrics.text import perplexity
from monoblock.tasks.batching import run_model
from monoblock.tasks.chat.data import collate_chats, encode_chats
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest, read_corpus
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.special_tokens import special_token_ids
from monoblock.tasks.task_data import iterate_evaluation_batches
from monoblock.training.loss import CrossEntropyLoss


@torch.inference_mode()
def evaluate_chat(loaded: LoadedModel, request: EvaluationRequest) -> Evaluation:
    """Compute loss, perplexity and accuracy over the tokens of the answers, including those that end the turns."""
    corpus, limit = read_corpus(request, "chat"), request.context or loaded.model.config.context
    samples, num_truncated = encode_chats(corpus.rows, loaded.tokenizer, limit)
    collate, loss = partial(collate_chats, special=special_token_ids(loaded.tokenizer)), CrossEntropyLoss()
    total, correct, count = 0.0, 0, 0
    for batch in iterate_evaluation_batches(samples, max(1, request.batch_size // 8), collate):
        count += batch.target_count
        batch = batch.to(loaded.model.device)
        logits = run_model(loaded, batch.inputs)
        total += float(loss.from_logits(logits, batch.labels))
        correct += int(((logits.argmax(-1) == batch.labels) & (batch.labels != IGNORE_INDEX)).sum())
    mean = total / count
    metrics = {
        "loss": mean,
        "perplexity": perplexity(mean),
        "accuracy": correct / count,
        "tokens": count,
        "sources": len(samples),
        "split": corpus.split,
    }
    notes = ["measured on the tokens of the answers, including the tokens that end turns"]
    if num_truncated:
        notes.append(f"{num_truncated:,} of {len(corpus):,} conversations were cut to {limit} tokens")
    num_dropped = len(corpus) - len(samples)
    if num_dropped:
        notes.append(f"{num_dropped:,} conversations without an answer in their first {limit} tokens were left out")
    return Evaluation(metrics, notes=notes)
