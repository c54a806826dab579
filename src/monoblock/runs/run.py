"""The class `Run`: a training run with its recipe, data, model and trainer, which leaves a model in its folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from monoblock.baselines.lstm import Recurrent
from monoblock.config.model import ModelConfig
from monoblock.config.parts import EmbeddingConfig, Sinusoid
from monoblock.errors import FileError
from monoblock.inference.runners.plain import evaluation_mode
from monoblock.interop.adapters import save_adapter
from monoblock.interop.model_folder import CONFIG_FILE, ModelFolder, format_config
from monoblock.interop.save import save_model
from monoblock.metrics.table import format_measure
from monoblock.model import Transformer
from monoblock.nn.lora import fold_lora
from monoblock.parallel.strategy import has_room
from monoblock.quantization.convert import dequantize, merge_adapters
from monoblock.recipes.schema import Recipe
from monoblock.runs.recipe import recipe_path
from monoblock.runs.run_folder import ADAPTER_FOLDER
from monoblock.tasks.loaded_model import LoadedModel, read_generation_defaults
from monoblock.tasks.task import Task
from monoblock.tasks.task_data import TaskData, validate
from monoblock.training import checkpoint
from monoblock.training.events import (
    DecisionEvent,
    EvaluationEvent,
    FinishedEvent,
    MetricsWriter,
    TrainingEvent,
    WarningEvent,
)
from monoblock.training.trainer import Trainer
from monoblock.training.weight_averaging import average_checkpoints
from monoblock.untrusted_files import write_atomically

CARD_FILE, TABLE_HEADER = "README.md", "| figure | value |\n|---|---|\n"


@dataclass(repr=False)
class Run:
    """A prepared training run; iterate over `events` to train."""

    recipe: Recipe
    folder: Path
    task: Task
    task_data: TaskData
    model: Transformer | Recurrent
    warm_start_event: DecisionEvent | None = None  # where the initial weights come from
    trainable_event: DecisionEvent | None = None  # which weights are trained
    stored_recipe: Recipe | None = None  # the recipe in the folder of a run that is resumed
    metrics: dict[str, float] = field(default_factory=dict)  # of the finished model on the validation split
    interrupted: bool = False  # stopped by Ctrl-C before the last step
    custom_optimizer: str | None = None  # the class of an optimizer given from Python
    base_digest: str | None = None  # the digest of the frozen weights, if adapters are trained
    trainer: Trainer = field(init=False)
    metrics_writer: MetricsWriter = field(init=False)

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name}={value:.4g}" for name, value in self.metrics.items())
        return f"Run({str(self.folder)!r}, objective={self.task.name!r}, steps={self.trainer.step}, {metrics})"

    def events(self, *, resume: bool = False) -> Iterator[TrainingEvent]:
        """Train, write the metrics, save the finished model in the run folder, and yield the events of the training."""
        world = self.trainer.world
        yield DecisionEvent(self.task_data.summary, self.recipe.data.corpus)
        yield from self.task_data.notices
        yield from (event for event in (self.warm_start_event, self.trainable_event) if event is not None)
        yield from map(WarningEvent, self._unusual_choices())
        if world.size > 1:
            strategy = self.trainer.strategy
            yield DecisionEvent(f"{world.size} processes, {self.recipe.train.parallel}", strategy.description)
            yield from map(WarningEvent, strategy.notes)
        if resume and not checkpoint.list_steps(self.trainer.folder):
            yield WarningEvent("the run has no checkpoint yet, so it starts from the first step")
            self.metrics_writer.truncate_after(0)
            resume = False
        truncate = resume
        try:
            for event in self.trainer.run(resume=resume):
                if isinstance(event, DecisionEvent) and truncate:  # the first event after the checkpoint was loaded
                    self.metrics_writer.truncate_after(self.trainer.step)
                    truncate = False
                    yield from self._update_recipe()
                self.metrics_writer.write(event)
                if isinstance(event, FinishedEvent) and not event.interrupted:
                    yield from self._finish()
                yield event
        finally:
            self.metrics_writer.close()

    def _update_recipe(self) -> Iterator[WarningEvent]:
        """Store the recipe of a resumed run, of which some keys may have changed; warn if the number of steps has."""
        stored, recipe = self.stored_recipe, self.recipe
        if stored is None or stored.to_tables() == recipe.to_tables():
            return
        if self.trainer.world.is_main:
            write_atomically(recipe_path(self.folder), recipe.to_toml())
        before, steps = stored.train.steps, recipe.train.steps
        if before != steps:
            yield WarningEvent(f"train.steps was {before} and is {steps}; the learning rate follows the new number")

    def _unusual_choices(self) -> Iterator[str]:
        """Yield a sentence for each choice of the recipe that usually trains badly."""
        section, config = self.recipe.train, self.model.config
        if section.warmup > section.steps:
            yield (
                f"train.warmup={section.warmup:g} is longer than the run of {section.steps} steps, so the learning "
                f"rate is still rising at the end; write train.warmup=0.1 for a tenth of the steps"
            )
        inputs = config.inputs.values() if isinstance(config, ModelConfig) and self.warm_start_event is None else ()
        for part in inputs:
            if isinstance(part, EmbeddingConfig) and isinstance(part.positions, Sinusoid) and part.scale == 1.0:
                yield (
                    "the sinusoidal positions are much larger than the embeddings of a new model, so it learns slowly; "
                    "scale the embeddings as in the paper, with model.embedding_scale=sqrt_width"
                )

    def _finish(self) -> Iterator[WarningEvent]:
        """Save the final model in the main process, and compute its metrics; every process must call this.

        The processes validate together. What only the main process does is not limited by parallel.timeout.
        """
        strategy, world, folder = self.trainer.strategy, self.trainer.world, self.folder
        self._load_final_weights()
        model: Any = self.model
        if self.recipe.lora.rank:  # the adapters are saved, and merged into the weights
            if world.is_main:
                base, labels = str(self.recipe.model.get("folder", "")) or None, self.task_data.labels or ()
                save_adapter(model, folder / ADAPTER_FOLDER, base=base, digest=self.base_digest, labels=labels)
            model = dequantize(fold_lora(model))
        else:
            model.requires_grad_(True)
        self.model = model.eval()
        whole = cast(Transformer | Recurrent | None, strategy.whole_model(self.model))
        with world.long_work():
            if whole is not None:
                published = ModelFolder(folder).published_fields
                save_model(whole, folder)
                tokenizer = self.task_data.tokenizer
                fingerprint = None if tokenizer is None else tokenizer.fingerprint
                config = format_config(whole.config, fingerprint, published)
                write_atomically(folder / CONFIG_FILE, config)
        self.model.loaded_from = folder.resolve()
        self.metrics = self.validate() if self.task_data.evaluation_batches is not None else {}
        can_generate = not self._scores_generation() or has_room(strategy, self.trainer.runtime.device)
        if not can_generate and world.is_main:
            yield WarningEvent(
                "the metrics of generated texts are left out: the whole model does not fit on the device of the main "
                "process"
            )
        with world.long_work():
            if whole is not None:
                self.metrics |= self.evaluate_generation(whole) if can_generate else {}
                write_atomically(folder / CARD_FILE, self._render_card(whole))
        if self.metrics:
            self.metrics_writer.write(EvaluationEvent(self.trainer.step, self.metrics, is_best=False, is_final=True))

    @torch.no_grad()
    def _load_final_weights(self) -> None:
        """Load the final weights that the recipe asks for; each process loads its part of them.

        They are the mean of the last checkpoints, the best checkpoint, the moving average, or the current weights.
        """
        trainer, section, average = self.trainer, self.recipe.train, self.trainer.average
        count, best = section.average_checkpoints, trainer.best["step"]
        tensors: Mapping[str, Tensor] = {} if average is None else average.tensors
        if count or section.load_best:
            steps = trainer.world.broadcast_list(checkpoint.list_steps(trainer.folder) if trainer.world.is_main else [])
            if count:
                last = [trainer.folder / f"step-{step}" for step in steps[-count:]]
                tensors = average_checkpoints(last, lambda path: self._read_checkpoint(path, "model"))
            elif best in steps:
                group = "model" if average is None else "average"
                tensors = self._read_checkpoint(trainer.folder / f"step-{best}", group)
        own = self.model.state_dict()
        for name, tensor in tensors.items():
            if name in own:
                own[name].copy_(tensor)

    def _read_checkpoint(self, path: Path, group: str) -> Mapping[str, Tensor]:
        """Return the tensors of a checkpoint, of which each process reads its part if the model is split."""
        index, own = checkpoint.read_index(path), self.model.state_dict()
        own = {name: tensor for name, tensor in own.items() if f"{group}/{name}" in index}
        expected = {f"{group}/{name}": (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()}
        checkpoint.check_tensors(path, index, expected, lambda name: True)
        if not self.trainer.strategy.is_sharded:
            return checkpoint.load(path).tensors[group]
        tensors = {name: torch.empty_like(tensor) for name, tensor in own.items()}
        checkpoint.load_into(path, index, {group: tensors})
        return tensors

    def validate(self, max_batches: int = 0) -> dict[str, float]:
        """Return loss and accuracy of the current model on the validation data; every process must call this.

        max_batches: use at most this many batches; 0 means all.
        """
        runtime, strategy, loss = self.trainer.runtime, self.trainer.strategy, self.trainer.loss.evaluation_loss()
        divided: dict[str, Any] = {"world": strategy.world, "evaluate_batch": strategy.evaluate_batch}
        with runtime.autocast():
            metrics = validate(self.model, self.task_data, loss, runtime.device, max_batches=max_batches, **divided)
        strategy.free_gathered_weights(self.model)
        return metrics

    def _scores_generation(self) -> bool:
        """Return whether the task has metrics of generated texts."""
        has_rows = bool(self.recipe.generate.scored_rows and self.task_data.validation_rows)
        return has_rows and self.task.scores_validation and self.task_data.tokenizer is not None

    def evaluate_generation(self, model: Transformer | Recurrent | None = None) -> dict[str, float]:
        """Return the metrics of the task on the first validation rows, decoded with the defaults of the run folder.

        Return {} if the task has no such metrics, or if generate.scored_rows is 0.

        model: the whole model; None is that of the run.
        """
        if not self._scores_generation():
            return {}
        recipe, tokenizer = self.recipe, self.task_data.tokenizer
        assert tokenizer is not None
        model = (self.model if model is None else model).to(self.trainer.runtime.device)
        loaded = LoadedModel(
            model,
            tokenizer,
            read_generation_defaults(ModelFolder(self.folder), tokenizer),
            data_section=recipe.data,
            task_section=recipe.task,
            labels=self.task_data.labels,
            optimize=True,
        )
        with evaluation_mode(model):
            return self.task.score_validation(loaded, self.task_data.validation_rows, recipe.generate.scored_rows)

    def sample_text(self, model: Any) -> str:
        """Return a text sampled from a decoder-only model with the settings of the recipe; "" for other models."""
        tokenizer, section = self.task_data.tokenizer, self.recipe.generate
        is_decoder = isinstance(model, Transformer | Recurrent) and model.config.family == "decoder-only"
        if not is_decoder or tokenizer is None:
            return ""
        model = merge_adapters(model) if self.recipe.lora.rank else model
        prompt = tokenizer.encode(section.prompt) or [tokenizer.eos_id or 0]
        ids = torch.tensor([prompt], device=model.device)
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

    def _render_card(self, model: Transformer | Recurrent) -> str:
        """Write the model card: the model, its data, how it was trained, and what was measured."""
        recipe, section, tokenizer = self.recipe, self.recipe.train, self.task_data.tokenizer
        family = model.config.family if isinstance(model.config, ModelConfig) else "recurrent"
        if section.batch_tokens is None:
            batch_size = f"{section.batch * section.accumulate} sequences"
        else:
            batch_size = f"at most {section.batch_tokens:,} tokens"
        lines = [
            f"- model: {family}, {sum(weight.numel() for weight in model.parameters()):,} parameters",
            *([] if tokenizer is None else [f"- tokenizer: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens"]),
            f"- trained on: {recipe.data.corpus} ({self.task_data.summary})",
            f"- objective: {section.objective}, {section.steps:,} updates of {batch_size}, "
            f"{self.custom_optimizer or section.optimizer}, lr {section.lr:g}, {section.schedule}, seed {section.seed}",
        ]
        if self.task.decoding == "beam_search":
            generate = recipe.generate
            form = "" if generate.length_penalty_form == "length" else f" ({generate.length_penalty_form})"
            beam = f"beam {generate.num_beams}, length penalty {generate.length_penalty:g}{form}"
            limit = f"at most {generate.new_tokens_within(model.config.context)} tokens (generation_config.json)"
            lines.append(f"- targets: {beam if generate.num_beams > 1 else 'greedy'}, {limit}")
        rows = _format_rows(self.metrics)
        figures = f"\n## Measured on the validation split\n\n{TABLE_HEADER}{rows}" if rows else ""
        return f"# {recipe.name}\n\n{recipe.about}\n\n" + "".join(f"{line}\n" for line in lines) + figures


def _format_rows(metrics: dict[str, Any]) -> str:
    """Write the metrics that are numbers or texts as the rows of a table."""
    rows = ""
    for name, value in metrics.items():
        text = format_measure(name, value, ".6g") if isinstance(value, int | float) else value
        rows += f"| {name} | {text} |\n" if isinstance(text, str) else ""
    return rows


def add_metrics(folder: Path, corpus: str, metrics: dict[str, Any]) -> None:
    """Add metrics on a corpus to the model card of a run folder, replacing those of the same corpus and split."""
    path = folder / CARD_FILE
    if not path.is_file():
        raise FileError(
            f"{folder} has no model card ({CARD_FILE}) to add metrics to; give --card only for a run folder"
        )
    heading = f"\n## Measured on {corpus}, split {metrics.get('split', 'all')}\n"
    before, _, rest = path.read_text(encoding="utf-8").partition(heading)
    _, next_heading, after = rest.partition("\n## ")
    write_atomically(path, f"{before}{heading}\n{TABLE_HEADER}{_format_rows(metrics)}{next_heading}{after}")
