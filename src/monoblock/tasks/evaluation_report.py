"""The request and the result of an evaluation: metrics, samples, tables and a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monoblock.data.corpora.load import Corpus, infer_corpus_kind, load_corpus
from monoblock.data.readers.records import CorpusKind
from monoblock.errors import ConfigError, SplitError
from monoblock.tasks.seq2seq.rescoring import WordFrequencies

MAX_MISTAKES = 12  # listed in the metrics and drawn beside a confusion matrix


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    data: str  # a named corpus or a path
    split: str | None = None  # None: test if there is one, else valid
    folder: Path | None = None  # folder with corpora
    samples: int = 0  # predictions to return
    limit: int | None = None  # at most so many rows
    options: dict[str, Any] = field(default_factory=dict)  # decoding options
    batch: int = 64
    n_best: int = 5  # the k of top_k accuracy
    lowercase: bool = False
    language: str | None = (
        None  # of the targets, for the Moses tokenizer; None: by the suffix of the files, else English
    )
    stride: int | None = None  # language models: tokens between windows; None: blocks
    context: int | None = None  # None: that of the model
    rescore: bool = False  # transliteration: rerank by word frequencies


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass
class Evaluation:
    metrics: dict[str, Any]
    samples: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # how to read the metrics
    word_frequencies: WordFrequencies | None = None
    tables: list[Table] = field(default_factory=list)
    save_plot: Callable[[Path], Path] | None = None


def read_corpus(
    request: EvaluationRequest,
    kinds: CorpusKind | Sequence[CorpusKind],
    split: str | None = None,
    *,
    kind: CorpusKind | None = None,
) -> Corpus:
    """Read the rows to evaluate on; raise ConfigError if the kind of the corpus is not in `kinds`.

    split: read this split, all of it, instead of the split and the `limit` of the request.
    kind: the kind of corpus to read a path as; None infers it from the suffix.
    """
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    splits = [split or request.split] if split or request.split else ["test", "valid"]
    kind = kind or infer_corpus_kind(request.data, kinds, folder=request.folder)
    for index, name in enumerate(splits):
        try:
            corpus = load_corpus(request.data, name, folder=request.folder, kind=kind)  # type: ignore[arg-type]
        except SplitError:  # only a missing split: a faulty one raises another error
            if index + 1 == len(splits):
                raise
            continue
        if corpus.kind not in kinds:
            raise ConfigError(
                f"this model is evaluated on {' or '.join(kinds)}, but {request.data} is {corpus.kind}; give other data"
            )
        limit = None if split is not None else request.limit
        return Corpus(corpus.name, corpus.kind, corpus.split, corpus.rows[:limit])
    raise AssertionError("there is at least one split")
