"""Compare methods of back-translation, given few pairs and many target sentences. Each method is an arm.

For every seed, a backward model, from targets to sources, is trained on the pairs. It generates a source for each
target sentence by beam search, by sampling and by restricted sampling (Edunov et al. 2018). Each arm then trains a
model on the pairs and its own synthetic pairs, for the same number of steps and with the same tokenizer. The arms with
noise or tags all change the same hypotheses of beam search, so that nothing else differs. All results are written to
files: an interrupted experiment continues where it stopped, and with the option `jobs`, several processes share the
work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from monoblock.config.schema import check_at_least, check_positive, check_types
from monoblock.data.corpora.load import load_corpus
from monoblock.data.readers.pairs import read_pairs
from monoblock.data.readers.records import Pair
from monoblock.errors import ConfigError
from monoblock.experiments.arms import (
    ArmResult,
    ExperimentResult,
    check_metric,
    load_arm,
    parse_arms,
    parse_seeds,
    train_arm,
    with_seed,
)
from monoblock.experiments.jobs import Job, run_jobs
from monoblock.interop.atomic_write import write_atomically
from monoblock.metrics.format import format_metric
from monoblock.recipes.schema import Recipe
from monoblock.runs.evaluate import evaluate_request
from monoblock.runs.recipe import read_recipe, task_of_recipe
from monoblock.tasks.evaluation_report import EvaluationRequest
from monoblock.tasks.seq2seq.backtranslation import (
    DECODING_OPTIONS,
    BacktranslationMethod,
    generate_sources,
    write_pairs,
)
from monoblock.tasks.seq2seq.pairs import prepare_pairs, recipe_section
from monoblock.tasks.seq2seq.task import SEQ2SEQ
from monoblock.tasks.splits import holdout_of
from monoblock.tasks.tags import SYNTHETIC_TAGS
from monoblock.tokenizers.tokenizer import Tokenizer

# Arm -> how its synthetic sources are generated; the arm "none" is trained on the real pairs only.
ARMS: dict[str, BacktranslationMethod | None] = {
    "none": None,
    "beam": BacktranslationMethod("beam"),
    "sampled": BacktranslationMethod("sample"),
    "restricted": BacktranslationMethod("restricted"),
    "permutation": BacktranslationMethod("noised", ("permutation",)),
    "drop": BacktranslationMethod("noised", ("drop",)),
    "blank": BacktranslationMethod("noised", ("blank",)),
    "noised": BacktranslationMethod("noised"),
    "tagged": BacktranslationMethod("beam", tag=True),
    "tagged-noised": BacktranslationMethod("noised", tag=True),
}
SEARCH_METHODS = {"noised": "beam"}  # method -> the method whose hypotheses it changes
OPPOSITE_DIRECTION = {"forward": "backward", "backward": "forward"}
EXTRA_METRICS = ("bleu", "bleu_tokenized", "chrf")  # extra columns of the table
METRICS_FILE = "figures.json"


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str = "multi30k"
    pairs: int = 5_000  # real pairs
    monolingual: int = 24_000  # target sentences to back-translate
    ratio: float = 1.0  # synthetic pairs per real pair
    seeds: str | int = "1,2,3"
    arms: str = ",".join(ARMS)
    limit: int | None = None  # evaluate on at most this many test sources
    figure: str = "bleu_lowercased"  # the compared metric
    jobs: int = 1  # number of processes; they share one GPU
    rows: int = 512  # sequences decoded at once, counting every beam

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "pairs", "monolingual", "limit", "jobs", "rows")
        check_positive(self, "ratio")


@dataclass(frozen=True)
class ExperimentContext:
    """The arguments of the experiment, in a form that can be pickled for jobs in other processes."""

    options: Options
    overrides: tuple[str, ...]
    folder: Path
    data: Path | None

    @property
    def recipe(self) -> Recipe:
        return read_recipe(self.options.recipe, self.overrides)

    def load_pairs(self) -> list[Pair]:
        recipe = self.recipe
        corpus = load_corpus(recipe.data.corpus, "train", folder=self.data, holdout=holdout_of(recipe.data))
        return prepare_pairs(corpus, recipe_section(recipe)).rows

    def load_target_sentences(self) -> list[str]:
        """Return the monolingual sentences: the targets of the rows that follow the first `options.pairs` rows."""
        start = self.options.pairs
        return [row.target for row in self.load_pairs()[start : start + self.options.monolingual]]

    def train_model(self, seed: int, name: str, **changes: Any) -> Iterator[str]:
        """Train the model `name` on the first `options.pairs` rows; `changes` change the section [seq2seq]."""
        data = {"limit": self.options.pairs}
        tokenizer = {"folder": str(self.folder / "tokenizer")}
        recipe = with_seed(self.recipe, seed, data=data, tokenizer=tokenizer, task=changes)
        yield from train_arm(recipe, self.seed_folder(seed) / name, self.data)

    def seed_folder(self, seed: int) -> Path:
        return self.folder / f"seed-{seed}"


def run(options: Options, overrides: list[str], folder: Path, data: Path | None) -> Iterator[str | ExperimentResult]:
    """Train and evaluate every arm; yield progress messages, and the result at the end."""
    context = ExperimentContext(options, tuple(overrides), folder, data)
    recipe, arms, seeds = context.recipe, parse_arms(options.arms, list(ARMS)), parse_seeds(options.seeds)
    if task_of_recipe(recipe) is not SEQ2SEQ:
        raise ConfigError(
            f"recipe={options.recipe} has the objective {recipe.train.objective!r}, but back-translation needs "
            "'seq2seq'; write recipe=multi30k"
        )
    direction = recipe_section(recipe).direction
    if direction not in OPPOSITE_DIRECTION:
        raise ConfigError(f"seq2seq.direction={direction!r} has no opposite direction; write forward or backward")
    rows = context.load_pairs()
    if options.pairs >= len(rows):
        raise ConfigError(
            f"pairs={options.pairs} uses all {len(rows):,} rows and leaves no target sentences; write a smaller number"
        )
    sentences = context.load_target_sentences()
    _train_tokenizer(recipe, rows[: options.pairs], sentences, folder / "tokenizer")
    yield from run_jobs(_build_jobs(context, arms, seeds), options.jobs)
    metrics = {arm: [_read_metrics(context.seed_folder(seed) / arm) for seed in seeds] for arm in arms}
    example = metrics[arms[0]][0]
    check_metric(options.figure, example)
    about = {
        "recipe": options.recipe,
        "changes": list(overrides),
        "direction": direction,
        "pairs": options.pairs,
        "target_sentences": len(sentences),
        "ratio": options.ratio,
        "seeds": seeds,
        "steps": recipe.train.steps,
        "split": example["split"],
        "signature": example.get("signature"),
    }
    rows_by_arm = tuple(_arm_result(arm, metrics[arm], options.figure) for arm in arms)
    yield ExperimentResult("backtranslation", options.figure, rows_by_arm, about)


def _arm_result(arm: str, metrics: list[dict[str, Any]], metric: str) -> ArmResult:
    extra = [name for name in EXTRA_METRICS if name in metrics[0] and name != metric]
    values = tuple(seed_metrics[metric] for seed_metrics in metrics)
    return ArmResult(arm, values, {name: fmean(seed_metrics[name] for seed_metrics in metrics) for name in extra})


# -- jobs -----------------------------------------------------------------------------------------------------------


def _build_jobs(context: ExperimentContext, arms: list[str], seeds: list[int]) -> list[Job]:
    """Return the jobs in order: train backward models, which most arms wait for; generate sources; run the arms."""
    searches = list(dict.fromkeys(_search_method(method) for arm in arms if (method := ARMS[arm]) is not None))
    backward = [Job(f"backward, seed {seed}", _train_backward, (context, seed)) for seed in seeds if searches]
    generated = [
        Job(
            f"sources by {search}, seed {seed}", _generate_sources, (context, seed, search), (f"backward, seed {seed}",)
        )
        for seed in seeds
        for search in searches
    ]
    trained = []
    for arm in arms:
        method = ARMS[arm]
        for seed in seeds:
            needs = () if method is None else (f"sources by {_search_method(method)}, seed {seed}",)
            trained.append(Job(f"{arm}, seed {seed}", _run_arm, (context, seed, arm), needs))
    return [*backward, *generated, *trained]


def _search_method(method: BacktranslationMethod) -> str:
    return SEARCH_METHODS.get(method.name, method.name)


def _train_backward(context: ExperimentContext, seed: int) -> Iterator[str]:
    """Train the model that translates targets to sources, which all arms of a seed share."""
    direction = OPPOSITE_DIRECTION[recipe_section(context.recipe).direction]
    yield from context.train_model(seed, "backward", direction=direction)


def _generate_sources(context: ExperimentContext, seed: int, search: str) -> Iterator[str]:
    """Back-translate every target sentence with the decoding method `search` and write the pairs to a file.

    Noise and tags are added later, by `_run_arm`.
    """
    file = context.seed_folder(seed) / f"{search}.hypotheses.tsv"
    if file.is_file():
        return
    sentences = context.load_target_sentences()
    yield f"sources by {search}, seed {seed}: generating {len(sentences):,}"
    pipe = load_arm(context.seed_folder(seed) / "backward", context.recipe.train.device)
    batch = max(1, context.options.rows // DECODING_OPTIONS[search]["num_beams"])
    pairs = generate_sources(pipe.loaded, sentences, search, seed=seed, batch=batch)
    write_pairs(file, (Pair(source, target) if source else None for source, target in pairs))


def _run_arm(context: ExperimentContext, seed: int, arm: str) -> Iterator[str]:
    """Write the synthetic pairs of an arm, with its noise and tag; then train and evaluate its model."""
    folder, method, changes = context.seed_folder(seed), ARMS[arm], {}
    if method is not None:
        file = folder / f"{arm}.tsv"
        if not file.is_file():
            rows = enumerate(read_pairs(folder / f"{_search_method(method)}.hypotheses.tsv"))
            pairs = (Pair(method.prepare_source(row.source, seed=seed, index=n), row.target) for n, row in rows)
            write_pairs(file, pairs)
        changes = {"synthetic": str(file), "synthetic_ratio": context.options.ratio}
    yield from context.train_model(seed, arm, **changes)
    if not (folder / arm / METRICS_FILE).is_file():
        pipe = load_arm(folder / arm, context.recipe.train.device)
        batch = max(1, context.options.rows // context.recipe.generate.num_beams)
        request = EvaluationRequest(
            data=context.recipe.data.corpus, folder=context.data, limit=context.options.limit, batch=batch
        )
        write_atomically(
            folder / arm / METRICS_FILE, json.dumps(evaluate_request(pipe, request).metrics, indent=2) + "\n"
        )
    metrics = _read_metrics(folder / arm)
    name = context.options.figure
    yield f"{arm}, seed {seed}: {name} {format_metric(name, metrics.get(name, 0.0), '.2f')}"


def _read_metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / METRICS_FILE).read_text(encoding="utf-8"))


def _train_tokenizer(recipe: Recipe, pairs: list[Pair], sentences: list[str], folder: Path) -> Path:
    """Train the tokenizer that all arms share, with the tags that some of them use; return the tokenizer's folder."""
    if not (folder / "tokenizer.json").is_file():
        section = recipe.tokenizer
        texts = [text for pair in pairs for text in (pair.source, pair.target)] + sentences
        specials = list(dict.fromkeys(["pad", "bos", "eos", *section.tags, *SYNTHETIC_TAGS]))
        tokenizer = Tokenizer.train(
            section.kind, texts, section.vocab, marker=section.marker, specials=specials, lowercase=section.lowercase
        )
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)
    return folder
