"""What is passed to `mb.diagnose` beside the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from monoblock.doctor.subject import KINDS, Kind
from monoblock.errors import InputError, did_you_mean


class DiagnoseOptions(TypedDict, total=False):
    """The keyword arguments of `mb.diagnose`, for type checkers and editors; `mb.diagnose` explains them."""

    vocab: int | None
    length: int | None
    kind: Kind | None
    pad_id: int | None
    mask_argument: str | None
    source: Tensor | None
    source_mask_argument: str | None
    cached: Callable[..., Any] | None
    window: int | None
    tied: bool | None
    documents_argument: str | None
    prefix_argument: str | None
    tokenizer: Any
    texts: Sequence[str]
    batch: tuple[Tensor, Tensor] | None
    loss: Callable[[Tensor, Tensor], Tensor] | None
    step: Callable[[], Any] | None
    generate: Callable[[Tensor], Any] | None
    optimizer: torch.optim.Optimizer | None
    objective: str | None
    labels: Sequence[str]
    generation: Mapping[str, Any] | None
    checks: str | Sequence[str] | None


def check_names(options: Mapping[str, Any]) -> None:
    """Raise InputError for an unknown keyword argument."""
    public = [*DiagnoseOptions.__annotations__]
    unknown = next((name for name in options if name not in (*public, "history")), None)
    if unknown is not None:
        hint = did_you_mean(unknown, public) or f"; it takes {', '.join(public)}"
        raise InputError(f"mb.diagnose has no argument {unknown!r:.60}{hint}")


@dataclass
class TrainingHistory:
    """What a run has logged: its settings, and the losses of its steps."""

    steps: Sequence[Mapping[str, float]] = ()  # step, loss, lr, grad_norm
    evaluations: Sequence[Mapping[str, float]] = ()  # step, val_loss
    lr: float | None = None
    warmup: float = 0.0
    total_steps: int = 0
    clip: float | None = None  # None or 0: gradients are not clipped
    optimizer: str = ""
    beta2: float | None = None
    weight_decay: float | None = None
    starts_fresh: bool = True  # from random weights
    uniform_loss: float | None = None  # ln V, or ln of the number of classes
    epochs: float | None = None  # passes over the data

    @property
    def validation_losses(self) -> list[float]:
        return [float(row["val_loss"]) for row in self.evaluations if "val_loss" in row]

    @property
    def last_train_loss(self) -> float:
        """The mean of the last tenth of the steps; NaN without steps."""
        losses = [float(row["loss"]) for row in self.steps[-max(1, len(self.steps) // 10) :]]
        return sum(losses) / len(losses) if losses else math.nan


@dataclass(frozen=True)
class Options:
    """The values of `DiagnoseOptions`; raises InputError for impossible ones."""

    # What the user declares for a model that cannot declare it.
    vocab: int | None = None
    length: int | None = None
    kind: Kind | None = None
    pad_id: int | None = None
    mask_argument: str | None = None
    source: Tensor | None = None
    source_mask_argument: str | None = None
    cached: Callable[..., Any] | None = None
    window: int | None = None
    tied: bool | None = None
    documents_argument: str | None = None
    prefix_argument: str | None = None
    # What belongs to the model.
    batch: tuple[Tensor, Tensor] | None = None  # ids and labels
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    step: Callable[[], Any] | None = None
    generate: Callable[[Tensor], Any] | None = None
    optimizer: torch.optim.Optimizer | None = None
    tokenizer: Any = None
    texts: Sequence[str] = ()
    objective: str | None = None  # the task that the model is for, such as "causal_lm" or "classification"
    labels: Sequence[str] = ()  # names of classes
    generation: Mapping[str, Any] | None = None  # default decoding options
    history: TrainingHistory | None = None

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS:
            raise InputError(f"kind={self.kind!r}: write one of {', '.join(KINDS)}{did_you_mean(self.kind, KINDS)}")
        if self.length is not None and self.length < 3:
            raise InputError(f"length={self.length} is too short to examine; give 8 tokens or more")
        if self.window is not None and self.window < 1:
            raise InputError(f"window={self.window}: a token sees at least itself; give 1 or more")
        batch: Any = self.batch
        if batch is None:
            return
        if not isinstance(batch, list | tuple) or len(batch) != 2 or not all(isinstance(t, Tensor) for t in batch):
            raise InputError("batch= takes two tensors, (ids, labels); for a language model ids[:, :-1] and ids[:, 1:]")
        if batch[0].dim() < 2 or len(batch[0]) != len(batch[1]):
            shapes = " and ".join(str(tuple(t.shape)) for t in batch)
            raise InputError(f"batch= has shapes {shapes}; ids are (B, T), and labels have as many rows")
