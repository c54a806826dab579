"""Find the text files to prepare, and open them: plain or compressed, one by one or all those in a folder."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from monoblock.data.batching.manifest import SourceFile
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
