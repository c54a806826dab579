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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from monoblock.config.schema import check_at_least, check_types, from_dict
from monoblock.data.batches import SEED_LIMIT, random_uint64
from monoblock.data.readers.text import BYTE_ORDER_MARK
from monoblock.data.text_parts import (
    PART_BYTES,
    STANDARD_INPUT,
    DocumentUnit,
    Part,
    Source,
    check_unchanged,
    find_sources,
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
    SplitWriter,
    WriterState,
    read_manifest,
    remove_unlisted_files,
    token_dtype,
    write_json,
    write_manifest,
)
from monoblock.errors import ConfigError, FileError, InputError, MonoblockError
from monoblock.tokenizers.inputs import check_text
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.tokenizers.word_cache import BulkEncoder
from monoblock.untrusted_files import read_json

SETTINGS_FILE = "settings.json"  # of a folder that is not complete
SYNC_SECONDS = 5.0
PARTS_AHEAD = 2  # parts for each process that are encoded ahead of the one that is written
SAMPLE_BYTES = 2**23  # of text on which a tokenizer is trained


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

    def build(self, sources: Sequence[Source], unit: DocumentUnit) -> Tokenizer:
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
        sources=tuple(source.describe() for source in sources),
    )
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(folder):
            if (folder / MANIFEST_FILE).is_file():
                manifest = read_manifest(folder)
                check_same_settings(folder, manifest.settings, settings)
                _finish(folder, manifest)
                return Preparation(manifest, was_complete=True)
            progress = _begin(folder, settings, plan, sources)
            on_start(_total_bytes(sources), progress.bytes)
            manifest = _encode_and_write(folder, settings, sources, progress, jobs, on_progress)
            return Preparation(manifest, progress.bytes)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        path = problem.filename or folder
        raise FileError(f"{path} cannot be written: {problem.strerror or problem}") from None


def _begin(folder: Path, settings: PreparationSettings, plan: TokenizerPlan, sources: Sequence[Source]) -> Progress:
    """Return the progress of an interrupted run, or begin a new one: build the tokenizer, and store it."""
    if (folder / PROGRESS_FILE).is_file():
        check_same_settings(folder, read_settings(folder / SETTINGS_FILE), settings)
        return read_progress(folder)
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


def _total_bytes(sources: Sequence[Source]) -> int | None:
    sizes = [source.size for source in sources if source.is_seekable and source.size is not None]
    return sum(sizes) if len(sizes) == len(sources) else None


def _encode_and_write(
    folder: Path,
    settings: PreparationSettings,
    sources: Sequence[Source],
    progress: Progress,
    jobs: int,
    on_progress: Callable[[int], object],
) -> ShardManifest:
    tokenizer = Tokenizer.from_pretrained(folder)
    parts = _PartReader(sources, settings, progress)
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(
                SplitWriter(folder, name, token_dtype(tokenizer.vocab_size), settings.shard_tokens, state)
            )
            for name, state in (("train", progress.train), ("valid", progress.valid))
        }
        num_bytes, last_sync = progress.bytes, time.monotonic()
        for encoded, checksum in _encode_parts(parts, folder, tokenizer, settings.validation, jobs):
            for name, (ids, ends, text_bytes, unknown) in encoded.splits.items():
                writers[name].append(ids, ends, text_bytes, unknown)
            num_bytes += encoded.size
            on_progress(encoded.size)
            if time.monotonic() - last_sync >= SYNC_SECONDS:
                states = {name: writer.sync() for name, writer in writers.items()}
                write_json(
                    folder / PROGRESS_FILE,
                    Progress(
                        next_part=encoded.number + 1,
                        bytes=num_bytes,
                        stream_checksum=checksum,
                        train=states["train"],
                        valid=states["valid"],
                    ),
                )
                last_sync = time.monotonic()
        check_unchanged(sources)
        files = {name: writer.finish() for name, writer in writers.items()}
        manifest = write_manifest(folder, tokenizer.vocab_size, tokenizer.fingerprint, files, settings)
    _finish(folder, manifest)
    return manifest


