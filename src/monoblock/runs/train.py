"""Train a recipe into a run folder: `mb.train`.

plan = resolve(recipe)                 the task, the stored model to start from, what is known of the new model
data = read_data(plan, …)              batches, tokenizer and labels (runs/build_data.py, and the task)
run = build(plan, data)                the model with its initial weights; its other sizes follow from the data
run.trainer = build_trainer(run, …)    optimizers, loss and schedule (training/trainer.py)
run.events()                           trains, and leaves a model in the folder (runs/run.py)
"""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.baselines.carried import CarriedLoss, CarriedState
from monoblock.baselines.lstm import Recurrent
from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.data.batches import BatchIndices, BatchLoader, batch_for_rank
from monoblock.errors import ConfigError, InputError
from monoblock.interop.weights import compute_body_digest
from monoblock.kernels.fp8_linear import SIZE_MULTIPLE
from monoblock.model import Transformer
from monoblock.nn.stack import Stack
from monoblock.parallel.strategy import DataParallel, FullySharded, Strategy, TensorParallel
from monoblock.parallel.world import SINGLE_PROCESS, World
from monoblock.recipes.schema import Recipe, TrainSection
from monoblock.runs.build_data import (
    DEFAULT_LSTM_CONTEXT,
    NO_CUSTOM_PARTS,
    Batch,
    CustomParts,
    build_custom_data,
    build_task_data,
    expected_config,
)
from monoblock.runs.initial_weights import WarmStart, copy_weights, load_warm_start, prepare_trainable
from monoblock.runs.progress import TrainingProgress, train_to_end
from monoblock.runs.recipe import (
    build_model_config,
    check_parallel,
    parse_recipe,
    read_recipe,
    read_toml,
    recipe_path,
    task_of_recipe,
)
from monoblock.runs.run import Run
from monoblock.runs.run_folder import (
    CHECKPOINTS_FOLDER,
    check_run_folder,
    lock_run_folder,
    run_identity,
    write_initial_files,
)
from monoblock.tasks.task import Task
from monoblock.tasks.task_data import TaskData
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.checkpoint import list_steps
from monoblock.training.collate import TensorBatch
from monoblock.training.events import DecisionEvent, MetricsWriter, TrainingEvent
from monoblock.training.interrupt import stop_on_interrupt
from monoblock.training.loss import AdversarialLoss, CrossEntropyLoss, FunctionLoss, Loss
from monoblock.training.optimizer import Optimizers, build_optimizers
from monoblock.training.resume_state import seed_generators
from monoblock.training.runtime import RuntimeConfig, check_device, choose_runtime
from monoblock.training.schedule import learning_rate
from monoblock.training.trainer import Trainer, TrainingArguments, UpdateGuard

RecipeLike = str | Path | Mapping[str, object] | Recipe
OWN_DATA = "batches"  # data.corpus of a run that trains on the user's batches
TOKEN_ACCURACY = "token_accuracy"  # the accuracy of a language model per token, teacher-forced


