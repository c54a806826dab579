"""Encode a part of a text to token ids, in the main process or in a worker process."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import parent_process
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from monoblock.data.batching.plans import SEED_LIMIT, random_uint64
from monoblock.data.batching.shards import token_dtype
from monoblock.data.preparation.parts import Part
from monoblock.data.preparation.sources import STANDARD_INPUT, Source, open_stream
from monoblock.data.readers.lines import BYTE_ORDER_MARK
from monoblock.errors import FileError, InputError
from monoblock.tokenizers.inputs import check_text
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.tokenizers.word_cache import BulkEncoder

PIECE_LENGTH = 2**15  # characters of running text that are held out, or trained on, together
HOLDOUT_SEED = 0
READ_BLOCK = 2**20
# As in parts.py: a letter or digit before white space.
_WORD_END = re.compile(r"(?<=[^\W_])[ \n\t]")


@dataclass
class SplitTokens:
    """The token ids of one split in a part: see `SplitWriter.append`."""

    rows: list[bytes] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_bytes: int = 0
    unknown: int = 0

    @property
    def ids(self) -> bytes:
        return b"".join(self.rows)

    @property
    def end_array(self) -> NDArray[np.int64]:
        return np.array(self.ends, np.int64)


@dataclass(frozen=True)
class EncodedPart:
    """The token ids of a part, as bytes: (ids, ends of documents, bytes of text, unknown tokens) for each split."""

    number: int
    stop: int
    size: int  # bytes of text
    splits: dict[str, tuple[bytes, NDArray[np.int64], int, int]]


class PartEncoder:
    """Encode parts with a tokenizer; the end token, if there is one, follows each document.

    validation: the share of documents, or of pieces of running text, that is held out for validation.
    """

    def __init__(self, tokenizer: Tokenizer, validation: float) -> None:
        self.tokenizer, self.dtype = tokenizer, token_dtype(tokenizer.vocab_size)
        self.encoder = BulkEncoder(tokenizer, self.dtype)
        self.eos = b"" if tokenizer.eos_id is None else np.array([tokenizer.eos_id], self.dtype).tobytes()
        self.validation_limit = int(validation * SEED_LIMIT)

    def __call__(self, part: Part) -> EncodedPart:
        data = part.read()
        texts = part_texts(part, data)
        splits = self._assign_splits(part, len(texts))
        tokens = {"train": SplitTokens(), "valid": SplitTokens()}
        for index, (text, ids) in enumerate(zip(texts, self.encoder(texts), strict=True)):
            split = tokens[splits[index]]
            # Running text goes on in the next piece, unless that belongs to the other split.
            ends = part.unit == "line" or splits[index] != splits[index + 1]
            self._append(split, ids, text, ends or (part.is_last and index + 1 == len(texts)))
        rows = {
            name: (split.ids, split.end_array, split.num_bytes, split.unknown)
            for name, split in tokens.items()
            if split.rows
        }
        return EncodedPart(part.number, part.stop, len(data), rows)

    def _assign_splits(self, part: Part, count: int) -> list[str]:
        """Return the split of each text of a part, and of the first text of the next part."""
        if not self.validation_limit:
            return ["train"] * (count + 1)
        draws = [*random_uint64(HOLDOUT_SEED, part.number, count, "holdout").tolist()]
        draws += random_uint64(HOLDOUT_SEED, part.number + 1, 1, "holdout").tolist()
        return ["valid" if draw < self.validation_limit else "train" for draw in draws]

    def _append(self, split: SplitTokens, ids: bytes, text: str, ends: bool) -> None:
        split.rows.append(ids)
        split.num_tokens += len(ids) // self.dtype.itemsize
        split.num_bytes += len(text) if text.isascii() else len(text.encode())
        if self.tokenizer.unk_id is not None:
            split.unknown += int(np.count_nonzero(np.frombuffer(ids, self.dtype) == self.tokenizer.unk_id))
        if ends:
            split.rows.append(self.eos)
            split.num_tokens += bool(self.eos)
            split.ends.append(split.num_tokens)


# -- texts -------------------------------------------------------------------------------------------------------------


def part_texts(part: Part, data: bytes | None = None) -> list[str]:
    """Return the documents of a part or, if its unit is the file, pieces of the running text."""
    data = part.read() if data is None else data
    return list(_lines(part, data) if part.unit == "line" else _pieces(_decode(part, data)))


def _decode(part: Part, data: bytes) -> str:
    """Return a part as text, in the form that `read_text` gives it."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise _error(part, data, problem.start, "a byte is not UTF-8; convert the file to UTF-8") from None
    return (text.removeprefix(BYTE_ORDER_MARK) if part.start == 0 else text).replace("\r\n", "\n")


def _pieces(text: str) -> Iterator[str]:
    """Cut running text into pieces of about PIECE_LENGTH characters."""
    start = 0
    while start < len(text):
        found = _WORD_END.search(text, start + PIECE_LENGTH, start + 2 * PIECE_LENGTH)
        stop = len(text) if start + PIECE_LENGTH >= len(text) else start + PIECE_LENGTH
        stop = stop if found is None else found.start()
        yield text[start:stop]
        start = stop


def _lines(part: Part, data: bytes) -> Iterator[str]:
    """Yield the document on each line that is not blank: the line itself, or "text" of the object on it."""
    offset = 0
    is_jsonl = part.source.is_jsonl
    for line in data.split(b"\n"):
        if line.strip():
            try:
                text = line.decode("utf-8").removesuffix("\r")
            except UnicodeDecodeError:
                raise _error(part, data, offset, "a byte is not UTF-8; convert the file to UTF-8") from None
            text = text.removeprefix(BYTE_ORDER_MARK) if part.start == offset == 0 else text
            yield _document(part, data, offset, text) if is_jsonl else text
        offset += len(line) + 1


def _document(part: Part, data: bytes, offset: int, line: str) -> str:
    try:
        row = json.loads(line)
    except RecursionError:
        raise _error(part, data, offset, "not JSON (it is nested too deep)") from None
    except ValueError as problem:
        raise _error(part, data, offset, f"not JSON ({problem!s:.60})") from None
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise _error(part, data, offset, 'no "text"; write an object such as {"text": "…"} on each line')
    try:
        check_text(text)
    except InputError as problem:
        raise _error(part, data, offset, str(problem)) from None
    return text


def _error(part: Part, data: bytes, offset: int, problem: str) -> FileError:
    """Return an error that names the file and the line."""
    if part.source.name == STANDARD_INPUT:
        return FileError(f"standard input, near byte {part.start + offset:,}: {problem}")
    number = 1 + _count_lines(part.source, part.start) + data.count(b"\n", 0, offset)
    return FileError(f"{part.source.name}, line {number:,}: {problem}")


def _count_lines(source: Source, stop: int) -> int:
    count = 0
    with open_stream(source) as stream:
        while stop > 0 and (block := stream.read(min(stop, READ_BLOCK))):
            count += block.count(b"\n")
            stop -= len(block)
    return count


# -- worker processes --------------------------------------------------------------------------------------------------

_encoder: PartEncoder | None = None


def start_worker(tokenizer_folder: Path, validation: float) -> None:
    """Prepare a worker process: load the tokenizer, and end when the main process ends."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = PartEncoder(Tokenizer.from_pretrained(tokenizer_folder), validation)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def encode_in_worker(part: Part) -> EncodedPart:
    assert _encoder is not None
    return _encoder(part)
