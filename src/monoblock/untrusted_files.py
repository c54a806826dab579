"""Read files from untrusted sources: with a size limit, as strict JSON or TOML, and only from inside their folder.

Files in a folder that may come from others, such as that of a run, are opened for writing by `open_to_write` only.

`parse_json` and `parse_toml` refuse what parsers interpret differently (duplicate keys, NaN and infinity) and what
could exhaust memory (deep nesting, long numbers, and more values than a configuration can have). Every function that
reads a file for a user does it in `with reading(path)`, so that no damage of the file can raise another exception than
a FileError.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import stat
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

from monoblock.errors import FileError, MonoblockError

MB = 2**20
NO_LINK_NO_WAIT = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))  # not on Windows
MAX_BYTES = 16 * MB
MAX_LINE_BYTES = 16 * MB  # of a stream
MAX_JSON_DEPTH = 32
MAX_JSON_VALUES = 1_000_000
MAX_DIGITS = 64  # of a whole number
MAX_TOML_BYTES = MB
MAX_KEY_PARTS = 16  # of a dotted key in TOML, whose parser takes quadratic time and memory for them
MAX_EXPANDED_BYTES = 192 * MB  # that any compressed file may have; a larger file may have MAX_EXPANSION times its size
MAX_EXPANSION = 8
MAX_REPR_LENGTH = 80  # characters of an untrusted value that a message shows
MAX_REASON_LENGTH = 120  # characters of the message of a parser that a message shows


def short_repr(value: object) -> str:
    """Format an untrusted value for an error message: one short line without terminal control characters."""
    text = repr(value)
    return text if len(text) <= MAX_REPR_LENGTH else f"{text[:MAX_REPR_LENGTH]}…"


TERMINAL_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but the ends of lines and tabs


def show_controls(text: str) -> str:
    """Write control characters, with which a text could take over the terminal that shows it, as <1B>."""
    return TERMINAL_CONTROLS.sub(lambda match: f"<{ord(match[0]):02X}>", text)


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Turn every exception that is not one of the package into a FileError that names the file or folder `path`.

    The original exception is the cause of the FileError, so that --debug shows it. Warnings and interrupts pass.
    """
    try:
        yield
    except (MonoblockError, Warning, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except RecursionError as problem:
        raise FileError(f"{path} cannot be read: it is nested too deep") from problem
    except MemoryError as problem:
        raise FileError(f"{path} cannot be read: there is not enough memory for it") from problem
    except OSError as problem:
        raise FileError(f"{problem.filename or path} cannot be read: {problem.strerror or problem}") from problem
    except BaseException as problem:  # a Rust panic is a BaseException, but not an Exception
        reason = " ".join(str(problem)[: 4 * MAX_REASON_LENGTH].split())[:MAX_REASON_LENGTH]
        raise FileError(f"{path} cannot be used: {type(problem).__name__}: {reason}") from problem


def safe_join(folder: str | Path, name: object) -> Path:
    """Return the path of the regular file `name` in a folder; raise FileError if it leads out of the folder.

    Links out of the folder are allowed in the Hugging Face cache only, where files in snapshots/REVISION are links to
    files in ../../blobs.
    """
    root = Path(os.path.realpath(folder))
    is_plain = isinstance(name, str) and name not in ("", ".", "..") and not any(c in "/\\:\0\n" for c in name)
    if not is_plain:
        raise FileError(
            f"{folder} refers to {short_repr(name)}, which is not a plain file name; write a file name without a path"
        )
    path = root / str(name)
    try:
        real = Path(os.path.realpath(path, strict=True))
        is_regular = stat.S_ISREG(os.stat(real).st_mode)
    except (OSError, ValueError):
        raise FileError(f"{folder} has no file {short_repr(name)}") from None
    blobs = root.parent.parent / "blobs"
    if real.parent != root and not (root.parent.name == "snapshots" and real.parent == blobs):
        raise FileError(
            f"{folder}: {short_repr(name)} is a link that leads out of the folder; put the file itself there"
        )
    if not is_regular:
        raise FileError(f"{folder}: {short_repr(name)} is not a regular file; put a file there")
    return path


def has_file(folder: str | Path, name: str) -> bool:
    """Return whether a folder has an entry of this name; a broken link counts, so that `safe_join` reports it."""
    return os.path.lexists(Path(folder) / name)


def safe_folder(folder: str | Path, name: str) -> Path:
    """Return the path of the folder `name` in a folder; raise FileError if it is a link or not a folder."""
    path = Path(folder) / name
    if path.is_symlink() or not path.is_dir():
        raise FileError(f"{folder}: {short_repr(name)} is not a folder, or a link; put the folder itself there")
    return path


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file to read bytes; raise FileError for a pipe or a device, which might never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for a writer
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileError(f"{path} is not a regular file")
        return os.fdopen(descriptor, "rb")
    except (OSError, ValueError) as problem:
        if isinstance(problem, FileError):
            raise
        raise FileError(f"{path} cannot be read: {getattr(problem, 'strerror', None) or problem}") from None


def standard_input() -> BinaryIO:
    """Return standard input, to read bytes; raise FileError if it is a device that may never end, such as /dev/zero."""
    if not hasattr(sys.stdin, "buffer"):  # a program has replaced it by one of text
        return io.BytesIO(sys.stdin.read().encode())
    stream, is_device = sys.stdin.buffer, False
    with suppress(OSError, ValueError):  # a program may have replaced it by one without a descriptor
        status = os.fstat(stream.fileno())
        is_device = stat.S_ISBLK(status.st_mode) or (stat.S_ISCHR(status.st_mode) and not stream.isatty())
        is_device = is_device and not os.path.samestat(status, os.stat(os.devnull))
    if is_device:
        raise FileError("standard input is a device, which may never end; redirect a file, or pipe a text")
    return stream


def bounded_lines(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield the lines of a stream that may never end; `name` is what the message about a line too long calls it."""
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        if len(raw) > MAX_LINE_BYTES:
            raise FileError(f"{name} has a line of more than {MAX_LINE_BYTES / MB:g} MB; is it text?")
        yield raw


def open_to_write(path: str | Path, mode: Literal["new", "append", "update"] = "new") -> BinaryIO:
    """Open a regular file to write bytes; no link is followed, and nothing waits for the reader of a pipe.

    mode: "new" removes what has this name, be it a file or a link, and creates a file; "append" and "update" (to read
        and write) open the file, or create one, and raise FileError for a link, a pipe or a device.
    """
    flags = {"new": os.O_WRONLY | os.O_EXCL, "append": os.O_RDWR | os.O_APPEND, "update": os.O_RDWR}[mode]
    if mode == "new":
        with suppress(FileNotFoundError):
            os.unlink(path)
    elif os.path.islink(path):
        raise FileError(f"{path} is a link; put the file itself there")
    descriptor = os.open(path, flags | os.O_CREAT | NO_LINK_NO_WAIT, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileError(f"{path} is not a regular file; delete it")
    file: Any = os.fdopen(descriptor, {"new": "wb", "append": "ab", "update": "r+b"}[mode])
    opened: BinaryIO = file
    return opened


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write text or bytes to a temporary file in the same folder, then rename it to `path`.

    Other programs never read the file half-written. A file or a link that has this name is replaced; for a folder, a
    pipe or a device, FileError is raised.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # nor a link to one, such as /dev/stdout
        raise FileError(f"{path} cannot be written: it is not a regular file; delete it, or give another name")
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open_to_write(temporary) as file:
            file.write(content if isinstance(content, bytes) else content.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as problem:
        with suppress(OSError):
            os.unlink(temporary)
        raise FileError(f"{path} cannot be written: {problem.strerror}") from None


def read_bytes(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a regular file; raise FileError if it has more than `max_bytes` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size <= max_bytes:
            raw = file.read(max_bytes + 1)
            if len(raw) <= max_bytes:
                return raw
    raise FileError(f"{path} is larger than {max_bytes / MB:g} MB; is it the right file?")


def read_text(path: str | Path, max_bytes: int = MAX_BYTES) -> str:
    """Read a UTF-8 file; raise FileError if it is not UTF-8 or has more than `max_bytes` bytes."""
    return _decode(read_bytes(path, max_bytes), f"{path} is not text")


def _decode(raw: bytes, problem: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{problem}: byte {error.start} is not UTF-8") from None


def check_expansion(path: str | Path, size: int) -> None:
    """Raise FileError if a compressed file states that it expands to `size` bytes and that is implausibly many."""
    limit = max(MAX_EXPANDED_BYTES, MAX_EXPANSION * os.path.getsize(path))
    if size > limit:
        raise FileError(f"{path} would expand to {size / MB:,.0f} MB, more than the limit of {limit / MB:,.0f} MB")


def read_json(path: str | Path, *, max_bytes: int = MAX_BYTES, max_values: int = MAX_JSON_VALUES) -> dict[str, Any]:
    """Read a JSON file that contains an object, by the rules of `parse_json`."""
    return _parse_object(read_bytes(path, max_bytes), path, max_values)


def _parse_object(raw: bytes, path: str | Path, max_values: int) -> dict[str, Any]:
    data = parse_json(raw, str(path), max_values=max_values)
    if not isinstance(data, dict):
        raise FileError(f"{path} does not contain a JSON object; is it the right file?")
    return data


class Folder:
    """The files of a folder, each of which is opened and parsed at most once."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._contents: dict[str, bytes] = {}
        self._objects: dict[str, dict[str, Any]] = {}

    def has(self, name: str) -> bool:
        return has_file(self.path, name)

    def read_bytes(self, name: str, max_bytes: int = MAX_BYTES) -> bytes:
        """Return the content of a regular file of the folder."""
        if name not in self._contents:
            self._contents[name] = read_bytes(safe_join(self.path, name), max_bytes)
        return self._contents[name]

    def read_json(self, name: str, *, max_bytes: int = MAX_BYTES, max_values: int = MAX_JSON_VALUES) -> dict[str, Any]:
        """Return the object in a JSON file, which must not be changed; {} if the folder has no such file."""
        if name not in self._objects:
            path = self.path / name
            self._objects[name] = (
                _parse_object(self.read_bytes(name, max_bytes), path, max_values) if self.has(name) else {}
            )
        return self._objects[name]


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file, by the rules of `parse_toml`."""
    return parse_toml(read_text(path, MAX_TOML_BYTES), str(path))


# A part of a dotted key and its dot. A match begins at a word or quote, so that the search takes linear time.
_KEY_PART = r"""(?:(?<![\w-])[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_LONG_KEY = re.compile(f"(?:{_KEY_PART}){{{MAX_KEY_PARTS}}}")


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML with limits on the nesting, on dotted keys and on numbers; `source` is the name of the file."""
    if _LONG_KEY.search(text):
        raise FileError(f"{source} has a key of more than {MAX_KEY_PARTS} parts; is it the right file?")
    try:
        data = tomllib.loads(text, parse_float=_parse_finite_float)
    except RecursionError:
        raise FileError(f"{source} is nested too deep; is it the right file?") from None
    except ValueError as problem:  # tomllib.TOMLDecodeError, or a number that is too long
        raise FileError(f"{source} is not valid TOML: {' '.join(str(problem).split())[:MAX_REASON_LENGTH]}") from None
    _check_depth(data, source, MAX_JSON_DEPTH)
    if any(type(value) is int and abs(value) >= 10**MAX_DIGITS for value in _iterate_values(data)):
        raise FileError(f"{source} has a number of more than {MAX_DIGITS} digits; is it the right file?")
    return data


def parse_json(raw: bytes, source: str, *, max_values: int = MAX_JSON_VALUES, max_depth: int = MAX_JSON_DEPTH) -> Any:
    """Parse strict JSON without duplicate keys, with at most `max_values` values and `max_depth` levels of nesting.

    source: the name of the file, for error messages.
    """
    # An upper bound of the number of values, before parsing allocates memory; commas in strings count too.
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > max_values:
        raise FileError(f"{source} has more than {max_values:,} values; is it the right file?")
    text = _decode(raw, f"{source} is not JSON")
    try:
        data = json.loads(
            text,
            object_pairs_hook=_reject_duplicate_keys,
            parse_constant=_reject_constant,
            parse_float=_parse_finite_float,
            parse_int=_parse_short_int,
        )
    except RecursionError:
        raise FileError(f"{source} is nested too deep; is it the right file?") from None
    except ValueError as problem:
        raise FileError(f"{source} is not JSON: {' '.join(str(problem).split())[:MAX_REASON_LENGTH]}") from None
    _check_depth(data, source, max_depth)
    return data


def _check_depth(data: Any, source: str, max_depth: int) -> None:
    if _is_deeper_than(data, max_depth):
        raise FileError(f"{source} is nested deeper than {max_depth} levels; is it the right file?")


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        duplicate = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {short_repr(duplicate)} occurs twice")
    return result


def _reject_constant(word: str) -> float:
    raise ValueError(f"{word} is not a JSON number")


def _parse_finite_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{short_repr(digits)} is too large a number")
    return number


def _parse_short_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"{short_repr(digits)} is too large a number")
    return int(digits)


def _iterate_values(value: Any) -> Iterator[Any]:
    """Yield all values in nested lists and dicts that are neither."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (dict, list)):
            stack.extend(item.values() if isinstance(item, dict) else item)
        else:
            yield item


def _is_deeper_than(value: Any, max_depth: int) -> bool:
    """Return whether lists and objects are nested deeper than `max_depth` levels."""
    level = [value]
    for _ in range(max_depth + 1):
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return False
    return any(isinstance(item, (dict, list)) for item in level)
