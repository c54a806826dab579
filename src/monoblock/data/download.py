"""Download a file to a temporary name, check its size and SHA-256 and rename it: no incomplete file is ever used."""

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

from monoblock.errors import FileError

CHUNK_BYTES = 2**20
TIMEOUT_SECONDS = 30.0  # the longest wait for the next bytes


def download(url: str, sha256: str, path: str | Path, *, max_bytes: int) -> Path:
    """Download `url` to `path`, unless the file exists already, and return `path`.

    A file whose SHA-256 is not `sha256` is deleted, and FileError is raised. So is it, before more is downloaded, if
    the file is larger than `max_bytes`.
    """
    path = Path(path)
    if path.is_file():
        with open(path, "rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual == sha256:
            return path
        path.unlink()
        raise FileError(
            f"{path} had SHA-256 {actual[:12]}…, but {sha256[:12]}… was expected; the file was deleted, so try again"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", suffix=".part", delete=False) as part:
            try:
                digest = hashlib.sha256()
                for chunk in _read_chunks(url, max_bytes):
                    digest.update(chunk)
                    part.write(chunk)
                actual = digest.hexdigest()
                if actual != sha256:
                    raise FileError(
                        f"the file at {url} has SHA-256 {actual[:12]}…, but {sha256[:12]}… was expected, so "
                        f"it was deleted; put the right file into a folder of corpora and give the folder with --data"
                    )
                part.flush()
                os.fsync(part.fileno())
                Path(part.name).replace(path)
            finally:
                Path(part.name).unlink(missing_ok=True)
    except OSError as problem:
        raise FileError(f"{path} cannot be written: {problem.strerror or problem}") from None
    return path


def _read_chunks(url: str, max_bytes: int) -> Iterator[bytes]:
    request = urllib.request.Request(url, headers={"User-Agent": "monoblock"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            length, read = response.headers.get("Content-Length"), 0
            while chunk := response.read(min(CHUNK_BYTES, max_bytes - read + 1)):
                read += len(chunk)
                if read > max_bytes:
                    raise FileError(
                        f"the file at {url} is larger than the {max_bytes:,} bytes expected, so it was not downloaded; "
                        f"put the right file into a folder of corpora and give the folder with --data"
                    )
                yield chunk
    except (OSError, HTTPException) as problem:
        if isinstance(problem, urllib.error.HTTPError):
            problem.close()  # an HTTPError is also the response, and its connection is still open
        reason = getattr(problem, "reason", None) or problem
        raise FileError(
            f"{url} cannot be downloaded ({reason}); "
            f"put the file into a folder of corpora and give the folder with --data"
        ) from None
    # An interrupted connection looks like the end of the file.
    if length is not None and length.isdigit() and int(length) != read:
        raise FileError(f"the download of {url} broke off after {read:,} of {int(length):,} bytes; try again")
