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
from collections import Counter
from collections.abc import Iterator, Sequence
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

PART_BYTES = 2**22
CUT_WINDOW = 2**16  # bytes in which a place to cut running text is looked for
MAX_LINE_BYTES = 2**26
READ_BLOCK = 2**20
SAMPLE_BLOCK = 2**16

DocumentUnit = Literal["file", "line"]  # a text file is one document, or one for each line
# A letter or digit (or any character beyond ASCII) and white space, where no known tokenizer joins characters.
_WORD_END = re.compile(rb"(?<=[0-9A-Za-z])[ \n\t]")
_ANY_END = re.compile(rb"(?<=[^\s])[ \n\t]")


# -- the texts ---------------------------------------------------------------------------------------------------------


def find_sources(names: Sequence[str]) -> list[SourceFile]:
    """Return the files at the given paths, and those in folders in the order of their names; `-` is standard input."""
    sources: list[SourceFile] = []
    for name in names:
        files = [name]
        if name != STANDARD_INPUT and Path(name).is_dir():
            inside = sorted(Path(root) / file for root, _, names in os.walk(name) for file in names)
            files = [str(file) for file in inside if file.name.endswith(SUFFIXES)]
            if not files:
                raise FileError(f"{name} has no file that ends in {', '.join(SUFFIXES)}")
        sources += map(_describe_source, files)
    for name, count in Counter(source.name for source in sources).most_common(1):
        if count > 1:
            raise FileError(f"{name} is given twice; give every text once")
    return sources


def _describe_source(name: str) -> SourceFile:
    if name == STANDARD_INPUT:
        return SourceFile(name=name)
    if not os.path.exists(name):
        raise FileError(f"there is no file or folder {name!r}")
    if not name.endswith(SUFFIXES):
        raise FileError(f"{name} ends in none of {', '.join(SUFFIXES)}; rename the file, or pipe its text into `-`")
    if name.endswith(".zst") and find_spec("zstandard") is None:
        raise FileError(f"{name} needs the package zstandard; pip install zstandard, or zstd -dc {name} | … prepare -")
    with open_regular(name) as file:
        status = os.fstat(file.fileno())
    return SourceFile(name=name, bytes=status.st_size, modified=status.st_mtime_ns)


def check_unchanged(sources: Sequence[SourceFile]) -> None:
    """Raise FileError if a file was changed since `find_sources` saw it."""
    for source in sources:
        if _describe_source(source.name) != source:
            raise FileError(f"{source.name} was changed while it was read; delete the output folder and begin anew")


def is_jsonl(source: SourceFile) -> bool:
    return any(source.name.endswith(f".jsonl{suffix}") for suffix in COMPRESSED_SUFFIXES)


def is_seekable(source: SourceFile) -> bool:
    """Return whether workers can read parts of a file by themselves."""
    return source.name != STANDARD_INPUT and not source.name.endswith(COMPRESSED_SUFFIXES[1:])


@contextmanager
def open_stream(source: SourceFile) -> Iterator[BinaryIO]:
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


