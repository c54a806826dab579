"""Write a file so that other programs never read it half-written."""

from __future__ import annotations

import os
from pathlib import Path

from monoblock.errors import FileError


def write_atomically(path: Path, text: str) -> None:
    """Write text to a temporary file in the same folder, then rename it to `path`."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as problem:
        raise FileError(f"{path} cannot be written: {problem.strerror}") from None