class _PartReader:
    """Iterate over the parts that are not written yet, each with the checksum of all streamed text up to its end."""

    def __init__(self, sources: Sequence[Source], settings: PreparationSettings, progress: Progress) -> None:
        self.sources, self.settings, self.progress = sources, settings, progress

    def __iter__(self) -> Iterator[tuple[Part, int]]:
        checksum, progress = 0, self.progress
        unit: DocumentUnit = "line" if self.settings.documents == "line" else "file"
        for part in iterate_parts(self.sources, unit, self.settings.part_bytes):
            if part.number == progress.next_part and checksum != progress.stream_checksum:
                raise FileError("the text of standard input is not the one that was begun with; give the same text")
            checksum = checksum if part.data is None else zlib.crc32(part.data, checksum)
            if part.number >= progress.next_part:
                yield part, checksum


def _encode_parts(
    parts: _PartReader, folder: Path, tokenizer: Tokenizer, validation: float, jobs: int
) -> Iterator[tuple[EncodedPart, int]]:
    """Yield the encoded parts in their order, each with the checksum that belongs to it."""
    if jobs == 1:
        encoder = PartEncoder(tokenizer, validation)
        yield from ((encoder(part), checksum) for part, checksum in parts)
        return
    # New processes, not copies of this one, which may have threads.
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), start_worker, (folder, validation))
    waiting: deque[tuple[Future[EncodedPart], int]] = deque()
    try:
        for part, checksum in parts:
            waiting.append((pool.submit(encode_in_worker, part), checksum))
            if len(waiting) > PARTS_AHEAD * jobs:
                future, first_checksum = waiting.popleft()
                yield future.result(), first_checksum
        while waiting:
            future, first_checksum = waiting.popleft()
            yield future.result(), first_checksum
    except BrokenProcessPool:
        raise MonoblockError(
            "a worker process ended unexpectedly, perhaps for lack of memory; run the same command again with fewer "
            "--jobs, and it goes on"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# -- the progress of an interrupted preparation ------------------------------------------------------------------------

try:
    import fcntl
except ImportError:  # on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

NOTHING_WRITTEN = WriterState()
SETTING_NAMES = {
    "tokenizer": "another tokenizer",
    "documents": "another --documents",
    "validation": "another --validation",
    "shard_tokens": "another --shard-tokens",
    "part_bytes": "parts of another size",
}


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


def read_progress(folder: Path) -> Progress:
    path = folder / PROGRESS_FILE
    try:
        return from_dict(Progress, read_json(path, max_bytes=MAX_MANIFEST_BYTES), PROGRESS_FILE)
    except ConfigError as problem:
        raise FileError(f"{path} cannot be used: {problem}; delete {folder} and begin anew") from None


def read_settings(path: Path) -> PreparationSettings:
    try:
        return from_dict(PreparationSettings, read_json(path, max_bytes=MAX_MANIFEST_BYTES), path.name)
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
        raise ConfigError(f"{folder} was begun with other texts: {_describe_source(saved, current)}; {advice}")


def _describe_source(saved: PreparationSettings, current: PreparationSettings) -> str:
    before: dict[str, SourceFile] = {source.name: source for source in saved.sources}
    now = {source.name: source for source in current.sources}
    for name in {**before, **now}:
        if name not in now:
            return f"{name} is missing now"
        if name not in before:
            return f"{name} is new"
        if before[name] != now[name]:
            return f"{name} was changed since then"
    return "their order differs"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other processes from preparing the same folder at the same time."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileError(f"{folder} is being written by another process; wait until it ends") from None
        yield
    finally:
        os.close(handle)


PIECE_LENGTH = 2**15  # characters of running text that are held out, or trained on, together
HOLDOUT_SEED = 0
READ_BLOCK = 2**20
# As in text_parts.py: a letter or digit before white space.
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
