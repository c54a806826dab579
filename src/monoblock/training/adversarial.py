"""Adversarial training on word embeddings (Miyato, Dai and Goodfellow 2017).

The embeddings x of a text are moved along the gradient g of its loss, by r = ε |x| g / ‖g‖. The losses of x and x + r
are averaged. |x| is the root mean square norm of the embeddings of the text, so that ε does not depend on their scale.
r is treated as a constant: no gradient flows through it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from monoblock.errors import InputError
from monoblock.training.loss import CrossEntropyLoss

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
