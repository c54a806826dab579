"""Pages: every sequence of operations on small states, against a model of twenty lines that stores tokens."""

import itertools

import numpy as np
import pytest

from monoblock.inference import pages as module
from monoblock.inference.pages import OutOfPages, Pages

SIZE, COUNT, ROWS = 2, 6, 3  # tokens in a page, pages with the scratch page, rows


class Reference:
    """Rows as lists of (token, when it was written); what is written is unique, so that a wrong page is noticed."""

    def __init__(self):
        self.rows, self.next = {}, itertools.count(1)

    def extend(self, row, count):
        new = [next(self.next) for _ in range(count)]
        self.rows[row] = self.rows[row] + new
        return new


class Memory:
    """What the tensors of a cache would hold."""

    def __init__(self, pages):
        self.pages, self.stored = pages, np.zeros((COUNT, SIZE), dtype=int)

    def write(self, row, new, start):
        for index, token in enumerate(new, start):
            page = self.pages.tables[row, index // SIZE]
            assert page > 0
            assert self.pages.users[page] == 1, "a shared page is written"
            self.stored[page, index % SIZE] = token

    def read(self, row):
        length = int(self.pages.lengths[row])
        return [int(self.stored[self.pages.tables[row, n // SIZE], n % SIZE]) for n in range(length)]


def extend(pages, memory, reference, row, count):
    """Reserve, copy, write and count new tokens; return False if there are too few pages."""
    before = pages.num_free
    column, last = divmod(int(pages.lengths[row]), SIZE)
    is_shared = bool(last) and pages.users[pages.tables[row, column]] > 1
    missing = -(-(last + count) // SIZE) - bool(last) + (count > 0 and is_shared)
    try:
        copies = pages.reserve([row], [count])
    except OutOfPages:
        assert missing > before == pages.num_free
        return False
    assert pages.num_free == before - missing
    for source, target, used in zip(*copies, strict=True):
        memory.stored[target, :used] = memory.stored[source, :used]
        memory.stored[target, used:] = -1
    start = int(pages.lengths[row])
    memory.write(row, reference.extend(row, count), start)
    pages.advance([row], [count])
    return True


def check(pages, memory, reference):
    """No leak, no double use, sharing exact, and every row has its tokens."""
    tables = {row: pages.tables[row, : pages.num_pages[row]].tolist() for row in reference.rows}
    used = list(itertools.chain(*tables.values()))
    assert all(pages.users[page] == used.count(page) for page in range(1, len(pages.users)))
    unused = [*pages.free, *pages.idle, *range(pages.used, COUNT)]
    assert sorted({*used, *unused}) == list(range(1, COUNT))
    assert len(unused) == len(set(unused))
    assert not {*used} & {*unused}
    assert pages.num_in_use == len({*used})
    for row, tokens in reference.rows.items():
        assert memory.read(row) == tokens
        assert len(tables[row]) >= -(-len(tokens) // SIZE)


def operations(reference):
    """The operations that are possible now."""
    rows = list(reference.rows)
    if len(rows) < ROWS:
        yield ("admit",)
        yield from (("fork", row) for row in rows)
    for row in rows:
        yield from ((name, row) for name in ("extend", "free", "truncate", "publish"))
        yield "extend by three", row
    for row, other in itertools.permutations(rows, 2):
        if len(reference.rows[row]) == len(reference.rows[other]):
            yield "regroup", row, other
    yield ("undo",)


def apply(operation, pages, memory, reference):
    name, *rows = operation
    if name == "admit":
        known = [digest for digest in pages.page_of if digest[:1] == b"1"][:1]  # at most the first page of some row
        found = pages.find(known)
        tokens = [int(token) for page in found for token in memory.stored[page]]
        reference.rows[pages.add_row(found)] = tokens
    elif name == "fork":
        reference.rows[pages.fork(rows[0])] = list(reference.rows[rows[0]])
    elif name in ("extend", "extend by three"):
        extend(pages, memory, reference, rows[0], 3 if "three" in name else 1)
    elif name == "free":  # a request that is preempted gives its pages back in the same way
        pages.drop(rows[0])
        del reference.rows[rows[0]]
    elif name == "truncate":
        length = max(0, len(reference.rows[rows[0]]) - 2)
        if length % SIZE or not any(page in pages.digest_of for page in pages.tables[rows[0]]):
            pages.truncate(rows[0], length)
            reference.rows[rows[0]] = reference.rows[rows[0]][:length]
    elif name == "publish":
        for index in range(len(reference.rows[rows[0]]) // SIZE):
            tokens = reference.rows[rows[0]][: (index + 1) * SIZE]
            pages.publish(rows[0], index, f"{index + 1}{tokens}".encode())
    elif name == "regroup":
        pages.regroup(list(rows), [rows[1], rows[1]])
        reference.rows[rows[0]] = list(reference.rows[rows[1]])
    elif name == "undo":  # a step that is undone before anything was written
        saved = pages.save()
        for row in reference.rows:
            pages.advance([row], [1])
        if len(reference.rows) < ROWS:
            pages.add_row()
        for row in reference.rows:
            pages.drop(row)
        pages.restore(saved)


def count_sequences(depth, monkeypatch):
    """Apply every sequence of at most `depth` operations; return how many different states were checked."""
    monkeypatch.setattr(module, "PAGE_SIZE", SIZE)
    seen = set()

    def run(sequence):
        pages, reference = Pages(COUNT, ROWS), Reference()
        memory = Memory(pages)
        for operation in sequence:
            apply(operation, pages, memory, reference)
        return pages, memory, reference

    level = [()]
    for _ in range(depth + 1):
        following = []
        for sequence in level:
            pages, memory, reference = run(sequence)
            check(pages, memory, reference)
            tables = tuple((row, *pages.tables[row].tolist()) for row in sorted(reference.rows))
            tokens = tuple(sorted((row, *own) for row, own in reference.rows.items()))
            state = (tables, tokens, tuple(pages.free), tuple(pages.idle), tuple(pages.page_of))
            if state not in seen:
                seen.add(state)
                following += [(*sequence, operation) for operation in operations(reference)]
        level = following
    return len(seen)


def test_every_sequence_of_five_operations_keeps_rows_and_loses_no_page(monkeypatch):
    assert count_sequences(5, monkeypatch) == 530


@pytest.mark.slow
def test_every_sequence_of_seven_operations_keeps_rows_and_loses_no_page(monkeypatch):
    count = count_sequences(7, monkeypatch)
    print(f"{count} states")
    assert count == 20_040


def test_rows_that_share_a_page_are_copied_when_they_continue_in_it_and_the_last_keeps_it():
    pages = Pages(8, 4)
    row = pages.add_row()
    pages.reserve([row], [10])
    pages.advance([row], [10])
    rows = [row, pages.fork(row), pages.fork(row)]
    page = int(pages.tables[row, 0])
    copies = pages.reserve(rows, [1, 1, 1])
    assert copies.sources == [page, page]
    assert copies.used == [10, 10]
    assert pages.users[page] == 1


def test_published_pages_are_taken_only_when_no_others_are_free_the_longest_unused_first():
    pages = Pages(4, 3)
    for digest in (b"first", b"second"):
        row = pages.add_row()
        pages.reserve([row], [16])
        pages.advance([row], [16])
        pages.publish(row, 0, digest)
        pages.drop(row)
    assert pages.num_free == 3
    row = pages.add_row()
    pages.reserve([row], [32])
    assert pages.find([b"first"]) == []
    assert len(pages.find([b"second"])) == 1
