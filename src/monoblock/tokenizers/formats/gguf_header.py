"""Read the header of a GGUF file, llama.cpp's format: its fields and the description of its tensors.

The file is untrusted: no length may exceed the size of the file, and no count may exceed what a model could need.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

from monoblock.errors import FileError
from monoblock.untrusted_files import short_repr

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_FIELDS = 10_000
MAX_TENSORS = 100_000
MAX_ARRAY_ITEMS = 4_000_000  # two million tokens, and as many merges
MAX_STRING_BYTES = 2**20
MAX_NAME_BYTES = 256
MAX_HEADER_BYTES = 32 * 2**20
MAX_DIMENSIONS = 4
SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING_TYPE, ARRAY_TYPE = 8, 9


class TensorInfo(NamedTuple):
    """The header's description of a tensor; `shape` is in PyTorch's order, the reverse of the order in the file."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int  # in bytes, from `data_offset`


class GgufHeader(NamedTuple):
    fields: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data_offset: int  # of the first tensor, in bytes from the start of the file
    file_size: int  # in bytes


class _InvalidGguf(Exception):
    """An invalid GGUF file; `read_gguf_header` puts its path before the message."""


class _ByteReader:
    """Read the values of a header one after the other, but never beyond `end` or MAX_HEADER_BYTES."""

    def __init__(self, raw: mmap.mmap, end: int) -> None:
        self.raw, self.offset, self.end = raw, 0, min(end, MAX_HEADER_BYTES)

    def advance(self, size: int) -> int:
        """Skip `size` bytes and return the offset where they begin."""
        if size > self.end - self.offset:
            raise _InvalidGguf("its header claims more bytes than there are, so it is damaged or incomplete")
        start = self.offset
        self.offset += size
        return start

    def read_number(self, code: str) -> Any:
        layout = f"<{code}"
        return struct.unpack_from(layout, self.raw, self.advance(struct.calcsize(layout)))[0]

    def read_string(self, max_bytes: int = MAX_STRING_BYTES) -> str:
        size = self.read_number("Q")
        if size > max_bytes:
            raise _InvalidGguf(f"a string claims {size:,} bytes, more than the limit of {max_bytes:,}")
        start = self.advance(size)
        return self.raw[start : start + size].decode()

    def read_value(self, value_type: int) -> Any:
        if value_type in SCALAR_FORMATS:
            return self.read_number(SCALAR_FORMATS[value_type])
        if value_type == STRING_TYPE:
            return self.read_string()
        if value_type != ARRAY_TYPE:
            raise _InvalidGguf(f"a field has the type {value_type}, which is unknown")
        item_type, count = self.read_number("I"), self.read_number("Q")
        if count > MAX_ARRAY_ITEMS:
            raise _InvalidGguf(f"an array claims {count:,} items, more than the limit of {MAX_ARRAY_ITEMS:,}")
        if item_type == STRING_TYPE:
            return [self.read_string() for _ in range(count)]
        if item_type not in SCALAR_FORMATS:
            raise _InvalidGguf("an array of arrays is not supported")
        layout = f"<{count}{SCALAR_FORMATS[item_type]}"
        return list(struct.unpack_from(layout, self.raw, self.advance(struct.calcsize(layout))))


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Read the fields and tensor descriptions of a GGUF file."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise FileError(f"{path} is not a GGUF file: it has only {size} bytes, too few for a header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
                return _parse_header(_ByteReader(raw, size), size)
    except (_InvalidGguf, UnicodeDecodeError, struct.error, OverflowError) as problem:
        raise FileError(f"{path} cannot be used: {' '.join(str(problem).split())[:120]}") from None
    except (OSError, ValueError) as problem:
        if isinstance(problem, FileError):
            raise
        raise FileError(f"{path} cannot be read: {getattr(problem, 'strerror', None) or problem}") from None


def _parse_header(reader: _ByteReader, size: int) -> GgufHeader:
    start = reader.advance(4)
    if reader.raw[start : start + 4] != MAGIC:
        raise _InvalidGguf("it is not a GGUF file")
    version = reader.read_number("I")
    if version not in VERSIONS:
        raise _InvalidGguf(f"it has version {version}; only little-endian files of versions 2 and 3 are supported")
    tensor_count, field_count = reader.read_number("Q"), reader.read_number("Q")
    if tensor_count > MAX_TENSORS or field_count > MAX_FIELDS:
        raise _InvalidGguf(f"it claims {tensor_count:,} tensors and {field_count:,} fields, more than any model has")
    fields: dict[str, Any] = {}
    for _ in range(field_count):
        name = reader.read_string(MAX_NAME_BYTES)
        if name in fields:
            raise _InvalidGguf(f"the field {short_repr(name)} occurs twice")
        fields[name] = reader.read_value(reader.read_number("I"))
    tensors: dict[str, TensorInfo] = {}
    for _ in range(tensor_count):
        name = reader.read_string(MAX_NAME_BYTES)
        if name in tensors:
            raise _InvalidGguf(f"the tensor {short_repr(name)} occurs twice")
        tensors[name] = _parse_tensor_info(reader, name)
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 2**16 or alignment % 8:
        raise _InvalidGguf(f"its alignment is {short_repr(alignment)}, not a multiple of 8 from 8 to {2**16}")
    return GgufHeader(fields, tensors, -(-reader.offset // alignment) * alignment, size)


def _parse_tensor_info(reader: _ByteReader, name: str) -> TensorInfo:
    axes = reader.read_number("I")
    if not 0 < axes <= MAX_DIMENSIONS:
        raise _InvalidGguf(f"the tensor {short_repr(name)} has {axes:,} axes, not 1 to {MAX_DIMENSIONS}")
    shape = [reader.read_number("Q") for _ in range(axes)]
    elements = 1
    for axis in shape:
        elements *= axis
        if not 0 < elements < 2**48:
            raise _InvalidGguf(
                f"the tensor {short_repr(name)} has the shape {short_repr(shape)}, which is empty or too large"
            )
    return TensorInfo(tuple(reversed(shape)), reader.read_number("I"), reader.read_number("Q"))
