"""What of a model a recipe trains: all of it, the upper layers alone, or adapters beside frozen weights.

A run with adapters leaves them in `adapter/`, where peft reads them, and beside it the model they became part of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from monoblock.errors import ConfigError
from monoblock.interop.adapters import save_adapter
from monoblock.lora import adapted, add_lora, folded
from monoblock.model import Transformer
from monoblock.quantize.convert import quantized, widened
from monoblock.recurrent import Recurrent
from monoblock.tasks.ground import Ground
from monoblock.tasks.recipe import Recipe
from monoblock.training.events import Chosen
from monoblock.training.optimizer import layers_above

ADAPTER = "adapter"
Model = Transformer | Recurrent


def resolved(recipe: Recipe, ground: Ground) -> Recipe:
    """The recipe with passes over the data as steps, and shares of the steps as numbers of them."""
    part = recipe.train
    batches = getattr(ground.plan, "batches", None)
    steps = part.steps if part.epochs is None or batches is None else max(1, round(part.epochs * batches))
    shares = {name: getattr(part, name) for name in ("warmup", "save_every", "eval_every")}
    counted: dict[str, Any] = {
        name: max(1, round(share * steps)) if 0 < share < 1 else int(share) for name, share in shares.items()
    }
    return replace(recipe, train=replace(part, steps=steps, **counted))


def tuned(model: Model, recipe: Recipe, fresh: Sequence[str]) -> tuple[Model, Chosen | None]:
    """The model with its adapters in place and what stays as it is frozen; `fresh` weights are always trained."""
    lora = recipe.lora
    if not lora.rank and recipe.train.freeze is None:
        return model, None
    if not isinstance(model, Transformer):
        raise ConfigError("an LSTM is trained as a whole; leave out lora.rank and train.freeze")
    _check_freeze(model, recipe.train.freeze)
    how, whole = f"LoRA of rank {lora.rank}", sum(weight.numel() for weight in model.parameters())
    if lora.rank:
        if lora.bits:
            head = model.head
            model = quantized(model, bits=lora.bits)
            model.head = head if any(name.startswith("head.") for name in fresh) else model.head
            how += f" beside {lora.bits}-bit weights"
        chosen = add_lora(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, dropout=lora.dropout)
        how += f" on {len(chosen)} projections"
        whole += sum(part.a.numel() + part.b.numel() for _, part in adapted(model))
    if recipe.train.freeze is not None:
        frozen = f"the first {recipe.train.freeze} layers frozen"
        how = f"{how}, {frozen} with their adapters" if lora.rank else frozen
        _freeze(model, recipe.train.freeze)
    for name, weight in model.named_parameters():
        if name in fresh or (fresh and name.startswith("head.")):
            weight.requires_grad_(True)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    if not trained:
        raise ConfigError(f"train.freeze={recipe.train.freeze} leaves nothing to train; write less")
    return model, Chosen(f"{trained:,} of {whole:,} weights are trained", how)


def _check_freeze(model: Transformer, layers: int | None) -> None:
    most = max(len(list(stack.layers())) for stack in model.config.stacks.values())
    if layers is not None and layers > most:
        raise ConfigError(f"train.freeze={layers} is more than the {most} layers of this model; write {most} or less")


def _freeze(model: nn.Module, layers: int) -> None:
    """The embedding and the first layers of every stack stay as they are."""
    above = layers_above(name for name, _ in model.named_parameters())
    for name, weight in model.named_parameters():
        stack, number = (name.split(".") + [""])[:2]
        first = stack in ("encoder", "decoder") and number.isdigit() and int(number) < layers
        if first or (stack in ("input", "target") and above[name]):
            weight.requires_grad_(False)


def finished(model: Any, folder: Path, recipe: Recipe, base: str | None = None) -> Any:
    """The model a run ends with: adapters are left in a folder of their own and become part of the weights.

    `base` is the digest of the weights they were trained beside.
    """
    if not any(True for _ in adapted(model)):
        for weight in model.parameters():
            weight.requires_grad_(True)
        return model
    save_adapter(model, folder / ADAPTER, base=str(recipe.model.get("folder", "")) or None, digest=base)
    return widened(folded(model))


def plain(model: Transformer) -> Transformer:
    """A model that can be decoded with: itself, or a copy whose adapters are part of its weights."""
    return widened(folded(model)) if any(True for _ in adapted(model)) else model
