"""Pages: which part of the key/value cache belongs to which row.

The cache is a pool of pages of 16 tokens.  A row is a table of page numbers and a length; rows that begin with the same
tokens share pages.  A shared page is never written: a row that continues inside one gets a copy first (`reserve`).

    row = pages.add_row()
    copies = pages.reserve([row], [20])    # room for 20 more tokens; the caller copies these pages before it writes
    pages.advance([row], [20])
    other = pages.fork(row)                # a second row with the same tokens; no page is copied
    pages.drop(row)                        # pages without users are free again

A full page may be published under a digest of all tokens up to its end, so that a later row can begin with it
(`find`).  Published pages without users are kept until their memory is needed, the longest unused first.  This is
bookkeeping only: the tensors are in nn/paged_cache.py.  Page 0 is scratch, for writes that go nowhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from monoblock.config.parts import EmbeddingConfig
from monoblock.kernels.gpu_attention import PAGE_SIZE
from monoblock.nn.paged_cache import token_bytes
from monoblock.nn.transformer import Transformer

MAX_CPU_BYTES = 8 << 30  # of the key/value cache
CPU_ROWS = 512  # each beam counts as one
FIRST_ROWS = 64  # that the bookkeeping has room for at first
MAX_GPU_ROWS = 2560  # of a small model, the fastest measured on an H200 with 5 beams; fewer leave the GPU idle
MEMORY_SHARE = 0.4  # of the free memory of the GPU, for caches and logits
GONE = object()


class PageCopies(NamedTuple):
    """Pages to copy before the next write: the first `used` tokens of each source page."""

    sources: list[int]
    targets: list[int]
    used: list[int]


class OutOfPages(Exception):
    """There are fewer free pages than a row needs."""


class Pages:
    """The pages of at most `max_rows` rows; `count` pages, of which page 0 is never handed out."""

    def __init__(self, count: int, max_rows: int) -> None:
        self.count, self.max_rows = count, max_rows
        # These grow with the rows and the pages that have been in use at the same time.
        rows = min(max_rows, FIRST_ROWS)
        self.tables = np.zeros((rows, 4), dtype=np.int32)
        self.num_pages = np.zeros(rows, dtype=np.int64)  # of each row
        self.lengths = np.zeros(rows, dtype=np.int64)  # tokens stored in each row
        self.room = np.zeros(rows, dtype=np.int64)  # a row that stays below this length needs no page and no copy
        self.users = np.zeros(1, dtype=np.int32)  # how many rows have each page
        self.used_rows, self.used = 0, 1  # rows and pages with lower numbers have been in use
        self.free: list[int] = []  # of these pages
        self.free_rows: list[int] = []
        self.page_of: dict[bytes, int] = {}  # published pages by digest
        self.digest_of: dict[int, bytes] = {}
        self.idle: dict[int, None] = {}  # published pages without users, the longest unused first
        self.changes: list[tuple[dict[Any, Any], object, object]] = []  # of these three since `save`

    @property
    def num_free(self) -> int:
        """The number of pages that can be handed out; those of finished rows that are kept for later ones count."""
        return len(self.free) + self.count - self.used + len(self.idle)

    @property
    def num_in_use(self) -> int:
        return self.count - 1 - self.num_free

    # -- rows -----------------------------------------------------------------------------------------------------

    def add_row(self, prefix: Sequence[int] = ()) -> int:
        """Add a row that begins with the tokens of published pages, and return its number."""
        row = self._take_row()
        self._widen(len(prefix))
        self.tables[row, : len(prefix)] = prefix
        self.num_pages[row], self.lengths[row], self.room[row] = len(prefix), len(prefix) * PAGE_SIZE, 0
        for page in prefix:
            self.users[page] += 1
            self._set(self.idle, page, GONE)
        return row

    def fork(self, row: int) -> int:
        """Add a row with the same tokens as another one, and return its number."""
        new, count = self._take_row(), -(-int(self.lengths[row]) // PAGE_SIZE)
        self.tables[new, :count] = self.tables[row, :count]
        self.users[self.tables[row, :count]] += 1
        self.num_pages[new], self.lengths[new] = count, self.lengths[row]
        self.room[[row, new]] = 0
        return new

    def drop(self, row: int) -> None:
        """Remove a row; its pages are free again if no other row has them."""
        self.truncate(row, 0)
        self.free_rows.append(row)

    def truncate(self, row: int, length: int) -> None:
        """Keep the first `length` tokens of a row, and give back the pages behind them."""
        kept, count = -(-length // PAGE_SIZE), int(self.num_pages[row])
        self.lengths[row], self.room[row] = min(length, self.lengths[row]), 0
        if kept < count:
            self._release(self.tables[row, kept:count][::-1])
            self.tables[row, kept:count] = 0
            self.num_pages[row] = kept

    def advance(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Count new tokens, which have been written to reserved pages, as part of their rows."""
        self.lengths[np.asarray(rows, dtype=np.int64)] += np.asarray(counts, dtype=np.int64)

    def regroup(self, rows: Sequence[int], origins: Sequence[int]) -> None:
        """Let each of these rows continue another one of them: row n gets the tokens of row `origins[n]`."""
        new, old = np.array([rows, origins], dtype=np.int64)
        moved = new != old
        new, old = new[moved], old[moved]
        self.room[new] = self.room[old] = 0
        tables, num_pages, lengths = self.tables[old], self.num_pages[old], self.lengths[old]
        np.add.at(self.users, tables[tables > 0], 1)
        gone = self.tables[new]
        self.tables[new], self.num_pages[new], self.lengths[new] = tables, num_pages, lengths
        self._release(gone[gone > 0])

    # -- pages ----------------------------------------------------------------------------------------------------

    def reserve(self, rows: Sequence[int], counts: Sequence[int]) -> PageCopies:
        """Make room for `counts` more tokens in rows; return the pages to copy, because other rows share them.

        Raise OutOfPages, having changed nothing, if there are too few free pages.
        """
        own, more = np.array([rows, counts], dtype=np.int64)
        if (self.lengths[own] + more <= self.room[own]).all():
            return PageCopies([], [], [])
        shared = self._shared_tails(own, more)
        new = np.maximum(-(-(self.lengths[own] + more) // PAGE_SIZE) - self.num_pages[own], 0)
        if len(shared) + new.sum() > self.num_free:
            raise OutOfPages
        column, used = np.divmod(self.lengths[shared], PAGE_SIZE)
        pages, copies = self.tables[shared, column], self._take(len(shared))
        self.tables[shared, column] = copies
        self._release(pages)
        self._widen(int((self.num_pages[own] + new).max(initial=0)))
        grown = np.repeat(own, new)
        offset = np.arange(len(grown)) - np.repeat(new.cumsum() - new, new)
        self.tables[grown, self.num_pages[grown] + offset] = self._take(len(grown))
        self.num_pages[own] += new
        self.room[own] = np.where(more > 0, self.num_pages[own] * PAGE_SIZE, 0)
        return PageCopies(pages.tolist(), copies, used.tolist())

    def _shared_tails(self, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return the rows that would write into a page of another row; the last user of a page keeps it."""
        column = self.lengths[rows] // PAGE_SIZE
        inside = (column < self.num_pages[rows]) & (counts > 0)
        pages = self.tables[rows, np.minimum(column, self.tables.shape[1] - 1)]
        shared = np.flatnonzero(inside & (self.users[pages] > 1))
        if not len(shared):
            return shared
        order = shared[np.argsort(pages[shared], kind="stable")]
        _, first, count = np.unique(pages[order], return_index=True, return_counts=True)
        number = np.arange(len(order)) - np.repeat(first, count)  # of a row among those that write into its page
        return rows[order[number < self.users[pages[order]] - 1]]

    def _take_row(self) -> int:
        if self.free_rows:
            return self.free_rows.pop()
        if self.used_rows == len(self.lengths):
            more = min(self.used_rows, self.max_rows - self.used_rows)
            self.tables = np.pad(self.tables, ((0, more), (0, 0)))
            for name in ("num_pages", "lengths", "room"):
                setattr(self, name, np.pad(getattr(self, name), (0, more)))
        self.used_rows += 1
        return self.used_rows - 1

    def _take(self, count: int) -> list[int]:
        """Take `count` pages, each with one user: free ones, new ones, and then published ones without users."""
        if not count:
            return []
        pages = [self.free.pop() for _ in range(min(count, len(self.free)))]
        new = min(count - len(pages), self.count - self.used)
        pages += range(self.used, self.used + new)
        self.used += new
        if self.used > len(self.users):
            self.users = np.pad(self.users, (0, 2 * self.used - len(self.users)))
        for page in list(itertools.islice(self.idle, count - len(pages))):
            self._set(self.page_of, self.digest_of[page], GONE)
            self._set(self.digest_of, page, GONE)
            self._set(self.idle, page, GONE)
            pages.append(page)
        self.users[pages] = 1
        return pages

    def _release(self, pages: Sequence[int] | np.ndarray) -> None:
        pages = np.asarray(pages)
        np.subtract.at(self.users, pages, 1)
        for page in dict.fromkeys(pages[self.users[pages] == 0].tolist()):
            if page in self.digest_of:
                self._set(self.idle, page, None)
            else:
                self.free.append(page)

    def _widen(self, width: int) -> None:
        missing = width - self.tables.shape[1]
        if missing > 0:
            self.tables = np.pad(self.tables, ((0, 0), (0, max(missing, self.tables.shape[1]))))

    # -- prefixes -------------------------------------------------------------------------------------------------

    def publish(self, row: int, index: int, digest: bytes) -> None:
        """Let later rows begin with page number `index` of a row, which is full; the digest stands for its tokens."""
        page = int(self.tables[row, index])
        if digest not in self.page_of and page not in self.digest_of:
            self._set(self.page_of, digest, page)
            self._set(self.digest_of, page, digest)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Return the published pages of the first digests, up to the first that is not there."""
        found: list[int] = []
        for digest in digests:
            page = self.page_of.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def forget(self) -> None:
        """Take back what has been published."""
        self.free += reversed(self.idle)
        self.page_of, self.digest_of, self.idle = {}, {}, {}

    # -- undo -----------------------------------------------------------------------------------------------------

    def save(self) -> dict[str, object]:
        """Return what `restore` needs to return to the present state, until the next call of `save`."""
        self.changes = []
        return {name: value if isinstance(value, int | dict) else value.copy() for name, value in vars(self).items()}

    def restore(self, saved: Mapping[str, object]) -> None:
        """Return to the bookkeeping of `save`, as if nothing had happened since."""
        for table, key, value in reversed(self.changes):
            self._set(table, key, value)
        vars(self).update(saved)

    def _set(self, table: dict[Any, Any], key: object, value: object) -> None:
        """Change an entry of a table, or remove it if the value is GONE."""
        self.changes.append((table, key, table.get(key, GONE)))
        if value is GONE:
            table.pop(key, None)
        else:
            table[key] = value


# -- what fits into memory --------------------------------------------------------------------------------------------


def default_max_rows(model: Transformer, capacity: int) -> int:
    """Return how many sequences of at most `capacity` tokens to decode at the same time.

    On a GPU these are as many as fit into its free memory, at least one and at most MAX_GPU_ROWS.
    """
    if model.device.type != "cuda":
        return CPU_ROWS
    return max(1, min(MAX_GPU_ROWS, _free_bytes(model.device) // row_bytes(model, capacity)))


def _free_bytes(device: torch.device) -> int:
    """Return how much memory of a GPU caches and logits may take."""
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(MEMORY_SHARE * free)


def row_bytes(model: Transformer, capacity: int) -> int:
    """Return an estimate of the memory of one row in bytes: its keys and values, and three copies of its logits."""
    assert model.decoder is not None
    target = model.config.input if model.config.target is None else model.config.target
    assert isinstance(target, EmbeddingConfig)
    return token_bytes(model.decoder.config, next(model.parameters()).element_size()) * capacity + 3 * 4 * target.vocab


def default_num_pages(models: Sequence[Transformer], capacity: int, max_rows: int) -> int:
    """Return the number of pages with which `max_rows` rows of `capacity` tokens run, or as many as fit into memory.

    It is an upper limit: the memory of pages is taken when they are first used.  One full row always fits.
    """
    full = -(-capacity // PAGE_SIZE) + 2
    device = models[0].device
    budget = _free_bytes(device) if device.type == "cuda" else MAX_CPU_BYTES
    size = sum(row_bytes(model, PAGE_SIZE) for model in models)
    return 1 + max(full, min(max_rows * full, budget // size))
