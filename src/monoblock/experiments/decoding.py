"""Experiments that measure decoding: with and without a cache, and with proposals of a draft."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from monoblock.accounting.report import account
from monoblock.config.families import gpt
from monoblock.config.schema import check_at_least, check_types
from monoblock.data.corpora.load import load_corpus
from monoblock.errors import SplitError
from monoblock.experiments.budgets import LANGUAGE_MODEL, TEXT_SMOKE, TEXT_STAND_IN
from monoblock.experiments.frame.experiment import Arm, Experiment, Metrics, Trial, selection
from monoblock.experiments.frame.jobs import Job
from monoblock.experiments.frame.rules import Rule
from monoblock.experiments.frame.training import load_run, train_run, training_metrics, trial_recipe
from monoblock.experiments.reversal import parse_lengths
from monoblock.experiments.time_and_memory import best_seconds, default_device
from monoblock.inference.optimized import OptimizedModel, optimize
from monoblock.model import Transformer
from monoblock.runs.pipeline import Pipeline
from monoblock.tasks.running_text import tokenize_corpus

# -- the cache --------------------------------------------------------------------------------------------------------

# Decoding with and without a key-value cache: positions processed, time by the number of new tokens, and bytes.

VOCAB, CACHED_TOKENS = 512, 512


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    prompt: int = 50
    lengths: str | int = "25,50,100,200,400"  # new tokens
    width: int = 384
    depth: int = 6
    rounds: int = selection(3)  # the best time of these counts

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "prompt", "width", "depth", "rounds")
        parse_lengths(self.lengths)


def measure_cache(trial: Trial) -> Iterator[str | Metrics]:
    """Generate texts of several lengths; count positions, and compare the cache with its closed form."""
    options, device, use_cache = trial.options, default_device(), trial.arm.name == "cache"
    lengths = parse_lengths(options.lengths)
    torch.manual_seed(trial.seed)
    context = max(CACHED_TOKENS, options.prompt + max(lengths))
    config = gpt(vocab=VOCAB, width=options.width, depth=options.depth, heads=options.width // 32, context=context)
    model = Transformer(config).to(device).eval()
    ids = torch.randint(VOCAB, (1, options.prompt), device=device)
    times, counted = {}, {}
    for length in lengths:
        generate = partial(model.generate, ids, max_new_tokens=length, use_cache=use_cache)
        times[str(length)] = best_seconds(generate, options.rounds, device)
        counted[str(length)] = count_positions(options.prompt, length, use_cache=use_cache)
        yield f"{length} new tokens"
    metrics: Metrics = {"seconds": times, "positions": counted, "seconds_longest": times[str(lengths[-1])]}
    if use_cache:
        metrics |= {"cache_bytes": cache_bytes(model, CACHED_TOKENS)}
        metrics["closed_form_bytes"] = account(config).kv_cache_bytes(length=CACHED_TOKENS, batch=1, dtype="fp32")
    yield metrics


def count_positions(prompt: int, new: int, *, use_cache: bool) -> int:
    """Return how many positions the model processes: the last new token is never read."""
    return prompt + new - 1 if use_cache else sum(prompt + step for step in range(new))


def cache_bytes(model: Transformer, capacity: int) -> int:
    """Return the bytes of the tensors of a filled cache."""
    cache = model.make_cache(batch=1, capacity=capacity)
    ids = torch.zeros(1, capacity, dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(ids, cache=cache)
    return sum(tensor.numel() * tensor.element_size() for tensor in cache_tensors(cache))


def cache_tensors(cache: object) -> list[torch.Tensor]:
    """Return the key and value tensors of a cache, each once."""
    found: dict[int, torch.Tensor] = {}
    pending, visited = [cache], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                found[value.data_ptr()] = value
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value
        elif type(value).__module__.startswith("monoblock."):
            slots = [getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
            pending += [*getattr(value, "__dict__", {}).values(), *slots]
    return list(found.values())


KV_CACHE = Experiment(
    name="kv-cache",
    claim="without a cache, 100 tokens after a prompt of 50 cost 9,950 positions instead of about 150: 66 times as "
    "many",
    source="C, question 4 and the KV cache; B §11",
    arms=(
        Arm(name="cache", about="keys and values of earlier tokens are kept"),
        Arm(name="no-cache", about="every new token reads the whole text again"),
    ),
    measure=measure_cache,
    options=CacheOptions,
    smoke_options={"prompt": 3, "lengths": "2,4", "width": 32, "depth": 1, "rounds": 1},
    is_timed=True,
    budget="one sequence after a prompt, with the sizes below; the best of the rounds; on a CPU, processor time",
    data="random weights and random tokens, since time does not depend on them",
    columns=("seconds_longest", "cache_bytes", "closed_form_bytes"),
    curves={"seconds": "new tokens", "positions": "new tokens"},
    logarithmic=True,
    rules=(
        Rule(
            "at 100 new tokens, the cache saves at least 66 times the positions",
            "positions of no-cache at 100 / positions of cache at 100 >= 66",
            is_exact=True,
        ),
        Rule(
            "it does not save 66 times the time: at 100 new tokens at most 20 times",
            "seconds of no-cache at 100 / seconds of cache at 100 <= 20",
        ),
        Rule(
            "at 400 new tokens, decoding with the cache is at least twice as fast",
            "seconds of no-cache at 400 / seconds of cache at 400 >= 2",
        ),
        Rule(
            "the bytes of the cache are those of the closed form, up to 1 %",
            "0.99 <= cache_bytes of cache / closed_form_bytes of cache <= 1.01",
            is_exact=True,
            added_later="the lower bound",
        ),
    ),
    reading="A single new token uses the machine less well than a long sequence does, so the time falls less than the "
    "number of positions.",
)


# -- speculative decoding ---------------------------------------------------------------------------------------------

# Speculative decoding with a trained draft: whether the text is the same, and how much faster it comes. A large and a
# small language model are trained on the same text with the same tokenizer. The large one then continues prompts from
# the test split greedily: alone, with the small one as the draft that proposes tokens, and with proposals looked up in
# the text itself.

SPECULATIVE_SIZES = {
    "large": ("model.depth=12", "model.width=768", "model.heads=12", "model.hidden=3072", "train.lr=5e-4"),
    "draft": ("model.depth=1", "model.width=256", "model.heads=4", "model.hidden=1024"),
}
SMOKE_SIZES = {"large": ("model.depth=2",), "draft": ("model.depth=1",)}


@dataclass(frozen=True, kw_only=True)
class SpeculativeOptions:
    prompts: int = 8  # texts that are continued, one after the other
    prompt_tokens: int = 64
    new_tokens: int = 128
    proposals: int = 4  # tokens that the lookup proposes at a time

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "prompts", "prompt_tokens", "new_tokens", "proposals")


def train_models(trial: Trial) -> tuple[Job, ...]:
    """Train the large model, and then the draft with the tokenizer of the large one, once for every seed."""
    large = Job(f"training the large model, seed {trial.seed}", train_model, (trial, "large"))
    return large, Job(f"training the draft, seed {trial.seed}", train_model, (trial, "draft"), (large.name,))


def _model_folder(trial: Trial, name: str) -> Path:
    return trial.work_folder / f"seed-{trial.seed}" / f"model-{name}"


def train_model(trial: Trial, name: str) -> Iterator[str]:
    more = [*(SMOKE_SIZES if trial.smoke else SPECULATIVE_SIZES)[name]]
    more += [f"tokenizer.folder={_model_folder(trial, 'large')}"] if name == "draft" else []
    for message in train_run(trial_recipe(trial, more), _model_folder(trial, name), trial.data):
        yield f"training the {name} model, seed {trial.seed}: {message}"


def measure_speculative(trial: Trial) -> Iterator[str | Metrics]:
    """Continue the prompts with the large model, alone and with proposals; compare the texts and the times."""
    recipe = trial_recipe(trial)
    large, draft = (load_run(_model_folder(trial, name), recipe) for name in ("large", "draft"))
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
        f"{name}_validation_loss": training_metrics(_model_folder(trial, name)).get("validation_loss")
        for name in SPECULATIVE_SIZES
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


SPECULATIVE = Experiment(
    name="speculative",
    claim="a small draft that proposes tokens makes greedy decoding faster and does not change the text",
    source="not in the documents: Leviathan et al. 2023",
    arms=(
        Arm(name="plain", about="the large model alone"),
        Arm(name="draft", about="a trained model with one layer proposes tokens"),
        Arm(name="lookup", about="tokens that followed the same words earlier in the text are proposed"),
    ),
    measure=measure_speculative,
    before=train_models,
    options=SpeculativeOptions,
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
            "with a draft, every text is exactly that of the large model alone",
            "equal_accuracy of draft >= 1",
            is_exact=True,
        ),
        Rule(
            "with a draft, decoding is faster than the large model alone",
            "tokens_per_second of draft / tokens_per_second of plain >= 1",
        ),
    ),
    reading="`equal_accuracy` is the share of prompts whose whole continuation is the same, token by token.",
)