def train(
    recipe: RecipeLike,
    overrides: Mapping[str, object] | Sequence[str] | str = (),
    *,
    out: str | Path | None = None,
    resume: bool = False,
    data: str | Path | None = None,
    task: Task | None = None,
    model_class: type[Transformer] = Transformer,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    batches: Iterable[Batch] | None = None,
    validation_batches: Iterable[Batch] | None = None,
    tokenizer: Tokenizer | None = None,
    callbacks: Sequence[Callable[[TrainingEvent], object]] = (),
    progress: bool = True,
) -> Run:
    """Train a recipe into a run folder, and return the run: `run.model`, `run.metrics`, `run.folder`.

        run = mb.train("gpt-tiny", {"train.steps": 200}, out="runs/x")

    Ctrl-C stops the run after the current step and saves a checkpoint; `run.interrupted` is then True. SIGTERM does the
    same, and then ends the process, unless the program has its own handler. The run folder is locked meanwhile.

    recipe: a name from `monoblock ls recipes`, a TOML file, nested dicts, or a Recipe.
    overrides: {"section.key": value}, or a list of "section.key=value", as on the command line.
    out: the run folder; None is runs/ and the name of the recipe. It must be new or empty, unless `resume`.
    resume: continue from the newest checkpoint in `out`, bit for bit.
    data: folder with corpora.
    task: a task that is not in the package; it sets train.objective.
    model_class: a subclass of Transformer, built from the configuration of the recipe.
    optimizer: a function that builds a torch optimizer for the model. The schedule of the recipe sets its learning
        rate; the key "factor" of a parameter group multiplies it.
    batches: train on these instead of a corpus: pairs (inputs, labels), where `inputs` are keyword arguments of the
        model. They are repeated when they end; a resumed run skips those already used.
    validation_batches: pairs as in `batches`, for the validation loss.
    tokenizer: saved with a model that is trained on `batches`.
    callbacks: functions called with each event of the training (monoblock.training.events).
    progress: show a progress bar in a terminal or notebook, plain lines otherwise.
    """
    if batches is None and (validation_batches is not None or tokenizer is not None):
        raise InputError("validation_batches and tokenizer are used only together with batches; give batches too")
    for callback in callbacks:
        if not callable(callback):
            raise InputError(f"callbacks: {callback!r:.60} is not a function; give functions that take an event")
    parts = CustomParts(task, model_class, optimizer, batches, validation_batches, tokenizer)
    if isinstance(recipe, Recipe):
        tables = recipe.to_tables()
    else:
        tables = copy.deepcopy(dict(recipe)) if isinstance(recipe, Mapping) else read_toml(str(recipe))
    if task is not None:
        tables.setdefault("train", {})["objective"] = task.name
    if batches is not None:
        tables.setdefault("data", {}).setdefault("corpus", OWN_DATA)
    parsed = parse_recipe(tables, [overrides] if isinstance(overrides, str) else overrides, task=task)
    folder = Path("runs") / parsed.name if out is None else Path(out)
    with stop_on_interrupt() as stop, lock_run_folder(folder, create=not resume):
        run = prepare_run(
            parsed, folder, parts=parts, data=None if data is None else Path(data), resume=resume, stop=stop
        )
        display = TrainingProgress(run.recipe.train.steps, run.task_data.unit, hidden=not progress)
        run.interrupted = train_to_end(run, display, resume=resume, callbacks=callbacks).interrupted
    run.model.eval()
    if run.interrupted and stop.signal == signal.SIGTERM:
        signal.raise_signal(signal.SIGTERM)
    return run


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
    with world.main_process_first():  # the others find the files that it wrote
        if world.is_main:
            check_run_folder(folder, resume)
        resume = resume and bool(list_steps(folder / CHECKPOINTS_FOLDER))  # else the run starts again, with its data
        plan = resolve(recipe, parts.task)
        task_data = read_data(plan, parts, data, folder if resume or not world.is_main else None)
        final = replace(plan, recipe=resolve_steps(recipe, task_data))
        check_parallel(final.recipe, world.size, has_own_loss=plan.task.has_own_loss)
        run = build(final, task_data, folder, parts.model_class)
        strategy = build_strategy(final.recipe, world)
        strategy.check_model(run.model)
        runtime = _choose_runtime(final.recipe.train, run.model, world)
        if world.is_main and not resume:
            write_initial_files(folder, final.recipe, plan.task, run.model.config, task_data, plan.start)
    run.trainer = build_trainer(run, runtime, strategy, stop, parts)
    run.trainer.identity = run_identity(recipe, plan.task, run.model.config, task_data, plan.start)
    run.metrics_writer = MetricsWriter(folder, tensorboard=tensorboard, disabled=not world.is_main)
    if resume:
        run.stored_recipe = read_recipe(recipe_path(folder), task=plan.task)
    return run


@dataclass(frozen=True)
class Plan:
    """What a recipe says before its data are read."""

    recipe: Recipe
    task: Task
    start: WarmStart | None  # the stored model that training starts from
    config: ModelConfig | RecurrentConfig | None  # of the model, as far as it does not follow from the data


