"""Prepare pairs for a recipe: normalize them, swap source and target, add tags, mix in synthetic pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from monoblock.data.corpora.load import Corpus, load_corpus
from monoblock.data.indic_normalization import normalize_indic
from monoblock.data.readers.records import Pair
from monoblock.errors import ConfigError
from monoblock.recipes.schema import DataSection
from monoblock.tasks.tags import script_tag

NORMALIZERS: dict[str, Callable[[str], str]] = {"none": lambda text: text, "indic": normalize_indic}


def prepare_pairs(corpus: Corpus, section: DataSection) -> Corpus:
    """Normalize, swap and tag the pairs of a corpus as a recipe says; return a corpus of another kind unchanged."""
    if corpus.kind != "pairs":
        options = {"direction": section.direction != "forward", "tag": section.tag != "none", "prefix": section.prefix}
        options |= {"synthetic": section.synthetic, "tasks": section.tasks}
        name = next((name for name, is_set in options.items() if is_set), None)
        if name is not None:
            raise ConfigError(f"data.{name} needs pairs, but the corpus {corpus.name} is {corpus.kind}; leave it out")
        return corpus
    return replace(corpus, rows=list(_prepare_rows(corpus.rows, section)))


def _prepare_rows(rows: Iterable[Pair], section: DataSection) -> Iterable[Pair]:
    normalize = NORMALIZERS[section.normalize]
    for source, target, frequency in rows:
        pair = Pair(normalize(source), normalize(target), frequency)
        if section.direction in ("forward", "both"):
            yield add_source_prefix(pair, section)
        if section.direction in ("backward", "both"):
            yield add_source_prefix(Pair(pair.target, pair.source, frequency), section)


def add_source_prefix(pair: Pair, section: DataSection) -> Pair:
    """Put the prefix and the tag for the script of the target before the source, if the recipe asks for them."""
    parts = [section.prefix, "" if section.tag == "none" else script_tag(pair.target), pair.source]
    return pair._replace(source=" ".join(part for part in parts if part))


def load_synthetic_pairs(section: DataSection, data: Path | None) -> Corpus | None:
    """Load the synthetic pairs of a recipe as they are, neither normalized nor tagged; None if it has none."""
    if section.synthetic is None:
        return None
    return load_corpus(section.synthetic, "all", folder=data, kind="pairs")


def mix_pairs(real: Sequence[Pair], synthetic: Sequence[Pair], ratio: float) -> list[Pair]:
    """Return all real and all synthetic pairs, with `ratio` synthetic pairs for each real pair.

    To reach the ratio, one of the two lists is repeated from its beginning, the last time only in part. No pair is
    dropped, so an epoch contains every pair at least once.
    """
    num_real = len(synthetic) / ratio
    if num_real >= len(real):
        return [*_repeat_to_count(real, round(num_real)), *synthetic]
    return [*real, *_repeat_to_count(synthetic, round(len(real) * ratio))]


def _repeat_to_count(rows: Sequence[Pair], count: int) -> list[Pair]:
    repeats, remainder = divmod(count, len(rows))
    return [*rows] * repeats + [*rows[:remainder]]


def collect_references(rows: Iterable[Pair]) -> dict[str, list[str]]:
    """Map each source to its distinct targets, in the order of the rows."""
    references: dict[str, list[str]] = {}
    for row in rows:
        targets = references.setdefault(row.source, [])
        if row.target not in targets:
            targets.append(row.target)
    return references
