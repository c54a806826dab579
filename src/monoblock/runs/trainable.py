"""Choose the weights that a recipe trains: all weights, only the upper layers, or only LoRA adapters.

A run with adapters stores them in the subfolder `adapter` in the format of the library peft; the model in the run
folder has the adapters merged into its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from monoblock.baselines.lstm import Recurrent
from monoblock.errors import ConfigError
from monoblock.interop.adapters import save_adapter
from monoblock.model import Transformer
from monoblock.nn.lora import add_lora, fold_lora, lora_layers
from monoblock.quantization.convert import dequantize, quantize
from monoblock.recipes.schema import LoraSection, Recipe
from monoblock.tasks.task_data import TaskData
from monoblock.training.events import DecisionEvent
from monoblock.training.optimizer import count_layers_above

ADAPTER_FOLDER = "adapter"
Model = Transformer | Recurrent


def resolve_steps(recipe: Recipe, task_data: TaskData) -> Recipe:
    """Return the recipe with train.epochs, and intervals that are given as fractions, converted to numbers of steps."""
    section = recipe.train
    batches = getattr(task_data.batch_plan, "batches", None)
    steps = section.steps if section.epochs is None or batches is None else max(1, round(section.epochs * batches))
    values = {name: getattr(section, name) for name in ("warmup", "save_every", "eval_every")}
    counts: dict[str, Any] = {
        name: max(1, round(value * steps)) if 0 < value < 1 else int(value) for name, value in values.items()
    }
    return replace(recipe, train=replace(section, steps=steps, **counts))


def prepare_trainable(model: Model, recipe: Recipe, fresh: Sequence[str]) -> tuple[Model, DecisionEvent | None]:
    """Add adapters and freeze weights as a recipe says; return the model and an event that reports what is trained.

    The event is None if all weights are trained.

    fresh: the names of newly initialized weights, which are always trained.
    """
    lora, freeze = recipe.lora, recipe.train.freeze_layers
    if not lora.rank and freeze is None:
        return model, None
    if not isinstance(model, Transformer):
        raise ConfigError("an LSTM is trained as a whole; leave out lora.rank and train.freeze_layers")
    _check_freeze(model, freeze)
    total = sum(weight.numel() for weight in model.parameters())
    reasons = []
    if lora.rank:
        model, reason = _add_adapters(model, lora, fresh)
        reasons.append(reason)
        total += sum(layer.a.numel() + layer.b.numel() for _, layer in lora_layers(model))
    if freeze is not None:
        reasons.append(f"the first {freeze} layers frozen{' with their adapters' if lora.rank else ''}")
        _freeze_layers(model, freeze)
    for name, weight in model.named_parameters():
        if name in fresh or (fresh and name.startswith("head.")):
            weight.requires_grad_(True)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    if not trained:
        raise ConfigError(f"train.freeze_layers={freeze} leaves nothing to train; write a smaller number")
    return model, DecisionEvent(f"{trained:,} of {total:,} weights are trained", ", ".join(reasons))


def _add_adapters(model: Transformer, lora: LoraSection, fresh: Sequence[str]) -> tuple[Transformer, str]:
    """Freeze the weights, quantize them if lora.bits is set, and add LoRA layers; return the model and a description.

    A newly initialized head is not quantized.
    """
    reason = f"LoRA of rank {lora.rank}"
    if lora.bits:
        head = model.head
        model = quantize(model, bits=lora.bits)
        model.head = head if any(name.startswith("head.") for name in fresh) else model.head
        reason += f" with {lora.bits}-bit weights"
    names = add_lora(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, dropout=lora.dropout)
    return model, f"{reason} on {len(names)} projections"


def _check_freeze(model: Transformer, layers: int | None) -> None:
    depth = max(len(list(stack.layers())) for stack in model.config.stacks.values())
    if layers is not None and layers > depth:
        raise ConfigError(
            f"train.freeze_layers={layers} is more than the {depth} layers of this model; write at most {depth}"
        )


def _freeze_layers(model: nn.Module, layers: int) -> None:
    """Freeze the embeddings and the first `layers` layers of the encoder and the decoder."""
    layers_above = count_layers_above(name for name, _ in model.named_parameters())
    for name, weight in model.named_parameters():
        stack, index = (name.split(".") + [""])[:2]
        first = stack in ("encoder", "decoder") and index.isdigit() and int(index) < layers
        if first or (stack in ("input", "target") and layers_above[name]):
            weight.requires_grad_(False)


def finalize_model(
    model: Any,
    folder: Path,
    recipe: Recipe,
    base_digest: str | None = None,
    labels: Sequence[str] = (),
    *,
    save_adapters: bool = True,
) -> Any:
    """Return the model to save at the end of a run; adapters are saved in the subfolder `adapter` and merged into it.

    base_digest: the digest of the frozen weights that the adapters were trained with.
    labels: the class names of the head.
    save_adapters: False in all processes but the main one.
    """
    if not recipe.lora.rank:
        for weight in model.parameters():
            weight.requires_grad_(True)
        return model
    base = str(recipe.model.get("folder", "")) or None
    if save_adapters:
        save_adapter(model, folder / ADAPTER_FOLDER, base=base, digest=base_digest, labels=labels)
    return dequantize(fold_lora(model))
