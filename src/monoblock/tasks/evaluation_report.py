"""The request and the result of an evaluation: metrics, samples, tables and a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monoblock.data.corpora.load import Corpus, infer_corpus_kind, load_corpus
from monoblock.data.readers.by_path import DEFAULT_HOLDOUT, Holdout
from monoblock.data.readers.records import CorpusKind
from monoblock.errors import ConfigError, SplitError, did_you_mean

if TYPE_CHECKING:
    from monoblock.tasks.word_frequencies import WordFrequencies

DEFAULT_BATCH = 64  # number of rows processed at once
MAX_MISTAKES = 12  # number of mistakes listed in the metrics and drawn next to a confusion matrix


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    data: str  # the name of a corpus, or a path
    split: str | None = None  # None: test if there is one, else valid
    folder: Path | None = None  # the folder that contains the corpora
    holdout: Holdout = DEFAULT_HOLDOUT  # which rows were held out, if the model was trained on these data
    samples: int = 0  # number of predictions to return as samples
    limit: int | None = None  # evaluate on at most this many rows
    options: dict[str, Any] = field(default_factory=dict)  # decoding options
    batch: int | None = None  # number of rows processed at once; None: 64, and more if a GPU generates text
    n_best: int = 5  # transliteration: the k of top-k accuracy
    lowercase: bool = False  # translation: compute BLEU on lower-cased text
    # Translation: the target language, for the Moses tokenizer; None: from the suffix of the files, else English.
    language: str | None = None
    stride: int | None = None  # language models: windows begin so many tokens apart; None: they do not overlap
    context: int | None = None  # language models: tokens in a window; None: the context length of the model
    rescore: bool = False  # transliteration: also rerank the hypotheses by word frequencies

    @property
    def batch_size(self) -> int:
        """The number of rows processed at once, in a task that generates no text."""
        return DEFAULT_BATCH if self.batch is None else self.batch


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass
class Evaluation:
    """The result of an evaluation; a metric that is a number is also read as `evaluation["accuracy"]`."""

    metrics: dict[str, Any]
    samples: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # explanations of the metrics
    word_frequencies: WordFrequencies | None = None
    tables: list[Table] = field(default_factory=list)
    save_plot: Callable[[Path], Path] | None = None

    @property
    def scores(self) -> dict[str, float]:
        """The metrics that are numbers."""
        return {name: float(value) for name, value in self.metrics.items() if isinstance(value, int | float)}

    def __getitem__(self, name: str) -> float:
        if name not in self.scores:
            raise KeyError(f"there is no metric {name!r}{did_you_mean(name, self.scores)}: {', '.join(self.scores)}")
        return self.scores[name]


def read_corpus(
    request: EvaluationRequest,
    kinds: CorpusKind | Sequence[CorpusKind],
    split: str | None = None,
    *,
    kind: CorpusKind | None = None,
) -> Corpus:
    """Read the rows to evaluate on; raise ConfigError if the kind of the corpus is not in `kinds`.

    split: read all rows of this split; None reads the split of the request, up to its `limit`.
    kind: the kind of corpus that `request.data` is, if it is a path; None infers it from the suffix.
    """
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    splits = [split or request.split] if split or request.split else ["test", "valid"]
    kind = kind or infer_corpus_kind(request.data, kinds, folder=request.folder)
    options: dict[str, Any] = {"folder": request.folder, "holdout": request.holdout}
    for index, name in enumerate(splits):
        try:
            corpus = load_corpus(request.data, name, kind=kind, **options)  # type: ignore[arg-type]
        except SplitError:  # the split is missing; one that is damaged raises another error
            if index + 1 == len(splits):
                raise
            continue
        if corpus.kind not in kinds:
            raise ConfigError(
                f"this model is evaluated on data of the kind {' or '.join(kinds)}, but {request.data} is of the kind "
                f"{corpus.kind}; give other data"
            )
        limit = None if split is not None else request.limit
        return Corpus(corpus.name, corpus.kind, corpus.split, corpus.rows[:limit])
    raise AssertionError("there is at least one split")
