"""A name on the Hugging Face hub becomes a folder here: weights, configuration and tokenizer, never code or pickles."""

from __future__ import annotations

import re
from pathlib import Path

from monoblock.errors import FileError

WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")
NAME = re.compile(r"(?!runs/)\w[\w.-]{0,95}/\w[\w.-]{0,95}")  # owner/name; a run folder is never meant for the hub


def at_hand(given: str | Path) -> Path:
    """What is here, as it is; owner/name, where there is no folder of that owner, is fetched if that can be done."""
    place = Path(given)
    if place.exists() or not NAME.fullmatch(str(given)) or place.parent.exists():
        return place
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise FileError(
            f"there is no folder {given} here; to fetch a model of that name, pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(str(given), allow_patterns=list(WANTED)))
    except Exception as problem:  # the library's, the network's, the server's: all mean that it did not come
        why = " ".join(str(problem).split())[:120] or type(problem).__name__
        raise FileError(f"there is no folder {given} here, and the hub did not give it ({why})") from None
