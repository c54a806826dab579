"""Files in, rows out: text, pairs, labelled text, tagged words, images.

Every reader is a generator, so a file of any size is read in passing; a fault in it is a FileError of one line that
names the file and the line.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from monoblock.errors import FileError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Kind = Literal["text", "pairs", "labelled", "tagged", "images", "questions", "chat"]
Boundaries = Literal["file", "blank-lines"]  # of documents in a text
MARK = "\ufeff"  # some editors begin a file with it


class Pair(NamedTuple):
    """A text and what it becomes; `seen` is how often, where a file counts."""

    source: str
    target: str
    seen: int = 1


class Labelled(NamedTuple):
    """A text, or two, and what they are."""

    text: str
    label: str
    pair: str | None = None


class Tagged(NamedTuple):
    """Words, and one label a word."""

    words: tuple[str, ...]
    labels: tuple[str, ...]


class Image(NamedTuple):
    pixels: NDArray[np.float32]  # (channels, height, width), from 0 to 1
    label: int


def lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file without their ends, numbered from 1."""
    number = 0
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                line = raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
                yield number, line.removeprefix(MARK) if number == 1 else line
    except UnicodeDecodeError:
        raise FileError(f"{path}, line {number}: a byte is not UTF-8; save the file as UTF-8") from None
    except OSError as problem:
        raise FileError(f"{path} cannot be read: {problem.strerror or problem}") from None


def read_text(path: str | Path, documents: Boundaries = "file") -> Iterator[str]:
    """The documents of a text file: the whole of it as it stands, or what blank lines separate."""
    found = False
    for document in _separated(path) if documents == "blank-lines" else _whole(path):
        found = found or bool(document.strip())
        yield document
    if not found:
        raise _empty(path)


def read_lines(path: str | Path) -> Iterator[str]:
    """Every line a text of its own, empty ones too: how word-level language models count ends of sentences."""
    for _, line in lines(path):
        yield line


def read_articles(path: str | Path) -> Iterator[str]:
    """The articles of a WikiText file, ` = Title = ` at the head of each; joined they are the file again."""
    found: list[str] = []
    for _, line in lines(path):
        # Sections have more signs: ` = = Early life = = `.
        title = line.startswith(" = ") and line.endswith(" = ") and not line.startswith(" = = ")
        if title and any(map(str.strip, found)):
            yield "\n".join(found) + "\n"
            found = []
        found.append(line)
    if not any(map(str.strip, found)):
        raise _empty(path)
    yield "\n".join(found) + "\n"


def _whole(path: str | Path) -> Iterator[str]:
    try:
        raw = Path(path).read_bytes()
        yield raw.decode("utf-8").removeprefix(MARK).replace("\r\n", "\n")
    except UnicodeDecodeError as problem:
        number = raw.count(b"\n", 0, problem.start) + 1
        raise FileError(f"{path}, line {number}: a byte is not UTF-8; save the file as UTF-8") from None
    except OSError as problem:
        raise FileError(f"{path} cannot be read: {problem.strerror or problem}") from None


def _separated(path: str | Path) -> Iterator[str]:
    gathered: list[str] = []
    for _, line in lines(path):
        if line.strip():
            gathered.append(line)
        elif gathered:
            yield "\n".join(gathered)
            gathered = []
    if gathered:
        yield "\n".join(gathered)


def read_pairs(path: str | Path) -> Iterator[Pair]:
    """`source<TAB>target`, or with a third column that counts: how often the pair was seen; or .jsonl objects."""
    if Path(path).suffix in (".jsonl", ".json"):
        yield from _pairs_of_objects(path)
        return
    found = False
    for number, line in lines(path):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) not in (2, 3):
            raise _columns(path, number, len(cells), "source<TAB>target")
        if len(cells) == 3 and not (cells[2].isascii() and cells[2].isdigit()):
            raise FileError(f"{path}, line {number}: the third column counts, and {cells[2]!r:.40} is no number")
        if not (cells[0].strip() and cells[1].strip()):
            raise FileError(f"{path}, line {number}: one side of the pair is empty; fill it or leave the line out")
        found = True
        yield Pair(cells[0].strip(), cells[1].strip(), int(cells[2]) if len(cells) == 3 else 1)
    if not found:
        raise _empty(path)


# The keys a .jsonl file of pairs may have: ours, and those of Aksharantar (Madhani et al. 2023).
PAIR_KEYS = (("source", "target"), ("english word", "native word"))


def _pairs_of_objects(path: str | Path) -> Iterator[Pair]:
    """{"source": …, "target": …} a line."""
    for number, row in read_objects(path):
        names = next((names for names in PAIR_KEYS if names[0] in row), PAIR_KEYS[0])
        source, target = (_field(path, number, row, name).strip() for name in names)
        if not (source and target):
            raise FileError(f"{path}, line {number}: one side of the pair is empty; fill it or leave the line out")
        yield Pair(source, target)


