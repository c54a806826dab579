"""Download a model from the Hugging Face hub: weights, configuration and tokenizer, never code or pickles."""

from __future__ import annotations

import re
from pathlib import Path

from monoblock.errors import FileError

ALLOW_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")
REPO_ID = re.compile(r"(?!runs/)\w[\w.-]{0,95}/\w[\w.-]{0,95}")  # owner/name; runs/NAME is always a local folder


def resolve_model_path(name_or_path: str | Path) -> Path:
    """Return the local path of a model; download it from the Hugging Face hub if `name_or_path` is like owner/name.

    A path that exists, or whose parent folder exists, is never downloaded.
    """
    path = Path(name_or_path)
    if path.exists() or not REPO_ID.fullmatch(str(name_or_path)) or path.parent.exists():
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise FileError(
            f"there is no folder {name_or_path} here; to download a model of that name, pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(str(name_or_path), allow_patterns=list(ALLOW_PATTERNS)))
    except Exception as error:  # whether the library, the network or the server failed, there is no model
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise FileError(f"there is no folder {name_or_path} here, and the download failed ({reason})") from None
