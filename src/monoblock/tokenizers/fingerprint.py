"""Compute the fingerprint of a tokenizer: a hash of everything that decides how a text is encoded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

FINGERPRINT_DIGITS = 12  # how many digits a message shows
ENCODING_SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "added_tokens", "model")


def compute_fingerprint(data: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the sections of a tokenizer.json that affect encoding."""
    canonical = json.dumps(_drop_unset({key: data[key] for key in ENCODING_SECTIONS}), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _drop_unset(value: Any) -> Any:
    """Drop settings that are None or False.

    A later version of the `tokenizers` library may write new settings; if they are unset, the fingerprint is the same.
    """
    if isinstance(value, dict):
        return {key: _drop_unset(item) for key, item in value.items() if item is not None and item is not False}
    return [_drop_unset(item) for item in value] if isinstance(value, list) else value
