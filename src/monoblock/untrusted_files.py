"""Read files from untrusted sources: with a size limit, as strict JSON, and only from inside their folder.

`parse_json` refuses what JSON parsers interpret differently (duplicate keys, NaN and infinity) and what could exhaust
memory (deep nesting, and more values than a configuration can have).
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from monoblock.errors import FileError

MB = 2**20
MAX_BYTES = 16 * MB
MAX_JSON_DEPTH = 32
MAX_JSON_VALUES = 1_000_000
MAX_REPR_LENGTH = 80  # characters of an untrusted value that a message shows


def short_repr(value: object) -> str:
    """Format an untrusted value for an error message: one short line without terminal control characters."""
    text = repr(value)
    return text if len(text) <= MAX_REPR_LENGTH else f"{text[:MAX_REPR_LENGTH]}…"


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


def read_bytes(path: str | Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a regular file; raise FileError if it has more than `max_bytes` bytes."""
    try:
        # Reading a pipe or a device may never end.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FileError(f"{path} is not a regular file")
        with open(path, "rb") as file:
            raw = file.read(max_bytes + 1)
    except (OSError, ValueError) as problem:
        if isinstance(problem, FileError):
            raise
        raise FileError(f"{path} cannot be read: {getattr(problem, 'strerror', None) or problem}") from None
    if len(raw) > max_bytes:
        raise FileError(f"{path} is larger than {max_bytes / MB:g} MB; is it the right file?")
    return raw


def read_json(path: str | Path, *, max_bytes: int = MAX_BYTES, max_values: int = MAX_JSON_VALUES) -> dict[str, Any]:
    """Read a JSON file that contains an object, by the rules of `parse_json`."""
    data = parse_json(read_bytes(path, max_bytes), str(path), max_values=max_values)
    if not isinstance(data, dict):
        raise FileError(f"{path} does not contain a JSON object; is it the right file?")
    return data


def parse_json(raw: bytes, source: str, *, max_values: int = MAX_JSON_VALUES, max_depth: int = MAX_JSON_DEPTH) -> Any:
    """Parse strict JSON without duplicate keys, with at most `max_values` values and `max_depth` levels of nesting.

    source: the name of the file, for error messages.
    """
    # An upper bound of the number of values, before parsing allocates memory; commas in strings count too.
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > max_values:
        raise FileError(f"{source} has more than {max_values:,} values; is it the right file?")
    try:
        data = json.loads(
            raw.decode("utf-8-sig"),
            object_pairs_hook=_reject_duplicate_keys,
            parse_constant=_reject_constant,
            parse_float=_parse_finite_float,
        )
    except RecursionError:
        raise FileError(f"{source} cannot be read as JSON: it is nested too deep; is it the right file?") from None
    except UnicodeDecodeError as problem:
        raise FileError(f"{source} is not JSON: byte {problem.start} is not UTF-8") from None
    except ValueError as problem:
        raise FileError(f"{source} is not JSON: {' '.join(str(problem).split())[:MAX_REPR_LENGTH]}") from None
    if _is_deeper_than(data, max_depth):
        raise FileError(
            f"{source} cannot be read as JSON: it is nested deeper than {max_depth} levels; is it the right file?"
        )
    return data


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


def _is_deeper_than(value: Any, max_depth: int) -> bool:
    """Return whether lists and objects are nested deeper than `max_depth` levels."""
    level = [value]
    for _ in range(max_depth + 1):
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return False
    return any(isinstance(item, (dict, list)) for item in level)
