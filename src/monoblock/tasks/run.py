"""A recipe becomes a run: tokenizer, data, model, objective and callbacks, in a folder that is a model when it ends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.config import ModelConfig, RecurrentConfig
from monoblock.data.batches import Batch, split
from monoblock.data.loader import Loader
from monoblock.interop.digest import digest_of_body
from monoblock.interop.folder import CONFIG, save_model
from monoblock.model import Transformer
from monoblock.recurrent import Recurrent
from monoblock.schema import to_dict
from monoblock.tasks import defaults as generation, starting, tuning
from monoblock.tasks.card import card
from monoblock.tasks.evaluation import HELD_OUT
from monoblock.tasks.folder import CHECKPOINTS, begin, check_folder, described, write
from monoblock.tasks.ground import Ground, evaluate
from monoblock.tasks.lay import lay
from monoblock.tasks.pipeline import Pipeline
from monoblock.tasks.recipe import TRAINS, Recipe, check_family, is_vision, model_config
from monoblock.tasks.starting import Start
from monoblock.training import averaging, checkpoint, optimizer
from monoblock.training.adversarial import Adversarial
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
    begun: Chosen | None = None  # where the first weights came from
    tuned: Chosen | None = None  # which of them are trained
    tokens: Mapping[str, Any] = field(default_factory=dict)  # special ones the model began with
    figures: dict[str, float] = field(default_factory=dict)  # of the finished model
    base: str | None = None  # the digest of what adapters are beside

    def events(self, *, resume: bool = False) -> Iterator[Event]:
        """Train, keep the metrics, and leave the finished model in the folder."""
        world = self.trainer.world
        yield Chosen(self.ground.said, self.recipe.data.corpus)
        yield from (event for event in (self.begun, self.tuned) if event is not None)
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
        trainer, part = self.trainer, self.recipe.train
        best = trainer.best["step"]
        if part.average:
            last = checkpoint.steps(trainer.folder)[-part.average :]
            mean = averaging.mean_of([trainer.folder / f"step-{step}" for step in last])
            self.model.load_state_dict(mean, strict=not trainer.partial)
        elif part.best and best in checkpoint.steps(trainer.folder):
            found = checkpoint.load(trainer.folder / f"step-{best}").tensors
            self._take(found["model"] if trainer.average is None else found["average"])
        elif trainer.average is not None:
            self._take(trainer.average.tensors)
        self.model = model = tuning.finished(self.model, self.folder, self.recipe, self.base).eval()
        save_model(model, self.folder)
        write(self.folder / CONFIG, described(model.config, self.ground.tokenizer))
        self.figures = self.measure() if self.ground.evaluation is not None else {}
        self.figures |= self.translations()
        write(self.folder / "README.md", card(self.recipe, model.config, self.figures, self.ground))

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        names = set(self.model.state_dict())
        self.model.load_state_dict({name: tensor for name, tensor in tensors.items() if name in names}, strict=False)

    def measure(self) -> dict[str, float]:
        """The validation figures of the model as it is now."""
        choice = self.trainer.choice
        with choice.computing():
            return evaluate(self.model, self.ground, self.trainer.loss.plain(), choice.device)

    def translations(self) -> dict[str, float]:
        """Scores of some validation rows, translated or answered as the folder's defaults say."""
        tokenizer, count = self.ground.tokenizer, self.recipe.generate.measure
        scored = HELD_OUT.get(self.recipe.train.objective)
        if scored is None or tokenizer is None or not (count and self.ground.held):
            return {}
        defaults = generation.read(self.folder, tokenizer)
        pipe = Pipeline(self.model, tokenizer, defaults, self.recipe.data, labels=self.ground.labels)
        return scored(pipe, self.ground.held, count)

    def sample(self, model: nn.Module) -> str:
        """A text from the model as the recipe says."""
        tokenizer, part = self.ground.tokenizer, self.recipe.generate
        if not isinstance(model, Transformer) or model.config.family != "decoder-only" or tokenizer is None:
            return ""
        model = tuning.plain(model)
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
            begin(folder, run.recipe, run.model.config, run.ground.tokenizer, run.ground.labels, run.tokens)
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
    start = starting.find(recipe.model)
    context = _context(recipe, start)
    ground = lay(recipe, context, data=data, folder=folder if resume or not world.leads else None, start=start)
    asked, recipe = recipe, tuning.resolved(recipe, ground)
    part = recipe.train
    plain = "adversarial training needs a gradient on the way" if part.adversarial else None
    exact, steps = part.deterministic, part.steps
    choice = choose(part.device, part.precision, part.compile, deterministic=exact, steps=steps, plain=plain)
    vocab = None if ground.tokenizer is None else ground.tokenizer.vocab_size
    config = model_config(recipe, vocab, None if start is None else start.config, **ground.sizes)
    torch.manual_seed(part.seed)
    model = build(config)
    begun, fresh = (None, []) if start is None else _begin_from(start, model, recipe)
    model, which = tuning.tuned(model, recipe, fresh)
    model.to(choice.device)
    world.seed(part.seed)
    if part.checkpointing and isinstance(model, Transformer):
        model.recompute()
    trainer = _trainer(recipe, folder, ground, model, config, choice, stop, world)
    trainer.identity = _identity(asked, config, ground, start)
    metrics = Metrics(folder, tensorboard=tensorboard, mute=not world.leads)
    run = Run(recipe, folder, ground, model, trainer, metrics, begun, which, {} if start is None else start.tokens)
    run.base = digest_of_body(start.model) if start is not None and recipe.lora.rank else None
    trainer.sample = run.sample
    return run


