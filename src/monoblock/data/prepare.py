"""Prepare tokens: encode any amount of text in parallel and write it to a folder of tokens (`token_folder.py`).

The sources are cut into parts (`text_parts.py`), worker processes encode the parts, and the main process appends the
ids to the shards in the order of the parts. So the shards depend neither on the number of processes nor on their speed,
and a few parts are in memory at a time. Every few seconds the files are synced and progress.json records how far they
go; an interrupted preparation goes on there, after the files have been cut to that length, and gives the same bytes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from monoblock.config.schema import check_at_least, check_types, from_dict
from monoblock.data.batches import SEED_LIMIT, random_uint64
from monoblock.data.readers.text import BYTE_ORDER_MARK
from monoblock.data.text_parts import (
    PART_BYTES,
    READ_BLOCK,
    STANDARD_INPUT,
    DocumentUnit,
    Part,
    check_unchanged,
    find_sources,
    is_jsonl,
    is_seekable,
    iterate_parts,
    open_stream,
    sample_parts,
)
from monoblock.data.token_folder import (
    DEFAULT_SHARD_TOKENS,
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    PROGRESS_FILE,
    PreparationSettings,
    ShardManifest,
    SourceFile,
    SplitTokens,
    SplitWriter,
    WriterState,
    read_manifest,
    remove_unlisted_files,
    token_dtype,
    write_json,
    write_manifest,
)
from monoblock.errors import ConfigError, FileError, InputError, MonoblockError
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.tokenizers.train import check_text
from monoblock.tokenizers.word_cache import BulkEncoder
from monoblock.untrusted_files import read_json

try:
    import fcntl
except ImportError:  # on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

SETTINGS_FILE = "settings.json"  # of a folder that is not complete
SYNC_SECONDS = 5.0
PARTS_AHEAD = 2  # parts for each process that are encoded ahead of the one that is written
SAMPLE_BYTES = 2**23  # of text on which a tokenizer is trained
PIECE_LENGTH = 2**15  # characters of running text that are held out, or trained on, together
HOLDOUT_SEED = 0
_WORD_END = re.compile(r"(?<=[^\W_])[ \n\t]")  # as in text_parts.py: a letter or digit before white space


@dataclass(frozen=True)
class TokenizerPlan:
    """The tokenizer to use: a loaded one, or the kind and the size of a new one, trained on a sample of the text."""

    tokenizer: Tokenizer | None = None
    kind: str = "bpe"
    vocab: int = 8192

    def describe(self) -> str:
        if self.tokenizer is not None:
            return f"the tokenizer {self.tokenizer.fingerprint}"
        return f"a new {self.kind} tokenizer of {self.vocab} tokens"

    def build(self, sources: Sequence[SourceFile], unit: DocumentUnit) -> Tokenizer:
        """Return the tokenizer; a new one is trained on parts of the text at equal distances."""
        if self.tokenizer is not None:
            return self.tokenizer
        if any(source.name == STANDARD_INPUT for source in sources):
            raise ConfigError(
                "standard input is read only once, so no tokenizer can be trained on it; give --tokenizer"
            )
        texts = [text for part in sample_parts(sources, unit, SAMPLE_BYTES) for text in part_texts(part)]
        if not any(texts):
            raise InputError("the files are empty; give at least one document")
        return Tokenizer.train(self.kind, texts, self.vocab)


@dataclass(frozen=True)
class Preparation:
    """The result: the manifest, and how many bytes of text earlier runs had written already."""

    manifest: ShardManifest
    resumed_bytes: int = 0
    was_complete: bool = False


def prepare_tokens(
    names: Sequence[str],
    out: str | Path,
    *,
    tokenizer: TokenizerPlan | None = None,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    validation: float = 0.0,
    documents: DocumentUnit = "file",
    jobs: int = 1,
    workers: Workers | None = None,
    part_bytes: int = PART_BYTES,
    on_start: Callable[[int | None, int], object] = lambda total, done: None,
    on_progress: Callable[[int], object] = lambda count: None,
) -> Preparation:
    """Write the tokens of texts to the folder `out`, or go on with a folder that an interrupted call left.

    names: paths of .txt and .jsonl files, also compressed ones, and of folders of them; `-` is standard input.
    tokenizer: the tokenizer, or how to train one.
    shard_tokens: the number of tokens in a file.
    validation: the share of the documents, or of pieces of running text, that is held out for validation.
    documents: whether a text file is one document, or each of its lines is.
    jobs: the number of processes; the result does not depend on it.
    workers: what encodes the parts, if it is not processes of this machine.
    part_bytes: the size of the parts in which the text is encoded.
    on_start: called with the number of bytes of all texts (None if it is unknown) and of those that are written.
    on_progress: called with the number of bytes that were just written.
    """
    plan, folder = tokenizer or TokenizerPlan(), Path(out)
    if not 0 <= validation < 1:
        raise ConfigError(f"validation={validation} is not a share; write 0 or more and less than 1")
    if shard_tokens < 1 or jobs < 1:
        raise ConfigError(f"shard_tokens={shard_tokens} or jobs={jobs} is too small; write 1 or more")
    sources = find_sources(names)
    settings = PreparationSettings(
        tokenizer=plan.describe(),
        documents=documents,
        validation=float(validation),
        shard_tokens=shard_tokens,
        part_bytes=part_bytes,
        sources=tuple(sources),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(folder):
            if (folder / MANIFEST_FILE).is_file():
                manifest = read_manifest(folder)
                check_same_settings(folder, manifest.settings, settings)
                _finish(folder, manifest)
                return Preparation(manifest, was_complete=True)
            progress = _begin(folder, settings, plan, sources)
            sizes = [source.bytes for source in sources if is_seekable(source)]
            on_start(sum(map(int, filter(None, sizes))) if len(sizes) == len(sources) else None, progress.bytes)
            manifest = _encode_and_write(folder, settings, progress, jobs, workers or processes, on_progress)
            return Preparation(manifest, progress.bytes)
    except OSError as problem:
        raise FileError(f"{problem.filename or folder} cannot be written: {problem.strerror or problem}") from None


def _begin(folder: Path, settings: PreparationSettings, plan: TokenizerPlan, sources: Sequence[SourceFile]) -> Progress:
    """Return the progress of an interrupted run, or begin a new one: build the tokenizer, and store it."""
    if (folder / PROGRESS_FILE).is_file():
        check_same_settings(folder, _read_record(folder / SETTINGS_FILE, PreparationSettings), settings)
        return _read_record(folder / PROGRESS_FILE, Progress)
    own = {SETTINGS_FILE, "tokenizer.json", "tokenizer_config.json"}
    others = sorted(name for name in os.listdir(folder) if name.removesuffix(".tmp") not in own)
    if others:
        raise FileError(f"{folder} is not empty (it has {others[0]}); give another folder with --out")
    plan.build(sources, settings.documents).save_pretrained(folder)  # type: ignore[arg-type]
    write_json(folder / SETTINGS_FILE, settings)
    write_json(folder / PROGRESS_FILE, Progress())
    return Progress()


def _finish(folder: Path, manifest: ShardManifest) -> None:
    """Remove what a complete folder does not need."""
    remove_unlisted_files(folder, manifest)
    for name in (PROGRESS_FILE, SETTINGS_FILE):
        (folder / name).unlink(missing_ok=True)


def _encode_and_write(
    folder: Path,
    settings: PreparationSettings,
    progress: Progress,
    jobs: int,
    workers: Workers,
    on_progress: Callable[[int], object],
) -> ShardManifest:
    tokenizer = Tokenizer.from_pretrained(folder)
    dtype, states = token_dtype(tokenizer.vocab_size), {"train": progress.train, "valid": progress.valid}
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(SplitWriter(folder, name, dtype, settings.shard_tokens, state))
            for name, state in states.items()
        }
        num_bytes, last_sync = progress.bytes, time.monotonic()
        parts = _parts_to_write(settings, progress)
        for encoded, checksum in _encode_parts(parts, folder, tokenizer, settings.validation, jobs, workers):
            for name, tokens in encoded.splits.items():
                writers[name].append(tokens)
            num_bytes += encoded.size
            on_progress(encoded.size)
            if time.monotonic() - last_sync >= SYNC_SECONDS:
                train, valid = (writer.sync() for writer in writers.values())
                next_part = encoded.number + 1
                state = Progress(
                    next_part=next_part, bytes=num_bytes, stream_checksum=checksum, train=train, valid=valid
                )
                write_json(folder / PROGRESS_FILE, state)
                last_sync = time.monotonic()
        check_unchanged(settings.sources)
        files = {name: writer.finish() for name, writer in writers.items()}
        manifest = write_manifest(folder, tokenizer.vocab_size, tokenizer.fingerprint, files, settings)
    _finish(folder, manifest)
    return manifest


def _parts_to_write(settings: PreparationSettings, progress: Progress) -> Iterator[tuple[Part, int]]:
    """Yield the parts that are not written yet, each with the checksum of all streamed text up to its end."""
    checksum = 0
    unit: DocumentUnit = "line" if settings.documents == "line" else "file"
    for part in iterate_parts(settings.sources, unit, settings.part_bytes):
        if part.number == progress.next_part and checksum != progress.stream_checksum:
            raise FileError("the text of standard input is not the one that was begun with; give the same text")
        checksum = checksum if part.data is None else zlib.crc32(part.data, checksum)
        if part.number >= progress.next_part:
            yield part, checksum


def _encode_parts(
    parts: Iterator[tuple[Part, int]],
    folder: Path,
    tokenizer: Tokenizer,
    validation: float,
    jobs: int,
    workers: Workers,
) -> Iterator[tuple[EncodedPart, int]]:
    """Yield the encoded parts in their order, each with the checksum that belongs to it."""
    if jobs == 1 and workers is processes:
        encoder = PartEncoder(tokenizer, validation)
        yield from ((encoder(part), checksum) for part, checksum in parts)
        return
    waiting: deque[tuple[Future[EncodedPart], int]] = deque()
    with workers(folder, validation, jobs) as encode:
        for part, checksum in parts:
            waiting.append((encode(part), checksum))
            if len(waiting) > PARTS_AHEAD * jobs:
                future, first_checksum = waiting.popleft()
                yield future.result(), first_checksum
        yield from ((future.result(), checksum) for future, checksum in waiting)


@contextmanager
def processes(folder: Path, validation: float, jobs: int) -> Iterator[Encode]:
    """Encode parts in processes of this machine."""
    # New processes, not copies of this one, which may have threads.
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _start_worker, (folder, validation))
    try:
        yield lambda part: pool.submit(_encode_in_worker, part)
    except BrokenProcessPool:
        raise MonoblockError(
            "a worker process ended unexpectedly, perhaps for lack of memory; run the same command again with fewer "
            "--jobs, and it goes on"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_encoder: PartEncoder | None = None  # of a worker process


def _start_worker(tokenizer_folder: Path, validation: float) -> None:
    """Prepare a worker process: load the tokenizer, and end when the main process ends."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C

    def end_with_parent() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _encoder = PartEncoder(Tokenizer.from_pretrained(tokenizer_folder), validation)


