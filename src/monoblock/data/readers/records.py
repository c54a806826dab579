"""The classes of corpus rows, one for each kind of corpus; a row of plain text is a `str`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CorpusKind = Literal["text", "pairs", "labelled", "tagged", "images", "questions", "chat", "tokens"]
DocumentBoundaries = Literal["file", "blank-lines"]  # a text file is one document, or one for each paragraph


class Pair(NamedTuple):
    """A source text and its target; `frequency` is how often the pair was observed (1 if unknown)."""

    source: str
    target: str
    frequency: int = 1


class LabelledText(NamedTuple):
    """A text, or a pair of texts, and its class."""

    text: str
    label: str
    text_pair: str | None = None


class TaggedSentence(NamedTuple):
    """The words of a sentence and one label for each word; `document` is the number of its document (0 if unknown)."""

    words: tuple[str, ...]
    labels: tuple[str, ...]
    document: int = 0


class LabelledPicture(NamedTuple):
    """A picture that is decoded when it is used, and its class; a row of the kind "images"."""

    path: str
    label: str


class LabelledImage(NamedTuple):
    pixels: NDArray[np.float32]  # (channels, height, width), from 0 to 1
    label: int


class Question(NamedTuple):
    """A question about a context, with its accepted answers and the character offset of each answer in the context.

    A question without answers is unanswerable.
    """

    question: str
    context: str
    answers: tuple[str, ...] = ()
    answer_starts: tuple[int, ...] = ()
    id: str = ""


class Message(NamedTuple):
    role: str
    content: str


class Chat(NamedTuple):
    messages: tuple[Message, ...]

    def to_dicts(self, count: int | None = None) -> list[dict[str, str]]:
        """Return the first `count` messages (default: all) as the dicts that chat templates take."""
        return [message._asdict() for message in self.messages[:count]]
