"""Find the texts to prepare, open them (plain or compressed, one by one or all in a folder), and cut them into parts.

Worker processes encode the parts, of about PART_BYTES, independently of each other. The cuts depend on the content
alone: not on the number of processes, and not on whether a file is compressed. Lines are never cut. Running text is cut
between a character and the white space that follows it.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, Literal

from monoblock.data.token_folder import SourceFile
from monoblock.errors import FileError
from monoblock.untrusted_files import open_regular, standard_input

STANDARD_INPUT = "-"
TEXT_SUFFIXES = (".txt", ".jsonl")
COMPRESSED_SUFFIXES = ("", ".gz", ".zst")
SUFFIXES = tuple(suffix + compressed for compressed in COMPRESSED_SUFFIXES for suffix in TEXT_SUFFIXES)


@dataclass(frozen=True)
class Source:
    """A file to read; the name `-` is standard input.

    size: in bytes, as it is stored; None for standard input.
    modified: the time of the last change in nanoseconds.
    """

    name: str
    size: int | None = None
    modified: int | None = None

    @property
    def is_jsonl(self) -> bool:
        return any(self.name.endswith(f".jsonl{suffix}") for suffix in COMPRESSED_SUFFIXES)

    @property
    def is_seekable(self) -> bool:
        """Whether workers can read parts of the file by themselves."""
        return self.name != STANDARD_INPUT and not self.name.endswith(COMPRESSED_SUFFIXES[1:])

    def describe(self) -> SourceFile:
        """Return the entry of the manifest."""
        return SourceFile(name=self.name, bytes=self.size, modified=self.modified)


def find_sources(names: Sequence[str]) -> list[Source]:
    """Return the files at the given paths, and those in folders in the order of their names."""
    sources = [source for name in names for source in _expand(name)]
    counts: dict[str, int] = {}
    for source in sources:
        counts[source.name] = counts.get(source.name, 0) + 1
        if counts[source.name] > 1:
            raise FileError(f"{source.name} is given twice; give every text once")
    return sources


def _expand(name: str) -> Iterator[Source]:
    path = Path(name)
    if name == STANDARD_INPUT:
        yield Source(name)
    elif path.is_dir():
        files = sorted(Path(root) / file for root, _, names in os.walk(path) for file in names)
        found = [file for file in files if file.name.endswith(SUFFIXES)]
        if not found:
            raise FileError(f"{name} has no file that ends in {', '.join(SUFFIXES)}")
        yield from map(_file_source, map(str, found))
    else:
        yield _file_source(name)


def _file_source(name: str) -> Source:
    if not os.path.exists(name):
        raise FileError(f"there is no file or folder {name!r}")
    if not name.endswith(SUFFIXES):
        raise FileError(f"{name} ends in none of {', '.join(SUFFIXES)}; rename the file, or pipe its text into `-`")
    if name.endswith(".zst") and find_spec("zstandard") is None:
        raise FileError(f"{name} needs the package zstandard; pip install zstandard, or zstd -dc {name} | … prepare -")
    with open_regular(name) as file:
        status = os.fstat(file.fileno())
    return Source(name, status.st_size, status.st_mtime_ns)


def check_unchanged(sources: Sequence[Source]) -> None:
    """Raise FileError if a file was changed since `find_sources` saw it."""
    for source in sources:
        if source.name != STANDARD_INPUT and _file_source(source.name) != source:
            raise FileError(f"{source.name} was changed while it was read; delete the output folder and begin anew")


@contextmanager
def open_stream(source: Source) -> Iterator[BinaryIO]:
    """Open a source to read its text from the beginning, decompressed; damage raises FileError."""
    try:
        if source.name == STANDARD_INPUT:
            yield standard_input()
            return
        with open_regular(source.name) as raw:
            if source.name.endswith(".gz"):
                with gzip.open(raw) as file:
                    yield file  # type: ignore[misc]
            elif source.name.endswith(".zst"):
                with import_module("zstandard").ZstdDecompressor().stream_reader(raw, read_across_frames=True) as file:
                    yield file
            else:
                yield raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise FileError(f"{source.name} is damaged: {problem}") from None
    except OSError as problem:
        raise FileError(f"{source.name} cannot be read: {problem.strerror or problem}") from None


PART_BYTES = 2**22
CUT_WINDOW = 2**16  # bytes in which a place to cut running text is looked for
MAX_LINE_BYTES = 2**26
READ_BLOCK = 2**20
SAMPLE_BLOCK = 2**16

DocumentUnit = Literal["file", "line"]  # a text file is one document, or one for each line
# A letter or digit (or any character beyond ASCII) and white space, where no known tokenizer joins characters.
_WORD_END = re.compile(rb"(?<=[0-9A-Za-z])[ \n\t]")
_ANY_END = re.compile(rb"(?<=[^\s])[ \n\t]")


@dataclass(frozen=True)
class Part:
    """A part of a source: bytes `start` to `stop` of its text.

    number: counts the parts of all sources from 0.
    data: the bytes themselves; None if they are to be read from the file.
    is_last: whether it is the last part of its source.
    """

    number: int
    source: Source
    unit: DocumentUnit
    start: int
    stop: int
    is_last: bool
    data: bytes | None = None

    def read(self) -> bytes:
        if self.data is not None:
            return self.data
        try:
            with open_regular(self.source.name) as file:
                file.seek(self.start)
                data = file.read(self.stop - self.start)
        except OSError as problem:
            raise FileError(f"{self.source.name} cannot be read: {problem.strerror or problem}") from None
        if len(data) < self.stop - self.start:
            raise FileError(f"{self.source.name} was cut while it was read; delete the output folder and begin anew")
        return data


def iterate_parts(sources: Sequence[Source], unit: DocumentUnit, part_bytes: int = PART_BYTES) -> Iterator[Part]:
    """Yield the parts of all sources in their order.

    unit: what a document of a text file is; each line of a .jsonl file is a document.
    """
    number = 0
    for source in sources:
        source_unit: DocumentUnit = "line" if source.is_jsonl else unit
        iterate = _iterate_file if source.is_seekable else _iterate_stream
        for start, stop, is_last, data in iterate(source, source_unit, part_bytes):
            yield Part(number, source, source_unit, start, stop, is_last, data)
            number += 1


Cut = tuple[int, int, bool, bytes | None]


def _iterate_file(source: Source, unit: DocumentUnit, part_bytes: int) -> Iterator[Cut]:
    assert source.size is not None
    with open_regular(source.name) as file:

        def read(start: int, size: int) -> bytes:
            file.seek(start)
            return file.read(size)

        start = 0
        while True:
            boundary = start - start % part_bytes + part_bytes
            stop = source.size if boundary >= source.size else _find_cut(source, unit, boundary, read)
            yield start, stop, stop >= source.size, None
            if stop >= source.size:
                return
            start = stop


def _iterate_stream(source: Source, unit: DocumentUnit, part_bytes: int) -> Iterator[Cut]:
    with open_stream(source) as stream:
        buffer = _StreamBuffer(stream)
        start = 0
        while True:
            boundary = start - start % part_bytes + part_bytes
            is_end = not buffer.read(boundary, 1)
            stop = buffer.end if is_end else _find_cut(source, unit, boundary, buffer.read)
            is_last = is_end or not buffer.read(stop, 1)
            yield start, stop, is_last, buffer.take(stop)
            if is_last:
                return
            start = stop


class _StreamBuffer:
    """The bytes of a stream that were read and not yet taken, by their offsets in the stream."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.start, self.data = stream, 0, bytearray()

    @property
    def end(self) -> int:
        return self.start + len(self.data)

    def read(self, start: int, size: int) -> bytes:
        """Return the `size` bytes from an offset on, or as many as there are."""
        while self.end < start + size:
            block = self.stream.read(READ_BLOCK)
            if not block:
                break
            self.data += block
        return bytes(self.data[start - self.start : start - self.start + size])

    def take(self, stop: int) -> bytes:
        """Remove and return all bytes before an offset."""
        taken = bytes(self.data[: stop - self.start])
        del self.data[: stop - self.start]
        self.start = stop
        return taken


