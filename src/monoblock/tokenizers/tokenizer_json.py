"""Read, inspect and write the tokenizer.json of a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monoblock.errors import FileError
from monoblock.tokenizers.chat_template import MAX_TEMPLATE_LENGTH
from monoblock.tokenizers.formats.gguf import read_gguf_tokenizer
from monoblock.tokenizers.formats.vocabulary_files import find_vocabulary, read_vocabulary
from monoblock.tokenizers.validation import validate_tokenizer_json
from monoblock.untrusted_files import has_file, open_to_write, read_bytes, read_json, reading, safe_join

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
MAX_FILE_BYTES = 64 * 2**20
MAX_CONFIG_BYTES = 16 * 2**20  # some list every added token and contain a chat template
MAX_JSON_VALUES = 5_000_000  # every merge counts as a list and two strings
KIND_BY_MODEL_TYPE = {"WordLevel": "word", "WordPiece": "wordpiece", "Unigram": "unigram", "BPE": "bpe"}

# -- reading -----------------------------------------------------------------------------------------------------------


def read_tokenizer(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the checked content of tokenizer.json and the content of tokenizer_config.json.

    `path` is a folder, a tokenizer.json or a GGUF file. If a folder has no tokenizer.json, its content is built from
    older vocabulary files such as vocab.txt.
    """
    with reading(path):
        return _read_tokenizer(path)


def _read_tokenizer(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise FileError(f"{path} holds no tokenizer, because there is no such folder or file")
    if path.suffix == ".gguf":
        data, config = read_gguf_tokenizer(path)
    else:
        data = _read_tokenizer_json(path)
        config = read_tokenizer_config(path.parent) if path.name == TOKENIZER_FILE else {}
    return validate_tokenizer_json(data, path), config


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    config = read_tokenizer_config(folder)
    if has_file(folder, TOKENIZER_FILE):
        data = _read_tokenizer_json(safe_join(folder, TOKENIZER_FILE))
        return validate_tokenizer_json(data, folder / TOKENIZER_FILE), config
    vocabulary = find_vocabulary(folder)
    if vocabulary is None:
        raise FileError(f"{folder} holds no tokenizer, because it has no {TOKENIZER_FILE} and no other vocabulary file")
    data, special_tokens = read_vocabulary(folder, vocabulary, config)
    return validate_tokenizer_json(data, folder / vocabulary), special_tokens | config


def _read_tokenizer_json(path: Path) -> dict[str, Any]:
    return read_json(path, max_bytes=MAX_FILE_BYTES, max_values=MAX_JSON_VALUES)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, completed from other files of the folder.

    These are special_tokens_map.json, chat_template.jinja and added_tokens.json.
    """
    config: dict[str, Any] = {}
    for name in (CONFIG_FILE, "special_tokens_map.json"):
        if has_file(folder, name):
            config = read_json(safe_join(folder, name), max_bytes=MAX_CONFIG_BYTES) | config
    if has_file(folder, CHAT_TEMPLATE_FILE):
        template = read_bytes(safe_join(folder, CHAT_TEMPLATE_FILE), MAX_TEMPLATE_LENGTH)
        config["chat_template"] = template.decode(errors="replace")
    if "added_tokens_decoder" not in config and has_file(folder, "added_tokens.json"):
        ids = read_json(safe_join(folder, "added_tokens.json"), max_bytes=MAX_CONFIG_BYTES)
        config["added_tokens_decoder"] = {str(number): {"content": token} for token, number in ids.items()}
    return config


# -- inspecting --------------------------------------------------------------------------------------------------------


def tokenizer_kind(data: Mapping[str, Any]) -> str:
    """Return the kind of a tokenizer.json, as `Tokenizer.train` names it; BPE without merges is "char" or "byte"."""
    model = data["model"]
    if model["type"] == "BPE" and not model["merges"]:
        return "byte" if is_byte_level(data["pre_tokenizer"]) else "char"
    return KIND_BY_MODEL_TYPE[model["type"]]


def is_byte_level(component: Any) -> bool:
    """Return whether a pre-tokenizer or decoder is byte-level, or is a sequence with a byte-level component."""
    return '"ByteLevel"' in json.dumps(component)


def unknown_token(model: Mapping[str, Any]) -> str | None:
    """Return the token that the model uses for unknown text, or None if it has none."""
    if model["type"] != "Unigram":
        return model.get("unk_token")
    return None if model.get("unk_id") is None else model["vocab"][model["unk_id"]][0]


# -- writing -----------------------------------------------------------------------------------------------------------


def write_tokenizer(folder: str | Path, data: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write tokenizer_config.json and tokenizer.json, each to a temporary file that then replaces the old one."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in ((CONFIG_FILE, config), (TOKENIZER_FILE, data)):
            temporary = folder / f"{name}.tmp"
            with open_to_write(temporary) as file:
                file.write(f"{json.dumps(content, ensure_ascii=False, indent=2)}\n".encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, folder / name)
    except OSError as problem:
        raise FileError(f"the tokenizer cannot be written to {folder}: {problem.strerror or problem}") from None
