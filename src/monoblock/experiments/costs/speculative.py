"""Speculative decoding with a trained draft: whether the text is the same, and how much faster it comes.

A large and a small language model are trained on the same text with the same tokenizer. The large one then continues
prompts from the test split greedily: alone, with the small one as the draft that proposes tokens, and with proposals
looked up in the text itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from monoblock.config.schema import check_at_least, check_types
from monoblock.data.corpora.load import load_corpus
from monoblock.errors import SplitError
from monoblock.experiments.frame.experiment import Arm, Experiment, Metrics, Trial
from monoblock.experiments.frame.jobs import Job
from monoblock.experiments.frame.rules import Rule
from monoblock.experiments.frame.training import load_run, train_run, training_metrics, trial_recipe
from monoblock.experiments.models.budgets import LANGUAGE_MODEL, TEXT_SMOKE, TEXT_STAND_IN
from monoblock.inference.optimized import OptimizedModel, optimize
from monoblock.runs.pipeline import Pipeline
from monoblock.tasks.running_text import tokenize_corpus

SIZES = {
    "large": ("model.depth=12", "model.width=768", "model.heads=12", "model.hidden=3072", "train.lr=5e-4"),
    "draft": ("model.depth=1", "model.width=256", "model.heads=4", "model.hidden=1024"),
}
SMOKE_SIZES = {"large": ("model.depth=2",), "draft": ("model.depth=1",)}


@dataclass(frozen=True, kw_only=True)
class Options:
    prompts: int = 8  # texts that are continued, one after the other
    prompt_tokens: int = 64
    new_tokens: int = 128
    proposals: int = 4  # tokens that the lookup proposes at a time

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "prompts", "prompt_tokens", "new_tokens", "proposals")


def before(trial: Trial) -> tuple[Job, ...]:
    """Train the large model, and then the draft with the tokenizer of the large one, once for every seed."""
    large = Job(f"training the large model, seed {trial.seed}", train_model, (trial, "large"))
    return large, Job(f"training the draft, seed {trial.seed}", train_model, (trial, "draft"), (large.name,))


def _folder(trial: Trial, name: str) -> Path:
    return trial.work_folder / f"seed-{trial.seed}" / f"model-{name}"


def train_model(trial: Trial, name: str) -> Iterator[str]:
    more = [*(SMOKE_SIZES if trial.smoke else SIZES)[name]]
    more += [f"tokenizer.folder={_folder(trial, 'large')}"] if name == "draft" else []
    for message in train_run(trial_recipe(trial, more), _folder(trial, name), trial.data):
        yield f"training the {name} model, seed {trial.seed}: {message}"


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Continue the prompts with the large model, alone and with proposals; compare the texts and the times."""
    recipe = trial_recipe(trial)
    large, draft = (load_run(_folder(trial, name), recipe) for name in ("large", "draft"))
    model, small = optimize(large.model), optimize(draft.model)
    prompts = _prompts(large, trial)
    options: dict[str, object] = {}
    if trial.arm.name == "draft":
        options = {"draft": small}
    elif trial.arm.name == "lookup":
        options = {"prompt_lookup": trial.options.proposals}
    plain, _ = _generate(model, prompts, trial.options.new_tokens, {})
    texts, seconds = _generate(model, prompts, trial.options.new_tokens, options)
    equal = sum(torch.equal(one, other) for one, other in zip(plain, texts, strict=True)) / len(prompts)
    tokens = sum(text.shape[1] for text in texts) - sum(prompt.shape[1] for prompt in prompts)
    losses = {
        f"{name}_validation_loss": training_metrics(_folder(trial, name)).get("validation_loss") for name in SIZES
    }
    yield {
        "tokens_per_second": tokens / seconds,
        "equal_accuracy": equal,
        **{name: loss for name, loss in losses.items() if loss is not None},
    }


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
    tokens = tokenize_corpus(corpus, pipe.loaded.tokenizer)
    stride = max(1, (len(tokens) - length) // count)
    pieces = [tokens.read(start, start + length) for start in range(0, count * stride, stride)]
    return [torch.as_tensor(piece, dtype=torch.long, device=pipe.model.device)[None] for piece in pieces]


EXPERIMENT = Experiment(
    name="speculative",
    claim="a small draft that proposes tokens makes greedy decoding faster and does not change the text",
    source="not in the documents: Leviathan et al. 2023",
    arms=(
        Arm(name="plain", about="the large model alone"),
        Arm(name="draft", about="a trained model with one layer proposes tokens"),
        Arm(name="lookup", about="tokens that followed the same words earlier in the text are proposed"),
    ),
    measure=measure,
    before=before,
    options=Options,
    recipe="wikitext2",
    changes=(
        *LANGUAGE_MODEL,
        "model.context=512",
        "train.batch=16",
        "tokenizer.kind=bpe",
        "tokenizer.vocab=4096",
        "model.vocab=4096",
    ),
    stand_in=TEXT_STAND_IN,
    toy="text",
    smoke=(*TEXT_SMOKE, "model.context=64"),
    smoke_options={"prompts": 2, "prompt_tokens": 8, "new_tokens": 6},
    is_timed=True,
    budget="a model of 12 layers and width 768 and a draft of one layer and width 256, 2,000 steps of 16 blocks of 512 "
    "subwords each; 8 prompts of 64 tokens, 128 new tokens each, one at a time",
    data="WikiText-2 by 4,096 subwords; prompts from the test split",
    columns=("tokens_per_second", "equal_accuracy", "large_validation_loss", "draft_validation_loss"),
    rules=(
        Rule(
            statement="with a draft, every text is exactly that of the large model alone",
            metric="equal_accuracy",
            arm="draft",
            at_least=1.0,
            is_exact=True,
        ),
        Rule(
            statement="with a draft, decoding is faster than the large model alone",
            metric="tokens_per_second",
            arm="draft",
            quantity="ratio",
            other="plain",
            at_least=1.0,
        ),
    ),
    reading="`equal_accuracy` is the share of prompts whose whole continuation is the same, token by token.",
)
