"""The cross-entropy loss, summed over target tokens.

The trainer divides the sum by the number of targets in the *whole* step, so that gradient accumulation, the number of
processes, padding and bucketing do not change the loss.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monoblock.accounting.fused_loss import MIN_CLASSES, pad_classes, rows_at_a_time
from monoblock.data.encode import IGNORE_INDEX
from monoblock.errors import InputError
from monoblock.kernels.linear_cross_entropy import linear_cross_entropy, supports_linear_cross_entropy
from monoblock.nn.experts import RouterTap, load_balancing_loss
from monoblock.nn.heads import Head
from monoblock.nn.norm import HALF_DTYPES
from monoblock.nn.tap import Tap, is_customized
from monoblock.nn.transformer import Transformer

MEAN_TOLERANCE = 1e-3  # relative difference between the losses of a row and of the same row twice


class Loss(Protocol):
    """A loss that the trainer minimizes: a callable (model, inputs, labels) that returns a sum over the targets."""

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> Tensor: ...

    def evaluation_loss(self) -> Loss:
        """Return the loss that evaluation reports."""

    def evaluate_batch(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> dict[str, float]:
        """Return metrics by name, "loss" among them, each summed over the targets of a batch."""


@dataclass(frozen=True)
class FunctionLoss:
    """A loss given as a function (model, inputs, labels) that returns the loss summed over the targets."""

    function: Callable[[nn.Module, dict[str, Tensor], Tensor], Tensor]

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        loss: object = self.function(model, inputs, labels)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"the loss returned {found}; return the sum over the targets, a tensor with one number")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise InputError(
                "the loss does not depend on the weights; compute it from the outputs of the model, without .item(), "
                ".detach(), argmax or numpy"
            )
        return loss.reshape(())

    @torch.no_grad()
    def find_problem(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> str | None:
        """Return in one line why this is not a finite sum over targets, as one row shows and the same row twice."""
        is_target = (labels != IGNORE_INDEX).flatten(1).any(1) if labels.dim() > 1 else labels != IGNORE_INDEX
        tensors = [labels, *inputs.values()]
        if not is_target.any() or not all(isinstance(one, Tensor) and len(one) == len(labels) for one in tensors):
            return None
        row = int(is_target.nonzero()[0])

        def loss_of(*rows: int) -> float:
            index = torch.tensor(rows, device=labels.device)
            return float(self(model, {name: tensor[index] for name, tensor in inputs.items()}, labels[index]))

        once, twice = loss_of(row), loss_of(row, row)
        if not math.isfinite(once):
            return f"the loss of the first row is {once}; updates with such a loss are skipped"
        if once and abs(twice - once) <= MEAN_TOLERANCE * abs(once):
            return (
                f"the loss seems to be a mean: it is {once:.4g} for a row and {twice:.4g} for the row twice; return "
                "the sum over the targets, which training divides by their number (docs/tasks.md)"
            )
        return None

    def evaluation_loss(self) -> FunctionLoss:
        return self

    def evaluate_batch(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> dict[str, float]:
        return {"loss": float(self.function(model, inputs, labels))}


@dataclass(frozen=True)
class CrossEntropyLoss:
    """The cross-entropy summed over all targets, plus a load-balancing loss for models with experts.

    The load-balancing loss is multiplied by `balance` and by the number of targets.
    """

    label_smoothing: float = 0.0
    balance: float = 0.0  # weight of the load-balancing loss
    top_k: int = 1  # experts per token
    accuracy_name: str = "accuracy"  # what the share of correct predictions is called
    sum_over_data: Callable[[Tensor], Tensor] | None = None  # of a tensor, over the processes with parts of the batch
    fp8: bool = False  # compute the logits of a language model in 8 bits in training, where a kernel allows it
    over_positions: bool = False  # for question answering: the classes are the positions of a row that are not padding

    def evaluation_loss(self) -> CrossEntropyLoss:
        """Return the loss that evaluation reports, without label smoothing and load balancing."""
        return replace(self, label_smoothing=0.0, balance=0.0)

    def __call__(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        labels: Tensor,
        tap: Tap | None = None,
    ) -> Tensor:
        router_tap = RouterTap(tap) if self.balance else None
        active_tap = tap if router_tap is None else router_tap
        options = {} if active_tap is None else {"tap": active_tap}
        if tap is None and self._can_fuse(model):
            from_product = functools.partial(self._from_product, labels=labels)
            loss: Tensor = model(**inputs, **options, output_linear=from_product)
        else:
            loss = self.from_logits(self.compute_logits(model, inputs, **options), labels)
        if router_tap is not None and router_tap.router_logits:
            is_target = labels != IGNORE_INDEX
            valid = is_target if labels.shape == router_tap.router_logits[0].shape[:-1] else None
            balancing = [
                load_balancing_loss(logits, self.top_k, valid, self.sum_over_data)
                for logits in router_tap.router_logits
            ]
            loss = loss + self.balance * torch.stack(balancing).mean() * is_target.sum()
        return loss

    def evaluate_batch(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> dict[str, float]:
        """Return the loss and the number of correct predictions of a batch, each summed over the targets."""
        logits = self.compute_logits(model, inputs)
        correct = (logits.argmax(-1) == labels) & (labels != IGNORE_INDEX)
        return {"loss": float(self.from_logits(logits, labels)), self.accuracy_name: int(correct.sum())}

    def compute_logits(
        self, model: Callable[..., Tensor] | nn.Module, inputs: dict[str, Tensor], **options: Any
    ) -> Tensor:
        """Return the logits of a model, with shape (…, classes).

        With `over_positions` they have shape (B, 2, T): the logits of each position to be the start or the end of the
        answer.
        """
        logits: Tensor = model(**inputs, **options)
        if not self.over_positions:
            return logits
        valid = inputs.get("attention_mask")
        return logits.mT if valid is None else logits.mT.masked_fill(~valid[:, None], -torch.inf)

    def _can_fuse(self, model: nn.Module) -> bool:
        """Return whether the last matrix product of a model and the loss can be computed together."""
        if not isinstance(model, Transformer) or type(model).forward is not Transformer.forward or self.over_positions:
            return False
        head = model.head
        if type(head) is not Head or is_customized(head) or (head.output is not None and is_customized(head.output)):
            return False  # a hook reads the logits
        return head.takes_output_linear(model.output_embedding)

    def _from_product(self, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        """Return the loss of the logits x weight^T + bias, which are not stored where a kernel allows it."""
        if len(weight) < MIN_CLASSES or not supports_linear_cross_entropy(x, weight):
            return self.from_logits(F.linear(x, weight, bias), labels)
        flat, columns = x.reshape(-1, x.shape[-1]), pad_classes(len(weight))
        return linear_cross_entropy(
            flat,
            weight,
            bias,
            labels.reshape(-1),
            ignore_index=IGNORE_INDEX,
            label_smoothing=self.label_smoothing,
            rows=rows_at_a_time(len(flat), columns),
            columns=columns,
            fp8=self.fp8,
        )

    def from_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy summed over all labels that are not IGNORE_INDEX.

        The logits have shape (…, classes), and the labels have shape (…).
        """
        flat = logits.reshape(-1, logits.shape[-1])
        if hasattr(flat, "device_mesh"):  # a DTensor: the vocabulary is split among processes
            from monoblock.parallel.tensor_parallel import vocabulary_cross_entropy  # takes a second to import

            return vocabulary_cross_entropy(
                flat, labels.reshape(-1), ignore_index=IGNORE_INDEX, label_smoothing=self.label_smoothing
            )
        return F.cross_entropy(
            flat.float() if flat.dtype in HALF_DTYPES else flat,
            labels.reshape(-1),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )


