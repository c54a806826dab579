"""Prepare a training run: build its data, model and trainer, and write the first files of the run folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from monoblock.baselines.lstm import Recurrent
from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.errors import ConfigError
from monoblock.interop.weights import compute_body_digest
from monoblock.kernels.fp8_linear import SIZE_MULTIPLE
from monoblock.model import Transformer
from monoblock.nn.stack import Stack
from monoblock.parallel.build_strategy import build_strategy
from monoblock.parallel.strategy import Strategy
from monoblock.parallel.world import SINGLE_PROCESS, World
from monoblock.recipes.parallel_checks import check_parallel
from monoblock.recipes.parse import recipe_path
from monoblock.recipes.schema import Recipe, TrainSection
from monoblock.runs.build_data import build_task_data, draft_config
from monoblock.runs.build_trainer import build_trainer
from monoblock.runs.custom_parts import NO_CUSTOM_PARTS, CustomParts, build_custom_data
from monoblock.runs.identity import run_identity
from monoblock.runs.recipe import build_model_config, read_recipe, task_of_recipe
from monoblock.runs.run import Run
from monoblock.runs.run_folder import CHECKPOINTS_FOLDER, check_run_folder, write_initial_files
from monoblock.runs.trainable import prepare_trainable, resolve_steps
from monoblock.runs.warm_start import WarmStart, copy_weights, load_warm_start
from monoblock.tasks.task import Task
from monoblock.tasks.task_data import TaskData
from monoblock.training.checkpoint import list_steps
from monoblock.training.events import DecisionEvent, MetricsWriter
from monoblock.training.resume_state import seed_generators
from monoblock.training.runtime import RuntimeConfig, check_device, choose_runtime

DEFAULT_LSTM_CONTEXT = 64  # length of training blocks for an LSTM, whose context is unlimited


def prepare_run(
    recipe: Recipe,
    folder: Path,
    *,
    parts: CustomParts = NO_CUSTOM_PARTS,
    data: Path | None = None,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
    tensorboard: bool = False,
    world: World = SINGLE_PROCESS,
) -> Run:
    """Build the data, model and trainer of a run, and write the first files of the run folder.

    parts: the parts of the run that the user wrote in Python.
    data: the user's folder of corpora.
    resume: continue the run in the folder; its tokenizer is used again.
    stop: a function that is called after every step; training stops when it returns True.
    world: the processes that train together; the main process builds its run before the others.
    """
    with world.main_process_first():
        if world.is_main:
            check_run_folder(folder, resume)
        resume = resume and bool(list_steps(folder / CHECKPOINTS_FOLDER))  # else the run starts again, with its data
        plan = _plan_run(recipe, folder, parts, data, resume, world)
        check_parallel(plan.recipe, world.size, has_own_loss=plan.task.has_own_loss)
        initial = _build_model(plan, parts)
        strategy = _build_strategy(plan.recipe, world)
        strategy.check_model(initial.model)
        runtime = _choose_runtime(plan.recipe.train, initial.model, world)
        if world.is_main and not resume:
            write_initial_files(folder, plan.recipe, plan.task, plan.config, plan.task_data, plan.start)
    run = _build_run(plan, initial, folder, parts, stop, tensorboard, strategy, runtime)
    if resume:
        run.stored_recipe = read_recipe(recipe_path(folder), task=plan.task)
    return run


class _Plan(NamedTuple):
    """What a run is built from; processes make it one after the other, because the first writes files for the rest."""

    task: Task
    start: WarmStart | None
    task_data: TaskData
    original: Recipe  # as given
    recipe: Recipe  # with the number of steps
    config: ModelConfig | RecurrentConfig


def _plan_run(recipe: Recipe, folder: Path, parts: CustomParts, data: Path | None, resume: bool, world: World) -> _Plan:
    task, start = task_of_recipe(recipe, parts.task), load_warm_start(recipe.model)
    run_folder = folder if resume or not world.is_main else None  # the folder whose tokenizer is used again
    if parts.batches is not None:
        task_data = build_custom_data(parts, start)
    else:
        draft = draft_config(recipe, task, start)
        context = _model_context(recipe, draft, start)
        options: dict[str, Any] = {"data_folder": data, "run_folder": run_folder, "start": start}
        task_data = build_task_data(recipe, context, task=task, config=draft, **options)
    resolved = resolve_steps(recipe, task_data)
    vocab = None if task_data.tokenizer is None else task_data.tokenizer.vocab_size
    stored = None if start is None else start.config
    config = build_model_config(resolved, vocab, stored, task=task, **task_data.model_sizes)
    return _Plan(task, start, task_data, recipe, resolved, config)


class _InitialModel(NamedTuple):
    model: Transformer | Recurrent
    warm_start_event: DecisionEvent | None
    trainable_event: DecisionEvent | None


def _build_model(plan: _Plan, parts: CustomParts) -> _InitialModel:
    """Build the model with its initial weights on the CPU."""
    seed_generators(plan.recipe.train.seed)
    model, event, fresh = build_model(plan.config, parts.model_class), None, list[str]()
    if plan.start is not None:
        event, fresh = _copy_initial_weights(plan.start, model, plan.recipe, plan.task.head)
    model, trainable_event = prepare_trainable(model, plan.recipe, fresh)
    return _InitialModel(model, event, trainable_event)


def _build_strategy(recipe: Recipe, world: World) -> Strategy:
    section = recipe.parallel
    return build_strategy(
        recipe.train.parallel,
        world,
        reshard_after_forward=section.reshard_after_forward,
        offload=section.offload,
        schedule=section.schedule,
        micro_batches=section.microbatches,
        sequence=section.sequence,
    )


def _build_run(
    plan: _Plan,
    initial: _InitialModel,
    folder: Path,
    parts: CustomParts,
    stop: Callable[[], bool],
    tensorboard: bool,
    strategy: Strategy,
    runtime: RuntimeConfig,
) -> Run:
    world = strategy.world
    task, start, task_data, original, recipe, config = plan
    section = recipe.train
    model = initial.model
    if not strategy.is_sharded:  # else its parts are moved when it is split
        model.to(runtime.device)
    world.seed_process(section.seed)
    if section.activation_checkpointing and isinstance(model, Transformer):
        model.recompute(section.activation_checkpointing)
    optimizer = None if parts.optimizer is None else parts.build_optimizer
    trainer = build_trainer(recipe, folder, task, task_data, model, config, runtime, stop, strategy, optimizer)
    trainer.identity = run_identity(original, task, config, task_data, start)
    run = Run(
        recipe,
        folder,
        task,
        task_data,
        model,
        trainer,
        MetricsWriter(folder, tensorboard=tensorboard, disabled=not world.is_main),
        initial.warm_start_event,
        initial.trainable_event,
        base_digest=compute_body_digest(start.model) if start is not None and recipe.lora.rank else None,
    )
    trainer.sample = run.sample_text
    if parts.optimizer is not None:
        run.custom_optimizer = type(trainer.optimizers.optimizers[0]).__name__
    return run


def _choose_runtime(section: TrainSection, model: Transformer | Recurrent, world: World) -> RuntimeConfig:
    """Choose device, precision and compilation; raise ConfigError if this machine or model cannot have them.

    With products in 8 bits, the model gets the layers for them.
    """
    check_device(section.device)
    runtime = choose_runtime(
        section.device,
        section.precision,
        section.compile,
        deterministic=section.deterministic,
        steps=section.steps,
        no_compile_reason=_no_compile_reason(section, world),
    )
    stacks = [part for part in model.modules() if isinstance(part, Stack) and runtime.fp8]
    changed = [stack.use_fp8_products() for stack in stacks]
    if runtime.fp8 and not any(changed):
        raise ConfigError(
            f"train.precision=fp8 changes no layer of this model: it needs a Transformer with sizes that are multiples "
            f"of {SIZE_MULTIPLE}; write train.precision=bf16"
        )
    return runtime


def _no_compile_reason(section: TrainSection, world: World) -> str | None:
    if world.pipeline_size > 1:
        return "pipeline stages are not compiled"
    return "adversarial training computes a gradient inside the loss" if section.adversarial else None


def _copy_initial_weights(
    start: WarmStart, model: Transformer | Recurrent, recipe: Recipe, head: str
) -> tuple[DecisionEvent, list[str]]:
    """Copy the stored weights into a model; return an event that reports this, and the names of weights not copied."""
    keep_head = isinstance(model, Recurrent) or start.keeps_head(head, recipe.model)
    fresh = copy_weights(model, start, keep_head=keep_head)
    count = sum(tensor.numel() for name, tensor in model.state_dict().items() if name not in fresh)
    event = DecisionEvent(f"begins with {count:,} weights of {start.folder}", f"fresh: {', '.join(fresh) or 'nothing'}")
    return event, fresh


def build_model(
    config: ModelConfig | RecurrentConfig, model_class: type[Transformer] = Transformer
) -> Transformer | Recurrent:
    return Recurrent(config) if isinstance(config, RecurrentConfig) else model_class(config)


def _model_context(recipe: Recipe, config: ModelConfig | RecurrentConfig | None, start: WarmStart | None) -> int | None:
    """Return the context of the model in tokens; None means no limit."""
    if config is None:
        return None
    context = config.context if isinstance(config, ModelConfig) else DEFAULT_LSTM_CONTEXT
    if start is not None or isinstance(config, RecurrentConfig):
        context = recipe.model.get("context", context)
    return context
