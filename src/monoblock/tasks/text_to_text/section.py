"""The recipe section [text_to_text]: the prefix that names the task, and further tasks of the same model."""

from __future__ import annotations

from dataclasses import dataclass

from monoblock.config.schema import check_at_least, check_types
from monoblock.data.readers.records import CorpusKind
from monoblock.tasks.seq2seq.section import Seq2SeqSection

TEXT_CORPUS_KINDS: tuple[CorpusKind, ...] = ("pairs", "questions", "labelled")  # those that convert to pairs of texts


@dataclass(frozen=True, kw_only=True)
class ExtraTask:
    """A task that a text-to-text model learns in addition to the task of data.corpus."""

    corpus: str  # of pairs, labelled texts or questions: a named corpus or a path
    prefix: str  # put before each source: "classify:"
    limit: int | None = None  # use at most this many training rows

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "limit")


@dataclass(frozen=True, kw_only=True)
class TextToTextSection(Seq2SeqSection):
    prefix: str = ""  # put before each source to name the task: "summarize:"
    tasks: tuple[ExtraTask, ...] = ()  # further tasks of the same model, each with its corpus and prefix
