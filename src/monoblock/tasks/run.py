"""A recipe becomes a run: tokenizer, data, model, objective and callbacks, in a folder that is a model when it ends."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from monoblock.config import ModelConfig, RecurrentConfig
from monoblock.data.loader import Loader
from monoblock.decoding.sample import continued
from monoblock.errors import ConfigError, FileError
from monoblock.interop.folder import save_model
from monoblock.model import Transformer
from monoblock.recurrent import Recurrent
from monoblock.schema import to_dict
from monoblock.tasks.card import card
from monoblock.tasks.ground import Ground, evaluate
from monoblock.tasks.lay import lay
from monoblock.tasks.recipe import Recipe, model_config
from monoblock.training import averaging, checkpoint, optimizer
from monoblock.training.events import Chosen, Event, Finished, Warned
from monoblock.training.guard import Guard
from monoblock.training.loop import Plan, Trainer
from monoblock.training.metrics import Metrics
from monoblock.training.objectives import Loss, Prepared
from monoblock.training.precision import choose
from monoblock.training.schedule import learning_rate

RECIPE, CHECKPOINTS, GENERATION, LABELS = "recipe.toml", "checkpoints", "generation_config.json", "labels.json"


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
        yield Chosen(self.ground.said, self.recipe.data.corpus)
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
                if isinstance(event, Finished) and not event.interrupted:
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
        self.figures = self.measure() if self.ground.evaluation is not None else {}
        _write(self.folder / "README.md", card(self.recipe, model.config, self.figures, self.ground))

    def measure(self) -> dict[str, float]:
        """The validation figures of the model as it is now."""
        choice = self.trainer.choice
        with choice.computing():
            return evaluate(self.model, self.ground, self.trainer.loss.plain(), choice.device)

    def sample(self, model: nn.Module) -> str:
        """A text from the model as the recipe says."""
        tokenizer, part = self.ground.tokenizer, self.recipe.generate
        if not isinstance(model, Transformer) or model.config.family != "decoder-only" or tokenizer is None:
            return ""
        prompt = tokenizer.encode(part.prompt) or [tokenizer.eos_id or 0]
        ids = torch.tensor([prompt], device=self.trainer.choice.device)
        model.eval()
        settings: dict[str, Any] = {"temperature": part.temperature, "top_k": part.top_k, "top_p": part.top_p}
        tokens = continued(model, ids, max_new_tokens=part.max_new_tokens, seed=self.recipe.train.seed, **settings)
        text = tokenizer.decode([*tokenizer.encode(part.prompt), *(int(token) for token in tokens)])
        model.train()
        return text


def prepare(
    recipe: Recipe,
    folder: Path,
    *,
    data: Path | None = None,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
    tensorboard: bool = False,
) -> Run:
    """Lay the ground, build the model, write the folder's first files."""
    _check_folder(folder, resume)
    part = recipe.train
    choice = choose(part.device, part.precision, part.compile, deterministic=part.deterministic, steps=part.steps)
    context = _context(recipe)
    ground = lay(recipe, context, data=data, folder=folder if resume else None)
    vocab = None if ground.tokenizer is None else ground.tokenizer.vocab_size
    config = model_config(recipe, vocab, **ground.sizes)
    torch.manual_seed(part.seed)
    model = build(config).to(choice.device)
    if part.checkpointing and isinstance(model, Transformer):
        model.recompute()
    trainer = _trainer(recipe, folder, ground, model, config, choice, stop)
    run = Run(recipe, folder, ground, model, trainer, Metrics(folder, tensorboard=tensorboard))
    trainer.sample = run.sample
    if not resume:
        _begin(run, config)
    return run


def build(config: ModelConfig | RecurrentConfig) -> Transformer | Recurrent:
    return Recurrent(config) if isinstance(config, RecurrentConfig) else Transformer(config)


def _context(recipe: Recipe) -> int | None:
    """The length the recipe's model is made for, before the vocabulary is known."""
    if recipe.model.get("family") == "lstm":
        return int(recipe.model.get("context", 64))
    if recipe.model.get("family") == "vit":
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
) -> Trainer:
    part = recipe.train
    blocks = [b for s in config.stacks.values() for b in s.layers()] if isinstance(config, ModelConfig) else []
    experts = next((b.feedforward.experts for b in blocks if b.feedforward.experts is not None), None)
    loss = Loss(part.label_smoothing, part.balance if experts else 0.0, experts.top_k if experts else 1)

    def batches(step: int) -> Iterator[Prepared]:
        return iter(Loader(ground.plan, ground.make, start=step, stop=part.steps, workers=part.workers))

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
    )


def _identity(recipe: Recipe, config: ModelConfig | RecurrentConfig, ground: Ground) -> dict[str, Any]:
    """What a resumed run must have in common with the one that was started."""
    free = ("steps", "save_every", "eval_every", "sample_every", "keep", "workers", "device", "compile", "eval_batches")
    training = {key: value for key, value in to_dict(recipe.train).items() if key not in free}
    parts = {"model": to_dict(config), "training recipe": training, "corpus": to_dict(recipe.data)}
    digests = {key: _digest(value) for key, value in parts.items()}
    return digests | {"tokenizer": ground.tokenizer.fingerprint if ground.tokenizer is not None else None}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# -- the folder ---------------------------------------------------------------------------------------------------


def _check_folder(folder: Path, resume: bool) -> None:
    if resume and not (folder / RECIPE).is_file():
        raise FileError(f"there is nothing to resume in {folder}; leave out --resume to start a run there")
    if not resume and folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is there already; go on with --resume, or name another with --out")


def _begin(run: Run, config: ModelConfig | RecurrentConfig) -> None:
    """The files a run starts with, so that even an interrupted one can be understood."""
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise FileError(f"{run.folder} cannot be made: {problem.strerror}") from None
    _write(run.folder / RECIPE, run.recipe.to_toml())
    kind = "recurrent" if isinstance(config, RecurrentConfig) else "model"
    tokenizer = run.ground.tokenizer
    described: dict[str, Any] = {"format": "monoblock", kind: to_dict(config)}
    _write(run.folder / "config.json", json.dumps(described, indent=2) + "\n")
    part = run.recipe.generate
    defaults: dict[str, Any] = {
        "temperature": part.temperature,
        "top_p": part.top_p,
        "top_k": part.top_k,
        "max_new_tokens": part.max_new_tokens,
    }
    if tokenizer is not None:
        tokenizer.save_pretrained(run.folder)
        defaults |= {
            "eos_token_id": tokenizer.eos_id,
            "pad_token_id": tokenizer.pad_id,
            "bos_token_id": tokenizer.bos_id,
        }
    _write(run.folder / GENERATION, json.dumps(defaults, indent=2) + "\n")
    if run.ground.labels:
        _write(run.folder / LABELS, json.dumps(run.ground.labels, indent=2, ensure_ascii=False) + "\n")


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f"{path.name}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as problem:
        raise FileError(f"{path} cannot be written: {problem.strerror}") from None
