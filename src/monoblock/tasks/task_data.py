"""The data of a training run: its tokenizer, its training batches and its validation batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.data.batching.encode import IGNORE_INDEX, EncodedDataset
from monoblock.data.batching.order import permutation
from monoblock.data.batching.plans import BatchIndices, BatchPlan, BucketBatchPlan, FixedBatchPlan
from monoblock.recipes.schema import Recipe
from monoblock.tasks.batching import group_by_length
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.collate import SpecialTokenIds, TensorBatch

EVALUATION_SEED = 0  # masks and order of an evaluation are the same in every run
Collate = Callable[..., tuple[dict[str, Tensor], Tensor]]  # samples -> inputs and labels


@dataclass(frozen=True)
class TaskData:
    tokenizer: Tokenizer | None
    special_tokens: SpecialTokenIds
    batch_plan: BatchPlan
    build_batch: Callable[[BatchIndices], TensorBatch]
    evaluation_batches: Callable[[], Iterable[TensorBatch]] | None
    model_sizes: dict[str, Any] = field(default_factory=dict)  # sizes of the model that follow from the data: classes …
    labels: list[str] = field(default_factory=list)
    summary: str = ""  # how much data there is, for the user
    bytes_per_token: float | None = None  # of the validation text
    baseline_losses: dict[str, float] = field(default_factory=dict)  # validation loss of trivial models
    validation_rows: list[Any] = field(default_factory=list)  # rows to score for the model card
    unit: str = "tokens"  # what throughput is counted in
    predicts_positions: bool = False  # question answering: the classes are the positions of a row
    content_digests: dict[str, str] = field(default_factory=dict)  # split -> SHA-256 of its content


# -- training batches -------------------------------------------------------------------------------------------------


def samples_per_step(recipe: Recipe) -> int:
    return recipe.train.batch * recipe.train.accumulate


def build_fixed_plan(recipe: Recipe, count: int) -> FixedBatchPlan:
    """Return a plan of batches of one size from `count` samples of equal length."""
    size = samples_per_step(recipe)
    return FixedBatchPlan(count, min(size, count), recipe.train.seed, last="drop")


def build_bucket_plan(recipe: Recipe, lengths: Any) -> BucketBatchPlan:
    """Return a plan of batches of samples of similar length."""
    return BucketBatchPlan(lengths, seed=recipe.train.seed, batch=samples_per_step(recipe))


def batch_builder(samples: EncodedDataset, collate: Collate) -> Callable[[BatchIndices], TensorBatch]:
    return lambda batch: TensorBatch(
        *collate([samples[int(index)] for index in batch.indices]), batch.epoch, batch.indices.tolist()
    )


def truncation_note(count: int, context: int | None) -> str:
    """Return a note for a summary on how many samples were truncated; "" for none."""
    return f" ({count:,} of them cut to {context} tokens)" if count else ""


# -- evaluation -------------------------------------------------------------------------------------------------------


def group_for_evaluation(lengths: Sequence[int], batch: int) -> list[list[int]]:
    """Group indices by similar length, in random order, so that the first few batches represent the whole."""
    groups = group_by_length(lengths, batch, longest_first=False)
    return [groups[index] for index in permutation(EVALUATION_SEED, 0, len(groups)).tolist()]


def iterate_evaluation_batches(samples: EncodedDataset, batch: int, collate: Collate) -> Iterator[TensorBatch]:
    """Yield batches that contain every sample once."""
    for indices in group_for_evaluation([samples.length(index) for index in range(len(samples))], batch):
        yield TensorBatch(*collate([samples[index] for index in indices]), 0, indices)


@torch.no_grad()
def validate(
    model: nn.Module, data: TaskData, loss: Any, device: torch.device, *, max_batches: int = 0
) -> dict[str, float]:
    """Return loss and accuracy per target on the validation batches, at most `max_batches` of them; 0 means all."""
    total, count, correct = 0.0, 0, 0
    assert data.evaluation_batches is not None
    loss = replace(loss, over_positions=data.predicts_positions)
    for number, batch in enumerate(data.evaluation_batches()):
        if max_batches and number >= max_batches:
            break
        count += batch.target_count
        batch = batch.to(device)
        logits = loss.compute_logits(model, batch.inputs)
        total += float(loss.from_logits(logits, batch.labels))
        correct += int(((logits.argmax(-1) == batch.labels) & (batch.labels != IGNORE_INDEX)).sum())
    mean = total / max(count, 1)
    metrics = {"val_loss": mean, "val_accuracy": correct / max(count, 1), "val_tokens": count}
    if data.bytes_per_token is not None:
        metrics["val_bits_per_byte"] = mean / math.log(2) / data.bytes_per_token
    return metrics
