"""What a model that talks is worth on conversations: loss and perplexity of the answers, each after all before it."""

from __future__ import annotations

from functools import partial

import torch

from monoblock.data.batching.encode import IGNORE_INDEX
from monoblock.metrics import text as scores
from monoblock.tasks.chat.data import collate_chats, encode_chats
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest, read_corpus
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.special_tokens import special_token_ids
from monoblock.tasks.task_data import iterate_evaluation_batches
from monoblock.training.loss import CrossEntropyLoss


@torch.inference_mode()
def evaluate_chat(loaded: LoadedModel, request: EvaluationRequest) -> Evaluation:
    """Over the tokens that training asks for: the answers with the ends of their turns."""
    corpus, limit = read_corpus(request, "chat"), request.context or loaded.model.config.context
    samples, cut = encode_chats(corpus.rows, loaded.tokenizer, limit)
    prepare, loss = partial(collate_chats, special=special_token_ids(loaded.tokenizer)), CrossEntropyLoss()
    total, right, count = 0.0, 0, 0
    for batch in iterate_evaluation_batches(samples, max(1, request.batch // 8), prepare):
        part = batch.to(loaded.model.device)
        logits = loaded.model(**part.inputs)
        total += float(loss.from_logits(logits, part.labels))
        right += int(((logits.argmax(-1) == part.labels) & (part.labels != IGNORE_INDEX)).sum())
        count += batch.target_count
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
    return Evaluation(figures, notes=notes)
