"""What a tokenizer is, read from its tokenizer.json, and whether it is the one a model was trained with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from monoblock.errors import InputError

if TYPE_CHECKING:
    from monoblock.tokenizers.tokenizer import Tokenizer

SHOWN = 12  # characters of a fingerprint in a message
ENCODING = ("normalizer", "pre_tokenizer", "post_processor", "added_tokens", "model")
KIND_OF = {"WordLevel": "word", "WordPiece": "wordpiece", "Unigram": "unigram", "BPE": "bpe"}


def kind_of(data: Mapping[str, Any]) -> str:
    """The kind, told by the model: BPE that merges nothing is characters, or bytes."""
    model = data["model"]
    if model["type"] == "BPE" and not model["merges"]:
        return "byte" if uses_bytes(data["pre_tokenizer"]) else "char"
    return KIND_OF[model["type"]]


def uses_bytes(part: Any) -> bool:
    """Whether a pre-tokenizer or decoder, or one in its sequence, is byte-level."""
    return '"ByteLevel"' in json.dumps(part)


def unknown_of(model: Mapping[str, Any]) -> str | None:
    """The token that stands for what the model does not know, where it has one."""
    if model["type"] != "Unigram":
        return model.get("unk_token")
    return None if model.get("unk_id") is None else model["vocab"][model["unk_id"]][0]


def fingerprint_of(data: Mapping[str, Any]) -> str:
    """SHA-256 of everything that decides which ids a text becomes."""
    canonical = json.dumps(_set({key: data[key] for key in ENCODING}), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _set(value: Any) -> Any:
    """Without what is off or absent, so that a setting added to the library later changes no fingerprint."""
    if isinstance(value, dict):
        return {key: _set(one) for key, one in value.items() if one is not None and one is not False}
    return [_set(one) for one in value] if isinstance(value, list) else value


def check_belongs(tokenizer: Tokenizer, vocab: int, fingerprint: str | None = None) -> None:
    """Raise InputError unless this tokenizer has that fingerprint and no more tokens than the model has embeddings."""
    ours = f"{tokenizer.kind}, {tokenizer.vocab_size:,} tokens, {tokenizer.fingerprint[:SHOWN]}"
    if fingerprint is not None and tokenizer.fingerprint != fingerprint:
        theirs = f"{vocab:,} tokens, {fingerprint[:SHOWN]}"
        problem = f"this tokenizer ({ours}) is not the one the model was trained with ({theirs})"
    elif tokenizer.vocab_size > vocab:
        problem = f"this tokenizer ({ours}) is not the model's, which knows {vocab:,} tokens"
    else:
        return
    raise InputError(f"{problem}; give the tokenizer from the model's own folder")
