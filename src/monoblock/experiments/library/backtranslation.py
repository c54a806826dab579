"""Synthetic pairs: how they are made, and their share.

Methods of back-translation are compared given few pairs and many target sentences; each method is an arm.

For every seed, a backward model, from targets to sources, is trained on the pairs. It generates a source for each
target sentence by beam search, by sampling and by restricted sampling (Edunov et al. 2018). Each arm then trains a
model on the pairs and its own synthetic pairs, for the same number of steps and with the same tokenizer. The arms with
noise or tags all change the same hypotheses of beam search, so that nothing else differs. With ratios=0.5,1,2,4 every
arm but "none" is trained with each mixture; its name then ends in the ratio. The ratio is that of synthetic to real
pairs among those that training sees: all synthetic pairs are used, and the real pairs are repeated as often as needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from monoblock.data.corpora.load import load_corpus
from monoblock.data.readers.records import Pair
from monoblock.data.readers.tables import read_pairs
from monoblock.errors import ConfigError
from monoblock.experiments.experiment import Arm, Experiment, Metrics, Options, SeedResults, Trial, selection
from monoblock.experiments.jobs import Job
from monoblock.experiments.rules import read_rules
from monoblock.experiments.training import evaluate_trial, load_run, train_run, training_metrics
from monoblock.recipes.schema import Recipe
from monoblock.runs.recipe import read_recipe, task_of_recipe
from monoblock.tasks.backtranslation import DECODING_OPTIONS, BacktranslationMethod, generate_sources, write_pairs
from monoblock.tasks.seq2seq import Seq2Seq, prepare_pairs, recipe_section
from monoblock.tasks.tags import SYNTHETIC_TAGS
from monoblock.tasks.task import holdout_of
from monoblock.tokenizers.tokenizer import Tokenizer

RATIOS = ("0.5", "1", "2", "4")
MAIN_METRIC = "bleu_lowercased"
MIN_POINTS = 3  # of a curve: with fewer, it says no more than the table
DEFAULT_RECIPE = "multi30k"
SEARCH_METHODS = {"noised": "beam"}  # method -> the method whose hypotheses it changes
OPPOSITE_DIRECTION = {"forward": "backward", "backward": "forward"}
# Arm -> how its synthetic sources are generated; the arm "none" is trained on the real pairs only.
METHODS: dict[str, tuple[BacktranslationMethod | None, str]] = {
    "none": (None, "the real pairs only"),
    "beam": (BacktranslationMethod("beam"), "sources by beam search"),
    "sampled": (BacktranslationMethod("sample"), "sources by sampling"),
    "restricted": (BacktranslationMethod("restricted"), "sources by sampling from the ten best tokens"),
    "permutation": (BacktranslationMethod("noised", ("permutation",)), "beam search, then words moved"),
    "drop": (BacktranslationMethod("noised", ("drop",)), "beam search, then words dropped"),
    "blank": (BacktranslationMethod("noised", ("blank",)), "beam search, then words replaced by <blank>"),
    "noised": (BacktranslationMethod("noised"), "beam search, then all three kinds of noise"),
    "tagged": (BacktranslationMethod("beam", tag=True), "beam search, with a tag before the source"),
    "tagged-noised": (BacktranslationMethod("noised", tag=True), "beam search, noise and tag"),
}


# -- options and arms -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BacktranslationOptions(Options):
    recipe: str = DEFAULT_RECIPE  # a recipe that translates
    pairs: int = 5_000  # real pairs
    monolingual: int = 24_000  # target sentences to back-translate
    ratios: str | float = selection("1")  # synthetic pairs seen for each real pair: 0.5, 1, 2 and 4
    limit: int | None = None  # evaluate on at most this many test sources
    rows: int = 512  # sequences decoded at once, counting every beam


def check(options: BacktranslationOptions, overrides: tuple[str, ...]) -> None:
    recipe = read_recipe(options.recipe, overrides)
    if type(task_of_recipe(recipe)) is not Seq2Seq:
        raise ConfigError(
            f"recipe={options.recipe} has the objective {recipe.train.objective!r}, but back-translation needs "
            "'seq2seq'; write recipe=multi30k"
        )
    direction = recipe_section(recipe).direction
    if direction not in OPPOSITE_DIRECTION:
        raise ConfigError(f"seq2seq.direction={direction!r} has no opposite direction; write forward or backward")


def expand_arms(options: BacktranslationOptions, names: list[str]) -> list[str]:
    """Return the chosen arms with every ratio."""
    try:
        ratios = [f"{float(word):g}" for word in str(options.ratios).split(",")]
    except ValueError:
        raise ConfigError(f"ratios={options.ratios} is not a list of numbers; write ratios=0.5,1,2,4") from None
    unknown = next((ratio for ratio in ratios if ratio not in RATIOS), None)
    if unknown is not None:
        raise ConfigError(f"ratios={unknown} is not one of {', '.join(RATIOS)}")
    expanded = [arm_name(name, ratio) for ratio in ratios for name in names if name in METHODS]
    return list(dict.fromkeys([*expanded, *(name for name in names if name not in METHODS)]))


def arm_name(method: str, ratio: str) -> str:
    return method if ratio == "1" or method == "none" else f"{method}-{ratio}"


def _arms() -> Iterator[Arm]:
    for ratio in RATIOS:
        for name, (method, about) in METHODS.items():
            if method is not None:
                about += f"; synthetic pairs seen for each real pair: {ratio}"
            elif ratio != RATIOS[0]:
                continue
            values = {"method": method, "ratio": 0.0 if method is None else float(ratio)}
            yield Arm(arm_name(name, ratio), about, values=values)


# -- data -------------------------------------------------------------------------------------------------------------


def _recipe(trial: Trial) -> Recipe:
    return read_recipe(trial.options.recipe, trial.changes)


def _load_pairs(trial: Trial) -> tuple[list[Pair], list[str]]:
    """Return the real pairs, and the monolingual sentences: the targets of the rows that follow them."""
    recipe, count = _recipe(trial), trial.options.pairs
    corpus = load_corpus(recipe.data.corpus, "train", folder=trial.data, holdout=holdout_of(recipe.data))
    rows = prepare_pairs(corpus, recipe_section(recipe)).rows
    if count >= len(rows):
        raise ConfigError(
            f"pairs={count} uses all {len(rows):,} rows and leaves no target sentences; write a smaller number"
        )
    return rows[:count], [row.target for row in rows[count : count + trial.options.monolingual]]


def _train_model(trial: Trial, folder: Path, **changes: Any) -> Iterator[str]:
    """Train a model on the real pairs; `changes` change the section [seq2seq]."""
    recipe = _recipe(trial)
    recipe = replace(
        recipe,
        data=replace(recipe.data, limit=trial.options.pairs),
        tokenizer=replace(recipe.tokenizer, folder=str(trial.work_folder / "tokenizer")),
        train=replace(recipe.train, seed=trial.seed),
        task=replace(recipe.task, **changes),  # type: ignore[type-var]
    )
    yield from train_run(recipe, folder, trial.data)


# -- jobs that the arms share -----------------------------------------------------------------------------------------


def before(trial: Trial) -> tuple[Job, ...]:
    """Return the jobs that must be done before a trial: tokenizer, backward model, and sources."""
    tokenizer = Job("tokenizer", train_tokenizer, (trial,))
    method = trial.arm.values["method"]
    if method is None:
        return (tokenizer,)
    search = _search_method(method)
    backward = Job(f"backward, seed {trial.seed}", train_backward, (trial,), (tokenizer.name,))
    sources = Job(f"sources by {search}, seed {trial.seed}", back_translate, (trial, search), (backward.name,))
    return tokenizer, backward, sources


def _search_method(method: BacktranslationMethod) -> str:
    return SEARCH_METHODS.get(method.name, method.name)


def train_tokenizer(trial: Trial) -> Iterator[str]:
    """Train the tokenizer that all arms share, with the tags that some of them use."""
    folder, section = trial.work_folder / "tokenizer", _recipe(trial).tokenizer
    if not (folder / "tokenizer.json").is_file():
        pairs, sentences = _load_pairs(trial)
        texts = [text for pair in pairs for text in (pair.source, pair.target)] + sentences
        specials = list(dict.fromkeys(["pad", "bos", "eos", *section.tags, *SYNTHETIC_TAGS]))
        tokenizer = Tokenizer.train(
            section.kind, texts, section.vocab, marker=section.marker, specials=specials, lowercase=section.lowercase
        )
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(folder)
    yield "tokenizer: ready"


def train_backward(trial: Trial) -> Iterator[str]:
    """Train the model that translates targets to sources, which all arms of a seed share."""
    direction = OPPOSITE_DIRECTION[recipe_section(_recipe(trial)).direction]
    for message in _train_model(trial, trial.seed_folder / "backward", direction=direction):
        yield f"backward, seed {trial.seed}: {message}"


def back_translate(trial: Trial, search: str) -> Iterator[str]:
    """Back-translate every target sentence with the decoding method `search` and write the pairs to a file.

    Noise and tags are added later, by `measure`.
    """
    file = trial.seed_folder / f"{search}.hypotheses.tsv"
    if file.is_file():
        return
    _, sentences = _load_pairs(trial)
    yield f"sources by {search}, seed {trial.seed}: generating {len(sentences):,}"
    pipe = load_run(trial.seed_folder / "backward", _recipe(trial))
    batch = max(1, trial.options.rows // DECODING_OPTIONS[search]["num_beams"])
    pairs = generate_sources(pipe, sentences, search, seed=trial.seed, batch=batch)
    write_pairs(file, (Pair(source, target) if source else None for source, target in pairs))


# -- trials -----------------------------------------------------------------------------------------------------------


def measure(trial: Trial) -> Iterator[str | Metrics]:
    """Write the synthetic pairs of an arm, with its noise and tag; then train and evaluate its model."""
    folder, method, changes = trial.seed_folder, trial.arm.values["method"], dict[str, Any]()
    if method is not None:
        file = folder / f"{trial.arm.name}.tsv"
        if not file.is_file():
            rows = enumerate(read_pairs(folder / f"{_search_method(method)}.hypotheses.tsv"))
            pairs = (Pair(method.prepare_source(row.source, seed=trial.seed, index=n), row.target) for n, row in rows)
            write_pairs(file, pairs)
        changes = {"synthetic": str(file), "synthetic_ratio": trial.arm.values["ratio"]}
    yield from _train_model(trial, trial.run_folder, **changes)
    recipe = _recipe(trial)
    pipe = load_run(trial.run_folder, recipe)
    batch = max(1, trial.options.rows // recipe.generate.num_beams)
    metrics = evaluate_trial(trial, pipe, recipe, limit=trial.options.limit, batch=batch)
    yield {**training_metrics(trial.run_folder), **metrics, "ratio": trial.arm.values["ratio"]}


def summarize(results: SeedResults) -> SeedResults:
    """Return the arms of ratio 1 with curves by ratio: BLEU, where ratio 0 is the arm "none", and BLEU minus beam's."""
    found: dict[str, dict[int, Metrics]] = {}
    for method in METHODS:
        if method == "none" or method not in results:
            continue
        seeds = results[method].items()
        with_curves = {seed: {**metrics, **_curves(results, method, seed)} for seed, metrics in seeds}
        if any("bleu_by_ratio" in metrics for metrics in with_curves.values()):
            found[method] = with_curves
    return found


