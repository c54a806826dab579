"""Evaluate a masked language model by its loss, perplexity and accuracy over masked tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from monoblock.data.batching.blocks import BlockDataset
from monoblock.data.batching.encode import IGNORE_INDEX
from monoblock.data.corpora.load import Corpus
from monoblock.errors import InputError
from monoblock.metrics.text import perplexity
from monoblock.tasks.batching import run_model
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest, read_corpus
from monoblock.tasks.language_modeling.data import tokenize_corpus
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.masked_lm.documents import iterate_evaluation_rows, nonempty_texts
from monoblock.tasks.masked_lm.section import MASKED_LM_CORPUS_KINDS
from monoblock.tasks.special_tokens import special_token_ids
from monoblock.tasks.task_data import EVALUATION_SEED
from monoblock.training.collate import collate_masked_lm
from monoblock.training.loss import CrossEntropyLoss

MASK_RATE = 0.15


@torch.inference_mode()
def evaluate_masked_lm(loaded: LoadedModel, request: EvaluationRequest) -> Evaluation:
    """Compute loss, perplexity and accuracy over the masked tokens, which are the same in every evaluation.

    Of the masked tokens, 80 % are replaced by [MASK] and 10 % by random tokens; 10 % are unchanged (Devlin et al.
    2019). The inputs are blocks of text or single documents, as in training; labels of the corpus are ignored.
    """
    corpus = read_corpus(request, MASKED_LM_CORPUS_KINDS)
    special, device, batch = special_token_ids(loaded.tokenizer), loaded.model.device, max(1, request.batch_size // 4)
    iterate = _iterate_documents if loaded.trained_on_documents else _iterate_blocks
    total, correct, count, loss = 0.0, 0, 0, CrossEntropyLoss()
    for rows in iterate(loaded, corpus, request, batch):
        inputs, labels = collate_masked_lm(rows, special, seed=EVALUATION_SEED, epoch=0, rate=MASK_RATE)
        labels = labels.to(device)
        logits = run_model(loaded, {name: tensor.to(device) for name, tensor in inputs.items()})
        total += float(loss.from_logits(logits, labels))
        correct += int(((logits.argmax(-1) == labels) & (labels != IGNORE_INDEX)).sum())
        count += int((labels != IGNORE_INDEX).sum())
    if not count:
        raise InputError(f"{corpus.name} is so short that none of its tokens is masked; give more text")
    mean = total / count
    metrics = {
        "loss": mean,
        "perplexity": perplexity(mean),
        "accuracy": correct / count,
        "tokens": count,
        "split": corpus.split,
    }
    return Evaluation(
        metrics, notes=[f"over the {MASK_RATE:.0%} of the tokens that are masked, always the same tokens"]
    )


def _iterate_blocks(
    loaded: LoadedModel, corpus: Corpus, request: EvaluationRequest, batch: int
) -> Iterator[list[dict[str, Any]]]:
    """Yield batches of blocks of running text, all of one length."""
    tokens = tokenize_corpus(corpus, loaded.tokenizer)
    blocks = BlockDataset(tokens, min(request.context or loaded.model.config.context or 256, max(1, len(tokens) - 1)))
    for start in range(0, len(blocks), batch):
        indices = range(start, min(start + batch, len(blocks)))
        yield [{"ids": blocks.sample(index, 0, EVALUATION_SEED)["ids"][:-1], "sample": index} for index in indices]


def _iterate_documents(
    loaded: LoadedModel, corpus: Corpus, request: EvaluationRequest, batch: int
) -> Iterator[list[dict[str, Any]]]:
    """Yield batches of single texts, with special tokens and truncated as in training."""
    training_length = None if loaded.data_section is None else loaded.data_section.max_length
    limits = (request.context or loaded.model.config.context, training_length)
    template = loaded.input_template(min((limit for limit in limits if limit is not None), default=None))
    texts = loaded.tokenizer.encode_batch(nonempty_texts(corpus))
    return iterate_evaluation_rows([template(ids).ids for ids in texts], batch)
