"""tiktoken's files: byte-level BPE told by ranks, from which the merges are found again."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from itertools import pairwise

from monoblock.errors import FileError
from monoblock.tokenizers.training import byte_symbols

MOST_TOKENS = 2_000_000
LONGEST = 512  # bytes of a token


def looks_like(raw: bytes) -> bool:
    """Whether the first line is a token in base 64 and its rank."""
    first = raw[:200].split(b"\n")[0].split(b" ")
    return len(first) == 2 and first[1].strip().isdigit()


def read(raw: bytes, where: str) -> tuple[dict[str, int], list[list[str]]]:
    """Vocabulary and merges from lines of a token in base 64 and its rank: a token is merged from the two parts that
    the tokens of lower rank make of it."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines()):
        if not line:
            continue
        word, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(word, validate=True)
            value = int(rank) if len(rank) < 9 else -1
        except (ValueError, binascii.Error):
            token, value = b"", -1
        if not 0 < len(token) <= LONGEST or not 0 <= value < MOST_TOKENS or token in ranks:
            raise FileError(f"{where}: line {number + 1} is no token in base 64 and its rank")
        ranks[token] = value
    lost = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if lost is not None:
        raise FileError(f"{where} has no token for the byte {lost}")
    symbols = byte_symbols()
    spelled = {token: "".join(symbols[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            parts = _parts(token, ranks, ranks[token])
            if len(parts) == 2:  # otherwise no merge makes it; only a whole word can be it
                merges.append([spelled[parts[0]], spelled[parts[1]]])
    return {spelled[token]: rank for token, rank in ranks.items()}, merges


def _parts(token: bytes, ranks: Mapping[bytes, int], below: int) -> list[bytes]:
    parts = [token[place : place + 1] for place in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(a + b, below) for a, b in pairwise(parts)]
        best = min(joined)
        if best >= below:
            break
        place = joined.index(best)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts
