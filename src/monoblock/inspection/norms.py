"""Norms by depth: of the residual stream, of what each sublayer adds to it, and of the gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.inspection.trace import Trace, trace
from monoblock.nn.stack import Stack
from monoblock.nn.transformer import Transformer


@dataclass(frozen=True)
class StackNorms:
    """Mean norms over the tokens of a text; each list has one number per layer."""

    stack: str
    residual: list[float]  # before the first block and after each block
    updates: dict[str, list[float]]  # "attention", "cross", "feedforward": what is added to the residual stream
    gradients: list[float] = field(default_factory=list)  # of the loss, with respect to the residual stream
    weight_gradients: list[float] = field(default_factory=list)  # with respect to the weights of each block


@torch.no_grad()
def residual_norms(model: Transformer, *inputs: Tensor, **options: Any) -> list[StackNorms]:
    """Measure the norm of the residual stream of each stack, and of the outputs of its sublayers."""
    seen = trace(model, *inputs, names=["*.input", "*.output"], **options)
    return [_stack_norms(seen, name, len(stack.blocks)) for name, stack in _stacks(model)]


def gradient_norms(model: Transformer, *inputs: Tensor, **options: Any) -> list[StackNorms]:
    """Measure the same, and the norm of the gradient of `text_loss` by depth.  The model stays as it was."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    seen = trace(model, *inputs, names=["*.input", "*.output"], gradients=True, **options)
    names = [name for name in seen if seen[name].requires_grad]
    targets = [seen[name] for name in names] + parameters
    grads = torch.autograd.grad(text_loss(model, seen.logits, inputs), targets, allow_unused=True)
    of_activation = dict(zip(names, grads, strict=False))
    of_parameter = {id(p): grad for p, grad in zip(parameters, grads[len(names) :], strict=True)}
    result = []
    with torch.no_grad():
        for name, stack in _stacks(model):
            norms = _stack_norms(seen, name, len(stack.blocks))
            stream = [f"{name}.0.input", *(f"{name}.{layer}.output" for layer in range(len(stack.blocks)))]
            norms.gradients.extend(_norm(of_activation.get(key)) for key in stream)
            for block in stack.blocks:
                block_grads = [of_parameter.get(id(parameter)) for parameter in block.parameters()]
                norms.weight_gradients.append(sum(_norm(grad) ** 2 for grad in block_grads) ** 0.5)
            result.append(norms)
    return result


def text_loss(model: Transformer, logits: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return a loss that needs no labels: the mean cross-entropy of the tokens that a model is trained to predict.

    These are the next tokens of a decoder, and for a masked language model the tokens themselves.  For any other head
    it is the cross-entropy of the model's own prediction, without a head the mean square of the hidden states.
    """
    kind = None if model.head is None else model.head.config.kind
    logits = logits.float()
    if kind == "language_model":
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs[-1][:, 1:].flatten())
    if kind == "masked_lm":
        return F.cross_entropy(logits.flatten(0, 1), inputs[0].flatten())
    if kind in (None, "pooled", "regression"):
        return logits.square().mean()
    return F.cross_entropy(logits.flatten(0, -2), logits.argmax(-1).flatten())


def describe_text_loss(model: Transformer) -> str:
    """Return what `text_loss` of a model is, in words."""
    kind = None if model.head is None else model.head.config.kind
    if kind in ("language_model", "masked_lm"):
        return "the cross-entropy of this text"
    if kind in (None, "pooled", "regression"):
        return "the mean square of the outputs"
    return "the cross-entropy of the model's own prediction"


def _stacks(model: Transformer) -> list[tuple[str, Stack]]:
    stacks = {"encoder": model.encoder, "decoder": model.decoder}
    return [(name, stack) for name, stack in stacks.items() if stack is not None]


def _stack_norms(seen: Trace, stack: str, depth: int) -> StackNorms:
    residual = [_mean_norm(seen[f"{stack}.0.input"])]
    residual += [_mean_norm(seen[f"{stack}.{layer}.output"]) for layer in range(depth)]
    updates = {
        kind: [_mean_norm(seen[f"{stack}.{layer}.{kind}.output"]) for layer in range(depth)]
        for kind in ("attention", "cross", "feedforward")
        if f"{stack}.0.{kind}.output" in seen
    }
    return StackNorms(stack, residual, updates)


def _mean_norm(tensor: Tensor) -> float:
    return float(tensor.detach().float().norm(dim=-1).mean())


def _norm(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.double().norm())
