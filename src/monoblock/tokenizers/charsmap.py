"""Check the compiled normalization rules of SentencePiece, which the `tokenizers` library follows without a check.

The rules are a number of bytes, a double array of that length (Aoe 1989, in the layout of Darts-clone) and the texts
that replace characters, each of which ends in a zero byte. A node of the double array is 32 bits: a label (bits 0 to 7
and 31), whether it has a value (bit 8) and the offset of its children (bits 10 to 30, times 256 if bit 9 is set). The
value of a key, in a node of its own, is where its replacement begins.
"""

from __future__ import annotations

import base64
import binascii

import numpy as np
from numpy.typing import NDArray

MAX_BYTES = 4 * 2**20
LABEL_MASK = 0x8000_00FF
VALUE_MASK = 0x7FFF_FFFF
MAX_KEY_BYTES = 256


def check_charsmap(encoded: object) -> None:
    """Raise ValueError unless the library can normalize every text with these rules, given in base 64."""
    if not isinstance(encoded, str) or len(encoded) > MAX_BYTES:
        raise ValueError("its charsmap is not a string of base 64, or too long")
    try:
        raw = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise ValueError("its charsmap is not base 64") from None
    size = int.from_bytes(raw[:4], "little")
    if len(raw) < 4 or size == 0 or size % 4 or size > len(raw) - 4:
        raise ValueError("its charsmap states a size that it does not have")
    texts = raw[4 + size :]
    try:
        texts.decode()
    except UnicodeDecodeError:
        raise ValueError("the texts of its charsmap are not UTF-8") from None
    values = _collect_values(np.frombuffer(raw, "<u4", size // 4, 4).astype(np.int64))
    starts = np.frombuffer(texts, np.uint8)
    if len(values) and (values.max() >= len(starts) or bool(((starts[values] & 0xC0) == 0x80).any())):
        raise ValueError("a rule of its charsmap points outside of its texts")


def _collect_values(nodes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the values of all keys; raise ValueError if a step from any reachable node leads out of the array."""
    labels = np.arange(256)
    positions = np.array([_offsets(nodes[:1])[0]])  # where the children of each node at this depth begin
    seen = np.zeros(len(nodes), bool)
    values: list[NDArray[np.int64]] = []
    for _ in range(MAX_KEY_BYTES):
        if (positions | 0xFF).max(initial=0) >= len(nodes):
            raise ValueError("its charsmap has a rule that leads out of it")
        children = positions[:, None] ^ labels
        is_child = (nodes[children] & LABEL_MASK) == labels
        is_child[:, 0] = False  # texts are keys, and have no zero byte
        reached = np.unique(children[is_child])
        reached = reached[~seen[reached]]
        if not len(reached):
            return np.concatenate(values) if values else np.empty(0, np.int64)
        seen[reached] = True
        positions = reached ^ _offsets(nodes[reached])
        has_value = (nodes[reached] >> 8 & 1).astype(bool)
        if (positions | 0xFF).max() < len(nodes):
            values.append(nodes[positions[has_value]] & VALUE_MASK)
    raise ValueError("its charsmap has a rule for a text that is too long")


def _offsets(nodes: NDArray[np.int64]) -> NDArray[np.int64]:
    return nodes >> 10 << ((nodes & 1 << 9) >> 6)
