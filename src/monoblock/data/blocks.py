"""Samples of a language model: rows of context + 1 ids, of which the first `context` are read and the last predicted.

    stream      documents flow into each other; the row is cut into blocks, elsewhere in every epoch
    documents   whole documents side by side in a row, each blind to the others; long ones are cut

A sample is a pure function of (sample, epoch, seed), so no state is kept between two of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monoblock.data.order import draws
from monoblock.data.shards import Tokens
from monoblock.errors import InputError

Packing = Literal["stream", "documents"]
NO_DOCUMENT = -1  # the number of what fills a row up


class Piece(NamedTuple):
    """A stretch of the tokens: a document, or a part of one."""

    start: int
    stop: int


class Blocks:
    """`len(blocks)` samples an epoch; `get` makes one.

    In a stream every token is predicted once an epoch, except fewer than `context` that do not fill a last block;
    which ones, the epoch decides.  The last block may run over the end of the tokens into their beginning.
    """

    def __init__(self, tokens: Tokens, context: int, *, packing: Packing = "stream") -> None:
        if context < 1:
            raise InputError(f"context={context} cannot be: write 1 or more")
        if packing not in ("stream", "documents"):
            raise InputError(f"packing={packing!r} cannot be: write 'stream' or 'documents'")
        self.tokens, self.context, self.packing = tokens, context, packing
        self._rows: list[list[Piece]] = []
        if packing == "documents":
            self._rows = pack(_pieces(tokens, context), context + 1)
            if not self._rows:
                raise InputError("no document has two tokens, so there is nothing to predict; try packing='stream'")
        elif len(tokens) < context + 1:
            raise InputError(f"{len(tokens)} tokens are too few for a context of {context}; give more, or shorten it")

    def __len__(self) -> int:
        return len(self._rows) if self.packing == "documents" else len(self.tokens) // self.context

    def get(self, sample: int, epoch: int, seed: int) -> dict[str, NDArray[np.int64]]:
        """ids (context + 1,), and with packed documents their numbers in this row (context + 1,), −1 for filling.

        A target counts where its number is that of the place before it, and not −1.
        """
        if not 0 <= sample < len(self):
            raise InputError(f"there is no sample {sample}; there are {len(self)}")
        if self.packing == "documents":
            return self._packed(sample)
        start = (self.offset(epoch, seed) + sample * self.context) % len(self.tokens)
        return {"ids": self._around(start)}

    def offset(self, epoch: int, seed: int) -> int:
        """Where the first block of an epoch begins, in [0, context)."""
        return int(draws(seed, epoch, 1, "offset")[0] % self.context)

    def _around(self, start: int) -> NDArray[np.int64]:
        stop = start + self.context + 1
        over = stop - len(self.tokens)
        if over <= 0:
            return self.tokens.read(start, stop)
        return np.concatenate([self.tokens.read(start, len(self.tokens)), self.tokens.read(0, over)])

    def _packed(self, sample: int) -> dict[str, NDArray[np.int64]]:
        ids = np.zeros(self.context + 1, np.int64)
        documents = np.full(self.context + 1, NO_DOCUMENT, np.int64)
        at = 0
        for number, piece in enumerate(self._rows[sample]):
            end = at + piece.stop - piece.start
            ids[at:end] = self.tokens.read(*piece)
            documents[at:end] = number
            at = end
        return {"ids": ids, "documents": documents}


def _pieces(tokens: Tokens, context: int) -> Iterator[Piece]:
    """Documents cut where they do not fit; two neighbours share a token, the last target being the next one's input."""
    for start, stop in zip(tokens.offsets[:-1].tolist(), tokens.offsets[1:].tolist(), strict=True):
        for first in range(start, stop - 1, context):  # a single token has nothing to predict
            yield Piece(first, min(first + context + 1, stop))


def pack(pieces: Iterator[Piece], width: int) -> list[list[Piece]]:
    """Best fit, longest first: each piece goes into the fullest row that still has room for it."""
    ordered = sorted(pieces, key=lambda piece: (piece.start - piece.stop, piece.start))
    rows: list[list[Piece]] = []
    by_room: dict[int, list[int]] = {}  # room left: rows with just that
    rooms: list[int] = []  # the keys above that have rows, sorted
    for piece in ordered:
        length = piece.stop - piece.start
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(rows), width
            rows.append([])
        else:
            room = rooms[place]
            row = by_room[room].pop()
            if not by_room[room]:
                del rooms[place]
        rows[row].append(piece)
        if room > length:
            waiting = by_room.setdefault(room - length, [])
            if not waiting:
                insort(rooms, room - length)
            waiting.append(row)
    return rows


class Window(NamedTuple):
    """ids (up to context + 1,), of which the last `targets` are to be counted."""

    ids: NDArray[np.int64]
    targets: int


def evaluation_blocks(tokens: Tokens, context: int, stride: int | None = None) -> Iterator[Window]:
    """Windows over all tokens in which every token but the first is counted as a target exactly once.

    A stride below the context lets windows overlap: each target then has at least context − stride + 1 tokens before
    it, the first window apart.
    """
    stride = context if stride is None else stride
    if not 1 <= stride <= context:
        raise InputError(f"stride={stride} cannot be: write a number from 1 to the context, {context}")
    counted = 1  # the first token has nothing before it
    start = 0
    while counted < len(tokens):
        stop = min(start + context + 1, len(tokens))
        yield Window(tokens.read(start, stop), stop - counted)
        counted, start = stop, start + stride
