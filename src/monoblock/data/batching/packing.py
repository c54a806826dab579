"""Pack documents into rows with a fixed number of tokens by best fit."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from monoblock.data.batching.shards import TokenDataset


class TokenRange(NamedTuple):
    """The tokens from `start` up to, but not including, `stop`: a document or a part of one."""

    start: int
    stop: int


def split_documents(tokens: TokenDataset, context: int) -> Iterator[TokenRange]:
    """Split documents into parts of at most context + 1 tokens.

    A part begins with the last token of the part before, so that every token of a document but the first is a target.
    """
    for start, stop in zip(tokens.document_offsets[:-1].tolist(), tokens.document_offsets[1:].tolist(), strict=True):
        for first in range(start, stop - 1, context):  # a document of one token has no target
            yield TokenRange(first, min(first + context + 1, stop))


def pack_best_fit(ranges: Iterator[TokenRange], width: int) -> list[list[TokenRange]]:
    """Pack ranges into rows of `width` tokens by best-fit decreasing and return the rows.

    The longest range is packed first, and each range goes into the fullest row that still has enough space.
    """
    rows: list[list[TokenRange]] = []
    rows_by_space: dict[int, list[int]] = {}  # the rows that have exactly this much free space
    spaces: list[int] = []  # sorted keys of `rows_by_space` whose list is not empty
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
