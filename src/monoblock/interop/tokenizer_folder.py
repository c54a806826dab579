"""Load the tokenizer of a model folder, and check that it is the one that the model was trained with.

In a monoblock folder, config.json contains the fingerprint of that tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from monoblock.config.model import EmbeddingConfig, ModelConfig, RecurrentConfig
from monoblock.config.schema import to_dict
from monoblock.errors import FileError, InputError
from monoblock.interop.folder import CONFIG_FILE, FORMAT_NAME, read_config
from monoblock.tokenizers.compatibility import check_tokenizer_fits
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.untrusted_files import has_file, read_json, safe_join

FINGERPRINT_KEY = "tokenizer"  # key in config.json


def load_tokenizer(folder: Path, config: ModelConfig | RecurrentConfig | None = None) -> Tokenizer:
    """Load the tokenizer of a run folder, a Hugging Face folder or a GGUF file.

    Raise FileError if the tokenizer does not match the model.

    config: the configuration of the model; if None, it is read from `folder`, which must be a monoblock folder.
    """
    tokenizer = Tokenizer.from_pretrained(folder)
    config = read_config(folder) if config is None else config
    try:
        check_tokenizer_fits(tokenizer, vocab_size(config), _stored_fingerprint(folder))
    except InputError as problem:
        raise FileError(f"{folder}: {problem}") from None
    return tokenizer


def _stored_fingerprint(folder: Path) -> str | None:
    """Return the tokenizer's fingerprint in config.json; None if the folder is not a monoblock folder."""
    if not (folder.is_dir() and has_file(folder, CONFIG_FILE)):
        return None
    data = read_json(safe_join(folder, CONFIG_FILE))
    fingerprint = data.get(FINGERPRINT_KEY) if data.get("format") == FORMAT_NAME else None
    return fingerprint if isinstance(fingerprint, str) else None


def vocab_size(config: ModelConfig | RecurrentConfig) -> int:
    """Return the size of a model's vocabulary; if source and target have different ones, return the smaller size."""
    if isinstance(config, RecurrentConfig):
        return min(config.vocab, config.target_vocab or config.vocab)
    return min((part.vocab for part in config.inputs.values() if isinstance(part, EmbeddingConfig)), default=0)


def format_config(config: ModelConfig | RecurrentConfig, tokenizer: Tokenizer | None) -> str:
    """Return the text of config.json: the model configuration and the fingerprint of its tokenizer."""
    kind = "recurrent" if isinstance(config, RecurrentConfig) else "model"
    data: dict[str, Any] = {"format": FORMAT_NAME, kind: to_dict(config)}
    if tokenizer is not None:
        data[FINGERPRINT_KEY] = tokenizer.fingerprint
    return json.dumps(data, indent=2) + "\n"