def _encode_in_worker(part: Part) -> EncodedPart:
    assert _encoder is not None
    return _encoder(part)


# -- encoding a part ---------------------------------------------------------------------------------------------------


class EncodedPart(NamedTuple):
    number: int
    size: int  # bytes of text
    splits: dict[str, SplitTokens]


Encode = Callable[[Part], "Future[EncodedPart]"]
Workers = Callable[[Path, float, int], AbstractContextManager[Encode]]  # of tokenizer's folder, validation and jobs


class PartEncoder:
    """Encode parts with a tokenizer; the end token, if there is one, follows each document.

    validation: the share of documents, or of pieces of running text, that is held out for validation.
    """

    def __init__(self, tokenizer: Tokenizer, validation: float) -> None:
        self.dtype, self.unk_id = token_dtype(tokenizer.vocab_size), tokenizer.unk_id
        self.encoder = BulkEncoder(tokenizer, self.dtype)
        self.eos = b"" if tokenizer.eos_id is None else np.array([tokenizer.eos_id], self.dtype).tobytes()
        self.validation_limit = int(validation * SEED_LIMIT)

    def __call__(self, part: Part) -> EncodedPart:
        data = part.read()
        texts = part_texts(part, data)
        is_valid = self._draw_splits(part, len(texts))
        splits: dict[str, SplitTokens] = {}
        for index, (text, ids) in enumerate(zip(texts, self.encoder(texts), strict=True)):
            tokens = splits.setdefault("valid" if is_valid[index] else "train", SplitTokens(bytearray(), []))
            tokens.ids += ids
            tokens.num_bytes += len(text) if text.isascii() else len(text.encode())
            if self.unk_id is not None:
                tokens.unknown += int(np.count_nonzero(np.frombuffer(ids, self.dtype) == self.unk_id))
            # Running text goes on in the next piece, unless that belongs to the other split.
            is_end = part.unit == "line" or is_valid[index] != is_valid[index + 1]
            if is_end or (part.is_last and index + 1 == len(texts)):
                tokens.ids += self.eos
                tokens.ends.append(len(tokens.ids) // self.dtype.itemsize)
        return EncodedPart(part.number, len(data), splits)

    def _draw_splits(self, part: Part, count: int) -> list[bool]:
        """Return whether each text of a part, and the first text of the next part, is held out for validation."""
        if not self.validation_limit:
            return [False] * (count + 1)
        draws = random_uint64(HOLDOUT_SEED, part.number, count, "holdout").tolist()
        draws += random_uint64(HOLDOUT_SEED, part.number + 1, 1, "holdout").tolist()
        return [draw < self.validation_limit for draw in draws]


def part_texts(part: Part, data: bytes | None = None) -> list[str]:
    """Return the documents of a part or, if its unit is the file, pieces of the running text."""
    data = part.read() if data is None else data
    return list(_lines(part, data) if part.unit == "line" else _pieces(part, data))


def _pieces(part: Part, data: bytes) -> Iterator[str]:
    """Cut running text, in the form that `read_text` gives it, into pieces of about PIECE_LENGTH characters."""
    text = _decode(part, data, 0, data).replace("\r\n", "\n")
    start = 0
    while start < len(text):
        found = _WORD_END.search(text, start + PIECE_LENGTH, start + 2 * PIECE_LENGTH)
        stop = min(start + PIECE_LENGTH, len(text)) if found is None else found.start()
        yield text[start:stop]
        start = stop


def _lines(part: Part, data: bytes) -> Iterator[str]:
    """Yield the document on each line that is not blank: the line itself, or "text" of the object on it."""
    offset = 0
    for line in data.split(b"\n"):
        if line.strip():
            text = _decode(part, data, offset, line).removesuffix("\r")
            yield _document(part, data, offset, text) if is_jsonl(part.source) else text
        offset += len(line) + 1


def _decode(part: Part, data: bytes, offset: int, raw: bytes) -> str:
    """Return the bytes from an offset in a part on as text."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        place = offset + (problem.start if raw is data else 0)
        raise _error(part, data, place, "a byte is not UTF-8; convert the file to UTF-8") from None
    return text.removeprefix(BYTE_ORDER_MARK) if part.start == offset == 0 else text


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
    number, rest = 1 + data.count(b"\n", 0, offset), part.start
    with open_stream(part.source) as stream:
        while rest > 0 and (block := stream.read(min(rest, READ_BLOCK))):
            number += block.count(b"\n")
            rest -= len(block)
    return FileError(f"{part.source.name}, line {number:,}: {problem}")


# -- the progress of an interrupted preparation ------------------------------------------------------------------------

SETTING_NAMES = {
    "tokenizer": "another tokenizer",
    "documents": "another --documents",
    "validation": "another --validation",
    "shard_tokens": "another --shard-tokens",
    "part_bytes": "parts of another size",
}
NOTHING_WRITTEN = WriterState()
Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The content of progress.json, which is replaced after the files of the splits have been synced."""

    format: Literal["monoblock-tokens-progress"] = "monoblock-tokens-progress"
    next_part: int = 0  # the first part that is not written yet
    bytes: int = 0  # of text before this part
    stream_checksum: int = 0  # CRC-32 of the text before this part that cannot be read twice
    train: WriterState = NOTHING_WRITTEN
    valid: WriterState = NOTHING_WRITTEN

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 0, "next_part", "bytes")


