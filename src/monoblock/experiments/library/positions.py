"""Position schemes, tested beyond the training length.

Each arm is a language model trained on blocks of the same length. It is then evaluated on blocks 1 to 16 times as long,
without overlap, and on windows that move by half a training block, so that almost every token has a long context.
Learned positions end at the training length. YaRN (Peng et al. 2023) scales the rotary frequencies of the trained model
to the tested length, without further training. The arm "frequencies" is no model: its perplexity is that of the
frequencies of words in the training text, which a model that cannot read beyond its training length may fall back to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from monoblock.config.knobs import vary
from monoblock.config.model import ModelConfig
from monoblock.config.parts import Scaling
from monoblock.experiments.budgets import LANGUAGE_MODEL, ON_WORDS
from monoblock.experiments.experiment import Arm, Metrics, Trial
from monoblock.experiments.rules import read_rules
from monoblock.experiments.training import train_and_load, trial_recipe
from monoblock.metrics.text import perplexity
from monoblock.model import Transformer
from monoblock.recipes.schema import Recipe
from monoblock.runs.build_data import build_task_data
from monoblock.runs.evaluate import evaluate_request
from monoblock.runs.pipeline import Pipeline
from monoblock.tasks.evaluation_report import EvaluationRequest, read_corpus
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.task_data import tokenize_corpus, unigram_loss

MULTIPLES = (1, 2, 4, 6, 8, 16)  # of the training length
BATCH_TOKENS = {"cuda": 32_768, "cpu": 4_096}  # in a batch of the evaluation
SCALED = "model.embedding_scale=sqrt_width"
LONG = "train.steps=12000"  # of arms that show whether longer training changes the result


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Train a language model and evaluate it at every length, in blocks and in sliding windows."""
    if trial.arm.values.get("frequencies"):
        yield _measure_frequencies(trial)
        return
    recipe = trial_recipe(trial, ("train.steps=3",) if trial.smoke else ())
    pipe, metrics = yield from train_and_load(trial, recipe)
    blocks, sliding = {}, {}
    for multiple in MULTIPLES if trial.arm.name != "learned" else MULTIPLES[:1]:
        loaded = _scale_rotary(pipe, multiple) if trial.arm.values.get("yarn") else pipe
        blocks[str(multiple)] = _perplexity(loaded, recipe, trial, multiple, sliding=False)
        sliding[str(multiple)] = _perplexity(loaded, recipe, trial, multiple, sliding=True)
    yield {**metrics, "perplexity": blocks, "perplexity_sliding": sliding, "perplexity_1": blocks["1"]}


def _measure_frequencies(trial: Trial) -> Metrics:
    """Return the perplexity of the test split if every word has its frequency in the training split."""
    recipe = trial_recipe(trial)
    data = build_task_data(recipe, int(recipe.model["context"]), data_folder=trial.data)
    assert data.tokenizer is not None
    request = EvaluationRequest(data=recipe.data.corpus, folder=trial.data)
    train, test = (tokenize_corpus(read_corpus(request, "text", split), data.tokenizer) for split in ("train", None))
    found = perplexity(unigram_loss(train, test))
    curve = {str(multiple): found for multiple in MULTIPLES}
    return {"perplexity": curve, "perplexity_sliding": curve, "perplexity_1": found}


def _scale_rotary(pipe: Pipeline, multiple: int) -> LoadedModel:
    """Return the model with YaRN scaling for sequences that are `multiple` times longer than in training."""
    model, config = pipe.model, pipe.model.config
    assert isinstance(model, Transformer)
    assert isinstance(config, ModelConfig)
    if multiple == 1:
        return pipe
    scaling = Scaling(kind="yarn", factor=float(multiple), original_context=config.context)
    scaled = Transformer(vary(config, scaling=scaling)).to(model.device)
    scaled.load_state_dict(model.state_dict())
    return replace(pipe, model=scaled.eval())


