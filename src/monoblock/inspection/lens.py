"""The logit lens (nostalgebraist 2020): what the model would predict if it ended after each layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from monoblock.config.parts import VOCABULARY_HEADS
from monoblock.errors import InputError
from monoblock.inspection.trace import trace
from monoblock.nn.transformer import Transformer


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
