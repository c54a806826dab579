"""Load the tokenizer of a model folder, and check that it is the one that the model was trained with.

In a monoblock folder, config.json contains the fingerprint of that tokenizer.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monoblock.config.model import CONFIG_KEYS, AnyConfig
from monoblock.config.schema import to_dict
from monoblock.errors import FileError, InputError
from monoblock.interop.companions import FINGERPRINT_KEY, HUGGINGFACE_KEY
from monoblock.interop.folder import CONFIG_FILE, FORMAT_NAME, read_config
from monoblock.tokenizers.compatibility import check_published_tokenizer, check_tokenizer_fits
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.untrusted_files import has_file, read_json, safe_join

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


def load_tokenizer(folder: Path, config: AnyConfig | None = None, *, force: bool = False) -> Tokenizer:
    """Load the tokenizer of a run folder, a Hugging Face folder or a GGUF file.

    Raise FileError if the tokenizer does not match the model; warn if it looks as if it did not.

    config: the configuration of the model; if None, it is read from `folder`, which must be a monoblock folder.
    force: use the tokenizer of a published folder even if it seems to belong to another model.
    """
    tokenizer = Tokenizer.from_pretrained(folder)
    config = read_config(folder) if config is None else config
    has_config = folder.is_dir() and has_file(folder, CONFIG_FILE)
    data = read_json(safe_join(folder, CONFIG_FILE)) if has_config else {}
    try:
        check_tokenizer_fits(tokenizer, vocab_size(config), _stored_fingerprint(data))
        if has_config and "format" not in data and not force:
            has_own = has_file(folder, TOKENIZER_CONFIG_FILE)
            own_class = read_json(safe_join(folder, TOKENIZER_CONFIG_FILE)).get("tokenizer_class") if has_own else None
            for text in check_published_tokenizer(tokenizer, vocab_size(config), data, own_class):
                warnings.warn(f"{folder}: {text}", stacklevel=2)
    except InputError as problem:
        advice = ", or load it anyway with --force (force=True in Python)" if "format" not in data else ""
        raise FileError(f"{folder}: {problem}{advice}") from None
    return tokenizer


def _stored_fingerprint(data: dict[str, Any]) -> str | None:
    """Return the tokenizer's fingerprint in the content of config.json; None if it is not that of monoblock."""
    fingerprint = data.get(FINGERPRINT_KEY) if data.get("format") == FORMAT_NAME else None
    return fingerprint if isinstance(fingerprint, str) else None


def vocab_size(config: AnyConfig) -> int:
    """Return the size of a model's vocabulary; if source and target have different ones, return the smaller size."""
    return min(config.vocab_sizes, default=0)


def format_config(config: AnyConfig, tokenizer: Tokenizer | None, published: Mapping[str, Any] | None = None) -> str:
    """Return the text of config.json: the model configuration and the fingerprint of its tokenizer.

    published: the fields of the Hugging Face config.json of the model that training started from.
    """
    data: dict[str, Any] = {"format": FORMAT_NAME, CONFIG_KEYS[type(config)]: to_dict(config)}
    if published:
        data[HUGGINGFACE_KEY] = dict(published)
    if tokenizer is not None:
        data[FINGERPRINT_KEY] = tokenizer.fingerprint
    return json.dumps(data, indent=2) + "\n"