def _read_record(path: Path, kind: type[Record]) -> Record:
    try:
        return from_dict(kind, read_json(path, max_bytes=MAX_MANIFEST_BYTES), path.name)
    except ConfigError as problem:
        raise FileError(f"{path} cannot be used: {problem}; delete {path.parent} and begin anew") from None


def check_same_settings(folder: Path, saved: PreparationSettings | None, current: PreparationSettings) -> None:
    """Raise ConfigError, naming the first difference, unless a folder was begun with the current settings."""
    advice = "give the same arguments, or another folder with --out"
    if saved is None:
        raise ConfigError(f"{folder} was not written by `monoblock data prepare`; give another folder with --out")
    for name, what in SETTING_NAMES.items():
        before, now = getattr(saved, name), getattr(current, name)
        if before != now:
            raise ConfigError(f"{folder} was begun with {what} ({before}, and now {now}); {advice}")
    if saved.sources != current.sources:
        old, new = ({source.name: source for source in settings.sources} for settings in (saved, current))
        what = "their order differs"
        for name in (name for name in {**old, **new} if old.get(name) != new.get(name)):
            change = "is missing now" if name not in new else "is new" if name not in old else "was changed since then"
            what = f"{name} {change}"
            break
        raise ConfigError(f"{folder} was begun with other texts: {what}; {advice}")


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other processes from preparing the same folder at the same time."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise FileError(f"{folder} is being written by another process; wait until it ends") from None
    finally:
        os.close(handle)
