"""Translated names of countries, places, languages, scripts and currencies, from pycountry."""

import gettext
import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from monoblock.errors import FileError

HELD_OUT_PERCENTILES = {"valid": (0, 10), "test": (10, 20)}


def read_translations(language: str) -> Iterator[tuple[str, str]]:
    """Yield (English name, translation) for all names that pycountry translates to `language`, a code such as "hi"."""
    # Importing pycountry would read all of its tables.
    spec = find_spec("pycountry")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "locales" / language / "LC_MESSAGES"
    files = sorted(folder.glob("*.mo"))
    if not files:
        raise FileError(f"{folder} has no .mo files; install a newer pycountry: pip install 'pycountry>=26.2.16'")
    for path in files:
        with open(path, "rb") as file:
            # gettext has no public function that lists all messages.
            catalogue = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        for key, value in catalogue.items():
            if isinstance(key, str) and isinstance(value, str) and key:
                yield key, value


def stable_hash(word: str) -> int:
    """Return a hash of a word that is the same in every process."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big")


def split_of_word(word: str) -> str:
    """Return the split of a word, which its hash decides: "valid" and "test" have a tenth of all words each."""
    percentile = stable_hash(word) % 100
    return next((split for split, (low, high) in HELD_OUT_PERCENTILES.items() if low <= percentile < high), "train")
