"""The head of a GGUF file, llama.cpp's format: its fields, and what it says about its tensors.

A length is believed only as far as the file reaches, and a count only as far as a model could need it.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

from monoblock.errors import FileError
from monoblock.untrusted import shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_FIELDS = 10_000
MOST_TENSORS = 100_000
MOST_ITEMS = 4_000_000  # of an array: two million tokens, and as many merges
LONGEST_TEXT = 2**20
LONGEST_NAME = 256
LARGEST_HEAD = 32 * 2**20
MOST_AXES = 4
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9


class Described(NamedTuple):
    """A tensor as the head describes it: axes from the slowest to the fastest, the number of its kind, its place."""

    shape: tuple[int, ...]
    kind: int
    offset: int  # in bytes, from the first tensor's place


class Head(NamedTuple):
    fields: dict[str, Any]
    tensors: dict[str, Described]
    data: int  # where the first tensor lies, in bytes from the beginning
    size: int  # of the whole file


class _Bad(Exception):
    """What is wrong with a file, to be said after its name."""


class _Cursor:
    """Reads on and on, and never beyond the end."""

    def __init__(self, raw: mmap.mmap, end: int) -> None:
        self.raw, self.at, self.end = raw, 0, min(end, LARGEST_HEAD)

    def take(self, size: int) -> int:
        """The place of the next `size` bytes."""
        if size > self.end - self.at:
            raise _Bad("it is cut short, or claims more than it holds")
        place = self.at
        self.at += size
        return place

    def number(self, letter: str) -> Any:
        form = f"<{letter}"
        return struct.unpack_from(form, self.raw, self.take(struct.calcsize(form)))[0]

    def text(self, longest: int = LONGEST_TEXT) -> str:
        size = self.number("Q")
        if size > longest:
            raise _Bad(f"a text claims {size:,} bytes")
        place = self.take(size)
        return self.raw[place : place + size].decode()

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            raise _Bad(f"a field is of the kind {kind}, which there is not")
        inner, count = self.number("I"), self.number("Q")
        if count > MOST_ITEMS:
            raise _Bad(f"a list claims {count:,} items")
        if inner == TEXT:
            return [self.text() for _ in range(count)]
        if inner not in SCALARS:
            raise _Bad("a list of lists is not read")
        form = f"<{count}{SCALARS[inner]}"
        return list(struct.unpack_from(form, self.raw, self.take(struct.calcsize(form))))


def read_head(path: str | Path) -> Head:
    """Fields and tensors of a GGUF file."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise FileError(f"{path} is no GGUF file: it has {size} bytes")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
                return _head(_Cursor(raw, size), size)
    except (_Bad, UnicodeDecodeError, struct.error, OverflowError) as problem:
        raise FileError(f"{path} cannot be used: {' '.join(str(problem).split())[:120]}") from None
    except (OSError, ValueError) as problem:
        if isinstance(problem, FileError):
            raise
        raise FileError(f"{path} cannot be read: {getattr(problem, 'strerror', None) or problem}") from None


def _head(cursor: _Cursor, size: int) -> Head:
    place = cursor.take(4)
    if cursor.raw[place : place + 4] != MAGIC:
        raise _Bad("it is no GGUF file")
    version = cursor.number("I")
    if version not in VERSIONS:
        raise _Bad(f"it is of version {version}; 2 and 3 are read, with the lowest byte first")
    tensor_count, field_count = cursor.number("Q"), cursor.number("Q")
    if tensor_count > MOST_TENSORS or field_count > MOST_FIELDS:
        raise _Bad(f"it claims {tensor_count:,} tensors and {field_count:,} fields")
    fields: dict[str, Any] = {}
    for _ in range(field_count):
        name = cursor.text(LONGEST_NAME)
        if name in fields:
            raise _Bad(f"the field {shown(name)} stands there twice")
        fields[name] = cursor.value(cursor.number("I"))
    tensors: dict[str, Described] = {}
    for _ in range(tensor_count):
        name = cursor.text(LONGEST_NAME)
        if name in tensors:
            raise _Bad(f"the tensor {shown(name)} stands there twice")
        tensors[name] = _described(cursor, name)
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 2**16 or alignment % 8:
        raise _Bad(f"its alignment is {shown(alignment)}")
    return Head(fields, tensors, -(-cursor.at // alignment) * alignment, size)


def _described(cursor: _Cursor, name: str) -> Described:
    axes = cursor.number("I")
    if not 0 < axes <= MOST_AXES:
        raise _Bad(f"the tensor {shown(name)} has {axes:,} axes")
    shape = [cursor.number("Q") for _ in range(axes)]
    elements = 1
    for axis in shape:
        elements *= axis
        if not 0 < elements < 2**48:
            raise _Bad(f"the tensor {shown(name)} has the shape {shown(shape)}")
    return Described(tuple(reversed(shape)), cursor.number("I"), cursor.number("Q"))