def resolve(recipe: Recipe, task: Task | None = None) -> Plan:
    """Find the task, the stored model and the configuration of a recipe; nothing is written.

    task: a task of the user, which the recipe selects by its name in train.objective.
    """
    task = task_of_recipe(recipe, task)
    start = load_warm_start(recipe.model["folder"]) if "folder" in recipe.model else None
    return Plan(recipe, task, start, expected_config(recipe, task, start))


def read_data(plan: Plan, parts: CustomParts, data_folder: Path | None, run_folder: Path | None) -> TaskData:
    """Return the batches of a run, with its tokenizer and labels.

    run_folder: the folder of a run whose tokenizer is used again.
    """
    if parts.batches is not None:
        return build_custom_data(parts, plan.start)
    recipe, start, config = plan.recipe, plan.start, plan.config
    context = None
    if config is not None:
        context = config.context if isinstance(config, ModelConfig) else DEFAULT_LSTM_CONTEXT
        if start is not None or isinstance(config, RecurrentConfig):
            context = recipe.model.get("context", context)
    folders = {"data_folder": data_folder, "run_folder": run_folder}
    return build_task_data(recipe, context, task=plan.task, config=config, start=start, **folders)


def resolve_steps(recipe: Recipe, data: TaskData) -> Recipe:
    """Return the recipe with train.epochs, and intervals that are given as fractions, converted to numbers of steps."""
    section, batches = recipe.train, getattr(data.batch_plan, "batches", None)
    steps = section.steps if section.epochs is None or batches is None else max(1, round(section.epochs * batches))
    values = {name: getattr(section, name) for name in ("warmup", "save_every", "eval_every")}
    counts: dict[str, Any] = {
        name: max(1, round(value * steps)) if 0 < value < 1 else int(value) for name, value in values.items()
    }
    return replace(recipe, train=replace(section, steps=steps, **counts))


def build(plan: Plan, data: TaskData, folder: Path, model_class: type[Transformer] = Transformer) -> Run:
    """Build the model of a run with its initial weights, on the CPU; weights that are not trained are frozen."""
    recipe, task, start = plan.recipe, plan.task, plan.start
    vocab = None if data.tokenizer is None else data.tokenizer.vocab_size
    stored = None if start is None else start.config
    config = build_model_config(recipe, vocab, stored, task=task, **data.model_sizes)
    seed_generators(recipe.train.seed)
    model: Transformer | Recurrent = Recurrent(config) if isinstance(config, RecurrentConfig) else model_class(config)
    event, fresh = None, list[str]()
    if start is not None:
        keep_head = isinstance(model, Recurrent) or start.keeps_head(task.head, recipe.model)
        fresh = copy_weights(model, start, keep_head=keep_head)
        count = sum(tensor.numel() for name, tensor in model.state_dict().items() if name not in fresh)
        new = f"fresh: {', '.join(fresh) or 'nothing'}"
        event = DecisionEvent(f"begins with {count:,} weights of {start.folder}", new)
    trainable_event = None
    if recipe.lora.rank or recipe.train.freeze_layers is not None:
        model, trainable_event = prepare_trainable(model, recipe, fresh)
    digest = compute_body_digest(start.model) if start is not None and recipe.lora.rank else None
    return Run(recipe, folder, task, data, model, event, trainable_event, base_digest=digest)


