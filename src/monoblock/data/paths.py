"""A user's own files: which reader a path asks for, and which part of it is which split.

notes.txt           one file: the first nine tenths train, the last tenth validates
folder/             train.*, valid.*, test.* in it
mine/{split}.tsv    the same, spelled out
mine/{split}.de-en  two aligned files a split, mine/train.de and mine/train.en
mine/               MNIST's own names: train-images-idx3-ubyte.gz, t10k-images-idx3-ubyte.gz and the labels beside them
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from monoblock.data import idx, readers
from monoblock.data.chats import read_chats
from monoblock.data.readers import Boundaries, Kind
from monoblock.data.squad import read_questions
from monoblock.errors import FileError, SplitError, did_you_mean

SPELLINGS = {"train": ("train",), "valid": ("valid", "val", "dev", "validation"), "test": ("test", "t10k")}
KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".tsv": "pairs",
    ".jsonl": "labelled",
    ".conll": "tagged",
    ".iob": "tagged",
    ".json": "questions",
    ".npz": "images",
    **dict.fromkeys(idx.ENDINGS, "images"),
}
READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    "pairs": readers.read_pairs,
    "labelled": readers.read_labelled,
    "tagged": readers.read_conll,
    "questions": read_questions,
    "chat": read_chats,
    "images": lambda path: idx.read_idx(path) if idx.is_idx(path) else readers.read_images(path),
}
ALIGNED = re.compile(r"\.([A-Za-z_]+)-([A-Za-z_]+)$")
VALIDATES = 0.1


class Read(NamedTuple):
    kind: Kind
    rows: list[Any]


def find(name: str, folder: str | Path | None) -> str | None:
    """The path that a name stands for, itself or in the folder of corpora; None where there is nothing."""
    for path in [Path(name), *([Path(folder) / name] if folder is not None else [])]:
        if path.exists() or _exist(iter([path])) or any(_exist(_spelled(path, split)) for split in SPELLINGS):
            return str(path)
    return None


def read(path: str, split: str, kind: Kind | None, documents: Boundaries) -> Read:
    """The rows of one split of a path that exists."""
    whole = Path(path)
    if is_one(path):
        found, rows = _read_file(whole, kind, documents)
        return Read(found, portion(rows, split, path))
    parts = [_read_file(file, kind, documents) for file in _files_of(whole, split)]
    kinds = sorted({part.kind for part in parts})
    if len(kinds) > 1:
        raise FileError(f"{path} mixes {' and '.join(kinds)}; keep one kind of file, or say which with kind")
    return Read(parts[0].kind, [row for part in parts for row in part.rows])


def files(path: Path) -> tuple[Path, ...]:
    """The file itself, or the two that a path such as train.de-en stands for."""
    languages = ALIGNED.search(path.name)
    if languages is None:
        return (path,)
    stem = path.name[: languages.start()]
    return tuple(path.with_name(f"{stem}.{language}") for language in languages.groups())


def is_one(path: str) -> bool:
    """Whether a path is one file, without splits of its own."""
    return "{split}" not in path and not Path(path).is_dir()


def kind_among(path: str, wanted: Sequence[Kind]) -> Kind:
    """How to read a path of which several kinds could be used: as its ending says, plain text as the first of them."""
    every = (_exist(_spelled(Path(path), split)) for split in SPELLINGS)
    file = Path(path) if is_one(path) else next((one for one in every if one is not None), None)
    ending = None if file is None else next((ending for ending in KINDS if file.name.endswith(ending)), None)
    if file is None or ending is None or len(wanted) == 1:
        return wanted[0]
    if ending == ".tsv":
        return next((kind for kind in wanted if kind in ("pairs", "labelled")), wanted[0])
    if ending == ".json" and "pairs" in wanted and _holds_pairs(file):
        return "pairs"
    found = _of_objects(file) if ending == ".jsonl" else KINDS[ending]
    return wanted[0] if found == "text" and "text" not in wanted else found


def portion(rows: list[Any], split: str, name: str) -> list[Any]:
    """A split of what has none of its own: the last tenth validates.  A single text is cut, not counted."""
    if split == "all":
        return rows
    if split == "test":
        raise SplitError(f"{name} is one file and has no split 'test'; give a folder with train, valid and test files")
    text = len(rows) == 1 and isinstance(rows[0], str)
    parts = rows[0] if text else rows
    cut = int(len(parts) * (1 - VALIDATES))
    part = parts[:cut] if split == "train" else parts[cut:]
    return [part] * bool(part) if text else part


def _read_file(path: Path, kind: Kind | None, documents: Boundaries) -> Read:
    found = files(path)
    if len(found) == 2 and not path.exists():
        return Read("pairs", list(readers.read_aligned(*found)))
    if kind is None:
        ending = next((ending for ending in KINDS if path.name.endswith(ending)), None)
        if ending is None:
            raise FileError(f"{path} ends in none of {', '.join(KINDS)}; rename it, or say what it is with kind")
        kind = _of_objects(path) if ending == ".jsonl" else KINDS[ending]
    if kind == "text":
        text = readers.read_documents(path) if path.suffix == ".jsonl" else readers.read_text(path, documents)
        return Read(kind, list(text))
    if kind not in READERS:
        raise FileError(f"kind={kind!r} cannot be read{did_you_mean(kind, ['text', *READERS])}")
    return Read(kind, list(READERS[kind](path)))


def _holds_pairs(path: Path) -> bool:
    """Whether a .json file has an object a line, and in the first a source."""
    try:
        return _of_objects(path) == "pairs"
    except FileError:
        return False


def _of_objects(path: Path) -> Kind:
    """What a .jsonl file holds, by the first of its lines: all the others must then, too."""
    first = next(readers.read_objects(path))[1]
    pairs = any(names[0] in first for names in readers.PAIR_KEYS)
    return "chat" if "messages" in first else "labelled" if "label" in first else "pairs" if pairs else "text"


def _files_of(path: Path, split: str) -> list[Path]:
    wanted = list(SPELLINGS) if split == "all" else [split]
    found = [_exist(_spelled(path, one)) for one in wanted]
    present = [file for file in found if file is not None]
    if not present:
        ending = "" if "{split}" in str(path) else f": it holds no {wanted[0]}{{{','.join(KINDS)}}}"
        raise SplitError(f"{path} has no split {split!r}{ending}")
    return present


def _spelled(path: Path, split: str) -> Iterator[Path]:
    for word in SPELLINGS[split]:
        if "{split}" in str(path):
            yield Path(str(path).replace("{split}", word))
        else:
            yield from (path / f"{word}{suffix}" for suffix in KINDS)


def _exist(candidates: Iterator[Path]) -> Path | None:
    return next((one for one in candidates if all(file.is_file() for file in files(one))), None)