def _begin_from(start: Start, model: Transformer | Recurrent, recipe: Recipe) -> tuple[Chosen, list[str]]:
    """Lay the stored weights in, and say what is fresh."""
    kept = isinstance(model, Recurrent) or start.keeps_head(TRAINS[recipe.train.objective][1], recipe.model)
    fresh = starting.lay_in(model, start, head=kept)
    loaded = sum(tensor.numel() for name, tensor in model.state_dict().items() if name not in fresh)
    return Chosen(f"begins with {loaded:,} weights of {start.folder}", f"fresh: {', '.join(fresh) or 'nothing'}"), fresh


def build(config: ModelConfig | RecurrentConfig) -> Transformer | Recurrent:
    return Recurrent(config) if isinstance(config, RecurrentConfig) else Transformer(config)


def _context(recipe: Recipe, start: Start | None) -> int | None:
    """The length the recipe's model is made for, before the vocabulary is known; data.longest may be less."""
    if start is not None:
        config = start.config
        check_family(recipe.train.objective, config)
    elif recipe.model.get("family") == "lstm" or is_vision(recipe):
        return None if is_vision(recipe) else int(recipe.model.get("context", 64))
    else:
        sizes: dict[str, Any] = {"classes": 2} if recipe.train.objective in ("classify", "label") else {}
        config = model_config(recipe, 3, **sizes)
    context = config.context if isinstance(config, ModelConfig) else recipe.model.get("context", 64)
    if start is not None:
        context = recipe.model.get("context", context)
    longest = recipe.data.longest if recipe.train.objective != "pairs" else None  # pairs are left out, not cut
    return min((length for length in (context, longest) if length is not None), default=None)


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
    plain = Loss(part.label_smoothing, part.balance if experts else 0.0, experts.top_k if experts else 1, ground.places)
    loss = Adversarial(plain, part.adversarial) if part.adversarial else plain

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
            layer_decay=part.layer_decay,
        ),
        rate=rate,
        loss=loss,
        batches=batches,
        plan=Plan(
            steps=part.steps,
            accumulate=part.accumulate,
            clip=part.clip,
            save_every=int(part.save_every),
            eval_every=int(part.eval_every),
            sample_every=part.sample_every,
            keep=max(part.keep, part.average),
            ema=part.ema,
        ),
        choice=choice,
        folder=folder / CHECKPOINTS,
        evaluate=measured if ground.evaluation is not None else None,
        guard=Guard(spike=part.spike, patience=part.patience),
        stop=stop,
        world=world,
        partial=bool(recipe.lora.rank),
    )


FREE = ("steps", "epochs", "save_every", "eval_every", "sample_every", "keep", "workers", "device", "compile")


def _identity(
    recipe: Recipe, config: ModelConfig | RecurrentConfig, ground: Ground, start: Start | None
) -> dict[str, Any]:
    """What a resumed run must have in common with the one that was started."""
    free = (*FREE, "eval_batches", "best")
    training = {key: value for key, value in to_dict(recipe.train).items() if key not in free}
    parts = {"model": to_dict(config), "training recipe": training, "corpus": to_dict(recipe.data)}
    parts |= {"adapter": to_dict(recipe.lora)} if recipe.lora.rank else {}
    begun = {} if start is None else {"set of weights in model.folder": start.digest}
    digests = {key: _digest(value) for key, value in parts.items()}
    content = {f"content of data.corpus, split {split}": digest for split, digest in ground.content.items()}
    return (
        digests
        | content
        | begun
        | {"tokenizer": ground.tokenizer.fingerprint if ground.tokenizer is not None else None}
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