EMBEDDING_NAME = "input.token"


class EmbeddingTap:
    """A tap that records the token embeddings of a forward pass, or replaces them by `replacement`.

    Both have shape (B, T, D).
    """

    def __init__(self, replacement: Tensor | None = None) -> None:
        self.replacement = replacement
        self.embeddings: Tensor | None = None

    def wants(self, name: str) -> bool:
        return False

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if name != EMBEDDING_NAME:
            return tensor
        if self.replacement is not None:
            return self.replacement
        self.embeddings = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        return self.embeddings


@dataclass(frozen=True)
class AdversarialLoss:
    """The mean of a loss on clean and on adversarially perturbed embeddings."""

    loss: CrossEntropyLoss
    epsilon: float  # ε

    def evaluation_loss(self) -> CrossEntropyLoss:
        return self.loss.evaluation_loss()

    def evaluate_batch(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> dict[str, float]:
        return self.loss.evaluate_batch(model, inputs, labels)

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        tap = EmbeddingTap()
        loss = self.loss(model, inputs, labels, tap)
        if tap.embeddings is None:
            raise InputError(
                "train.adversarial perturbs token embeddings, which this model lacks; leave train.adversarial out"
            )
        attention_mask = inputs.get("attention_mask")
        perturbation = adversarial_perturbation(loss, tap.embeddings, attention_mask, self.epsilon)
        perturbed = EmbeddingTap(tap.embeddings + perturbation)
        return (loss + self.loss(model, inputs, labels, perturbed)) / 2


def adversarial_perturbation(loss: Tensor, embeddings: Tensor, attention_mask: Tensor | None, epsilon: float) -> Tensor:
    """Return the perturbation r of `embeddings` for ε = `epsilon`, as defined at the top of this file.

    Both have shape (B, T, D).
    """
    (gradient,) = torch.autograd.grad(loss, embeddings, retain_graph=True)
    vectors, gradient = embeddings.detach().float(), gradient.float()
    if attention_mask is None:
        lengths = vectors.new_full((len(vectors),), vectors.shape[1])
    else:
        lengths = attention_mask.sum(1)
        vectors = vectors * attention_mask[..., None]
    scale = (vectors.square().sum((1, 2)) / lengths.clamp(min=1)).sqrt()
    direction = gradient / gradient.flatten(1).norm(dim=1).clamp(min=torch.finfo(gradient.dtype).tiny)[:, None, None]
    return (epsilon * scale[:, None, None] * direction).to(embeddings.dtype)
