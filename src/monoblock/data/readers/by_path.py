"""Read a user's own files: choose the reader by the path, and find the files of a split.

A path may have one of these forms:

notes.txt           one file: a tenth of its rows, or the last tenth of a running text, is for validation (holdout.py)
mine/               a folder with the files train.*, valid.* and test.*
mine/{split}.tsv    one file per split; {split} is written as it is here and stands for train, valid or test
mine/{split}.de-en  two aligned files per split, mine/train.de and mine/train.en
mine/               a folder of pictures, one folder for each class: mine/cats/*.png and mine/dogs/*.png, or for each
                    split mine/train/cats/*.png
mine/               a folder of images named as in MNIST, train-images-idx3-ubyte.gz and t10k-images-idx3-ubyte.gz, and
                    of their labels, train-labels-idx1-ubyte.gz and t10k-labels-idx1-ubyte.gz
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from monoblock.data.readers.chat import read_chats
from monoblock.data.readers.columns import table_kind
from monoblock.data.readers.holdout import DEFAULT_HOLDOUT, Holdout, split_rows
from monoblock.data.readers.images import (
    IMAGE_FILE_SUFFIXES,
    has_pictures,
    is_class_folder,
    is_idx_images,
    read_class_folders,
    read_idx,
    read_images,
)
from monoblock.data.readers.labelled import read_conll, read_labelled
from monoblock.data.readers.lines import read_jsonl
from monoblock.data.readers.pairs import PAIR_KEYS, read_aligned_pairs, read_pairs
from monoblock.data.readers.records import CorpusKind, DocumentBoundaries
from monoblock.data.readers.squad import read_questions
from monoblock.data.readers.text import read_documents, read_text
from monoblock.errors import FileError, SplitError, did_you_mean
from monoblock.untrusted_files import reading, safe_folder, safe_join

SPLIT_FILE_NAMES = {"train": ("train",), "valid": ("valid", "val", "dev", "validation"), "test": ("test", "t10k")}
KIND_BY_SUFFIX: dict[str, CorpusKind] = {
    ".txt": "text",
    ".tsv": "pairs",
    ".csv": "labelled",
    ".jsonl": "labelled",
    ".conll": "tagged",
    ".iob": "tagged",
    ".json": "questions",
    ".npz": "images",
    **dict.fromkeys(IMAGE_FILE_SUFFIXES, "images"),
}
READER_BY_KIND: dict[str, Callable[[Path], Iterator[Any]]] = {
    "pairs": read_pairs,
    "labelled": read_labelled,
    "tagged": read_conll,
    "questions": read_questions,
    "chat": read_chats,
    "images": lambda path: read_idx(path) if is_idx_images(path) else read_images(path),
}
ALIGNED_SUFFIX = re.compile(r"\.([A-Za-z_]+)-([A-Za-z_]+)$")


class FileContent(NamedTuple):
    kind: CorpusKind
    rows: list[Any]
    selection: str = ""  # which rows are held out for validation, if the file has no splits of its own


def find_path(name: str, folder: str | Path | None) -> str | None:
    """Return the path of `name` in the working directory, or else in `folder`; None if it exists in neither."""
    for path in [Path(name), *([Path(folder) / name] if folder is not None else [])]:
        if (
            path.exists()
            or _first_existing(iter([path]))
            or any(_first_existing(_candidate_paths(path, split)) for split in SPLIT_FILE_NAMES)
        ):
            return str(path)
    return None


def read_split(
    path: str,
    split: str,
    kind: CorpusKind | None,
    document_boundaries: DocumentBoundaries,
    holdout: Holdout = DEFAULT_HOLDOUT,
) -> FileContent:
    """Read one split of the corpus at a path that `find_path` returned."""
    if is_single_file(path):
        content = _read_file(Path(path), kind, document_boundaries)
        return FileContent(content.kind, *split_rows(content.rows, split, path, holdout))
    contents = [_read_file(file, kind, document_boundaries) for file in _split_files(Path(path), split)]
    kinds = sorted({content.kind for content in contents})
    if len(kinds) > 1:
        raise FileError(f"{path} has files of several kinds ({', '.join(kinds)}); keep one kind, or set kind=…")
    return FileContent(contents[0].kind, [row for content in contents for row in content.rows])


def expand_aligned_path(path: Path) -> tuple[Path, ...]:
    """Return both files, train.de and train.en, for a path such as train.de-en, and any other path unchanged."""
    languages = ALIGNED_SUFFIX.search(path.name)
    if languages is None:
        return (path,)
    stem = path.name[: languages.start()]
    return tuple(path.with_name(f"{stem}.{language}") for language in languages.groups())


def is_single_file(path: str) -> bool:
    """Return whether a path holds the rows of all splits: one file, or a folder of classes of pictures."""
    return "{split}" not in path and (not Path(path).is_dir() or _is_undivided_class_folder(Path(path)))


def _is_undivided_class_folder(path: Path) -> bool:
    """Return whether a folder has folders of classes and no files or folders of splits."""
    return is_class_folder(path) and not any(_find_split_file(path, split) for split in SPLIT_FILE_NAMES)


def infer_kind(path: str, allowed: Sequence[CorpusKind]) -> CorpusKind:
    """Guess the kind of corpus at a path from the suffix of its files or from their first JSON object.

    If that does not determine the kind, return one of `allowed`.
    """
    files = (_find_split_file(Path(path), split) for split in SPLIT_FILE_NAMES)
    file = Path(path) if is_single_file(path) else next((file for file in files if file is not None), None)
    if file is not None and file.is_dir():
        return "images"
    suffix = None if file is None else _known_suffix(file)
    if file is None or suffix is None or len(allowed) == 1:
        return allowed[0]
    if suffix in (".csv", ".tsv"):
        named = table_kind(file)
        tables = [kind for kind in allowed if kind in ("pairs", "labelled")]
        return named if named is not None and named in allowed else next(iter(tables), allowed[0])
    if suffix == ".json" and "pairs" in allowed and _has_pairs(file):
        return "pairs"
    kind = _jsonl_kind(file) if suffix == ".jsonl" else KIND_BY_SUFFIX[suffix]
    return allowed[0] if kind == "text" and "text" not in allowed else kind


def _read_file(path: Path, kind: CorpusKind | None, document_boundaries: DocumentBoundaries) -> FileContent:
    with reading(path):
        return _read_rows(path, kind, document_boundaries)


def _read_rows(path: Path, kind: CorpusKind | None, document_boundaries: DocumentBoundaries) -> FileContent:
    if path.is_dir():
        return FileContent("images", list(read_class_folders(path)))
    files = expand_aligned_path(path)
    if len(files) == 2 and not path.exists():
        return FileContent("pairs", list(read_aligned_pairs(*files)))
    if kind is None:
        suffix = _known_suffix(path)
        if suffix is None:
            raise FileError(f"{path} ends in none of {', '.join(KIND_BY_SUFFIX)}; rename the file, or set kind=…")
        named = table_kind(path) if suffix in (".csv", ".tsv") else None
        kind = _jsonl_kind(path) if suffix == ".jsonl" else named or KIND_BY_SUFFIX[suffix]
    if kind == "text":
        documents = read_documents(path) if path.suffix in (".jsonl", ".csv") else read_text(path, document_boundaries)
        return FileContent(kind, list(documents))
    if kind not in READER_BY_KIND:
        raise FileError(
            f"kind={kind!r} is unknown{did_you_mean(kind, ['text', *READER_BY_KIND])}; "
            f"write one of text, {', '.join(READER_BY_KIND)}"
        )
    return FileContent(kind, list(READER_BY_KIND[kind](path)))


def _known_suffix(path: Path) -> str | None:
    return next((suffix for suffix in KIND_BY_SUFFIX if path.name.endswith(suffix)), None)


def _has_pairs(path: Path) -> bool:
    """Return whether a .json file has one JSON object per line, the first of which is a pair."""
    try:
        return _jsonl_kind(path) == "pairs"
    except FileError:
        return False


def _jsonl_kind(path: Path) -> CorpusKind:
    """Return the kind of corpus in a .jsonl file, decided by the keys of its first object."""
    first = next(read_jsonl(path))[1]
    if "messages" in first:
        return "chat"
    if "label" in first:
        return "labelled"
    return "pairs" if any(keys[0] in first for keys in PAIR_KEYS) else "text"


def _split_files(path: Path, split: str) -> list[Path]:
    splits = list(SPLIT_FILE_NAMES) if split == "all" else [split]
    files = [_find_split_file(path, name) for name in splits]
    present = [file for file in files if file is not None]
    if not present:
        detail = "" if "{split}" in str(path) else f"; add a file named {splits[0]}{{{','.join(KIND_BY_SUFFIX)}}}"
        if path.is_dir() and has_pictures(path):
            detail = (
                f"; its pictures have no classes: put those of each class into a folder, {path}/cats and {path}/dogs"
            )
        raise SplitError(f"{path} has no split {split!r}{detail}")
    return present


def _find_split_file(path: Path, split: str) -> Path | None:
    """Return the first file of a split that exists, or None.

    A pattern with {split} names its files, which may be links. A folder does not, so a link out of it is refused.
    """
    file = _first_existing(_candidate_paths(path, split))
    if file is not None and "{split}" not in str(path):
        (safe_folder if file.is_dir() else safe_join)(path, file.name)
    return file


def _candidate_paths(path: Path, split: str) -> Iterator[Path]:
    for name in SPLIT_FILE_NAMES[split]:
        if "{split}" in str(path):
            yield Path(str(path).replace("{split}", name))
        else:
            yield from (path / f"{name}{suffix}" for suffix in KIND_BY_SUFFIX)
            yield path / name  # a folder of classes of pictures


def _first_existing(candidates: Iterator[Path]) -> Path | None:
    """Return the first candidate that is a file, both of two aligned files, or a folder of classes of pictures."""
    return next(
        (
            path
            for path in candidates
            if all(file.is_file() for file in expand_aligned_path(path)) or is_class_folder(path)
        ),
        None,
    )
