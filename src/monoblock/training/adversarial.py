"""Adversarial training (Miyato, Dai and Goodfellow 2017): the loss once more, with every text moved a little to where
it is worst.

The words' vectors x of a text move along the gradient of its loss, r = ε |x| g / ‖g‖, where |x| is the length that its
vectors have on average (root mean square), so that ε says the same whatever the size of the embedding.  The second loss
is that of x + r, and r is a constant: nothing is learnt about making the gradient small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from monoblock.errors import InputError
from monoblock.training.objectives import Loss

WORDS = "input.token"


class Words:
    """A tap on the words' vectors: keeps them, or puts others in their place."""

    def __init__(self, instead: Tensor | None = None) -> None:
        self.instead = instead
        self.seen: Tensor | None = None

    def wants(self, name: str) -> bool:
        return False

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if name != WORDS:
            return tensor
        if self.instead is not None:
            return self.instead
        frozen = not tensor.requires_grad
        self.seen = tensor.detach().requires_grad_() if frozen else tensor
        return self.seen


@dataclass(frozen=True)
class Adversarial:
    """The mean of a loss and of the same where the words lie worse."""

    loss: Loss
    size: float  # ε

    def plain(self) -> Loss:
        return self.loss.plain()

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        tap = Words()
        loss = self.loss(model, inputs, labels, tap)
        if tap.seen is None:
            raise InputError("train.adversarial moves the words of a text, and this model reads none; leave it out")
        worse = tap.seen + worst(loss, tap.seen, inputs.get("attention_mask"), self.size)
        return (loss + self.loss(model, inputs, labels, Words(worse))) / 2


def worst(loss: Tensor, words: Tensor, real: Tensor | None, size: float) -> Tensor:
    """The move of each text's words (B, T, D) that makes the loss grow most, of so many word lengths."""
    (gradient,) = torch.autograd.grad(loss, words, retain_graph=True)
    vectors, gradient = words.detach().float(), gradient.float()
    counted = vectors.new_full((len(vectors),), vectors.shape[1]) if real is None else real.sum(1)
    if real is not None:
        vectors = vectors * real[..., None]
    length = (vectors.square().sum((1, 2)) / counted.clamp(min=1)).sqrt()
    along = gradient / gradient.flatten(1).norm(dim=1).clamp(min=torch.finfo(gradient.dtype).tiny)[:, None, None]
    return (size * length[:, None, None] * along).to(words.dtype)
