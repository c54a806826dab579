"""Data that experiments write by themselves: toy corpora for smoke runs, and strings of letters with their reversal."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Literal

from monoblock.data.readers.records import Pair
from monoblock.errors import ConfigError
from monoblock.runs.evaluate import evaluate_request
from monoblock.runs.pipeline import Pipeline
from monoblock.tasks.backtranslation import write_pairs
from monoblock.tasks.evaluation_report import EvaluationRequest
from monoblock.untrusted_files import write_atomically

# -- toy corpora ------------------------------------------------------------------------------------------------------

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


# -- strings to reverse -----------------------------------------------------------------------------------------------

SEED = 8  # of the data, which is the same for all arms and seeds
MAX_TEST_PAIRS, MAX_VALIDATION_PAIRS = 500, 1_000


def parse_lengths(words: str | int) -> list[int]:
    """Parse a comma-separated list of lengths."""
    try:
        lengths = [int(word) for word in str(words).split(",")]
    except ValueError:
        lengths = [0]
    if min(lengths) < 1:
        raise ConfigError(f"lengths={words!r} is not a list of whole numbers from 1; write lengths=5,10,20")
    return lengths


def strings_folder(folder: Path, lengths: Sequence[int], pairs: int) -> Path:
    return folder / f"pairs-{'-'.join(map(str, lengths))}-{pairs}"


def write_strings(folder: Path, lengths: Sequence[int], pairs: int) -> Iterator[str]:
    """Write a training and a validation file with all lengths from 2 on, and a test file for each length."""
    if folder.is_dir():
        return
    random = Random(SEED)
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "corpus").mkdir(parents=True)
    for length in lengths:
        rows = min(MAX_TEST_PAIRS, pairs)
        write_pairs(temporary / f"length-{length}.tsv", (_pair(random, length) for _ in range(rows)))
    for split, rows in (("train", pairs), ("valid", min(MAX_VALIDATION_PAIRS, pairs))):
        drawn = (_pair(random, random.randint(2, max(lengths))) for _ in range(rows))
        write_pairs(temporary / "corpus" / f"{split}.tsv", drawn)
    temporary.rename(folder)
    yield f"pairs: {pairs:,} strings of up to {max(lengths)} letters"


def _pair(random: Random, length: int) -> Pair:
    letters = random.choices(ascii_lowercase, k=length)
    return Pair(" ".join(letters), " ".join(reversed(letters)))


def accuracy_by_length(pipe: Pipeline, folder: Path, lengths: Sequence[int], limit: int | None) -> dict[str, float]:
    """Return the share of strings of each length that are reversed without a mistake."""
    found = {}
    for length in lengths:
        options = {"max_new_tokens": length + 2, "num_beams": 1}
        file = str(folder / f"length-{length}.tsv")
        request = EvaluationRequest(data=file, limit=limit, batch=256, options=options)
        found[str(length)] = float(evaluate_request(pipe, request).metrics["accuracy"])
    return found
