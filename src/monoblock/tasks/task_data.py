"""The data of a training run: a task builds `TaskData`, training and validation batches, from `TaskInputs`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.data.batches import BatchIndices, BatchPlan, BucketBatchPlan, FixedBatchPlan, permutation
from monoblock.data.corpora.load import Corpus
from monoblock.data.encode import EncodedDataset
from monoblock.parallel.world import SINGLE_PROCESS, World
from monoblock.recipes.schema import Recipe
from monoblock.tasks.tokenizer_checks import SubwordSampler, requested_key
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.collate import SpecialTokenIds, TensorBatch
from monoblock.training.events import DecisionEvent, WarningEvent
from monoblock.training.loss import Loss

S = TypeVar("S")
EVALUATION_SEED = 0  # every evaluation masks the same tokens and has the same order of batches
Collate = Callable[..., tuple[dict[str, Tensor], Tensor]]  # takes a list of samples, and returns inputs and labels


def special_token_ids(tokenizer: Tokenizer) -> SpecialTokenIds:
    """Return the ids of the special tokens that collate functions need."""
    return SpecialTokenIds(
        pad_id=tokenizer.pad_id or 0,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        mask_id=tokenizer.mask_id,
        sentinel_ids=tuple(tokenizer.sentinel_ids),
        unmaskable_ids=tokenizer.special_ids,
        vocab_size=tokenizer.vocab_size,
    )


def group_by_length(lengths: Sequence[int], batch: int, *, longest_first: bool = True) -> list[list[int]]:
    """Group the indices of `lengths` into batches of similar length, so that little padding is needed."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index] if longest_first else lengths[index])
    return [order[start : start + batch] for start in range(0, len(order), batch)]