def _perplexity(loaded: LoadedModel, recipe: Recipe, trial: Trial, multiple: int, *, sliding: bool) -> float:
    context = int(recipe.model["context"])
    length = multiple * context
    windows = max(1, BATCH_TOKENS[loaded.model.device.type] // length)
    request = EvaluationRequest(
        data=recipe.data.corpus,
        folder=trial.data,
        context=length,
        stride=max(1, context // 2) if sliding else None,
        batch=8 * windows,  # of which language models take an eighth
    )
    return float(evaluate_request(loaded, request).metrics["perplexity"])


def _arm(name: str, about: str, positions: str | None = None, *changes: str, **values: bool) -> Arm:
    return Arm(name, about, (f"model.positions={positions or name}", *changes), values=values)


EXPERIMENT = replace(
    ON_WORDS,
    name="positions",
    claim="sinusoids extrapolate to longer sequences in principle, but in practice ALiBi does, and rotary positions do "
    "so only with scaling",
    source="A, positional encoding; B §03 and §11; E §8.4",
    arms=(
        _arm("none", "no positions: only the causal mask tells the order"),
        _arm("sinusoidal", "sinusoids added to the embedding", "sinusoid", SCALED),
        _arm("learned", "a learned vector for each position; it ends at the training length"),
        _arm("rotary", "rotary positions, unchanged at longer lengths"),
        _arm("rotary-yarn", "rotary positions, scaled by YaRN to the tested length", "rotary", yarn=True),
        _arm("alibi", "a penalty on the score that is linear in the distance"),
        _arm("buckets", "a learned bias for each bucket of distances, as in T5"),
        Arm("frequencies", "no model: the frequencies of words in training", values={"frequencies": True}),
        _arm("sinusoidal-long", "sinusoids, three times as many steps", "sinusoid", SCALED, LONG),
        _arm("alibi-long", "ALiBi, three times as many steps", "alibi", LONG),
    ),
    default_arms=("none", "sinusoidal", "learned", "rotary", "rotary-yarn", "alibi", "buckets", "frequencies"),
    measure=measure,
    changes=(*LANGUAGE_MODEL, "train.steps=4000", "train.eval_every=1000"),
    budget="4,000 steps of 32 blocks of 256 words for every arm, 12,000 for those whose name ends in -long",
    columns=("perplexity_1", "validation_loss", "training_loss", "parameters", "seconds_training"),
    curves=dict.fromkeys(("perplexity", "perplexity_sliding"), "multiple of the training length"),
    logarithmic=True,
    rules=read_rules("""
        ALiBi loses at most 1 % of perplexity at six times the training length
            perplexity of alibi at 6 / perplexity of alibi at 1 <= 1.01
        sinusoids are more than five times worse at six times the training length
            perplexity of sinusoidal at 6 / perplexity of sinusoidal at 1 >= 5
        sinusoids are more than five times worse in sliding windows of six times the training length
            perplexity_sliding of sinusoidal at 6 / perplexity_sliding of sinusoidal at 1 >= 5 [later: the rule]
        rotary positions without scaling lose more than 10 % at six times the training length
            perplexity of rotary at 6 / perplexity of rotary at 1 >= 1.1
        YaRN has at most 0.9 of the perplexity of rotary without scaling at six times the length
            perplexity of rotary-yarn at 6 / perplexity of rotary at 6 <= 0.9
        at the training length, rotary positions are at least 1 % better than sinusoids
            perplexity of rotary at 1 / perplexity of sinusoidal at 1 <= 0.99
        sinusoids lose at most 10 % of perplexity at six times the training length
            perplexity of sinusoidal at 6 / perplexity of sinusoidal at 1 <= 1.1 [later: the rule]
        at six times the training length, rotary positions are at least 10 % better than sinusoids
            perplexity of rotary at 6 / perplexity of sinusoidal at 6 <= 0.9 [later: the rule]
        after three times as many steps, sinusoids are more than five times worse at six times the training length
            perplexity of sinusoidal-long at 6 / perplexity of sinusoidal-long at 1 >= 5 [later: this arm]
        after three times as many steps, ALiBi loses at most 1 % of perplexity at six times the training length
            perplexity of alibi-long at 6 / perplexity of alibi-long at 1 <= 1.01 [later: this arm]
        after three times as many steps, sinusoids are more than five times worse in sliding windows of six times the \
training length
            perplexity_sliding of sinusoidal-long at 6 / perplexity_sliding of sinusoidal-long at 1 >= 5 \
[later: the rule]
        after three times as many steps, sinusoids are more than five times worse in sliding windows of sixteen times \
the training length
            perplexity_sliding of sinusoidal-long at 16 / perplexity_sliding of sinusoidal-long at 1 >= 5 \
[later: the rule]
    """),
    reading="A curve that stays level or falls extrapolates. In longer blocks the average token has more context, so "
    "even a model that ignores distant tokens gains a little without overlap, and the first tokens of a block are "
    "never beyond the training length; the sliding windows show the rest.",
)
