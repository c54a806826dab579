"""Write a file so that other programs never read it half-written."""

from __future__ import annotations

import os
from pathlib import Path

from monoblock.errors import FileError
from monoblock.untrusted_files import open_to_write


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write text or bytes to a temporary file in the same folder, then rename it to `path`."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open_to_write(temporary) as file:
            file.write(content if isinstance(content, bytes) else content.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as problem:
        raise FileError(f"{path} cannot be written: {problem.strerror}") from None
