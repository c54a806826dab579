"""The rows of a corpus of pairs as a recipe asks for them: normalised, turned round, tagged, mixed with made ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from monoblock.data import corpora
from monoblock.data.corpora import Corpus
from monoblock.data.indic import normalize
from monoblock.data.readers import Pair
from monoblock.errors import ConfigError
from monoblock.tasks.recipe import DataPart
from monoblock.tasks.tags import script_tag

NORMALIZE: dict[str, Callable[[str], str]] = {"none": lambda text: text, "indic": normalize}


def arranged(corpus: Corpus, part: DataPart) -> Corpus:
    """A corpus of pairs as the model is to see it; other corpora as they are."""
    if corpus.kind != "pairs":
        about = {"direction": part.direction != "forward", "tag": part.tag != "none", "prefix": part.prefix}
        about |= {"synthetic": part.synthetic, "tasks": part.tasks}
        named = [f"data.{name}" for name, given in about.items() if given]
        if named:
            raise ConfigError(f"{named[0]} is about pairs, and {corpus.name} is {corpus.kind}; leave it out")
        return corpus
    return replace(corpus, rows=list(_arranged(corpus.rows, part)))


def _arranged(rows: Iterable[Pair], part: DataPart) -> Iterable[Pair]:
    clean = NORMALIZE[part.normalize]
    for source, target, seen in rows:
        pair = Pair(clean(source), clean(target), seen)
        if part.direction in ("forward", "both"):
            yield tagged(pair, part)
        if part.direction in ("backward", "both"):
            yield tagged(Pair(pair.target, pair.source, seen), part)


def tagged(pair: Pair, part: DataPart) -> Pair:
    """The pair with what is wanted said before its source, where the recipe says so: a prefix, the target's script."""
    said = [part.prefix, "" if part.tag == "none" else script_tag(pair.target), pair.source]
    return pair._replace(source=" ".join(word for word in said if word))


def synthetic(part: DataPart, data: Path | None) -> Corpus | None:
    """The made pairs a recipe names; they are taken as they stand."""
    if part.synthetic is None:
        return None
    return corpora.load(part.synthetic, "all", folder=data, kind="pairs")


def mixed(real: Sequence[Pair], made: Sequence[Pair], ratio: float) -> list[Pair]:
    """Real and made pairs, `ratio` made ones for each real one: the fewer of the two are repeated as often as needed.

    Repeated, not sampled, so that an epoch still holds every pair; the last repetition is cut short.
    """
    wanted = len(made) / ratio
    if wanted >= len(real):
        return [*_filled(real, round(wanted)), *made]
    return [*real, *_filled(made, round(len(real) * ratio))]


def _filled(rows: Sequence[Pair], count: int) -> list[Pair]:
    times, rest = divmod(count, len(rows))
    return [*rows] * times + [*rows[:rest]]


def references(rows: Iterable[Pair]) -> dict[str, list[str]]:
    """Source -> every target that is attested for it, in the order of the file."""
    found: dict[str, list[str]] = {}
    for row in rows:
        accepted = found.setdefault(row.source, [])
        if row.target not in accepted:
            accepted.append(row.target)
    return found