# -- their parts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part of a source: bytes `start` to `stop` of its text.

    number: counts the parts of all sources from 0.
    data: the bytes themselves; None if they are to be read from the file.
    is_last: whether it is the last part of its source.
    """

    number: int
    source: SourceFile
    unit: DocumentUnit
    start: int
    stop: int
    is_last: bool
    data: bytes | None = None

    def read(self) -> bytes:
        if self.data is not None:
            return self.data
        with open_stream(self.source) as file:
            file.seek(self.start)
            data = file.read(self.stop - self.start)
        if len(data) < self.stop - self.start:
            raise FileError(f"{self.source.name} was cut while it was read; delete the output folder and begin anew")
        return data


def iterate_parts(sources: Sequence[SourceFile], unit: DocumentUnit, part_bytes: int = PART_BYTES) -> Iterator[Part]:
    """Yield the parts of all sources in their order.

    unit: what a document of a text file is; each line of a .jsonl file is a document.
    """
    number = 0
    for source in sources:
        for part in _iterate_source(source, unit, part_bytes, number):
            yield part
            number += 1


def _iterate_source(source: SourceFile, unit: DocumentUnit, part_bytes: int, number: int = 0) -> Iterator[Part]:
    unit = "line" if is_jsonl(source) else unit
    with open_stream(source) as stream:
        text = _File(stream) if is_seekable(source) else _Stream(stream)
        start, is_last = 0, False
        while not is_last:
            stop = text.find_cut(source, unit, start - start % part_bytes + part_bytes)
            is_last = not text.read(stop, 1)
            yield Part(number, source, unit, start, stop, is_last, text.take(stop))
            start, number = stop, number + 1


def sample_parts(sources: Sequence[SourceFile], unit: DocumentUnit, num_bytes: int) -> Iterator[Part]:
    """Yield parts at equal distances with about `num_bytes` in all; of compressed sources, the first part."""
    total = sum(source.bytes or 0 for source in sources)
    for source in sources:
        size = source.bytes or 0
        share = max(SAMPLE_BLOCK, num_bytes * size // max(1, total))
        if not is_seekable(source):
            yield next(_iterate_source(source, unit, share))
        elif size:
            source_unit: DocumentUnit = "line" if is_jsonl(source) else unit
            count = max(1, min(share, size) // SAMPLE_BLOCK)
            with open_stream(source) as stream:
                text = _File(stream)
                for offset in (size * index // count for index in range(count)):
                    start = text.find_cut(source, source_unit, offset) if offset else 0
                    stop = text.find_cut(source, source_unit, min(size, start + SAMPLE_BLOCK))
                    yield Part(0, source, source_unit, start, stop, stop == size)


class _File:
    """A file that is read from any offset on; workers read its parts by themselves."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream

    def read(self, start: int, size: int) -> bytes:
        """Return the `size` bytes from an offset on, or as many as there are."""
        self.stream.seek(start)
        return self.stream.read(size)

    def take(self, stop: int) -> bytes | None:
        """Return what workers cannot read by themselves."""
        return None

    def find_cut(self, source: SourceFile, unit: DocumentUnit, boundary: int) -> int:
        """Return the offset of the first good place to cut at or after `boundary`, or the end of the text."""
        start = boundary - 1  # a line that ends just before the boundary is not followed by another one
        if unit == "file":
            window = self.read(start, CUT_WINDOW)
            if found := _WORD_END.search(window, 1) or _ANY_END.search(window, 1):
                return start + found.start()
            # Text without spaces is cut between any two characters; the bytes 80 to BF continue a character of UTF-8.
            inside = (index for index in range(1, len(window)) if window[index] & 0xC0 != 0x80)
            return self.end() if len(window) <= 1 else start + next(inside, len(window))
        while True:
            block = self.read(start, READ_BLOCK)
            index = block.find(b"\n")
            if index >= 0:
                return start + index + 1
            if len(block) < READ_BLOCK:
                return self.end()
            start += len(block)
            if start - boundary > MAX_LINE_BYTES:
                raise FileError(
                    f"{source.name} has a line of more than {MAX_LINE_BYTES >> 20} MB near byte {boundary:,}; "
                    "is every document on its own line?"
                )

    def end(self) -> int:
        return self.stream.seek(0, os.SEEK_END)


class _Stream(_File):
    """The bytes of a stream that were read and not yet taken, by their offsets in the stream."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream)
        self.start, self.data = 0, bytearray()

    def end(self) -> int:
        return self.start + len(self.data)

    def read(self, start: int, size: int) -> bytes:
        while self.end() < start + size:
            block = self.stream.read(READ_BLOCK)
            if not block:
                break
            self.data += block
        return bytes(self.data[max(start - self.start, 0) : max(start - self.start + size, 0)])

    def take(self, stop: int) -> bytes:
        """Remove and return all bytes before an offset."""
        taken = bytes(self.data[: stop - self.start])
        del self.data[: stop - self.start]
        self.start = stop
        return taken
