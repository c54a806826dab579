"""Files from strangers: read whole only when small, as JSON only when plain, and never outside the folder they lie in.

A JSON text can lie in more ways than it can be wrong: a key twice, of which every reader takes another; NaN; lists in
lists until the stack is gone; three bytes that become eighty in memory. None of these gets past `parse_json`.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from monoblock.errors import FileError

MB = 2**20
LARGEST = 16 * MB
DEEPEST = 32
MOST_VALUES = 1_000_000
SHOWN = 80  # characters of something foreign in a message


def shown(value: object) -> str:
    """Something foreign as it may stand in a message: one line, short, with nothing a terminal would obey."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def inside(folder: str | Path, name: object) -> Path:
    """The file of that name in a folder: a plain name, and a file that lies there, not one that a link leads to.

    The one exception is the Hugging Face cache, where snapshots/REVISION holds links into blobs/ beside snapshots/.
    """
    root = Path(os.path.realpath(folder))
    plain = isinstance(name, str) and name not in ("", ".", "..") and not any(c in "/\\:\0\n" for c in name)
    if not plain:
        raise FileError(f"{folder} names the file {shown(name)}; a file is named without a path")
    path = root / str(name)
    try:
        real = Path(os.path.realpath(path, strict=True))
        regular = stat.S_ISREG(os.stat(real).st_mode)
    except (OSError, ValueError):
        raise FileError(f"{folder} has no file {shown(name)}") from None
    cache = root.parent.parent / "blobs"
    if real.parent != root and not (root.parent.name == "snapshots" and real.parent == cache):
        raise FileError(f"{folder}: {shown(name)} is a link that leads out of the folder; put the file itself there")
    if not regular:
        raise FileError(f"{folder}: {shown(name)} is no plain file")
    return path


def present(folder: str | Path, name: str) -> bool:
    """Whether a folder has something of that name, be it a link that leads nowhere: `inside` says what is wrong."""
    return os.path.lexists(Path(folder) / name)


def read_bytes(path: str | Path, largest: int = LARGEST) -> bytes:
    """The whole of a plain file, if it is no larger than that."""
    try:
        # What is no plain file may never end, or wait for a writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FileError(f"{path} is no plain file")
        with open(path, "rb") as file:
            raw = file.read(largest + 1)
    except (OSError, ValueError) as problem:
        if isinstance(problem, FileError):
            raise
        raise FileError(f"{path} cannot be read: {getattr(problem, 'strerror', None) or problem}") from None
    if len(raw) > largest:
        raise FileError(f"{path} is larger than {largest / MB:g} MB; is it the right file?")
    return raw


def read_json(path: str | Path, *, largest: int = LARGEST, most: int = MOST_VALUES) -> dict[str, Any]:
    """The object in a JSON file."""
    found = parse_json(read_bytes(path, largest), str(path), most=most)
    if not isinstance(found, dict):
        raise FileError(f"{path} holds no object; is it the right file?")
    return found


def parse_json(raw: bytes, where: str, *, most: int = MOST_VALUES, deepest: int = DEEPEST) -> Any:
    """JSON as its standard has it, with no key twice, at most `most` values and `deepest` levels."""
    # Counted before anything is made of them; a comma in a string counts too, and there is room for those.
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > most:
        raise FileError(f"{where} holds more than {most:,} values; is it the right file?")
    try:
        found = json.loads(
            raw.decode("utf-8-sig"), object_pairs_hook=_single, parse_constant=_no_constant, parse_float=_finite
        )
    except RecursionError:
        raise FileError(f"{where} is not JSON we read: it is nested too deep") from None
    except UnicodeDecodeError as problem:
        raise FileError(f"{where} is not JSON: byte {problem.start} is not UTF-8") from None
    except ValueError as problem:
        raise FileError(f"{where} is not JSON: {' '.join(str(problem).split())[:SHOWN]}") from None
    if _deeper(found, deepest):
        raise FileError(
            f"{where} is not JSON we read: it is nested deeper than {deepest} levels; is it the right file?"
        )
    return found


def _single(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} stands there twice")
    return made


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{shown(digits)} is too large a number")
    return number


def _deeper(value: Any, deepest: int) -> bool:
    """Whether lists and objects lie in each other deeper than that."""
    level = [value]
    for _ in range(deepest + 1):
        inner = [one for one in level if isinstance(one, (dict, list))]
        level = [x for one in inner for x in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return False
    return any(isinstance(one, (dict, list)) for one in level)
