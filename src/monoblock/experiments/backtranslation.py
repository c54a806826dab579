"""Back-translation compared: few pairs and many target sentences, one row for each way to make the missing sources.

For every seed: a model of the other direction is trained on the pairs; it makes a source for each target sentence, by
beam search, by sampling and by restricted sampling; each arm then trains a model of the wanted direction on the pairs
and its made ones, with the same number of steps.  One tokenizer, cut from the pairs and the target sentences, serves
all of them.  The arms that noise or tag start from the same beam hypotheses, so only that differs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monoblock.data import corpora
from monoblock.data.readers import Pair, read_pairs
from monoblock.errors import ConfigError
from monoblock.experiments.arms import Result, Row, listed, loaded, numbers, seeded, trained
from monoblock.schema import check, check_at_least, check_positive
from monoblock.tasks.backtranslation import Method, raw, write_pairs
from monoblock.tasks.evaluation import Asked, evaluate
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

    def __post_init__(self) -> None:
        check(self)
        check_at_least(self, 1, "pairs", "monolingual", "limit")
        check_positive(self, "ratio")


def run(asked: Options, overrides: list[str], folder: Path, data: Path | None) -> Iterator[str | Result]:
    """Train and measure every arm; the last thing yielded is the result."""
    recipe, arms, seeds = read(asked.recipe, overrides), listed(asked.arms, list(ARMS)), numbers(asked.seeds)
    if recipe.train.objective != "pairs":
        raise ConfigError(f"back-translation needs a recipe for pairs; {asked.recipe} is {recipe.train.objective}")
    if recipe.data.direction not in OTHER:
        raise ConfigError(f"data.direction={recipe.data.direction!r} has no other direction; write forward or backward")
    rows = arranged(corpora.load(recipe.data.corpus, "train", folder=data), recipe.data).rows
    if asked.pairs >= len(rows):
        raise ConfigError(f"pairs={asked.pairs} leaves no target sentence of the {len(rows):,} rows; write less")
    sentences = [row.target for row in rows[asked.pairs : asked.pairs + asked.monolingual]]
    tokenizer = _tokenizer(recipe, rows[: asked.pairs], sentences, folder / "tokenizer")
    limited: dict[str, Any] = {"data": {"limit": asked.pairs}, "tokenizer": {"folder": str(tokenizer)}}
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for seed in seeds:
        place = folder / f"seed-{seed}"
        for arm in arms:
            method, changes = ARMS[arm], limited
            if method is not None:
                made = place / f"{arm}.tsv"
                yield from _made(recipe, limited, method, sentences, seed, place, made, data)
                told = limited["data"] | {"synthetic": str(made), "ratio": asked.ratio}
                changes = limited | {"data": told}
            yield from trained(seeded(recipe, seed, **changes), place / arm, data)
            figures = _measured(place / arm, recipe, asked, data)
            found[arm].append(figures[asked.figure])
            yield f"{arm}, seed {seed}: {asked.figure} {figures[asked.figure]:.2f}"
    about = {
        "recipe": asked.recipe,
        "pairs": asked.pairs,
        "target_sentences": len(sentences),
        "ratio": asked.ratio,
        "seeds": seeds,
        "steps": recipe.train.steps,
        "split": figures["split"],
        "signature": figures.get("signature"),
    }
    yield Result("backtranslation", asked.figure, tuple(Row(arm, tuple(found[arm])) for arm in arms), about)


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


def _made(
    recipe: Recipe,
    limited: dict[str, Any],
    method: Method,
    sentences: list[str],
    seed: int,
    place: Path,
    out: Path,
    data: Path | None,
) -> Iterator[str]:
    """The file of an arm: the hypotheses of its search, noised and tagged as it asks."""
    if out.is_file():
        return
    search = SEARCH.get(method.name, method.name)
    found = place / f"{search}.hypotheses.tsv"
    if not found.is_file():
        back = limited | {"data": limited["data"] | {"direction": OTHER[recipe.data.direction]}}
        yield from trained(seeded(recipe, seed, **back), place / "backward", data)
        yield f"seed {seed}: making {len(sentences):,} sources by {search}"
        pipe = loaded(place / "backward", recipe.train.device)
        pairs = (Pair(source, target) if source else None for source, target in raw(pipe, sentences, search, seed=seed))
        write_pairs(found, pairs)
    rows = enumerate(read_pairs(found))
    write_pairs(out, (Pair(method.dress(row.source, seed=seed, number=n), row.target) for n, row in rows))


def _measured(folder: Path, recipe: Recipe, asked: Options, data: Path | None) -> dict[str, Any]:
    pipe = loaded(folder, recipe.train.device)
    return evaluate(pipe, Asked(data=recipe.data.corpus, folder=data, limit=asked.limit)).figures
