"""pycountry's translations of the names of countries, places, languages, scripts and currencies."""

import gettext
import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from monoblock.errors import FileError

HELD_OUT = {"valid": (0, 10), "test": (10, 20)}  # of a hundred


def entries(language: str) -> Iterator[tuple[str, str]]:
    """(English, translation) of all that a language has."""
    # Only the folder is looked up: importing pycountry reads all of its tables.
    spec = find_spec("pycountry")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "locales" / language / "LC_MESSAGES"
    files = sorted(folder.glob("*.mo"))
    if not files:
        raise FileError(f"{folder} has no .mo files; install a newer one: pip install 'pycountry>=26.2.16'")
    for path in files:
        with open(path, "rb") as file:
            # gettext has no public way to list what it holds.
            catalogue = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        for key, value in catalogue.items():
            if isinstance(key, str) and isinstance(value, str) and key:
                yield key, value


def place(word: str) -> int:
    """A number that a word always has, and that says nothing else about it."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big")


def split_of(word: str) -> str:
    """The split of whatever goes by this word: a tenth each is held out."""
    share = place(word) % 100
    return next((split for split, (low, high) in HELD_OUT.items() if low <= share < high), "train")
