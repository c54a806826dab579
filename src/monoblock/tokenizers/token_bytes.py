"""Find the bytes that a token stands for, in tokenizers whose tokens may be bytes instead of text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monoblock.tokenizers.components import byte_symbols
from monoblock.tokenizers.tokenizer_json import is_byte_level

BYTE_BY_SYMBOL = {symbol: value for value, symbol in enumerate(byte_symbols())}


def byte_decoder(data: dict[str, Any]) -> Callable[[str], bytes | None]:
    """Return a function that maps a token to the bytes it stands for, or to None if it stands for text.

    `data` is the content of the tokenizer.json.
    """
    if is_byte_level(data["decoder"]):
        return _byte_level_token
    return _fallback_token if data["model"].get("byte_fallback") else lambda token: None


def _byte_level_token(token: str) -> bytes | None:
    """Return the bytes of a token of byte-level BPE, which writes each byte as a printable symbol."""
    known = all(symbol in BYTE_BY_SYMBOL for symbol in token)
    return bytes(BYTE_BY_SYMBOL[symbol] for symbol in token) if known else None


def _fallback_token(token: str) -> bytes | None:
    """Return the byte of a token such as <0x0A>, which SentencePiece uses for a byte of unknown text, or None."""
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return bytes.fromhex(token[3:5]) if is_byte else None