def build_trainer(
    run: Run, runtime: RuntimeConfig, strategy: Strategy, stop: Callable[[], bool], parts: CustomParts
) -> Trainer:
    """Distribute the model of a run among its processes, and build the trainer; every process must call this."""
    section, data, model, world = run.recipe.train, run.task_data, run.model, strategy.world
    if not strategy.is_sharded:  # else its parts are moved when it is split
        model.to(runtime.device)
    world.seed_process(section.seed)
    if section.activation_checkpointing and isinstance(model, Transformer):
        model.recompute(section.activation_checkpointing)
    if strategy.is_sharded and runtime.autocast_dtype == torch.float16:
        raise ConfigError(f"fp16 cannot be used with train.parallel={section.parallel}; write train.precision=bf16")
    loss = build_loss(section, model.config, run.task, world.sum_tensor_over_data if world.size > 1 else None)
    module = strategy.prepare(model, runtime.autocast_dtype)
    if parts.optimizer is not None:
        optimizers = Optimizers([parts.build_optimizer(model)])
        run.custom_optimizer = type(optimizers.optimizers[0]).__name__
    else:
        optimizers = build_optimizers(
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

    def rate(step: int) -> float:
        sizes: dict[str, Any] = {"steps": section.steps, "warmup": section.warmup, "width": model.config.width}
        return learning_rate(section.schedule, step, peak=section.lr, floor=section.min_lr_ratio, **sizes)

    return Trainer(
        model=model,
        optimizers=optimizers,
        learning_rate=rate,
        loss=loss,
        batches=data.batches or batch_iterator(section, data, world),
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
        folder=run.folder / CHECKPOINTS_FOLDER,
        evaluate=None if data.evaluation_batches is None else lambda model: run.validate(section.eval_batches),
        sample=run.sample_text,
        guard=UpdateGuard(spike=section.spike_threshold, patience=section.max_skipped_updates),
        should_stop=stop,
        strategy=strategy,
        module=module,
        save_trainable_only=bool(run.recipe.lora.rank),
    )


def batch_iterator(section: TrainSection, data: TaskData, world: World) -> Callable[[int], Iterator[TensorBatch]]:
    """Return a function that takes the number of a step and yields the batches of this process from that step on."""
    plan, build_batch = data.batch_plan, data.build_batch
    assert plan is not None
    assert build_batch is not None

    def build_share(batch: BatchIndices) -> TensorBatch:
        """Build this process's share of a batch; `samples` has the indices of the whole batch.

        If there are fewer samples than processes, some build the first sample, without targets: all have to compute.
        """
        share, samples = batch_for_rank(batch, world.data_rank, world.data_size), batch.indices.tolist()
        if not len(share.indices):
            first = BatchIndices(batch.epoch, batch.indices[:1])
            return build_batch(first).without_targets()._replace(samples=samples)
        return build_batch(share)._replace(samples=samples)

    return lambda step: iter(BatchLoader(plan, build_share, start=step, stop=section.steps, workers=section.workers))


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


def build_strategy(recipe: Recipe, world: World) -> Strategy:
    """Return the strategy that a recipe names; a process without torchrun needs none."""
    name, section = recipe.train.parallel, recipe.parallel
    if world.mesh is None:
        return Strategy(world)
    if name == "ddp" or (name == "pp" and world.pipeline_size == 1):
        return DataParallel(world)
    if name == "tp":
        return TensorParallel(world, sequence=section.sequence)
    if name == "pp":
        from monoblock.parallel.pipeline_parallel import PipelineParallel  # torch's pipelines take a second to import

        return PipelineParallel(world, schedule=section.schedule, micro_batches=section.microbatches)
    sharding = {"reshard_after_forward": section.reshard_after_forward, "offload": section.offload}
    return FullySharded(world, **sharding, sequence=section.sequence)


def _choose_runtime(section: TrainSection, model: Transformer | Recurrent, world: World) -> RuntimeConfig:
    """Choose device, precision and compilation; raise ConfigError if this machine or model cannot have them.

    With products in 8 bits, the model gets the layers for them.
    """
    check_device(section.device)
    reason = "adversarial training computes a gradient inside the loss" if section.adversarial else None
    if world.pipeline_size > 1:
        reason = "pipeline stages are not compiled"
    runtime = choose_runtime(
        section.device,
        section.precision,
        section.compile,
        deterministic=section.deterministic,
        steps=section.steps,
        no_compile_reason=reason,
    )
    stacks = [part for part in model.modules() if isinstance(part, Stack) and runtime.fp8]
    changed = [stack.use_fp8_products() for stack in stacks]
    if runtime.fp8 and not any(changed):
        raise ConfigError(
            f"train.precision=fp8 changes no layer of this model: it needs a Transformer with sizes that are multiples "
            f"of {SIZE_MULTIPLE}; write train.precision=bf16"
        )
    return runtime
