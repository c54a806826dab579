"""The parts of a run that a user may write in Python: a task, a model class, an optimizer, or batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from monoblock.errors import ConfigError, InputError
from monoblock.model import Transformer
from monoblock.runs.warm_start import WarmStart
from monoblock.tasks.task import Task
from monoblock.tasks.task_data import TaskData, special_token_ids
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.collate import SpecialTokenIds, TensorBatch

Batch = tuple[dict[str, Tensor], Tensor]  # keyword arguments of the model, and labels; -100 means no label

OPTIMIZER_ADVICE = (
    "write optimizer=lambda model: torch.optim.AdamW(model.parameters()), or set train.optimizer in the recipe"
)


@dataclass(frozen=True)
class CustomParts:
    """The parts of a run that a recipe cannot describe; they are arguments of `mb.train`."""

    task: Task | None = None
    model_class: type[Transformer] = Transformer
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    batches: Iterable[Batch] | None = None
    validation_batches: Iterable[Batch] | None = None
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        if self.task is not None and not isinstance(self.task, Task):
            raise InputError(
                f"task={self.task!r:.60} is not an object of a subclass of mb.Task; give task=MyTask(), or name a "
                "task of the package in train.objective"
            )
        if not (isinstance(self.model_class, type) and issubclass(self.model_class, Transformer)):
            raise InputError(f"model_class={self.model_class!r:.60} is not a class; give a subclass of mb.Transformer")
        is_torch_class = isinstance(self.optimizer, type) and self.optimizer.__module__.startswith("torch.")
        if self.optimizer is not None and (is_torch_class or not callable(self.optimizer)):
            raise InputError(f"optimizer={self.optimizer!r:.60} is not a function of the model; {OPTIMIZER_ADVICE}")
        for name, batches in (("batches", self.batches), ("validation_batches", self.validation_batches)):
            if batches is not None and not isinstance(batches, Iterable):
                raise InputError(f"{name}={batches!r:.60} is not iterable; give a list of pairs (inputs, labels)")

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer that the user's function builds for a model."""
        assert self.optimizer is not None
        optimizer = self.optimizer(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(
                f"the function optimizer returned {type(optimizer).__name__}, not a torch optimizer; {OPTIMIZER_ADVICE}"
            )
        return optimizer


NO_CUSTOM_PARTS = CustomParts()


def build_custom_data(parts: CustomParts, start: WarmStart | None) -> TaskData:
    """Return the data of a run that trains on the user's batches."""
    assert parts.batches is not None
    if parts.validation_batches is not None and iter(parts.validation_batches) is parts.validation_batches:
        raise ConfigError("validation_batches are read several times, and an iterator only once; give a list instead")
    tokenizer = parts.tokenizer if parts.tokenizer is not None or start is None else start.tokenizer
    batches, validation = parts.batches, parts.validation_batches
    count = len(batches) if hasattr(batches, "__len__") else None  # type: ignore[arg-type]
    return TaskData(
        tokenizer,
        SpecialTokenIds() if tokenizer is None else special_token_ids(tokenizer),
        None,
        None,
        None if validation is None else lambda: (to_tensor_batch(batch, 0, "validation") for batch in validation),
        summary="batches given from Python" if count is None else f"{count:,} batches given from Python",
        batches=lambda step: repeat_batches(batches, step),
        unit="targets",
    )


def repeat_batches(batches: Iterable[Batch], start: int) -> Iterator[TensorBatch]:
    """Yield the user's batches from step `start` on; after the last batch, continue with the first."""
    step = 0
    for epoch in itertools.count():
        before = step
        for batch in batches:
            if step >= start:
                yield to_tensor_batch(batch, epoch, f"batch {step}")
            step += 1
        if step == before:
            problem = "are empty" if step == 0 else f"ended after {step:,} and cannot be read again"
            raise InputError(f"the batches {problem}; give a list, or lower train.steps")


def to_tensor_batch(batch: Batch, epoch: int, name: str) -> TensorBatch:
    """Convert a batch of the user to a `TensorBatch`; raise InputError if it is not a pair (inputs, labels).

    name: what error messages call the batch.
    """
    inputs, labels = batch if isinstance(batch, tuple) and len(batch) == 2 else (None, None)
    if not (isinstance(inputs, dict) and isinstance(labels, Tensor)):
        raise InputError(
            f"{name} is not a pair (inputs, labels); give a dict of tensors for the model, and a tensor of labels"
        )
    return TensorBatch(inputs, labels, epoch, list(range(len(labels))))
