"""How important each head is for a loss: by gradient (Michel et al. 2019) or by ablation.

By gradient, the importance of a head is the mean over the batches of |Σ heads · ∂loss/∂heads|: to first order, by how
much the loss would change if the output of the head were zero.  By ablation, it is that change, measured; an ablation
takes one pass for each head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from monoblock.errors import InputError
from monoblock.inspection.edits import ablate
from monoblock.inspection.trace import TraceTap, attach_tap

ImportanceMethod = Literal["gradient", "ablation"]
BatchLoss = Callable[[nn.Module, Any], Tensor]  # the loss of a batch, summed over its targets


class HeadImportance(NamedTuple):
    layer: str  # such as "decoder.3.attention"
    head: int
    importance: float


def head_importance(
    model: nn.Module,
    batches: Iterable[Any],
    loss: BatchLoss,
    *,
    method: ImportanceMethod = "gradient",
    names: str | Sequence[str] = "*.heads",
    progress: Callable[[int], None] = lambda count: None,
) -> list[HeadImportance]:
    """Return the importance of every head, in the order of the layers.

    batches: what `loss(model, batch)` takes.
    names: patterns of the outputs of heads, (B, H, T, K).
    progress: a function that is called with 1 after every pass over a batch, or over all batches by ablation.
    """
    batches = list(batches)
    if not batches:
        raise InputError("there is no batch to rank heads on; give more data")
    if method not in METHODS:
        raise InputError(f"there is no importance {method!r}; write one of {', '.join(METHODS)}")
    was_training = model.training
    model.eval()
    try:
        totals = METHODS[method](model, batches, loss, names, progress)
    finally:
        model.train(was_training)
    return [
        HeadImportance(name.removesuffix(".heads"), head, value / len(batches))
        for name, values in totals.items()
        for head, value in enumerate(values.tolist())
    ]


def _by_gradient(
    model: nn.Module, batches: list[Any], loss: BatchLoss, names: Any, progress: Callable[[int], None]
) -> dict[str, Tensor]:
    totals: dict[str, Tensor] = {}
    for batch in batches:
        tap = TraceTap(names, with_gradients=True)
        with attach_tap(model, tap), torch.enable_grad():
            value = loss(model, batch)
        tap.check()
        grads = torch.autograd.grad(value, list(tap.activations.values()), allow_unused=True)
        for (name, heads), grad in zip(tap.activations.items(), grads, strict=True):
            effect = heads.detach() * (torch.zeros_like(heads) if grad is None else grad)
            totals[name] = totals.get(name, 0) + effect.sum((2, 3)).abs().sum(0).double().cpu()
        progress(1)
    return totals


@torch.no_grad()
def _by_ablation(
    model: nn.Module, batches: list[Any], loss: BatchLoss, names: Any, progress: Callable[[int], None]
) -> dict[str, Tensor]:
    tap = TraceTap(names)
    with attach_tap(model, tap):
        loss(model, batches[0])
    tap.check()
    before = sum(float(loss(model, batch)) for batch in batches)
    totals = {}
    for name, tensor in tap.activations.items():
        changes = []
        for head in range(tensor.shape[1]):
            with attach_tap(model, TraceTap(edits=[ablate(name, heads=[head])])):
                changes.append(sum(float(loss(model, batch)) for batch in batches) - before)
            progress(1)
        totals[name] = torch.tensor(changes, dtype=torch.float64)
    return totals


METHODS: dict[str, Callable[..., dict[str, Tensor]]] = {"gradient": _by_gradient, "ablation": _by_ablation}
