"""Build the trainer of a run from its recipe: loss, optimizer, schedule, batches and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.baselines.carried import CarriedLoss, CarriedState
from monoblock.baselines.lstm import Recurrent
from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.data.batching.loader import BatchLoader
from monoblock.data.batching.plans import BatchIndices, batch_for_rank
from monoblock.errors import ConfigError
from monoblock.model import Transformer
from monoblock.parallel.strategy import Strategy
from monoblock.parallel.world import World
from monoblock.recipes.schema import Recipe, TrainSection
from monoblock.runs.run_folder import CHECKPOINTS_FOLDER
from monoblock.tasks.task import Task
from monoblock.tasks.task_data import TaskData, validate
from monoblock.training.collate import TensorBatch
from monoblock.training.guard import UpdateGuard
from monoblock.training.loss import AdversarialLoss, CrossEntropyLoss, FunctionLoss, Loss
from monoblock.training.optimizer import Optimizers, build_optimizers
from monoblock.training.runtime import RuntimeConfig
from monoblock.training.schedule import learning_rate
from monoblock.training.trainer import Trainer, TrainingArguments

TOKEN_ACCURACY = "token_accuracy"  # the accuracy of a language model, given the right tokens before; not of whole texts


def build_trainer(
    recipe: Recipe,
    folder: Path,
    task: Task,
    task_data: TaskData,
    model: Transformer | Recurrent,
    config: ModelConfig | RecurrentConfig,
    runtime: RuntimeConfig,
    stop: Callable[[], bool],
    strategy: Strategy,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> Trainer:
    """Distribute the model among the processes of a run, and build the trainer; every process must call this."""
    section, world = recipe.train, strategy.world
    loss = build_loss(section, config, task, world.sum_tensor_over_data if world.size > 1 else None)
    if strategy.is_sharded and runtime.autocast_dtype == torch.float16:
        raise ConfigError(f"fp16 cannot be used with train.parallel={section.parallel}; write train.precision=bf16")
    module = strategy.prepare(model, runtime.autocast_dtype)

    def evaluate(current: nn.Module) -> dict[str, float]:
        with runtime.autocast():
            return validate(
                current,
                task_data,
                loss.evaluation_loss(),
                runtime.device,
                max_batches=section.eval_batches,
                world=world,
                evaluate_batch=strategy.evaluate_batch,
            )

    def rate(step: int) -> float:
        sizes: dict[str, Any] = {
            "steps": section.steps,
            "warmup": section.warmup,
            "floor": section.min_lr_ratio,
            "width": config.width,
        }
        return learning_rate(section.schedule, step, peak=section.lr, **sizes)

    return Trainer(
        model=model,
        optimizers=_build_optimizers(section, model, strategy) if optimizer is None else Optimizers([optimizer(model)]),
        learning_rate=rate,
        loss=loss,
        batches=_batch_iterator(section, task_data, world),
        args=TrainingArguments(
            steps=section.steps,
            accumulate=section.accumulate,
            clip=section.clip,
            save_every=int(section.save_every),
            save_async=section.save_async,
            eval_every=int(section.eval_every),
            sample_every=section.sample_every,
            keep=max(section.keep_checkpoints, section.average_checkpoints),
            ema=section.ema,
        ),
        runtime=runtime,
        folder=folder / CHECKPOINTS_FOLDER,
        evaluate=evaluate if task_data.evaluation_batches is not None else None,
        guard=UpdateGuard(spike=section.spike_threshold, patience=section.max_skipped_updates),
        should_stop=stop,
        strategy=strategy,
        module=module,
        save_trainable_only=bool(recipe.lora.rank),
    )


def build_loss(
    section: TrainSection,
    config: ModelConfig | RecurrentConfig,
    task: Task,
    sum_over_data: Callable[[Tensor], Tensor] | None = None,
) -> Loss:
    """Return the loss of a task, with the label smoothing, load balancing and adversarial training of the recipe."""
    if task.has_own_loss:
        if section.label_smoothing:
            raise ConfigError(
                f"train.label_smoothing cannot be used with the objective {task.name!r}, which has a loss of its own; "
                "leave it out"
            )
        return FunctionLoss(task.loss)
    stacks = config.stacks.values() if isinstance(config, ModelConfig) else ()
    experts = next(
        (block.feedforward.experts for stack in stacks for block in stack.layers() if block.feedforward.experts), None
    )
    kind, carried = CrossEntropyLoss, {}
    if isinstance(config, RecurrentConfig):
        kind, carried = CarriedLoss, {"carried": CarriedState(section.batch * section.accumulate)}
    loss = kind(
        section.label_smoothing,
        section.load_balancing if experts else 0.0,
        experts.top_k if experts else 1,
        TOKEN_ACCURACY if task.head in ("language_model", "masked_lm") else "accuracy",
        sum_over_data=sum_over_data,
        over_positions=task.classes_are_positions,
        fp8=section.precision == "fp8",
        **carried,
    )
    return AdversarialLoss(loss, section.adversarial) if section.adversarial else loss


def _build_optimizers(section: TrainSection, model: nn.Module, strategy: Strategy) -> Optimizers:
    return build_optimizers(
        model,
        section.optimizer,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        weight_decay=section.weight_decay,
        table_decay=section.embedding_weight_decay,
        adam_factor=section.adam_lr_factor,
        layer_decay=section.layer_decay,
        other_names=strategy.weights_elsewhere,
    )


def _batch_iterator(section: TrainSection, task_data: TaskData, world: World) -> Callable[[int], Iterator[TensorBatch]]:
    """Return a function that takes the number of a step and yields the batches of this process from that step on."""

    if task_data.batches is not None:
        return task_data.batches
    plan, build_batch = task_data.batch_plan, task_data.build_batch
    assert plan is not None
    assert build_batch is not None

    def build(batch: BatchIndices) -> TensorBatch:
        """Build this process's share of a batch; `samples` has the indices of the whole batch.

        If there are fewer samples than processes, some build the first sample, without targets: all have to compute.
        """
        share, samples = batch_for_rank(batch, world.data_rank, world.data_size), batch.indices.tolist()
        if not len(share.indices):
            first = BatchIndices(batch.epoch, batch.indices[:1])
            return build_batch(first).without_targets()._replace(samples=samples)
        return build_batch(share)._replace(samples=samples)

    def batches(step: int) -> Iterator[TensorBatch]:
        return iter(BatchLoader(plan, build, start=step, stop=section.steps, workers=section.workers))

    return batches
