"""Back-translation compared: few pairs and many target sentences, one row for each way to make the missing sources.

For every seed: a model of the other direction is trained on the pairs; it makes a source for each target sentence, by
beam search, by sampling and by restricted sampling; each arm then trains a model of the wanted direction on the pairs
and its made ones, with the same number of steps.  One tokenizer, cut from the pairs and the target sentences, serves
all of them.  The arms that noise or tag start from the same beam hypotheses, so only that differs.  What is made lies
in files: an experiment that was interrupted goes on, and with `jobs` its parts run in processes of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from monoblock.data import corpora
from monoblock.data.readers import Pair, read_pairs
from monoblock.errors import ConfigError
from monoblock.experiments.arms import Result, Row, listed, loaded, numbers, seeded, trained
from monoblock.experiments.jobs import Job, carried_out
from monoblock.schema import check, check_at_least, check_positive
from monoblock.tasks.backtranslation import METHODS, Method, raw, write_pairs
from monoblock.tasks.evaluation import Asked, evaluate
from monoblock.tasks.folder import write
from monoblock.tasks.pairing import arranged
from monoblock.tasks.recipe import Recipe, read
from monoblock.tasks.tags import SYNTHETIC
from monoblock.tokenizers.tokenizer import Tokenizer

# Arm -> how its sources are made; the first makes none.
ARMS: dict[str, Method | None] = {
    "none": None,
    "beam": Method("beam"),
    "sampled": Method("sample"),
    "restricted": Method("restricted"),
    "permutation": Method("noised", ("permutation",)),
    "drop": Method("noised", ("drop",)),
    "blank": Method("noised", ("blank",)),
    "noised": Method("noised"),
    "tagged": Method("beam", tag=True),
    "tagged-noised": Method("noised", tag=True),
}
SEARCH = {"noised": "beam"}  # made from the hypotheses of another method
OTHER = {"forward": "backward", "backward": "forward"}  # direction
BESIDE = ("bleu", "bleu_tokenized", "chrf")  # figures that are told beside the one asked for
FIGURES = "figures.json"


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str = "multi30k"
    pairs: int = 5_000
    monolingual: int = 24_000
    ratio: float = 1.0  # made pairs for each real one
    seeds: str | int = "1,2,3"
    arms: str = ",".join(ARMS)
    limit: int | None = None  # test sources
    figure: str = "bleu_lowercased"
    jobs: int = 1  # processes at once; several share one GPU
    rows: int = 512  # sequences written at once, beams counted

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "pairs", "monolingual", "limit", "jobs", "rows")
        check_positive(self, "ratio")


@dataclass(frozen=True)
class Setting:
    """What every job is given: it makes the rest of it anew, so that a process of its own can."""

    asked: Options
    overrides: tuple[str, ...]
    folder: Path
    data: Path | None

    @property
    def recipe(self) -> Recipe:
        return read(self.asked.recipe, self.overrides)

    def rows(self) -> list[Pair]:
        recipe = self.recipe
        return arranged(corpora.load(recipe.data.corpus, "train", folder=self.data), recipe.data).rows

    def sentences(self) -> list[str]:
        """The target sides that stand for text in one language: those of the rows beyond the pairs."""
        first = self.asked.pairs
        return [row.target for row in self.rows()[first : first + self.asked.monolingual]]

    def trained(self, seed: int, name: str, **data: Any) -> Iterator[str]:
        """A model of the pairs, with changes to the data part."""
        limited = {"limit": self.asked.pairs, **data}
        tokenizer = {"folder": str(self.folder / "tokenizer")}
        recipe = seeded(self.recipe, seed, data=limited, tokenizer=tokenizer)
        yield from trained(recipe, self.place(seed) / name, self.data)

    def place(self, seed: int) -> Path:
        return self.folder / f"seed-{seed}"


def run(asked: Options, overrides: list[str], folder: Path, data: Path | None) -> Iterator[str | Result]:
    """Train and measure every arm; the last thing yielded is the result."""
    here = Setting(asked, tuple(overrides), folder, data)
    recipe, arms, seeds = here.recipe, listed(asked.arms, list(ARMS)), numbers(asked.seeds)
    if recipe.train.objective != "pairs":
        raise ConfigError(f"back-translation needs a recipe for pairs; {asked.recipe} is {recipe.train.objective}")
    if recipe.data.direction not in OTHER:
        raise ConfigError(f"data.direction={recipe.data.direction!r} has no other direction; write forward or backward")
    rows = here.rows()
    if asked.pairs >= len(rows):
        raise ConfigError(f"pairs={asked.pairs} leaves no target sentence of the {len(rows):,} rows; write less")
    sentences = here.sentences()
    _tokenizer(recipe, rows[: asked.pairs], sentences, folder / "tokenizer")
    yield from carried_out(_jobs(here, arms, seeds), asked.jobs)
    found = {arm: [_figures(here.place(seed) / arm) for seed in seeds] for arm in arms}
    figures = found[arms[0]][0]
    if asked.figure not in figures:
        raise ConfigError(f"figure={asked.figure} is not measured here; there is {', '.join(figures)}")
    about = {
        "recipe": asked.recipe,
        "changes": list(overrides),
        "direction": recipe.data.direction,
        "pairs": asked.pairs,
        "target_sentences": len(sentences),
        "ratio": asked.ratio,
        "seeds": seeds,
        "steps": recipe.train.steps,
        "split": figures["split"],
        "signature": figures.get("signature"),
    }
    yield Result("backtranslation", asked.figure, tuple(_row(arm, found[arm], asked.figure) for arm in arms), about)


def _row(arm: str, found: list[dict[str, Any]], figure: str) -> Row:
    others = [name for name in BESIDE if name in found[0] and name != figure]
    return Row(arm, tuple(one[figure] for one in found), {name: fmean(one[name] for one in found) for name in others})


# -- what is done ---------------------------------------------------------------------------------------------------


def _jobs(here: Setting, arms: list[str], seeds: list[int]) -> list[Job]:
    """Models of the other direction first, for most arms wait for them; then searches, then arms."""
    searches = list(dict.fromkeys(_search(method) for arm in arms if (method := ARMS[arm]) is not None))
    back = [Job(f"backward, seed {seed}", _backward, (here, seed)) for seed in seeds if searches]
    made = [
        Job(f"sources by {search}, seed {seed}", _hypotheses, (here, seed, search), (f"backward, seed {seed}",))
        for seed in seeds
        for search in searches
    ]
    last = []
    for arm in arms:
        method = ARMS[arm]
        for seed in seeds:
            needs = () if method is None else (f"sources by {_search(method)}, seed {seed}",)
            last.append(Job(f"{arm}, seed {seed}", _arm, (here, seed, arm), needs))
    return [*back, *made, *last]


def _search(method: Method) -> str:
    return SEARCH.get(method.name, method.name)


def _backward(here: Setting, seed: int) -> Iterator[str]:
    """The model that makes sources, one for all arms of a seed."""
    yield from here.trained(seed, "backward", direction=OTHER[here.recipe.data.direction])


def _hypotheses(here: Setting, seed: int, search: str) -> Iterator[str]:
    """A source for every target sentence, before noise and tags."""
    found = here.place(seed) / f"{search}.hypotheses.tsv"
    if found.is_file():
        return
    sentences = here.sentences()
    yield f"sources by {search}, seed {seed}: {len(sentences):,} are made"
    pipe = loaded(here.place(seed) / "backward", here.recipe.train.device)
    made = raw(pipe, sentences, search, seed=seed, batch=max(1, here.asked.rows // METHODS[search]["num_beams"]))
    write_pairs(found, (Pair(source, target) if source else None for source, target in made))


def _arm(here: Setting, seed: int, arm: str) -> Iterator[str]:
    """Train an arm on its file, the hypotheses of its search noised and tagged, and measure it."""
    place, method, changes = here.place(seed), ARMS[arm], {}
    if method is not None:
        file = place / f"{arm}.tsv"
        if not file.is_file():
            rows = enumerate(read_pairs(place / f"{_search(method)}.hypotheses.tsv"))
            dressed = (Pair(method.dress(row.source, seed=seed, number=n), row.target) for n, row in rows)
            write_pairs(file, dressed)
        changes = {"synthetic": str(file), "ratio": here.asked.ratio}
    yield from here.trained(seed, arm, **changes)
    if not (place / arm / FIGURES).is_file():
        pipe = loaded(place / arm, here.recipe.train.device)
        batch = max(1, here.asked.rows // here.recipe.generate.num_beams)
        asked = Asked(data=here.recipe.data.corpus, folder=here.data, limit=here.asked.limit, batch=batch)
        write(place / arm / FIGURES, json.dumps(evaluate(pipe, asked).figures, indent=2) + "\n")
    figures = _figures(place / arm)
    yield f"{arm}, seed {seed}: {here.asked.figure} {figures.get(here.asked.figure, 0.0):.2f}"


def _figures(folder: Path) -> dict[str, Any]:
    return json.loads((folder / FIGURES).read_text(encoding="utf-8"))


def _tokenizer(recipe: Recipe, pairs: list[Pair], sentences: list[str], folder: Path) -> Path:
    """One for all arms, with the tags that some of them use."""
    if not (folder / "tokenizer.json").is_file():
        part = recipe.tokenizer
        texts = [text for pair in pairs for text in (pair.source, pair.target)] + sentences
        specials = list(dict.fromkeys(["pad", "bos", "eos", *part.tags, *SYNTHETIC]))
        made = Tokenizer.train(
            part.kind, texts, part.vocab, marker=part.marker, specials=specials, lowercase=part.lowercase
        )
        folder.mkdir(parents=True, exist_ok=True)
        made.save_pretrained(folder)
    return folder
