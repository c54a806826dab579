"""Pack documents into rows of a fixed width by best fit."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from monoblock.data.batching.shards import TokenDataset


class TokenRange(NamedTuple):
    """The tokens from `start` to before `stop`: a document or a part of one."""

    start: int
    stop: int


def split_documents(tokens: TokenDataset, context: int) -> Iterator[TokenRange]:
    """Split documents into parts of at most context + 1 tokens; each begins with the last token of the one before."""
    for start, stop in zip(tokens.document_offsets[:-1].tolist(), tokens.document_offsets[1:].tolist(), strict=True):
        for first in range(start, stop - 1, context):  # a single token has nothing to predict
            yield TokenRange(first, min(first + context + 1, stop))


def pack_best_fit(ranges: Iterator[TokenRange], width: int) -> list[list[TokenRange]]:
    """Pack ranges into rows of `width` tokens: longest first, into the fullest row with space (best-fit decreasing)."""
    rows: list[list[TokenRange]] = []
    rows_by_space: dict[int, list[int]] = {}  # free space -> rows with exactly that
    spaces: list[int] = []  # the keys above that have rows, sorted
    for item in sorted(ranges, key=lambda item: (item.start - item.stop, item.start)):
        length = item.stop - item.start
        index = bisect_left(spaces, length)
        if index == len(spaces):
            row, space = len(rows), width
            rows.append([])
        else:
            space = spaces[index]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                del spaces[index]
        rows[row].append(item)
        if space > length:
            open_rows = rows_by_space.setdefault(space - length, [])
            if not open_rows:
                insort(spaces, space - length)
            open_rows.append(row)
    return rows
