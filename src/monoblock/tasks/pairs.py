"""Pairs of source and target: normalize them, swap source and target, add tags, mix in synthetic pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from monoblock.config.schema import check_positive, check_types
from monoblock.data.corpora.load import Corpus, load_corpus
from monoblock.data.indic_normalization import normalize_indic
from monoblock.data.readers.records import Pair
from monoblock.recipes.schema import Recipe
from monoblock.tasks.splits import CorpusSplits
from monoblock.tasks.tags import script_tag

# Maps the values of seq2seq.normalize to the functions that normalize texts.
NORMALIZERS: dict[str, Callable[[str], str]] = {"none": lambda text: text, "indic": normalize_indic}


@dataclass(frozen=True, kw_only=True)
class Seq2SeqSection:
    """The direction of translation, normalization, tags and synthetic pairs."""

    direction: Literal["forward", "backward", "both"] = (
        "forward"  # "backward": swap source and target; "both": both ways
    )
    normalize: Literal["none", "indic"] = "none"  # "indic": spell Indic words that look the same in one way
    tag: Literal["none", "script"] = "none"  # "script": begin each source with the script of its target, as in <2tamil>
    synthetic: str | None = None  # a file of synthetic training pairs, written by `monoblock backtranslate`
    synthetic_ratio: float = 1.0  # how many synthetic pairs to train on for each real pair

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "synthetic_ratio")


def prepare_splits(splits: CorpusSplits, recipe: Recipe, folder: Path | None, prefix: str = "") -> CorpusSplits:
    """Apply the keys of [seq2seq] to all rows: normalize, swap and tag the pairs, and add synthetic training pairs.

    prefix: a text to put before each source.
    """
    from monoblock.data.corpora.load import fingerprint_rows

    section, digests = recipe_section(recipe), dict(splits.digests)
    train = prepare_pairs(splits.train, section, prefix)
    synthetic = load_synthetic_pairs(section, folder)
    if synthetic is not None:
        digests["synthetic"] = fingerprint_rows(synthetic)
        train = replace(train, rows=mix_pairs(train.rows, synthetic.rows, section.synthetic_ratio))
    valid = None if splits.valid is None else prepare_pairs(splits.valid, section, prefix)
    return replace(splits, train=train, valid=valid, digests=digests)


def recipe_section(recipe: Recipe) -> Seq2SeqSection:
    assert isinstance(recipe.task, Seq2SeqSection)
    return recipe.task


def prepare_pairs(corpus: Corpus, section: Seq2SeqSection, prefix: str = "") -> Corpus:
    """Normalize, swap and tag the pairs of a corpus as `section` says, and put a prefix before each source."""
    return replace(corpus, rows=list(_prepare_rows(corpus.rows, section, prefix)))


def _prepare_rows(rows: Iterable[Pair], section: Seq2SeqSection, prefix: str) -> Iterable[Pair]:
    normalize = NORMALIZERS[section.normalize]
    for source, target, frequency in rows:
        pair = Pair(normalize(source), normalize(target), frequency)
        if section.direction in ("forward", "both"):
            yield add_source_prefix(pair, section, prefix)
        if section.direction in ("backward", "both"):
            yield add_source_prefix(Pair(pair.target, pair.source, frequency), section, prefix)


def add_source_prefix(pair: Pair, section: Seq2SeqSection, prefix: str = "") -> Pair:
    """Put a prefix and, with seq2seq.tag="script", the tag for the script of the target before the source."""
    parts = [prefix, "" if section.tag == "none" else script_tag(pair.target), pair.source]
    return pair._replace(source=" ".join(part for part in parts if part))


def load_synthetic_pairs(section: Seq2SeqSection, data: Path | None) -> Corpus | None:
    """Load the pairs in the file seq2seq.synthetic, without normalizing or tagging them; None if the key is not set.

    data: the user's folder of corpora.
    """
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