def read_aligned(source: str | Path, target: str | Path) -> Iterator[Pair]:
    """Two files whose lines belong together, such as train.de and train.en."""
    found = False
    for one, other in zip_longest(lines(source), lines(target)):
        if one is None or other is None:
            short, number = (source, other[0]) if one is None else (target, one[0])
            raise FileError(f"{short} ends before line {number} of the other file; the two must have as many lines")
        left, right = one[1].strip(), other[1].strip()
        if bool(left) != bool(right):
            raise FileError(f"{source if not left else target}, line {one[0]}: empty where the other file has text")
        if left:
            found = True
            yield Pair(left, right)
    if not found:
        raise _empty(source)


def read_labelled(path: str | Path) -> Iterator[Labelled]:
    """`label<TAB>text` or `label<TAB>text<TAB>text`; in a .jsonl file {"text", "label"}, with "text_pair" for two."""
    if Path(path).suffix == ".jsonl":
        for number, row in read_objects(path):
            pair = None if row.get("text_pair") is None else _field(path, number, row, "text_pair")
            yield Labelled(_field(path, number, row, "text"), _field(path, number, row, "label"), pair)
        return
    columns = 0
    for number, line in lines(path):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) not in (2, 3) or columns not in (0, len(cells)):
            wanted = {2: "label<TAB>text", 3: "label<TAB>text<TAB>text"}
            raise _columns(path, number, len(cells), wanted.get(columns, " or ".join(wanted.values())))
        columns = len(cells)
        yield Labelled(cells[1].strip(), cells[0].strip(), cells[2].strip() if columns == 3 else None)
    if not columns:
        raise _empty(path)


def read_objects(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """One JSON object a line, numbered."""
    found = False
    for number, line in lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise FileError(f"{path}, line {number}: not JSON ({problem!s:.60})") from None
        if not isinstance(row, dict):
            raise FileError(f'{path}, line {number}: not an object; write {{"text": "…"}}')
        found = True
        yield number, row
    if not found:
        raise _empty(path)


def read_documents(path: str | Path) -> Iterator[str]:
    """The texts of a .jsonl file of {"text": …}, one document a line."""
    for number, row in read_objects(path):
        yield _field(path, number, row, "text")


def read_conll(path: str | Path) -> Iterator[Tagged]:
    """A word a line, its label in the last column, a blank line after each sentence; -DOCSTART- lines are left out."""
    words: list[str] = []
    labels: list[str] = []
    found, columns = False, 0
    for number, line in lines(path):
        cells = line.split()
        if cells and cells[0] != "-DOCSTART-":
            columns = columns or len(cells)
            if len(cells) != columns or columns < 2:
                raise _columns(path, number, len(cells), f"word … label ({max(columns, 2)} columns)")
            words.append(cells[0])
            labels.append(cells[-1])
        elif words:
            found = True
            yield Tagged(tuple(words), tuple(labels))
            words, labels = [], []
    if words:
        yield Tagged(tuple(words), tuple(labels))
    elif not found:
        raise _empty(path)


def read_images(path: str | Path) -> Iterator[Image]:
    """An .npz file with `images` (count, height, width) or (count, channels, height, width), and `labels` (count,)."""
    import numpy as np

    try:
        # Never a pickle: an array of objects in the file is an error here.
        with np.load(path, allow_pickle=False) as file:
            missing = {"images", "labels"} - set(file.files)
            if missing:
                raise FileError(f"{path} lacks the array {min(missing)!r}; save it with images=… and labels=…")
            images, labels = file["images"], file["labels"]
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as problem:
        if isinstance(problem, FileError):
            raise
        raise FileError(f"{path} is no .npz file of plain arrays: {str(problem).splitlines()[0]:.80}") from None
    if images.ndim not in (3, 4) or labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        shapes = f"images {images.shape} and labels {labels.shape} of {labels.dtype}"
        raise FileError(f"{path} holds {shapes}; write (count, height, width) and whole numbers (count,)")
    if images.dtype.kind not in "uf" or not len(images):
        raise FileError(
            f"{path}: images of {images.dtype} {images.shape}; write bytes 0…255 or numbers 0…1, one or more"
        )
    check_range(images, path)
    scale = float(np.iinfo(images.dtype).max) if images.dtype.kind == "u" else 1.0
    for pixels, label in zip(images, labels, strict=True):
        yield Image((pixels / scale).astype(np.float32).reshape(-1, *images.shape[-2:]), int(label))


def check_range(images: NDArray[Any], path: str | Path) -> None:
    """One line for pixels that are numbers and not from 0 to 1."""
    if images.dtype.kind == "f" and not ((images >= 0) & (images <= 1)).all():  # no comparison holds for NaN
        low, high = images.min(), images.max()
        raise FileError(f"{path}: pixels from {low:g} to {high:g}; write numbers 0…1, or bytes 0…255 as uint8")


def _field(path: str | Path, number: int, row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if name == "label" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise FileError(f'{path}, line {number}: "{name}" is missing or no text')
    return value


def _columns(path: str | Path, number: int, found: int, wanted: str) -> FileError:
    return FileError(f"{path}, line {number}: {found} column{'s' * (found != 1)}; write {wanted}")


def _empty(path: str | Path) -> FileError:
    return FileError(f"{path} is empty; give a file with at least one line of text")
