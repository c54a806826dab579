"""A recipe becomes a run: tokenizer, data, model, objective and callbacks, in a folder that is a model when it ends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from monoblock.config import ModelConfig, RecurrentConfig
from monoblock.data.batches import Batch, split
from monoblock.data.loader import Loader
from monoblock.interop.folder import CONFIG, save_model
from monoblock.model import Transformer
from monoblock.recurrent import Recurrent
from monoblock.schema import to_dict
from monoblock.tasks import defaults as generation
from monoblock.tasks.card import card
from monoblock.tasks.evaluation import held_out_scores
from monoblock.tasks.folder import CHECKPOINTS, begin, check_folder, described, write
from monoblock.tasks.ground import Ground, evaluate
from monoblock.tasks.lay import lay
from monoblock.tasks.pipeline import Pipeline
from monoblock.tasks.recipe import Recipe, is_vision, model_config
from monoblock.training import averaging, checkpoint, optimizer
from monoblock.training.events import Chosen, Event, Finished, Warned
from monoblock.training.guard import Guard
from monoblock.training.loop import Plan, Trainer
from monoblock.training.metrics import Metrics
from monoblock.training.objectives import Loss, Prepared
from monoblock.training.parallel import ALONE, World
from monoblock.training.precision import choose
from monoblock.training.schedule import learning_rate


@dataclass
class Run:
    """Everything of a run, ready to go; `events` starts it."""

    recipe: Recipe
    folder: Path
    ground: Ground
    model: Transformer | Recurrent
    trainer: Trainer
    metrics: Metrics
    figures: dict[str, float] = field(default_factory=dict)  # of the finished model

    def events(self, *, resume: bool = False) -> Iterator[Event]:
        """Train, keep the metrics, and leave the finished model in the folder."""
        world = self.trainer.world
        yield Chosen(self.ground.said, self.recipe.data.corpus)
        if world.size > 1:
            yield Chosen(f"{world.size} processes", "each reads its part of every batch")
        if resume and not checkpoint.steps(self.trainer.folder):
            yield Warned("no checkpoint was reached yet: starting from the first step")
            self.metrics.rewind(0)
            resume = False
        waiting = resume
        try:
            for event in self.trainer.run(resume=resume):
                if isinstance(event, Chosen) and waiting:  # the first word after a checkpoint was taken up
                    self.metrics.rewind(self.trainer.step)
                    waiting = False
                self.metrics.write(event)
                if isinstance(event, Finished) and not event.interrupted and world.leads:
                    self._finish()
                yield event
        finally:
            self.metrics.close()

    def _finish(self) -> None:
        """The final weights (the average where averaging is on), the model card, the generation defaults."""
        model, trainer, part = self.model, self.trainer, self.recipe.train
        if part.average:
            last = checkpoint.steps(trainer.folder)[-part.average :]
            mean = averaging.mean_of([trainer.folder / f"step-{step}" for step in last])
            model.load_state_dict(mean)
        elif trainer.average is not None:
            names = {name for name, _ in model.named_parameters()}
            kept = {name: tensor for name, tensor in trainer.average.tensors.items() if name in names}
            model.load_state_dict(kept, strict=False)
        model.eval()
        save_model(model, self.folder)
        write(self.folder / CONFIG, described(model.config, self.ground.tokenizer))
        self.figures = self.measure() if self.ground.evaluation is not None else {}
        self.figures |= self.translations()
        write(self.folder / "README.md", card(self.recipe, model.config, self.figures, self.ground))

    def measure(self) -> dict[str, float]:
        """The validation figures of the model as it is now."""
        choice = self.trainer.choice
        with choice.computing():
            return evaluate(self.model, self.ground, self.trainer.loss.plain(), choice.device)

    def translations(self) -> dict[str, float]:
        """Scores of some validation sources, translated as the folder's defaults say."""
        tokenizer, count = self.ground.tokenizer, self.recipe.generate.measure
        if self.recipe.train.objective != "pairs" or tokenizer is None or not (count and self.ground.held):
            return {}
        defaults = generation.read(self.folder, tokenizer)
        return held_out_scores(Pipeline(self.model, tokenizer, defaults, self.recipe.data), self.ground.held, count)

    def sample(self, model: nn.Module) -> str:
        """A text from the model as the recipe says."""
        tokenizer, part = self.ground.tokenizer, self.recipe.generate
        if not isinstance(model, Transformer) or model.config.family != "decoder-only" or tokenizer is None:
            return ""
        prompt = tokenizer.encode(part.prompt) or [tokenizer.eos_id or 0]
        ids = torch.tensor([prompt], device=self.trainer.choice.device)
        settings: dict[str, Any] = {"temperature": part.temperature, "top_k": part.top_k, "top_p": part.top_p}
        seed, count = self.recipe.train.seed, part.max_new_tokens
        new = model.generate(ids, max_new_tokens=count, seed=seed, **settings)[0, len(prompt) :]
        known = [number for number in new.tolist() if number < tokenizer.vocab_size]  # model.vocab may be larger
        return tokenizer.decode([*tokenizer.encode(part.prompt), *known])


