"""Download a model from the Hugging Face hub: weights, configuration and tokenizer, never code or pickles."""

from __future__ import annotations

import re
import warnings
from os import PathLike
from pathlib import Path

from monoblock.config.presets import PRESETS
from monoblock.errors import FileError, InputError, with_article

ALLOW_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")
# owner/name or owner/name@revision; runs/NAME is always a local folder
REPO_ID = re.compile(r"(?P<name>(?!runs/)\w[\w.-]{0,95}/\w[\w.-]{0,95})(?:@(?P<revision>\w[\w./-]{0,199}))?")
# Who publishes the models that transformers once knew by a name without an owner, by the beginning of this name.
OWNERS = {
    "albert-": "albert",
    "bert-": "google-bert",
    "camembert-": "almanach",
    "distilbert-": "distilbert",
    "distilgpt2": "distilbert",
    "distilroberta-": "distilbert",
    "gpt2": "openai-community",
    "openai-gpt": "openai-community",
    "roberta-": "FacebookAI",
    "t5-": "google-t5",
    "xlm-": "FacebookAI",
}
COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve_model_path(name_or_path: str | Path) -> Path:
    """Return the local path of a model; download it from the Hugging Face hub if `name_or_path` is like owner/name.

    owner/name@revision is the model of a commit, a tag or a branch. Unless the revision is a commit, a warning says
    which commit was loaded. A path that exists, or whose parent folder exists, is never downloaded. For the name of a
    published model without its owner, raise an error that says what to write.
    """
    if not isinstance(name_or_path, str | PathLike):
        kind = with_article(type(name_or_path).__name__)
        raise InputError(f"a model is loaded from a folder or a file, but got {kind}; give a path or owner/name")
    path = Path(name_or_path)
    if not path.exists() and path.name == str(name_or_path):
        _check_name(path.name)
    match = REPO_ID.fullmatch(str(name_or_path))
    if path.exists() or match is None or path.parent.exists():
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise FileError(
            f"there is no folder {name_or_path} here; to download a model of that name, pip install huggingface_hub"
        ) from None
    name, revision = match["name"], match["revision"]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(ALLOW_PATTERNS)))
    except Exception as error:  # whether the library, the network or the server failed, there is no model
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise FileError(f"there is no folder {name_or_path} here, and the download failed ({reason})") from None
    if revision != folder.name and COMMIT.fullmatch(folder.name):  # the folder of a snapshot is named after its commit
        warnings.warn(
            f"{name_or_path} may change; this is {name}@{folder.name}, and that name always gives the same model",
            stacklevel=2,
        )
    return folder


def _check_name(name: str) -> None:
    """Raise FileError if `name` is that of a published model, or of a preset, which has no weights."""
    owner = next((owner for start, owner in OWNERS.items() if name.startswith(start)), None)
    if owner is not None and not Path(name).suffix:
        raise FileError(
            f"there is no folder {name} here; write {owner}/{name} for the model of the Hugging Face hub, or the path "
            "of a folder"
        )
    if name in PRESETS:
        raise FileError(
            f"there is no folder {name} here, and the preset {name} has no weights; write mb.Transformer(mb.preset("
            f"{name!r})) to train it, or owner/name for a model of the Hugging Face hub"
        )
