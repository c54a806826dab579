"""Toy corpora for smoke runs, so that these need neither packages nor data and take seconds."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Literal

from monoblock.untrusted_files import write_atomically

ToyKind = Literal["text", "pairs", ""]
FILES = {"text": "toy.txt", "pairs": "toy.tsv"}
LINES, WORDS = 240, ("a", "red", "dog", "runs", "to", "the", "blue", "house", "and", "sees", "an", "old", "tree")


def toy_path(kind: ToyKind, folder: Path) -> Path:
    return folder / FILES[kind]


def write_toy_corpus(kind: ToyKind, folder: Path) -> None:
    """Write a corpus of random words, if it is not there: running text, or sentences and their reversal."""
    if not kind or toy_path(kind, folder).is_file():
        return
    random = Random(0)
    sentences = [random.choices(WORDS, k=random.randint(3, 9)) for _ in range(LINES)]
    if kind == "text":
        lines = [" ".join(words) for words in sentences]
    else:
        lines = [f"{' '.join(words)}\t{' '.join(reversed(words))}" for words in sentences]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(toy_path(kind, folder), "\n".join(lines) + "\n")