def prepare(
    recipe: Recipe,
    folder: Path,
    *,
    data: Path | None = None,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
    tensorboard: bool = False,
    world: World = ALONE,
) -> Run:
    """Lay the ground, build the model, write the folder's first files; among several processes the leader first."""
    with world.leader_first():
        if world.leads:
            check_folder(folder, resume)
        run = _prepared(recipe, folder, data, resume, stop, tensorboard, world)
        if world.leads and not resume:
            begin(folder, recipe, run.model.config, run.ground.tokenizer, run.ground.labels)
    return run


def _prepared(
    recipe: Recipe,
    folder: Path,
    data: Path | None,
    resume: bool,
    stop: Callable[[], bool],
    tensorboard: bool,
    world: World,
) -> Run:
    part = recipe.train
    choice = choose(part.device, part.precision, part.compile, deterministic=part.deterministic, steps=part.steps)
    context = _context(recipe)
    ground = lay(recipe, context, data=data, folder=folder if resume or not world.leads else None)
    vocab = None if ground.tokenizer is None else ground.tokenizer.vocab_size
    config = model_config(recipe, vocab, **ground.sizes)
    torch.manual_seed(part.seed)
    model = build(config).to(choice.device)
    world.seed(part.seed)
    if part.checkpointing and isinstance(model, Transformer):
        model.recompute()
    trainer = _trainer(recipe, folder, ground, model, config, choice, stop, world)
    metrics = Metrics(folder, tensorboard=tensorboard, mute=not world.leads)
    run = Run(recipe, folder, ground, model, trainer, metrics)
    trainer.sample = run.sample
    return run


def build(config: ModelConfig | RecurrentConfig) -> Transformer | Recurrent:
    return Recurrent(config) if isinstance(config, RecurrentConfig) else Transformer(config)


def _context(recipe: Recipe) -> int | None:
    """The length the recipe's model is made for, before the vocabulary is known."""
    if recipe.model.get("family") == "lstm":
        return int(recipe.model.get("context", 64))
    if is_vision(recipe):
        return None
    sizes = {"classes": 2} if recipe.train.objective in ("classify", "label") else {}
    config = model_config(recipe, 3, **sizes)
    return config.context if isinstance(config, ModelConfig) else None


def _trainer(
    recipe: Recipe,
    folder: Path,
    ground: Ground,
    model: Transformer | Recurrent,
    config: ModelConfig | RecurrentConfig,
    choice: Any,
    stop: Callable[[], bool],
    world: World,
) -> Trainer:
    part = recipe.train
    blocks = [b for s in config.stacks.values() for b in s.layers()] if isinstance(config, ModelConfig) else []
    experts = next((b.feedforward.experts for b in blocks if b.feedforward.experts is not None), None)
    loss = Loss(part.label_smoothing, part.balance if experts else 0.0, experts.top_k if experts else 1)

    def make(batch: Batch) -> Prepared:
        """This process's part of a batch, which may be nothing; it names the samples of the whole."""
        mine, samples = split(batch, world.rank, world.size), batch.samples.tolist()
        if not len(mine.samples):
            return Prepared({}, torch.empty(0, dtype=torch.int64), batch.epoch, samples)
        return ground.make(mine)._replace(samples=samples)

    def batches(step: int) -> Iterator[Prepared]:
        return iter(Loader(ground.plan, make, start=step, stop=part.steps, workers=part.workers))

    def rate(step: int) -> float:
        sizes: dict[str, Any] = {"steps": part.steps, "warmup": part.warmup, "floor": part.floor, "width": config.width}
        return learning_rate(part.schedule, step, peak=part.lr, **sizes)

    def measured(current: nn.Module) -> dict[str, float]:
        with choice.computing():
            return evaluate(current, ground, loss.plain(), choice.device, batches=part.eval_batches)

    return Trainer(
        model=model,
        optimizers=optimizer.build(
            model,
            part.optimizer,
            betas=(part.beta1, part.beta2),
            eps=part.eps,
            weight_decay=part.weight_decay,
            table_decay=part.table_decay,
            adam_factor=part.adam_factor,
        ),
        rate=rate,
        loss=loss,
        batches=batches,
        plan=Plan(
            steps=part.steps,
            accumulate=part.accumulate,
            clip=part.clip,
            save_every=part.save_every,
            eval_every=part.eval_every,
            sample_every=part.sample_every,
            keep=max(part.keep, part.average),
            ema=part.ema,
        ),
        choice=choice,
        folder=folder / CHECKPOINTS,
        identity=_identity(recipe, config, ground),
        evaluate=measured if ground.evaluation is not None else None,
        guard=Guard(spike=part.spike, patience=part.patience),
        stop=stop,
        world=world,
    )


def _identity(recipe: Recipe, config: ModelConfig | RecurrentConfig, ground: Ground) -> dict[str, Any]:
    """What a resumed run must have in common with the one that was started."""
    free = ("steps", "save_every", "eval_every", "sample_every", "keep", "workers", "device", "compile", "eval_batches")
    training = {key: value for key, value in to_dict(recipe.train).items() if key not in free}
    parts = {"model": to_dict(config), "training recipe": training, "corpus": to_dict(recipe.data)}
    digests = {key: _digest(value) for key, value in parts.items()}
    content = {f"content of data.corpus, split {split}": digest for split, digest in ground.content.items()}
    return digests | content | {"tokenizer": ground.tokenizer.fingerprint if ground.tokenizer is not None else None}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
