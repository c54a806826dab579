"""Prune a stored model: rank its attention heads on a corpus, remove the least important, and compare the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.accounting.report import account
from monoblock.config.model import ModelConfig
from monoblock.errors import ConfigError, InputError
from monoblock.inspection.edits import ablate
from monoblock.inspection.pruning import HeadGroup, ImportanceMethod, list_groups, prune_in_rounds
from monoblock.inspection.trace import trace
from monoblock.interop.model_folder import RECIPE_FILE
from monoblock.model import Transformer
from monoblock.recipes.schema import Recipe, TokenizerSection
from monoblock.runs.build_data import build_task_data, expected_config
from monoblock.runs.finetune import build_finetuning_recipe
from monoblock.runs.initial_weights import load_warm_start
from monoblock.runs.recipe import read_recipe, recipe_path, task_of_recipe
from monoblock.tasks.task_data import TaskData, validate
from monoblock.training.collate import TensorBatch
from monoblock.training.loss import CrossEntropyLoss, FunctionLoss, Loss

VALIDATION_BATCHES = 20  # at most, for the loss before and after


@dataclass(frozen=True)
class PruningResult:
    model: Transformer
    ranking: list[HeadGroup]  # removed groups in the order of removal, then the others, the least important first
    removed: dict[str, list[int]]  # heads by layer, with the numbers that they had in the original model
    num_rounds: int  # how often importance was measured
    num_heads: dict[str, int]  # "before" and "after"
    parameters: dict[str, int]
    accounted_parameters: int  # of the pruned model, in closed form
    metrics: dict[str, dict[str, float]]  # of "before" and "after" on the validation rows
    max_logit_difference: float  # between the pruned model and the original with the outputs of these heads set to 0


def prune_model(
    folder: str | Path,
    data: str,
    *,
    remove: int | None = None,
    keep: float | None = None,
    layers: str = "*",
    method: ImportanceMethod = "gradient",
    rounds: int | None = None,
    num_batches: int = 16,
    device: str = "cpu",
    data_folder: Path | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> PruningResult:
    """Remove the heads of a stored model that matter least for its loss on a corpus.

    remove, keep: the number of heads to remove, or the fraction to keep; give one of them.
    layers: a pattern of the layers to prune, such as "encoder.*".
    rounds: remove the heads in so many rounds, and measure importance anew in each; None: see `prune_in_rounds`.
    num_batches: rank heads on so many training batches.
    """
    recipe = _recipe(Path(folder), data, data_folder)
    task = task_of_recipe(recipe)
    start = load_warm_start(recipe.model["folder"])
    if not isinstance(start.model, Transformer):
        raise ConfigError(f"{folder} is an LSTM, which has no attention heads to prune; give a Transformer")
    model = start.model.to(device).eval()
    count = _count_to_remove(list_groups(model.config, layers), remove, keep)
    config = expected_config(recipe, task, start)
    context = model.config.context
    task_data = build_task_data(recipe, context, task=task, config=config, data_folder=data_folder, start=start)
    loss = FunctionLoss(task.loss) if task.has_own_loss else CrossEntropyLoss(over_positions=task.classes_are_positions)
    plan, build_batch = task_data.batch_plan, task_data.build_batch
    assert plan is not None
    assert build_batch is not None
    steps = range(min(num_batches, getattr(plan, "batches", num_batches)))
    batches = [build_batch(plan.batch_at(step)).to(torch.device(device)) for step in steps]

    def batch_loss(module: nn.Module, batch: TensorBatch) -> Tensor:
        return loss(module, batch.inputs, batch.labels)

    options: dict[str, Any] = {"rounds": rounds, "layers": layers, "method": method, "progress": progress}
    smaller, removed, ranking, num_rounds = prune_in_rounds(model, batches, batch_loss, count, **options)
    smaller.loaded_from = model.loaded_from
    models = {"before": model, "after": smaller}
    return PruningResult(
        smaller,
        ranking,
        removed,
        num_rounds,
        {name: _count_heads(one.config) for name, one in models.items()},
        {name: sum(p.numel() for p in one.parameters()) for name, one in models.items()},
        account(smaller.config).parameters,
        {name: _validate(one, task_data, loss, device) for name, one in models.items()},
        _difference(model, smaller, removed, batches[0]),
    )


def _recipe(folder: Path, data: str, data_folder: Path | None) -> Recipe:
    """Return the recipe that trained the model, or else one to fine-tune it, with the corpus `data`."""
    if not (folder / RECIPE_FILE).is_file():
        return build_finetuning_recipe(str(folder), data, folder=data_folder)
    recipe = read_recipe(recipe_path(folder))
    tokenizer = TokenizerSection()  # that of the model, without random segmentations
    section = replace(recipe.data, corpus=data)
    return replace(recipe, data=section, model={"folder": str(folder)}, tokenizer=tokenizer)


def _count_to_remove(groups: list[HeadGroup], remove: int | None, keep: float | None) -> int:
    """Return the number of heads to remove; of a fraction, rounded down to whole groups."""
    if (remove is None) == (keep is None):
        raise ConfigError("give the number of heads to remove, or the fraction to keep: --remove 8 or --keep 0.5")
    sizes = {group.layer: len(group.heads) for group in groups}
    total, size = sum(len(group.heads) for group in groups), max(sizes.values())
    most = total - sum(sizes.values())  # each layer keeps a group
    if remove is not None:
        count, advice = remove, f"give --remove {most} or less"
    else:
        assert keep is not None
        if not 0 <= keep <= 1:
            raise ConfigError(f"the fraction of heads to keep must be from 0 to 1, not {keep}; give --keep 0.5")
        count = int((1 - keep) * total + 1e-9) // size * size
        advice = f"give --keep {math.ceil((1 - most / total) * 100 - 1e-9) / 100:g} or more"
    if count < 1:
        raise InputError("no head would be removed; give a smaller --keep, or --remove 1")
    if count > most:
        raise InputError(f"each layer keeps a head, so that at most {most} of {total} can be removed; {advice}")
    return count


def _count_heads(config: ModelConfig) -> int:
    blocks = [block for stack in config.stacks.values() for block in stack.layers()]
    return sum(one.heads for block in blocks for one in (block.attention, block.cross) if one is not None)


def _validate(model: Transformer, task_data: TaskData, loss: Loss, device: str) -> dict[str, float]:
    if task_data.evaluation_batches is None:
        return {}
    metrics = validate(model, task_data, loss, torch.device(device), max_batches=VALIDATION_BATCHES)
    return {name.removeprefix("val_"): value for name, value in metrics.items() if name != "val_tokens"}


@torch.no_grad()
def _difference(model: Transformer, smaller: Transformer, removed: dict[str, list[int]], batch: TensorBatch) -> float:
    """Return the largest difference of the logits between the pruned model and the masked original."""
    inputs: dict[str, Any] = batch.inputs
    edits = [ablate(f"{layer}.heads", heads=heads) for layer, heads in removed.items()]
    masked = trace(model, names=(), edits=edits, **inputs).logits
    return float((masked - smaller(**inputs)).abs().max())
