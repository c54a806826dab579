"""A file from the web, once: beside its place first, checked by SHA-256, then renamed into it."""

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import IO

from monoblock.errors import FileError

PIECE = 2**20
PATIENCE = 30.0  # seconds without a byte


def fetch(url: str, sha256: str, place: str | Path) -> Path:
    """The file at `place`, downloaded unless it is there; what does not have this SHA-256 never gets there."""
    place = Path(place)
    if place.is_file():
        found = _sha256(place)
        if found == sha256:
            return place
        place.unlink()
        raise FileError(f"{place} had SHA-256 {found[:12]}… and not {sha256[:12]}…; it was deleted, so run this again")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=place.parent, prefix=f"{place.name}.", suffix=".part", delete=False
        ) as part:
            _settle(url, sha256, part, place)
    except OSError as problem:
        raise FileError(f"{place} cannot be written: {problem.strerror or problem}") from None
    return place


def _settle(url: str, sha256: str, part: IO[bytes], place: Path) -> None:
    written = Path(part.name)
    try:
        found = _download(url, part)
        if found != sha256:
            raise FileError(f"{url} gave a file with SHA-256 {found[:12]}… and not {sha256[:12]}…; it was deleted")
        part.flush()
        os.fsync(part.fileno())
        written.replace(place)
    finally:
        written.unlink(missing_ok=True)


def _download(url: str, part: IO[bytes]) -> str:
    """Copy the answer into `part`; its SHA-256."""
    digest = hashlib.sha256()
    for piece in _pieces(url):
        digest.update(piece)
        part.write(piece)
    return digest.hexdigest()


def _pieces(url: str) -> Iterator[bytes]:
    request = urllib.request.Request(url, headers={"User-Agent": "monoblock"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            length, read = answer.headers.get("Content-Length"), 0
            while piece := answer.read(PIECE):
                read += len(piece)
                yield piece
    except (OSError, HTTPException) as problem:
        if isinstance(problem, urllib.error.HTTPError):
            problem.close()  # it is the answer itself, its connection open
        reason = getattr(problem, "reason", None) or problem
        raise FileError(f"{url} cannot be downloaded ({reason}); give a local file with --data instead") from None
    # A connection that ends early ends like any other.
    if length is not None and length.isdigit() and int(length) != read:
        raise FileError(f"{url} broke off after {read:,} of {int(length):,} bytes; run this again")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