def _find_cut(source: Source, unit: DocumentUnit, boundary: int, read: Callable[[int, int], bytes]) -> int:
    """Return the offset of the first good place to cut at or after `boundary`, or the end of the text."""
    return _find_line_end(source, boundary, read) if unit == "line" else _find_word_end(boundary, read)


def _find_line_end(source: Source, boundary: int, read: Callable[[int, int], bytes]) -> int:
    start = boundary - 1  # a line that ends just before the boundary is not followed by another one
    while True:
        block = read(start, READ_BLOCK)
        index = block.find(b"\n")
        if index >= 0:
            return start + index + 1
        start += len(block)
        if len(block) < READ_BLOCK:
            return start
        if start - boundary > MAX_LINE_BYTES:
            raise FileError(
                f"{source.name} has a line of more than {MAX_LINE_BYTES >> 20} MB near byte {boundary:,}; "
                "is every document on its own line?"
            )


def _find_word_end(boundary: int, read: Callable[[int, int], bytes]) -> int:
    window = read(boundary - 1, CUT_WINDOW)
    found = _WORD_END.search(window, 1) or _ANY_END.search(window, 1)
    if found is not None:
        return boundary - 1 + found.start()
    # Text without spaces is cut between any two characters; the bytes 80 to BF continue a character of UTF-8.
    return boundary - 1 + next((i for i in range(1, len(window)) if window[i] & 0xC0 != 0x80), len(window))


def sample_parts(sources: Sequence[Source], unit: DocumentUnit, num_bytes: int) -> Iterator[Part]:
    """Yield parts at equal distances with about `num_bytes` in all; of compressed sources, the first part."""
    total = sum(source.size or 0 for source in sources)
    for source in sources:
        source_unit: DocumentUnit = "line" if source.is_jsonl else unit
        share = max(SAMPLE_BLOCK, num_bytes * (source.size or 0) // max(1, total))
        if not source.is_seekable:
            start, stop, is_last, data = next(_iterate_stream(source, source_unit, share))
            yield Part(0, source, source_unit, start, stop, is_last, data)
        elif source.size:
            count = max(1, min(share, source.size) // SAMPLE_BLOCK)
            yield from _sample_file(source, source_unit, [source.size * index // count for index in range(count)])


def _sample_file(source: Source, unit: DocumentUnit, offsets: Sequence[int]) -> Iterator[Part]:
    assert source.size is not None
    with open_regular(source.name) as file:

        def read(start: int, size: int) -> bytes:
            file.seek(start)
            return file.read(size)

        for offset in offsets:
            start = _find_cut(source, unit, offset, read) if offset else 0
            stop = _find_cut(source, unit, min(source.size, start + SAMPLE_BLOCK), read)
            yield Part(0, source, unit, start, stop, stop == source.size)
