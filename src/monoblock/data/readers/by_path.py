"""Read a user's own files: choose the reader by the path, and find the files of a split.

A path may have one of these forms:

notes.txt           one file: a tenth of its rows, or the last tenth of a running text, is for validation (below)
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
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from monoblock.data.readers.images import (
    IMAGE_FILE_SUFFIXES,
    has_pictures,
    is_class_folder,
    is_idx_images,
    read_class_folders,
    read_idx,
    read_images,
)
from monoblock.data.readers.records import (
    CorpusKind,
    DocumentBoundaries,
    LabelledImage,
    LabelledPicture,
    LabelledText,
    Pair,
    Question,
    TaggedSentence,
)
from monoblock.data.readers.squad import read_questions
from monoblock.data.readers.tables import (
    PAIR_KEYS,
    is_number,
    read_aligned_pairs,
    read_conll,
    read_documents,
    read_labelled,
    read_pairs,
    table_kind,
)
from monoblock.data.readers.text import read_chats, read_jsonl, read_text
from monoblock.errors import ConfigError, FileError, SplitError, did_you_mean
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


SplitMethod = Literal["random", "last"]
VALIDATION_FRACTION = 0.1
SEED = 0


@dataclass(frozen=True)
class Holdout:
    """How many rows are held out for validation, and which.

    method: "random" draws them, with a fixed seed; "last" takes the last rows of the file.
    count: the number of rows; 0 means a tenth of a file without splits, and none of a corpus that has splits.
    """

    method: SplitMethod = "random"
    count: int = 0


DEFAULT_HOLDOUT = Holdout()


class FileContent(NamedTuple):
    kind: CorpusKind
    rows: list[Any]
    selection: str = ""  # which rows are held out for validation, if the file has no splits of its own


def find_path(name: str, folder: str | Path | None) -> str | None:
    """Return the path of `name` in the working directory, or else in `folder`; None if it exists in neither."""
    for path in [Path(name), *([Path(folder) / name] if folder is not None else [])]:
        files = (file for split in SPLIT_FILE_NAMES for file in _candidate_paths(path, split))
        if path.exists() or any(map(_is_there, (path, *files))):
            return str(path)
    return None


def is_single_file(path: str) -> bool:
    """Return whether a path holds the rows of all splits: one file, or a folder of classes of pictures."""
    if "{split}" in path or not Path(path).is_dir():
        return "{split}" not in path
    return is_class_folder(Path(path)) and not any(_find_split_file(Path(path), split) for split in SPLIT_FILE_NAMES)


def expand_aligned_path(path: Path) -> tuple[Path, ...]:
    """Return both files, train.de and train.en, for a path such as train.de-en, and any other path unchanged."""
    languages = ALIGNED_SUFFIX.search(path.name)
    if languages is None:
        return (path,)
    stem = path.name[: languages.start()]
    return tuple(path.with_name(f"{stem}.{language}") for language in languages.groups())


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
    files = [_find_split_file(Path(path), name) for name in (SPLIT_FILE_NAMES if split == "all" else [split])]
    contents = [_read_file(file, kind, document_boundaries) for file in files if file is not None]
    if not contents:
        name = "train" if split == "all" else split
        detail = "" if "{split}" in path else f"; add a file named {name}{{{','.join(KIND_BY_SUFFIX)}}}"
        if Path(path).is_dir() and has_pictures(Path(path)):
            detail = (
                f"; its pictures have no classes: put those of each class into a folder, {path}/cats and {path}/dogs"
            )
        raise SplitError(f"{path} has no split {split!r}{detail}")
    kinds = sorted({content.kind for content in contents})
    if len(kinds) > 1:
        raise FileError(f"{path} has files of several kinds ({', '.join(kinds)}); keep one kind, or set kind=…")
    return FileContent(contents[0].kind, [row for content in contents for row in content.rows])


def _read_file(path: Path, kind: CorpusKind | None, document_boundaries: DocumentBoundaries) -> FileContent:
    with reading(path):
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
            is_table = path.suffix in (".jsonl", ".csv")
            return FileContent(kind, list(read_documents(path) if is_table else read_text(path, document_boundaries)))
        if kind not in READER_BY_KIND:
            raise FileError(
                f"kind={kind!r} is unknown{did_you_mean(kind, ['text', *READER_BY_KIND])}; "
                f"write one of text, {', '.join(READER_BY_KIND)}"
            )
        return FileContent(kind, list(READER_BY_KIND[kind](path)))


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
    kind = KIND_BY_SUFFIX[suffix]
    if suffix == ".jsonl":
        kind = _jsonl_kind(file)
    elif suffix == ".json" and "pairs" in allowed:
        with suppress(FileError):  # it may have one JSON object per line, the first of which is a pair
            kind = "pairs" if _jsonl_kind(file) == "pairs" else kind
    return allowed[0] if kind == "text" and "text" not in allowed else kind


def _known_suffix(path: Path) -> str | None:
    return next((suffix for suffix in KIND_BY_SUFFIX if path.name.endswith(suffix)), None)


def _jsonl_kind(path: Path) -> CorpusKind:
    """Return the kind of corpus in a .jsonl file, decided by the keys of its first object."""
    first = next(read_jsonl(path))[1]
    if "messages" in first:
        return "chat"
    if "label" in first:
        return "labelled"
    return "pairs" if any(keys[0] in first for keys in PAIR_KEYS) else "text"


def _find_split_file(path: Path, split: str) -> Path | None:
    """Return the first file of a split that exists, or None.

    A pattern with {split} names its files, which may be links. A folder does not, so a link out of it is refused.
    """
    file = next(filter(_is_there, _candidate_paths(path, split)), None)
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


def _is_there(path: Path) -> bool:
    """Return whether a path is that of a file, of two aligned files, or of a folder of classes of pictures."""
    return all(file.is_file() for file in expand_aligned_path(path)) or is_class_folder(path)


# -- the rows that are held out for validation ------------------------------------------------------------------------
# They are drawn at random with a fixed seed, so that a file sorted by class, source or date is split like any other,
# and every run and evaluation of the file has the same split. Each class keeps its share. Rows that belong together are
# held out together: sentences of one document, questions about one context, targets of one source, copies of one text.


class SplitRows(NamedTuple):
    rows: list[Any]
    selection: str  # which rows are held out for validation, in words for the user


def split_rows(rows: list[Any], split: str, name: str, holdout: Holdout) -> SplitRows:
    """Return the rows of one split, in their order: "valid" is what is held out, "train" the rest, "all" every row.

    If the only row is a text, its characters are divided instead: the last tenth is held out. `name` is the path that
    an error names.
    """
    if split == "all":
        return SplitRows(rows, "")
    if split == "test":
        raise SplitError(f"{name} is one file and has no split 'test'; give a folder with train, valid and test files")
    if len(rows) == 1 and isinstance(rows[0], str):
        if holdout.count:
            raise ConfigError(
                f"{name} is one running text, of which the last tenth is held out; leave out data.validation_rows, "
                "or give documents as the rows of a .jsonl file"
            )
        cut = int(len(rows[0]) * (1 - VALIDATION_FRACTION))
        part = rows[0][:cut] if split == "train" else rows[0][cut:]
        return SplitRows([part] * bool(part), "the last tenth of the text")
    if holdout.count and holdout.count >= len(rows):
        raise ConfigError(
            f"data.validation_rows={holdout.count} leaves none of the {len(rows)} rows to train on; "
            "write a smaller number"
        )
    held_out, selection = choose_held_out(rows, holdout)
    chosen = set(held_out)
    return SplitRows([row for index, row in enumerate(rows) if (index in chosen) == (split == "valid")], selection)


# What rows of a kind share that belong together (None: nothing), and how users call it.
GROUPS: dict[type, tuple[str, Callable[[Any], Hashable]]] = {
    Pair: ("source", lambda row: row.source),
    LabelledText: ("text", lambda row: (row.text, row.text_pair)),
    TaggedSentence: ("document", lambda row: row.document or None),
    Question: ("context", lambda row: row.context),
}


def choose_held_out(rows: Sequence[Any], holdout: Holdout) -> tuple[list[int], str]:
    """Return the ascending indices of the rows to hold out, and in words how they were chosen."""
    count = holdout.count or len(rows) - int(len(rows) * (1 - VALIDATION_FRACTION))
    if holdout.method == "last":
        return list(range(len(rows) - count, len(rows))), "the last rows"
    classes: list[Any] = []
    if isinstance(rows[0], LabelledText | LabelledImage | LabelledPicture):
        distinct = {row.label for row in rows}
        is_regression = 2 * len(distinct) > len(rows) and all(map(is_number, distinct))
        classes = [] if is_regression else [row.label for row in rows]
    by_class = "drawn at random with a fixed seed" + (", the same share of each class" if classes else "")
    group_name, key = GROUPS.get(type(rows[0]), ("", lambda row: None))
    groups: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        shared = key(row)
        groups.setdefault(("row", index) if shared is None else ("group", shared), []).append(index)
    if len(groups) < len(rows) and (chosen := _draw(list(groups.values()), classes, count)):
        return chosen, f"{by_class}, rows of one {group_name} together"
    single = [[index] for index in range(len(rows))]
    return _draw(single, classes, count) or _draw(single, [], count), by_class


def _draw(groups: Sequence[list[int]], classes: Sequence[Any], count: int) -> list[int]:
    """Draw groups with about `count` rows in all; every class gives its share, and keeps a row to train on.

    classes: the class of each row; [] if there are none. A group has the class of its first row.
    """
    from monoblock.data.batches import permutation

    by_class: dict[Any, list[list[int]]] = {}
    for group in groups:
        by_class.setdefault(classes[group[0]] if classes else None, []).append(group)
    strata = [by_class[label] for label in sorted(by_class)] if classes else list(by_class.values())
    chosen: list[int] = []
    for number, (members, quota) in enumerate(zip(strata, _quotas(strata, count), strict=True)):
        for index in permutation(SEED, number, len(members), "holdout").tolist() if quota else ():
            if len(members[index]) <= quota:
                chosen += members[index]
                quota -= len(members[index])
    return sorted(chosen)


def _quotas(strata: Sequence[list[list[int]]], count: int) -> list[int]:
    """Divide `count` rows among classes in proportion to their sizes, by the method of largest remainders."""
    sizes = [sum(map(len, members)) for members in strata]
    total = sum(sizes)
    quotas = [min(count * size // total, size - 1) for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda number: (-(count * sizes[number] % total), -sizes[number]))
    missing = count - sum(quotas)
    while missing and any(quota < size - 1 for quota, size in zip(quotas, sizes, strict=True)):
        for number in by_remainder:
            if missing and quotas[number] < sizes[number] - 1:
                quotas[number] += 1
                missing -= 1
    return quotas
