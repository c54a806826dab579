"""The rows of a corpus of pairs as a recipe asks for them: normalised, turned round, tagged, mixed with made ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from monoblock.data.corpora import load as corpora
from monoblock.data.corpora.load import Corpus
from monoblock.data.indic_normalization import normalize_indic
from monoblock.data.readers.records import Pair
from monoblock.errors import ConfigError
from monoblock.recipes.schema import DataSection
from monoblock.tasks.tags import script_tag

NORMALIZERS: dict[str, Callable[[str], str]] = {"none": lambda text: text, "indic": normalize_indic}


def prepare_pairs(corpus: Corpus, section: DataSection) -> Corpus:
    """A corpus of pairs as the model is to see it; other corpora as they are."""
    if corpus.kind != "pairs":
        about = {"direction": section.direction != "forward", "tag": section.tag != "none", "prefix": section.prefix}
        about |= {"synthetic": section.synthetic, "tasks": section.tasks}
        named = [f"data.{name}" for name, given in about.items() if given]
        if named:
            raise ConfigError(f"{named[0]} is about pairs, and {corpus.name} is {corpus.kind}; leave it out")
        return corpus
    return replace(corpus, rows=list(_prepare_rows(corpus.rows, section)))


def _prepare_rows(rows: Iterable[Pair], section: DataSection) -> Iterable[Pair]:
    clean = NORMALIZERS[section.normalize]
    for source, target, seen in rows:
        pair = Pair(clean(source), clean(target), seen)
        if section.direction in ("forward", "both"):
            yield add_source_prefix(pair, section)
        if section.direction in ("backward", "both"):
            yield add_source_prefix(Pair(pair.target, pair.source, seen), section)


def add_source_prefix(pair: Pair, section: DataSection) -> Pair:
    """The pair with what is wanted said before its source, where the recipe says so: a prefix, the target's script."""
    said = [section.prefix, "" if section.tag == "none" else script_tag(pair.target), pair.source]
    return pair._replace(source=" ".join(word for word in said if word))


def load_synthetic_pairs(section: DataSection, data: Path | None) -> Corpus | None:
    """The made pairs a recipe names; they are taken as they stand."""
    if section.synthetic is None:
        return None
    return corpora.load_corpus(section.synthetic, "all", folder=data, kind="pairs")


def mix_pairs(real: Sequence[Pair], synthetic: Sequence[Pair], ratio: float) -> list[Pair]:
    """Real and made pairs, `ratio` made ones for each real one: the fewer of the two are repeated as often as needed.

    Repeated, not sampled, so that an epoch still holds every pair; the last repetition is cut short.
    """
    wanted = len(synthetic) / ratio
    if wanted >= len(real):
        return [*_repeat_to_count(real, round(wanted)), *synthetic]
    return [*real, *_repeat_to_count(synthetic, round(len(real) * ratio))]


def _repeat_to_count(rows: Sequence[Pair], count: int) -> list[Pair]:
    times, rest = divmod(count, len(rows))
    return [*rows] * times + [*rows[:rest]]


def collect_references(rows: Iterable[Pair]) -> dict[str, list[str]]:
    """Source -> every target that is attested for it, in the order of the file."""
    found: dict[str, list[str]] = {}
    for row in rows:
        accepted = found.setdefault(row.source, [])
        if row.target not in accepted:
            accepted.append(row.target)
    return found
