"""Greedy decoding alone, with a trained draft, and with lookup.

A large and a small language model are trained on the same text with the same tokenizer. The large one then continues
prompts from the test split greedily: alone, with the small one as the draft that proposes tokens, and with proposals
looked up in the text itself. Measured are whether the text is the same, and how much faster it comes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from monoblock.data.corpora.load import load_corpus
from monoblock.errors import SplitError
from monoblock.experiments.budgets import LANGUAGE_MODEL, ON_WORDS, TEXT_SMOKE
from monoblock.experiments.experiment import Arm, Metrics, Options, Trial
from monoblock.experiments.jobs import Job
from monoblock.experiments.rules import read_rules
from monoblock.experiments.training import load_run, train_run, training_metrics, trial_recipe
from monoblock.inference.optimized import OptimizedModel, optimize
from monoblock.runs.pipeline import Pipeline
from monoblock.tasks.task_data import tokenize_corpus

SIZES = {
    "large": ("model.depth=12", "model.width=768", "model.heads=12", "model.hidden=3072", "train.lr=5e-4"),
    "draft": ("model.depth=1", "model.width=256", "model.heads=4", "model.hidden=1024"),
}
SMOKE_SIZES = {"large": ("model.depth=2",), "draft": ("model.depth=1",)}


@dataclass(frozen=True, kw_only=True)
class SpeculativeOptions(Options):
    prompts: int = 8  # texts that are continued, one after the other
    prompt_tokens: int = 64
    new_tokens: int = 128
    proposals: int = 4  # tokens that the lookup proposes at a time


def before(trial: Trial) -> tuple[Job, ...]:
    """Train the large model, and then the draft with the tokenizer of the large one, once for every seed."""
    large = Job(f"training the large model, seed {trial.seed}", train_model, (trial, "large"))
    return large, Job(f"training the draft, seed {trial.seed}", train_model, (trial, "draft"), (large.name,))


def _model_folder(trial: Trial, name: str) -> Path:
    return trial.seed_folder / f"model-{name}"


def train_model(trial: Trial, name: str) -> Iterator[str]:
    more = [*(SMOKE_SIZES if trial.smoke else SIZES)[name]]
    more += [f"tokenizer.folder={_model_folder(trial, 'large')}"] if name == "draft" else []
    for message in train_run(trial_recipe(trial, more), _model_folder(trial, name), trial.data):
        yield f"training the {name} model, seed {trial.seed}: {message}"


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Continue the prompts with the large model, alone and with proposals; compare the texts and the times."""
    recipe, new = trial_recipe(trial), trial.options.new_tokens
    large, draft = (load_run(_model_folder(trial, name), recipe) for name in SIZES)
    model, prompts = optimize(large.model), _prompts(large, trial)
    options: dict[str, dict[str, object]] = {
        "plain": {},
        "draft": {"draft": optimize(draft.model)},
        "lookup": {"prompt_lookup": trial.options.proposals},
    }
    plain, _ = _generate(model, prompts, new, {})
    texts, seconds = _generate(model, prompts, new, options[trial.arm.name])
    tokens = sum(text.shape[1] for text in texts) - sum(prompt.shape[1] for prompt in prompts)
    equal = sum(torch.equal(one, other) for one, other in zip(plain, texts, strict=True)) / len(prompts)
    metrics: Metrics = {"tokens_per_second": tokens / seconds, "equal_accuracy": equal}
    for name in SIZES:
        if (loss := training_metrics(_model_folder(trial, name)).get("validation_loss")) is not None:
            metrics[f"{name}_validation_loss"] = loss
    yield metrics


def _generate(
    model: OptimizedModel, prompts: list[torch.Tensor], new: int, options: dict[str, object]
) -> tuple[list[torch.Tensor], float]:
    """Continue each prompt greedily; return the texts and the seconds, after one prompt that warms up."""
    model.generate(prompts[0], max_new_tokens=new, **options)  # type: ignore[call-overload]
    start = time.perf_counter()
    texts = [model.generate(prompt, max_new_tokens=new, **options) for prompt in prompts]  # type: ignore[call-overload]
    if prompts[0].is_cuda:
        torch.cuda.synchronize()
    return texts, time.perf_counter() - start


def _prompts(pipe: Pipeline, trial: Trial) -> list[torch.Tensor]:
    """Return pieces of the test split, or of the validation split, at equal distances."""
    recipe, length, count = trial_recipe(trial), trial.options.prompt_tokens, trial.options.prompts
    try:
        corpus = load_corpus(recipe.data.corpus, "test", folder=trial.data)
    except SplitError:
        corpus = load_corpus(recipe.data.corpus, "valid", folder=trial.data)
    tokens = tokenize_corpus(corpus, pipe.tokenizer)
    stride = max(1, (len(tokens) - length) // count)
    pieces = [tokens.read(start, start + length) for start in range(0, count * stride, stride)]
    return [torch.as_tensor(piece, dtype=torch.long, device=pipe.model.device)[None] for piece in pieces]


EXPERIMENT = replace(
    ON_WORDS,
    name="speculative",
    claim="a small draft that proposes tokens makes greedy decoding faster and does not change the text",
    source="not in the documents: Leviathan et al. 2023",
    arms=(
        Arm("plain", "the large model alone"),
        Arm("draft", "a trained model with one layer proposes tokens"),
        Arm("lookup", "tokens that followed the same words earlier in the text are proposed"),
    ),
    measure=measure,
    before=before,
    options=SpeculativeOptions,
    changes=(
        *(*LANGUAGE_MODEL, "model.context=512", "train.batch=16"),
        *("tokenizer.kind=bpe", "tokenizer.vocab=4096", "model.vocab=4096"),
    ),
    smoke=(*TEXT_SMOKE, "model.context=64"),
    smoke_options={"prompts": 2, "prompt_tokens": 8, "new_tokens": 6},
    is_timed=True,
    budget="a model of 12 layers and width 768 and a draft of one layer and width 256, 2,000 steps of 16 blocks of 512 "
    "subwords each; 8 prompts of 64 tokens, 128 new tokens each, one at a time",
    data="WikiText-2 by 4,096 subwords; prompts from the test split",
    columns=("tokens_per_second", "equal_accuracy", "large_validation_loss", "draft_validation_loss"),
    rules=read_rules("""
        with a draft, every text is exactly that of the large model alone
            equal_accuracy of draft >= 1 [exact]
        with a draft, decoding is faster than the large model alone
            tokens_per_second of draft / tokens_per_second of plain >= 1
    """),
    reading="`equal_accuracy` is the share of prompts whose whole continuation is the same, token by token.",
)
