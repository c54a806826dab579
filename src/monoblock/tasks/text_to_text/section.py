"""The recipe section [text_to_text]: the keys of [seq2seq], the prefix of the task, and further tasks."""

from __future__ import annotations

from dataclasses import dataclass

from monoblock.config.schema import check_at_least, check_types
from monoblock.data.readers.records import CorpusKind
from monoblock.tasks.seq2seq.section import Seq2SeqSection

TEXT_CORPUS_KINDS: tuple[CorpusKind, ...] = ("pairs", "questions", "labelled")  # these convert to pairs


@dataclass(frozen=True, kw_only=True)
class ExtraTask:
    """A task that a text-to-text model learns in addition to the task of data.corpus."""

    corpus: str  # a named corpus or a path, with pairs, labelled texts or questions
    prefix: str  # the text before each source that names the task, such as "classify:"
    limit: int | None = None  # train on at most this many rows of the corpus

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 1, "limit")


@dataclass(frozen=True, kw_only=True)
class TextToTextSection(Seq2SeqSection):
    """The keys of [seq2seq], the prefix of the task, and further tasks."""

    prefix: str = ""  # the text before each source that names the task, such as "summarize:"
    tasks: tuple[ExtraTask, ...] = ()  # further tasks that the model learns, each with its own corpus and prefix