@dataclass(frozen=True)
class TaskInputs:
    """What a task builds its data from."""

    recipe: Recipe
    context: int | None  # context length of the model in tokens; None means no limit
    tokenizer: Tokenizer | None  # None for images
    train: Corpus
    valid: Corpus | None
    labels: list[str] = field(default_factory=list)  # class names in the data, or of a stored head that is trained on
    config: ModelConfig | RecurrentConfig | None = None  # of the model; vocabulary and classes may be placeholders
    decoder_start_id: int | None = None  # the first token of targets, if training starts from a stored model

    @property
    def max_length(self) -> int | None:
        """Maximum length of a sample: the smaller of the model's context and data.max_length; None means no limit."""
        limits = (self.context, self.recipe.data.max_length)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer, for tasks on text, which always have one."""
        assert self.tokenizer is not None
        return self.tokenizer

    @property
    def sampler(self) -> SubwordSampler | None:
        """The function that segments training texts at random, if the recipe asks for it."""
        if requested_key(self.recipe.tokenizer) is None:
            return None
        return SubwordSampler(self.text_tokenizer, self.recipe.tokenizer, self.recipe.train.seed)

    def section(self, kind: type[S]) -> S:
        """Return the task section of the recipe if it has the type `kind`, else a `kind` with its defaults."""
        return self.recipe.task if isinstance(self.recipe.task, kind) else kind()

    # -- batches ------------------------------------------------------------------------------------------------------

    @property
    def special_tokens(self) -> SpecialTokenIds:
        return SpecialTokenIds() if self.tokenizer is None else special_token_ids(self.tokenizer)

    @property
    def samples_per_step(self) -> int:
        return self.recipe.train.batch * self.recipe.train.accumulate

    def fixed_plan(self, count: int) -> FixedBatchPlan:
        """Return a plan of batches of equal size, for `count` samples that need not be grouped by length."""
        return FixedBatchPlan(count, min(self.samples_per_step, count), self.recipe.train.seed, last="drop")

    def bucket_plan(self, lengths: Any) -> BucketBatchPlan:
        """Return a plan of batches in which samples have similar lengths; `lengths` has the length of each sample."""
        return BucketBatchPlan(lengths, seed=self.recipe.train.seed, batch=self.samples_per_step)

    def truncation_note(self, count: int) -> str:
        """Return a note for `TaskData.summary` that says how many samples were truncated; "" if none were."""
        return f" ({count:,} of them cut to {self.max_length} tokens)" if count else ""

    def encoded_data(
        self,
        samples: EncodedDataset,
        collate: Collate,
        validation: EncodedDataset | None = None,
        *,
        resample: Callable[[int, int], dict[str, Any]] | None = None,
        plan: BatchPlan | None = None,
        validation_collate: Collate | None = None,
        **facts: Any,
    ) -> TaskData:
        """Return the data for training on encoded samples, by default in batches of similar lengths.

        collate: a function that converts a list of samples to the keyword arguments of the model and the labels.
        resample: a function (index, epoch) that returns a sample as it is in an epoch; None: it is always the same.
        validation_collate: the same as `collate` for validation samples, if it is another function.
        facts: further fields of `TaskData`.
        """

        def build_batch(batch: BatchIndices) -> TensorBatch:
            indices = batch.indices.tolist()
            rows = [samples[index] if resample is None else resample(index, batch.epoch) for index in indices]
            return TensorBatch(*collate(rows), batch.epoch, indices)

        evaluation = None
        if validation is not None:
            batch_size, function = self.recipe.train.batch, validation_collate or collate
            evaluation = partial(iterate_evaluation_batches, validation, batch_size, function)
        plan = plan or self.bucket_plan(samples.lengths)
        return TaskData(self.tokenizer, self.special_tokens, plan, build_batch, evaluation, **facts)

    def corrupted_data(
        self,
        collate: Collate,
        plan: BatchPlan,
        load: Callable[[int, int], NDArray[np.int64]],
        load_validation: Callable[[int], NDArray[np.int64]],
        validation_batches: Sequence[Sequence[int]],
        summary: str,
    ) -> TaskData:
        """Return the data for training on texts whose tokens `collate` corrupts, differently in every epoch.

        load, load_validation: functions that return the ids of a training text (index, epoch) or validation text.
        validation_batches: the indices of the validation texts in each batch.
        """

        def build(ids: Iterable[NDArray[np.int64]], indices: Sequence[int], epoch: int, seed: int) -> TensorBatch:
            rows = [{"ids": row, "sample": index} for index, row in zip(indices, ids, strict=True)]
            return TensorBatch(*collate(rows, self.special_tokens, seed=seed, epoch=epoch), epoch, list(indices))

        def build_batch(batch: BatchIndices) -> TensorBatch:
            indices = batch.indices.tolist()
            return build((load(n, batch.epoch) for n in indices), indices, batch.epoch, self.recipe.train.seed)

        def evaluation() -> Iterator[TensorBatch]:
            for indices in validation_batches:
                yield build(map(load_validation, indices), indices, 0, EVALUATION_SEED)

        has_validation = bool(validation_batches)
        special = self.special_tokens
        return TaskData(
            self.tokenizer, special, plan, build_batch, evaluation if has_validation else None, summary=summary
        )

    def task_data(
        self,
        samples: Sequence[Any],
        collate: Callable[[list[Any]], tuple[dict[str, Tensor], Tensor]],
        *,
        validation: Sequence[Any] | None = None,
        unit: str = "samples",
    ) -> TaskData:
        """Return the data for training on `samples`, which are shuffled in every epoch.

        samples, validation: the training and validation samples; any objects, such as the rows of a corpus.
        collate: a function that converts a list of samples to the keyword arguments of the model and the labels. The
            first dimension of every tensor is that of the samples, and labels of -100 are ignored.
        unit: the unit in which the progress display counts labels.
        """

        def batch_of(rows: Sequence[Any], indices: Sequence[int], epoch: int) -> TensorBatch:
            return TensorBatch(*collate([rows[index] for index in indices]), epoch, list(indices))

        def evaluation_batches() -> Iterator[TensorBatch]:
            rows, step = validation or (), self.recipe.train.batch
            for start in range(0, len(rows), step):
                yield batch_of(rows, range(start, min(start + step, len(rows))), 0)

        return TaskData(
            self.tokenizer,
            self.special_tokens,
            self.fixed_plan(len(samples)),
            lambda batch: batch_of(samples, batch.indices.tolist(), batch.epoch),
            evaluation_batches if validation else None,
            summary=f"{len(samples):,} {unit} to train on",
            unit=unit,
        )

    @property
    def has_segments(self) -> bool:
        """Whether the model has segment embeddings, which tell the two texts of a pair apart."""
        return getattr(getattr(self.config, "input", None), "segments", 0) > 1


@dataclass(frozen=True)
class TaskData:
    tokenizer: Tokenizer | None
    special_tokens: SpecialTokenIds
    batch_plan: BatchPlan | None  # None if the user gives the batches
    build_batch: Callable[[BatchIndices], TensorBatch] | None
    evaluation_batches: Callable[[], Iterable[TensorBatch]] | None
    model_sizes: dict[str, Any] = field(default_factory=dict)  # sizes that follow from the data, such as `classes`
    model_files: dict[str, dict[str, Any]] = field(default_factory=dict)  # JSON files beside the model, by their names
    labels: list[str] = field(default_factory=list)  # the class names, in the order of the outputs
    summary: str = ""  # the amount of data, in words for the user
    bytes_per_token: float | None = None  # mean number of bytes per token of the validation text
    baseline_losses: dict[str, float] = field(default_factory=dict)  # validation losses of trivial models by name
    validation_rows: list[Any] = field(default_factory=list)  # rows on which the metrics of the model card are computed
    unit: str = "tokens"  # the unit of throughput
    batches: Callable[[int], Iterator[TensorBatch]] | None = None  # the user's batches from a step on
    content_digests: dict[str, str] = field(default_factory=dict)  # SHA-256 of the content of each split
    notices: tuple[DecisionEvent | WarningEvent, ...] = ()  # what the user is told about the data before training


# -- evaluation -------------------------------------------------------------------------------------------------------


def group_for_evaluation(lengths: Sequence[int], batch: int) -> list[list[int]]:
    """Group the indices of samples of similar length into batches.

    The batches are in random order, so that the first few are representative of all.
    """
    groups = group_by_length(lengths, batch, longest_first=False)
    return [groups[index] for index in permutation(EVALUATION_SEED, 0, len(groups)).tolist()]


def iterate_evaluation_batches(samples: EncodedDataset, batch: int, collate: Collate) -> Iterator[TensorBatch]:
    """Yield batches that contain every sample once."""
    for indices in group_for_evaluation([samples.length(index) for index in range(len(samples))], batch):
        yield TensorBatch(*collate([samples[index] for index in indices]), 0, indices)


@torch.no_grad()
def validate(
    model: nn.Module,
    data: TaskData,
    loss: Loss,
    device: torch.device,
    *,
    max_batches: int = 0,
    world: World = SINGLE_PROCESS,
    evaluate_batch: Callable[..., dict[str, float]] | None = None,
) -> dict[str, float]:
    """Return the mean metrics over the targets of the validation batches, such as "val_loss" and "val_accuracy".

    max_batches: use at most this many batches; 0 means all.
    world: the processes among which the batches are divided; all must call this, and compute equally often.
    evaluate_batch: the method `Strategy.evaluate_batch`, if the model is divided among the processes.
    """
    totals: dict[str, float] = {"loss": 0.0}
    count = 0
    assert data.evaluation_batches is not None
    for batch in _divide(data.evaluation_batches(), max_batches, world):
        count += batch.target_count
        batch = batch.to(device)
        if evaluate_batch is None:
            values = loss.evaluate_batch(model, batch.inputs, batch.labels)
        else:
            values = evaluate_batch(loss.evaluate_batch, model, batch)
        for name, value in values.items():
            totals[name] = totals.get(name, 0) + value
    if world.size > 1:
        total, *sums = world.sum_over_data(count, *totals.values())
        count, totals = int(total), dict(zip(totals, sums, strict=True))
    metrics = {f"val_{name}": total / max(count, 1) for name, total in totals.items()} | {"val_tokens": count}
    if data.bytes_per_token is not None:
        metrics["val_bits_per_byte"] = metrics["val_loss"] / math.log(2) / data.bytes_per_token
    return metrics


def _divide(batches: Iterable[TensorBatch], max_batches: int, world: World) -> Iterator[TensorBatch]:
    """Yield the batches of one process, as many as every other process has; an additional one has no targets."""
    last, number = None, 0
    for number, last in enumerate(itertools.islice(batches, max_batches or None), 1):
        if (number - 1) % world.data_size == world.data_rank:
            yield last
    if last is not None and world.data_rank >= number % world.data_size > 0:
        yield last.without_targets()
