"""Build the trainer of a run from its recipe: loss, optimizer, schedule, batches and evaluation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.config.schema import to_dict
from monoblock.data.batching.loader import BatchLoader
from monoblock.data.batching.plans import BatchIndices, batch_for_rank
from monoblock.nn.lstm import Recurrent
from monoblock.nn.transformer import Transformer
from monoblock.recipes.schema import Recipe, TrainSection
from monoblock.runs.run_folder import CHECKPOINTS_FOLDER
from monoblock.runs.warm_start import WarmStart
from monoblock.tasks.task_data import TaskData, validate
from monoblock.training.adversarial import AdversarialLoss
from monoblock.training.arguments import TrainingArguments
from monoblock.training.collate import TensorBatch
from monoblock.training.distributed import World
from monoblock.training.loss import CrossEntropyLoss
from monoblock.training.optimizer import Optimizers, build_optimizers
from monoblock.training.runtime import RuntimeConfig
from monoblock.training.schedule import learning_rate
from monoblock.training.trainer import Trainer
from monoblock.training.update_guard import UpdateGuard

# Keys of [train] that a resumed run may change.
CHANGEABLE_ON_RESUME = (
    "steps",
    "epochs",
    "save_every",
    "eval_every",
    "sample_every",
    "keep",
    "workers",
    "device",
    "compile",
    "eval_batches",
    "best",
)


def build_trainer(
    recipe: Recipe,
    folder: Path,
    task_data: TaskData,
    model: Transformer | Recurrent,
    config: ModelConfig | RecurrentConfig,
    runtime: RuntimeConfig,
    stop: Callable[[], bool],
    world: World,
) -> Trainer:
    section = recipe.train
    loss = _build_loss(section, config, task_data)

    def evaluate(current: nn.Module) -> dict[str, float]:
        with runtime.autocast():
            return validate(
                current, task_data, loss.evaluation_loss(), runtime.device, max_batches=section.eval_batches
            )

    def rate(step: int) -> float:
        sizes: dict[str, Any] = {
            "steps": section.steps,
            "warmup": section.warmup,
            "floor": section.floor,
            "width": config.width,
        }
        return learning_rate(section.schedule, step, peak=section.lr, **sizes)

    return Trainer(
        model=model,
        optimizers=_build_optimizers(section, model),
        learning_rate=rate,
        loss=loss,
        batches=_batch_iterator(section, task_data, world),
        args=TrainingArguments(
            steps=section.steps,
            accumulate=section.accumulate,
            clip=section.clip,
            save_every=int(section.save_every),
            eval_every=int(section.eval_every),
            sample_every=section.sample_every,
            keep=max(section.keep, section.average),
            ema=section.ema,
        ),
        runtime=runtime,
        folder=folder / CHECKPOINTS_FOLDER,
        evaluate=evaluate if task_data.evaluation_batches is not None else None,
        guard=UpdateGuard(spike=section.spike, patience=section.patience),
        should_stop=stop,
        world=world,
        save_trainable_only=bool(recipe.lora.rank),
    )


def _build_loss(
    section: TrainSection, config: ModelConfig | RecurrentConfig, task_data: TaskData
) -> CrossEntropyLoss | AdversarialLoss:
    """Return cross-entropy, with load balancing for experts and adversarial training if the recipe asks for it."""
    stacks = config.stacks.values() if isinstance(config, ModelConfig) else ()
    experts = next(
        (block.feedforward.experts for stack in stacks for block in stack.layers() if block.feedforward.experts), None
    )
    loss = CrossEntropyLoss(
        section.label_smoothing,
        section.balance if experts else 0.0,
        experts.top_k if experts else 1,
        task_data.predicts_positions,
    )
    return AdversarialLoss(loss, section.adversarial) if section.adversarial else loss


def _build_optimizers(section: TrainSection, model: nn.Module) -> Optimizers:
    return build_optimizers(
        model,
        section.optimizer,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        weight_decay=section.weight_decay,
        table_decay=section.table_decay,
        adam_factor=section.adam_factor,
        layer_decay=section.layer_decay,
    )


def _batch_iterator(section: TrainSection, task_data: TaskData, world: World) -> Callable[[int], Iterator[TensorBatch]]:
    """Return a function that yields the batches of this process from a given step on."""

    def build(batch: BatchIndices) -> TensorBatch:
        """Build this process's part of a batch, which may be empty; its `samples` list those of the whole batch."""
        share, samples = batch_for_rank(batch, world.rank, world.size), batch.indices.tolist()
        if not len(share.indices):
            return TensorBatch({}, torch.empty(0, dtype=torch.int64), batch.epoch, samples)
        return task_data.build_batch(share)._replace(samples=samples)

    def batches(step: int) -> Iterator[TensorBatch]:
        return iter(BatchLoader(task_data.batch_plan, build, start=step, stop=section.steps, workers=section.workers))

    return batches


def run_identity(
    recipe: Recipe, config: ModelConfig | RecurrentConfig, task_data: TaskData, start: WarmStart | None
) -> dict[str, Any]:
    """Return digests of the model, recipe, data, initial weights and tokenizer, which must not change on resuming."""
    training = {key: value for key, value in to_dict(recipe.train).items() if key not in CHANGEABLE_ON_RESUME}
    parts = {"model": to_dict(config), "training recipe": training, "corpus": to_dict(recipe.data)}
    parts |= {"adapter": to_dict(recipe.lora)} if recipe.lora.rank else {}
    identity: dict[str, Any] = {key: _json_digest(value) for key, value in parts.items()}
    for split, digest in task_data.content_digests.items():
        identity[f"content of data.corpus, split {split}"] = digest
    if start is not None:
        identity["set of weights in model.folder"] = start.digest
    identity["tokenizer"] = task_data.tokenizer.fingerprint if task_data.tokenizer is not None else None
    return identity


def _json_digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
