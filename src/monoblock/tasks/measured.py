"""What is asked of an evaluation and what it tells: one row of figures, samples, tables, a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monoblock.data import corpora
from monoblock.data.corpora import Corpus
from monoblock.data.readers import Kind
from monoblock.errors import ConfigError, SplitError
from monoblock.tasks.rescoring import Frequencies


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be measured, and how."""

    data: str
    split: str | None = None  # None: test where there is one, else valid
    folder: Path | None = None
    samples: int = 0
    limit: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of decoding
    batch: int = 64
    n_best: int = 5  # words: top_k is measured with this k
    lowercase: bool = False
    language: str | None = None  # of the targets, for the Moses tokenizer; None: by the files' endings, else English
    stride: int | None = None
    context: int | None = None
    rescore: bool = False


@dataclass(frozen=True)
class Table:
    """More than one figure of a kind."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass
class Measured:
    figures: dict[str, Any]
    samples: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what a reader must know about the figures
    words: Frequencies | None = None
    tables: list[Table] = field(default_factory=list)  # beside the figures, for a reader
    picture: Callable[[Path], Path] | None = None  # draws what there is to see


def read(asked: Asked, kinds: Kind | Sequence[Kind], split: str | None = None, *, kind: Kind | None = None) -> Corpus:
    """The rows that are measured on, of a kind or of several; a path is read as its ending says, or as `kind`."""
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    wanted = [split or asked.split] if split or asked.split else ["test", "valid"]
    known = kind or corpora.kind_of(asked.data, kinds, folder=asked.folder)
    for place, name in enumerate(wanted):
        try:
            found = corpora.load(asked.data, name, folder=asked.folder, kind=known)  # type: ignore[arg-type]
        except SplitError:  # a split with a fault is no missing one
            if place + 1 == len(wanted):
                raise
            continue
        if found.kind not in kinds:
            raise ConfigError(
                f"this model is measured on {' or '.join(kinds)}, and {asked.data} is {found.kind}; give other data"
            )
        limit = None if split is not None else asked.limit
        return Corpus(found.name, found.kind, found.split, found.rows[:limit])
    raise AssertionError("one split at least is tried")
