"""The residual stream by depth: its norms and those of its gradient, and the logit lens (nostalgebraist 2020).

The lens shows what the model would predict if it ended after each layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from monoblock.config.parts import VOCABULARY_HEADS
from monoblock.errors import InputError
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


class LayerPrediction(NamedTuple):
    """The predictions after one layer, or after the embedding, for each token of each row."""

    name: str  # "input" or "layer 3"
    tokens: Tensor  # (B, T, top) ids, best first
    probabilities: Tensor  # (B, T, top)
    final_rank: Tensor  # (B, T) the rank of the token that the whole model predicts, from 1


@torch.no_grad()
def logit_lens(model: Transformer, *inputs: Tensor, top: int = 5, **options: Any) -> list[LayerPrediction]:
    """Apply the last norm and the head of a model to the residual stream before and after every block.

    The inputs are those of the model; predictions for padding mean nothing. The last entry is the prediction of the
    model itself.
    """
    head = model.head
    if head is None or head.config.kind not in VOCABULARY_HEADS:
        kind = "no head" if head is None else f"the head {head.config.kind!r}"
        raise InputError(f"the logit lens needs a model that predicts tokens, but this one has {kind}")
    stack = "decoder" if model.decoder is not None else "encoder"
    depth = len(model.get_submodule(stack).blocks)  # type: ignore[arg-type]
    names = [f"{stack}.0.input", *(f"{stack}.{layer}.output" for layer in range(depth))]
    seen = trace(model, *inputs, names=names, **options)
    norm = model.get_submodule(stack).norm
    final = seen.logits
    best = final.argmax(-1, keepdim=True)
    result = []
    for index, name in enumerate(names):
        hidden = seen[name] if norm is None else norm(seen[name])  # type: ignore[operator]
        logits = final if index == depth else head(hidden, table=model.output_embedding)
        probabilities, tokens = logits.float().softmax(-1).topk(top)
        rank = (logits > logits.gather(-1, best)).sum(-1) + 1
        result.append(LayerPrediction("input" if index == 0 else f"layer {index - 1}", tokens, probabilities, rank))
    return result
