"""Texts as a model reads them: between the special tokens its tokenizer puts around one text or two, with segments.

`<cls> text <sep>`, `<cls> text <sep> text <sep>`, or whatever a published tokenizer says.  Training, prediction and
evaluation frame texts here, so that a model never meets a frame it was not trained in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from monoblock.tokenizers.tokenizer import Tokenizer


class Framed(NamedTuple):
    ids: list[int]
    segments: list[int]
    begins: int = 0  # where the first text stands
    cut: int = 0  # tokens that were left out


class Frame:
    """Give it the ids of a text, or of two; `longest` counts the special tokens, and `bare` leaves them out."""

    def __init__(self, tokenizer: Tokenizer, longest: int | None = None, *, bare: bool = False) -> None:
        plain: list[tuple[int | None, int]] = [(None, 0)]
        self.longest = longest
        self.single = plain if bare else tokenizer.frame(1)
        self.double = [*plain, (None, 1)] if bare else tokenizer.frame(2)

    def __call__(self, text: Sequence[int], pair: Sequence[int] | None = None) -> Framed:
        """The framed ids; where they are too many, the longer text loses its end, token by token."""
        template = self.single if pair is None else self.double
        texts = [list(text), *([] if pair is None else [list(pair)])]
        room = None if self.longest is None else self.longest - sum(token is not None for token, _ in template)
        kept = _within([len(one) for one in texts], room)
        cut = sum(map(len, texts)) - sum(kept)
        waiting = iter(one[:count] for one, count in zip(texts, kept, strict=True))
        ids: list[int] = []
        segments: list[int] = []
        begins = next(place for place, (token, _) in enumerate(template) if token is None)
        for token, segment in template:
            some = next(waiting) if token is None else [token]
            ids += some
            segments += [segment] * len(some)
        return Framed(ids, segments, begins, cut)


def _within(lengths: list[int], room: int | None) -> list[int]:
    """How much of each text is kept so that all of it fits: the longest gives way first."""
    if room is None or sum(lengths) <= room:
        return lengths
    room = max(0, room)  # the frame alone may be too long
    if len(lengths) == 1:
        return [room]
    first, second = lengths
    half = room // 2
    if second <= half:
        return [room - second, second]
    if first <= room - half:
        return [first, room - first]
    return [room - half, half]


class FramedWords(NamedTuple):
    ids: list[int]
    places: list[int]  # where the first piece of each word stands; words beyond the end have none


class Words:
    """Words to framed ids, each cut into pieces by itself with the space before it; its first piece stands for it."""

    def __init__(self, tokenizer: Tokenizer, frame: Frame) -> None:
        self.tokenizer, self.frame = tokenizer, frame
        self.known: dict[str, list[int]] = {}
        # A word of which a tokenizer leaves nothing still has a place.
        self.nothing = [next((n for n in (tokenizer.unk_id, tokenizer.mask_id, tokenizer.pad_id) if n is not None), 0)]

    def pieces(self, word: str) -> list[int]:
        if word not in self.known:
            self.known[word] = self.tokenizer.encode(f" {word}") or self.nothing
        return self.known[word]

    def length(self, words: Sequence[str]) -> int:
        """How many ids they are with the frame."""
        return len(self.frame.single) - 1 + sum(len(self.pieces(word)) for word in words)

    def __call__(self, words: Sequence[str]) -> FramedWords:
        return self.framed([self.pieces(word) for word in words])

    def among(self, rows: Sequence[Sequence[str]]) -> FramedWords:
        """Rows read together, parted as two texts are."""
        return self.framed(self.parted([[self.pieces(word) for word in row] for row in rows]))

    def parted(self, rows: Sequence[Sequence[Sequence[int]]]) -> list[Sequence[int]]:
        """Rows of words in pieces as one row; a separator follows the last word of each but the last."""
        ends = [] if self.tokenizer.sep_id is None else [self.tokenizer.sep_id]
        found: list[Sequence[int]] = []
        for row in rows:
            if found:
                found[-1] = [*found[-1], *ends]
            found += row
        return found

    def framed(self, pieces: Sequence[Sequence[int]]) -> FramedWords:
        """Words that are in pieces already; those that do not wholly fit are left out, with all that follow."""
        places: list[int] = []
        flat: list[int] = []
        begins = next(place for place, (token, _) in enumerate(self.frame.single) if token is None)
        for some in pieces:
            longer = len(self.frame.single) - 1 + len(flat) + len(some)
            if places and self.frame.longest is not None and longer > self.frame.longest:
                break
            places.append(begins + len(flat))
            flat += some
        return FramedWords(self.frame(flat).ids, places)
