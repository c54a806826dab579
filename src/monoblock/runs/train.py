"""Train a recipe into a run folder, which is a model folder when the run ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.interop.atomic_write import write_atomically
from monoblock.interop.digest import compute_body_digest
from monoblock.interop.folder import CONFIG_FILE, save_model
from monoblock.interop.tokenizer_folder import format_config
from monoblock.nn.lstm import Recurrent
from monoblock.nn.transformer import Transformer
from monoblock.recipes.schema import Recipe
from monoblock.runs.build_data import build_task_data, draft_config
from monoblock.runs.build_trainer import build_trainer
from monoblock.runs.generation_config import read_generation_defaults
from monoblock.runs.identity import old_run_identity, run_identity
from monoblock.runs.model_card import CARD_FILE, render_model_card
from monoblock.runs.recipe import build_model_config, task_of_recipe
from monoblock.runs.run_folder import check_run_folder, write_initial_files
from monoblock.runs.trainable import finalize_model, merge_adapters, prepare_trainable, resolve_steps
from monoblock.runs.warm_start import WarmStart, copy_weights, load_warm_start
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.task import Task
from monoblock.tasks.task_data import TaskData, validate
from monoblock.training import checkpoint
from monoblock.training.distributed import SINGLE_PROCESS, World
from monoblock.training.events import DecisionEvent, FinishedEvent, TrainingEvent, WarningEvent
from monoblock.training.metrics_file import MetricsWriter
from monoblock.training.runtime import choose_runtime
from monoblock.training.trainer import Trainer
from monoblock.training.weight_averaging import average_checkpoints

DEFAULT_LSTM_CONTEXT = 64  # length of the training blocks of an LSTM, which has no limit of its own


@dataclass
class Run:
    """A prepared training run; iterate over `events` to train."""

    recipe: Recipe
    folder: Path
    task: Task
    task_data: TaskData
    model: Transformer | Recurrent
    trainer: Trainer
    metrics: MetricsWriter
    warm_start_event: DecisionEvent | None = None  # where the initial weights come from
    trainable_event: DecisionEvent | None = None  # which weights are trained
    special_tokens: Mapping[str, Any] = field(default_factory=dict)  # of the model that training starts from
    final_metrics: dict[str, float] = field(default_factory=dict)  # of the finished model
    base_digest: str | None = None  # of the weights that adapters belong to

    def events(self, *, resume: bool = False) -> Iterator[TrainingEvent]:
        """Train, write the metrics, save the finished model in the run folder, and yield the events of the training."""
        world = self.trainer.world
        yield DecisionEvent(self.task_data.summary, self.recipe.data.corpus)
        yield from (event for event in (self.warm_start_event, self.trainable_event) if event is not None)
        if world.size > 1:
            yield DecisionEvent(f"{world.size} processes", "each reads its part of every batch")
        if resume and not checkpoint.list_steps(self.trainer.folder):
            yield WarningEvent("no checkpoint was reached yet: starting from the first step")
            self.metrics.truncate_after(0)
            resume = False
        truncate = resume
        try:
            for event in self.trainer.run(resume=resume):
                if isinstance(event, DecisionEvent) and truncate:  # the first event after the checkpoint was loaded
                    self.metrics.truncate_after(self.trainer.step)
                    truncate = False
                self.metrics.write(event)
                if isinstance(event, FinishedEvent) and not event.interrupted and world.is_main:
                    self._save_final_model()
                yield event
        finally:
            self.metrics.close()

    def _save_final_model(self) -> None:
        """Save the final weights, the configuration and the model card."""
        self._load_final_weights()
        self.model = model = finalize_model(self.model, self.folder, self.recipe, self.base_digest).eval()
        save_model(model, self.folder)
        write_atomically(self.folder / CONFIG_FILE, format_config(model.config, self.task_data.tokenizer))
        self.final_metrics = self.validate() if self.task_data.evaluation_batches is not None else {}
        self.final_metrics |= self.evaluate_generation()
        card = render_model_card(self.recipe, self.task, model.config, self.final_metrics, self.task_data)
        write_atomically(self.folder / CARD_FILE, card)

    def _load_final_weights(self) -> None:
        """Load the final weights by the recipe: the mean of the last checkpoints, the best one, or a moving average."""
        trainer, section = self.trainer, self.recipe.train
        steps, best = checkpoint.list_steps(trainer.folder), trainer.best["step"]
        if section.average_checkpoints:
            last = [trainer.folder / f"step-{step}" for step in steps[-section.average_checkpoints :]]
            mean = average_checkpoints(last)
            self.model.load_state_dict(mean, strict=not trainer.save_trainable_only)
        elif section.load_best and best in steps:
            tensors = checkpoint.load(trainer.folder / f"step-{best}").tensors
            self._load_tensors(tensors["model"] if trainer.average is None else tensors["average"])
        elif trainer.average is not None:
            self._load_tensors(trainer.average.tensors)

    def _load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        names = set(self.model.state_dict())
        self.model.load_state_dict({name: tensor for name, tensor in tensors.items() if name in names}, strict=False)

    def validate(self) -> dict[str, float]:
        """Return loss and accuracy of the current model on all validation batches."""
        runtime = self.trainer.runtime
        with runtime.autocast():
            return validate(self.model, self.task_data, self.trainer.loss.evaluation_loss(), runtime.device)

    def evaluate_generation(self) -> dict[str, float]:
        """Return the metrics of the task on the first validation rows, decoded with the defaults of the run folder."""
        tokenizer, count = self.task_data.tokenizer, self.recipe.generate.scored_rows
        score = self.task.score_validation
        if score is None or tokenizer is None or not (count and self.task_data.validation_rows):
            return {}
        defaults = read_generation_defaults(self.folder, tokenizer)
        recipe, labels = self.recipe, self.task_data.labels
        section = recipe.task
        loaded = LoadedModel(self.model, tokenizer, defaults, recipe.data, labels=labels, task_section=section)
        return score(loaded, self.task_data.validation_rows, count)

    def sample_text(self, model: nn.Module) -> str:
        """Return a text sampled from a decoder-only model with the settings of the recipe; "" for other models."""
        tokenizer, section = self.task_data.tokenizer, self.recipe.generate
        if not isinstance(model, Transformer) or model.config.family != "decoder-only" or tokenizer is None:
            return ""
        model = merge_adapters(model)
        prompt = tokenizer.encode(section.prompt) or [tokenizer.eos_id or 0]
        ids = torch.tensor([prompt], device=self.trainer.runtime.device)
        settings: dict[str, Any] = {
            "max_new_tokens": section.max_new_tokens,
            "temperature": section.temperature,
            "top_k": section.top_k,
            "top_p": section.top_p,
            "seed": self.recipe.train.seed,
        }
        new = model.generate(ids, **settings)[0, len(prompt) :]
        known = [token for token in new.tolist() if token < tokenizer.vocab_size]  # model.vocab may be larger
        return tokenizer.decode([*tokenizer.encode(section.prompt), *known])


def prepare_run(
    recipe: Recipe,
    folder: Path,
    *,
    task: Task | None = None,
    data: Path | None = None,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
    tensorboard: bool = False,
    world: World = SINGLE_PROCESS,
) -> Run:
    """Build the data, model and trainer of a run, and write the first files of the run folder.

    task: a task that is not in the package.
    data: folder with corpora.
    stop: called after every step; training stops when it returns True.
    world: the processes that train together; the main process builds and writes first.
    """
    with world.main_process_first():
        if world.is_main:
            check_run_folder(folder, resume)
        run = _build_run(recipe, folder, task_of_recipe(recipe, task), data, resume, stop, tensorboard, world)
        if world.is_main and not resume:
            write_initial_files(folder, run.recipe, run.task, run.model.config, run.task_data, run.special_tokens)
    return run


def _build_run(
    recipe: Recipe,
    folder: Path,
    task: Task,
    data: Path | None,
    resume: bool,
    stop: Callable[[], bool],
    tensorboard: bool,
    world: World,
) -> Run:
    start = load_warm_start(recipe.model)
    run_folder = folder if resume or not world.is_main else None  # whose tokenizer is used again
    draft = draft_config(recipe, task, start)
    task_data = build_task_data(
        recipe,
        _model_context(recipe, draft, start),
        task=task,
        config=draft,
        data_folder=data,
        run_folder=run_folder,
        start=start,
    )
    original, recipe = recipe, resolve_steps(recipe, task_data)
    section = recipe.train
    runtime = choose_runtime(
        section.device,
        section.precision,
        section.compile,
        deterministic=section.deterministic,
        steps=section.steps,
        no_compile_reason="adversarial training needs a gradient on the way" if section.adversarial else None,
    )
    vocab = None if task_data.tokenizer is None else task_data.tokenizer.vocab_size
    stored = None if start is None else start.config
    config = build_model_config(recipe, vocab, stored, task=task, **task_data.model_sizes)
    torch.manual_seed(section.seed)
    model = build_model(config)
    warm_start_event, fresh = (None, []) if start is None else _copy_initial_weights(start, model, recipe, task.head)
    model, trainable_event = prepare_trainable(model, recipe, fresh)
    model.to(runtime.device)
    world.seed_process(section.seed)
    if section.activation_checkpointing and isinstance(model, Transformer):
        model.recompute()
    trainer = build_trainer(recipe, folder, task, task_data, model, config, runtime, stop, world)
    trainer.identity = run_identity(original, task, config, task_data, start)
    trainer.old_identity = old_run_identity(original, task, config, task_data, start)
    run = Run(
        recipe,
        folder,
        task,
        task_data,
        model,
        trainer,
        MetricsWriter(folder, tensorboard=tensorboard, disabled=not world.is_main),
        warm_start_event,
        trainable_event,
        {} if start is None else start.special_tokens,
        base_digest=compute_body_digest(start.model) if start is not None and recipe.lora.rank else None,
    )
    trainer.sample = run.sample_text
    return run


def _copy_initial_weights(
    start: WarmStart, model: Transformer | Recurrent, recipe: Recipe, head: str
) -> tuple[DecisionEvent, list[str]]:
    """Copy the stored weights into a model; return an event that reports it, and the names of weights not copied."""
    keep_head = isinstance(model, Recurrent) or start.keeps_head(head, recipe.model)
    fresh = copy_weights(model, start, keep_head=keep_head)
    count = sum(tensor.numel() for name, tensor in model.state_dict().items() if name not in fresh)
    event = DecisionEvent(f"begins with {count:,} weights of {start.folder}", f"fresh: {', '.join(fresh) or 'nothing'}")
    return event, fresh


def build_model(config: ModelConfig | RecurrentConfig) -> Transformer | Recurrent:
    return Recurrent(config) if isinstance(config, RecurrentConfig) else Transformer(config)


def _model_context(recipe: Recipe, config: ModelConfig | RecurrentConfig | None, start: WarmStart | None) -> int | None:
    """Return the context of the model in tokens; None means no limit."""
    if config is None:
        return None
    context = config.context if isinstance(config, ModelConfig) else DEFAULT_LSTM_CONTEXT
    if start is not None or isinstance(config, RecurrentConfig):
        context = recipe.model.get("context", context)
    return context
