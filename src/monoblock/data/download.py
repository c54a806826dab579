"""Download a file once: to a temporary file that is checked by SHA-256 and then renamed."""

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

CHUNK_BYTES = 2**20
TIMEOUT_SECONDS = 30.0  # without a byte


def download(url: str, sha256: str, path: str | Path) -> Path:
    """Download `url` to `path` unless it exists, and return `path`; only a file with this SHA-256 is accepted."""
    path = Path(path)
    if path.is_file():
        actual = _sha256(path)
        if actual == sha256:
            return path
        path.unlink()
        raise FileError(f"{path} had SHA-256 {actual[:12]}… and not {sha256[:12]}…; it was deleted, so run this again")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", suffix=".part", delete=False) as part:
            _download_and_verify(url, sha256, part, path)
    except OSError as problem:
        raise FileError(f"{path} cannot be written: {problem.strerror or problem}") from None
    return path


def _download_and_verify(url: str, sha256: str, part: IO[bytes], path: Path) -> None:
    temporary = Path(part.name)
    try:
        actual = _write_response(url, part)
        if actual != sha256:
            raise FileError(
                f"{url} gave a file with SHA-256 {actual[:12]}… and not {sha256[:12]}…; it was deleted, "
                f"so give a local file with --data instead"
            )
        part.flush()
        os.fsync(part.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_response(url: str, part: IO[bytes]) -> str:
    """Download `url` into the open file `part`; return the SHA-256 of its content."""
    digest = hashlib.sha256()
    for chunk in _read_chunks(url):
        digest.update(chunk)
        part.write(chunk)
    return digest.hexdigest()


def _read_chunks(url: str) -> Iterator[bytes]:
    request = urllib.request.Request(url, headers={"User-Agent": "monoblock"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            length, read = response.headers.get("Content-Length"), 0
            while chunk := response.read(CHUNK_BYTES):
                read += len(chunk)
                yield chunk
    except (OSError, HTTPException) as problem:
        if isinstance(problem, urllib.error.HTTPError):
            problem.close()  # it is the response itself, with an open connection
        reason = getattr(problem, "reason", None) or problem
        raise FileError(f"{url} cannot be downloaded ({reason}); give a local file with --data instead") from None
    # An interrupted connection looks like the end of the file.
    if length is not None and length.isdigit() and int(length) != read:
        raise FileError(f"{url} broke off after {read:,} of {int(length):,} bytes; run this again")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
