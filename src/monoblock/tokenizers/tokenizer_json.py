"""Read, inspect and write the tokenizer.json of a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monoblock.errors import FileError
from monoblock.tokenizers.chat_template import MAX_TEMPLATE_LENGTH
from monoblock.tokenizers.components import JsonObject
from monoblock.tokenizers.formats.gguf import GgufHeader, from_fields, read_gguf_header
from monoblock.tokenizers.formats.vocabulary_files import find_vocabulary, read_vocabulary
from monoblock.tokenizers.special_tokens import ROLE_SPELLINGS
from monoblock.tokenizers.validation import validate_tokenizer_json
from monoblock.untrusted_files import Folder, read_json, reading, write_atomically

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
MAX_FILE_BYTES = 64 * 2**20
MAX_CONFIG_BYTES = 16 * 2**20  # some list every added token and contain a chat template
MAX_JSON_VALUES = 5_000_000  # every merge counts as a list and two strings
KIND_BY_MODEL_TYPE = {"WordLevel": "word", "WordPiece": "wordpiece", "Unigram": "unigram", "BPE": "bpe"}

# -- reading -----------------------------------------------------------------------------------------------------------


def read_tokenizer(path: str | Path | Folder) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the checked content of tokenizer.json and the content of tokenizer_config.json.

    `path` is a folder, a tokenizer.json or a GGUF file. If a folder has no tokenizer.json, its content is built from
    older vocabulary files such as vocab.txt.
    """
    folder = path if isinstance(path, Folder) else Folder(path)
    file = folder.path
    with reading(file):
        if not file.is_dir():
            if not file.is_file():
                raise FileError(f"{file} holds no tokenizer, because there is no such folder or file")
            if file.suffix == ".gguf":
                return read_gguf_tokenizer(read_gguf_header(file), file)
            data = read_json(file, max_bytes=MAX_FILE_BYTES, max_values=MAX_JSON_VALUES)
            config = read_tokenizer_config(Folder(file.parent)) if file.name == TOKENIZER_FILE else {}
            return validate_tokenizer_json(data, file), config
        config = read_tokenizer_config(folder)
        if folder.has(TOKENIZER_FILE):
            data = folder.read_json(TOKENIZER_FILE, max_bytes=MAX_FILE_BYTES, max_values=MAX_JSON_VALUES)
            return validate_tokenizer_json(data, file / TOKENIZER_FILE), config
        vocabulary = find_vocabulary(file)
        if vocabulary is None:
            raise FileError(
                f"{file} holds no tokenizer, because it has no {TOKENIZER_FILE} and no other vocabulary file"
            )
        data, special_tokens = read_vocabulary(folder, vocabulary, config)
        return validate_tokenizer_json(data, file / vocabulary), special_tokens | config


def read_gguf_tokenizer(header: GgufHeader, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `read_tokenizer` returns, for the tokenizer in the header of a GGUF file."""
    data, config = from_fields(header.fields, str(path))
    return validate_tokenizer_json(data, path), config


def read_tokenizer_config(folder: Folder) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, completed from other files of the folder.

    These are special_tokens_map.json, chat_template.jinja and added_tokens.json.
    """
    config: dict[str, Any] = {}
    for name in (CONFIG_FILE, "special_tokens_map.json"):
        config = folder.read_json(name, max_bytes=MAX_CONFIG_BYTES) | config
    if folder.has(CHAT_TEMPLATE_FILE):
        template = folder.read_bytes(CHAT_TEMPLATE_FILE, MAX_TEMPLATE_LENGTH)
        config["chat_template"] = template.decode(errors="replace")
    if "added_tokens_decoder" not in config and folder.has("added_tokens.json"):
        ids = folder.read_json("added_tokens.json", max_bytes=MAX_CONFIG_BYTES)
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


def find_chat_template(config: Mapping[str, Any]) -> str | None:
    """Return the chat template in the content of a tokenizer_config.json, or None if there is none.

    If there are several templates, return the one named "default".
    """
    template = config.get("chat_template")
    if isinstance(template, list):
        rows = [row for row in template if isinstance(row, Mapping) and row.get("name") == "default"]
        template = rows[0].get("template") if rows else None
    return template if isinstance(template, str) else None


def assign_roles(tokens: Mapping[str, int], config: Mapping[str, Any]) -> dict[str, str]:
    """Return a dict from roles to their tokens among `tokens`, the special tokens of a published tokenizer.

    The token of a role is the one that tokenizer_config.json (`config`) names, or else the first usual spelling.
    """
    roles = {}
    for role, spellings in ROLE_SPELLINGS.items():
        value = config.get(f"{role}_token")
        value = value.get("content") if isinstance(value, Mapping) else value
        candidates = (value, *spellings) if isinstance(value, str) else spellings
        for spelling in candidates:
            if spelling in tokens:
                roles[role] = spelling
                break
    return roles


def build_backend(sections: JsonObject) -> Any:
    """Build a `tokenizers.Tokenizer` from sections of a tokenizer.json; sections that are not given are empty."""
    from tokenizers import Tokenizer

    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    keys = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return Tokenizer.from_str(json.dumps(dict.fromkeys(keys) | empty | sections))


# -- writing -----------------------------------------------------------------------------------------------------------


def write_tokenizer(folder: str | Path, data: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write tokenizer_config.json and tokenizer.json, each to a temporary file that then replaces the old one."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in ((CONFIG_FILE, config), (TOKENIZER_FILE, data)):
            write_atomically(folder / name, f"{json.dumps(content, ensure_ascii=False, indent=2)}\n")
    except OSError as problem:
        raise FileError(f"the tokenizer cannot be written to {folder}: {problem.strerror or problem}") from None