def _curves(results: SeedResults, method: str, seed: int) -> Metrics:
    """Return the curves of a method and a seed; none if BLEU has so few points that the table says as much."""

    def bleu(arm: str) -> float | None:
        return results.get(arm, {}).get(seed, {}).get(MAIN_METRIC)

    names = {"0": "none"} | {ratio: arm_name(method, ratio) for ratio in RATIOS}
    values = {ratio: value for ratio, name in names.items() if (value := bleu(name)) is not None}
    if len(values) < MIN_POINTS:
        return {}
    beam = {ratio: bleu(arm_name("beam", ratio)) for ratio in RATIOS if method != "beam"}
    gains = {ratio: values[ratio] - one for ratio, one in beam.items() if one is not None and ratio in values}
    return {"bleu_by_ratio": values} | ({"bleu_minus_beam": gains} if gains else {})


EXPERIMENT = Experiment(
    name="backtranslation",
    claim="synthetic pairs from monolingual targets help, noise and a tag make them more useful, and the balance of "
    "true and synthetic pairs matters",
    source="D, back-translation",
    arms=tuple(_arms()),
    default_arms=tuple(METHODS),
    expand=expand_arms,
    measure=measure,
    before=before,
    # A small model, so that several share a GPU: a step of it is limited by kernel launches.
    changes=(
        *("seq2seq.direction=backward", "model.depth=3", "train.steps=1800", "train.compile=graphs"),
        *("train.workers=0", "tokenizer.dropout=0.0", "train.eval_every=0", "train.save_every=100"),
        "generate.scored_rows=0",
    ),
    check=check,
    options=BacktranslationOptions,
    toy="pairs",
    smoke=(
        *("tokenizer.vocab=60", "tokenizer.dropout=0.0", "tokenizer.tags=['<bt>', '<blank>']", "model.width=16"),
        *("model.heads=2", "model.depth=1", "model.hidden=32", "train.steps=3", "train.batch=8", "train.compile=no"),
        *("train.workers=0", "train.average_checkpoints=0", "train.save_every=0", "train.eval_every=0"),
        *("generate.max_new_tokens=8", "generate.scored_rows=0"),
    ),
    smoke_arms=("none", "beam", "tagged-noised"),
    smoke_options={"pairs": 40, "monolingual": 20, "limit": 4, "ratios": "1,2"},
    budget="5,000 real pairs, 24,000 German sentences, and 1,800 steps for every arm",
    data="Multi30k from English to German, test split of 2016; published gains are 2.1 to 3.4 BLEU (Sennrich et al. "
    "2016, low-resource pairs, plain beam search)",
    columns=(MAIN_METRIC, "bleu", "bleu_tokenized", "chrf"),
    curves=dict.fromkeys(("bleu_by_ratio", "bleu_minus_beam"), "synthetic pairs seen for each real pair"),
    summarize=summarize,
    rules=read_rules("""
        beam sources raise BLEU by at least 0.5
            bleu_lowercased of beam - bleu_lowercased of none >= 0.5
        tagged sources raise BLEU by at least 0.5
            bleu_lowercased of tagged - bleu_lowercased of none >= 0.5
        noised sources raise BLEU by at least 0.5
            bleu_lowercased of noised - bleu_lowercased of none >= 0.5
        tagged-noised sources raise BLEU by at least 0.5
            bleu_lowercased of tagged-noised - bleu_lowercased of none >= 0.5
        a tag raises the BLEU of beam-search sources by at least 0.3
            bleu_lowercased of tagged - bleu_lowercased of beam >= 0.3
        four synthetic pairs for each real one, without a tag, are at least 0.3 BLEU better than one
            bleu_lowercased of beam-4 - bleu_lowercased of beam >= 0.3
        with four synthetic pairs for each real one, a tag helps by at least 0.3 BLEU
            bleu_lowercased of tagged-4 - bleu_lowercased of beam-4 >= 0.3
        noise raises the BLEU of beam-search sources by at least 0.3
            bleu_lowercased of noised - bleu_lowercased of beam >= 0.3 [later: the rule]
    """),
    reading="The ratio is a balance, not an amount: all 24,000 synthetic pairs are in every mixture, and the 5,000 "
    "real pairs are repeated until the ratio is reached, about ten times at 0.5 and hardly at 4. Every arm is"
    " trained for the same number of steps, so a higher ratio means fewer passes over the real pairs and more"
    " over the synthetic ones. The arms with noise or tags change the same hypotheses of beam search. The "
    "test sources are real and therefore have no tag: a model with tags may translate them mainly by what it "
    "learned from the few real pairs. All sentences are captions of photographs, so the monolingual ones are "
    "as close to the test data as the real pairs; published gains of noise (Edunov et al. 2018) and tags "
    "(Caswell et al. 2019) were measured with millions of pairs of other texts. A table of all ten "
    "methods at ratio 1, from other runs, is backtranslation-methods.md.",
)
