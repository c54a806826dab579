"""Read tiktoken files, which give the ranks of byte-level BPE tokens; the merges are reconstructed from the ranks."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from itertools import pairwise

from monoblock.errors import FileError
from monoblock.tokenizers.components import byte_symbols

MAX_TOKENS = 2_000_000
MAX_TOKEN_BYTES = 512
MAX_SQUARED_BYTES = 2**26  # the sum over all tokens; reconstructing the merge of a token takes quadratic time


def is_tiktoken(raw: bytes) -> bool:
    """Return whether the first line of a file is a base-64 token and its rank."""
    first = raw[:200].split(b"\n")[0].split(b" ")
    return len(first) == 2 and first[1].strip().isdigit()


def parse_ranks(raw: bytes, where: str) -> tuple[dict[str, int], list[list[str]]]:
    """Return the vocabulary and the merges of a file with a base-64 token and its rank on each line.

    The merge that creates a token joins the two parts into which the merges of lower rank segment it. Errors call the
    file `where`.
    """
    ranks: dict[bytes, int] = {}
    work = 0
    for number, line in enumerate(raw.splitlines()):
        if not line:
            continue
        encoded, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(encoded, validate=True)
            value = int(rank) if len(rank) < 9 else -1
        except (ValueError, binascii.Error):
            token, value = b"", -1
        if not 0 < len(token) <= MAX_TOKEN_BYTES or not 0 <= value < MAX_TOKENS or token in ranks:
            raise FileError(f"{where}: line {number + 1} is not a base-64 token and its rank, or repeats a token")
        work += len(token) ** 2
        if work > MAX_SQUARED_BYTES:
            raise FileError(f"{where} has too many long tokens; is it the right file?")
        ranks[token] = value
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise FileError(f"{where} has no token for the byte {missing}, but byte-level BPE needs one for every byte")
    symbols = byte_symbols()
    spellings = {token: "".join(symbols[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            parts = _split_by_rank(token, ranks, ranks[token])
            if len(parts) == 2:  # otherwise no merge creates the token, and it can only be a whole word
                merges.append([spellings[parts[0]], spellings[parts[1]]])
    return {spellings[token]: rank for token, rank in ranks.items()}, merges


def _split_by_rank(token: bytes, ranks: Mapping[bytes, int], max_rank: int) -> list[bytes]:
    """Merge the bytes of a token by the merges below `max_rank` until two parts are left or no merge applies."""
    parts = [token[index : index + 1] for index in range(len(token))]
    pair_ranks = [ranks.get(left + right, max_rank) for left, right in pairwise(parts)]
    while len(parts) > 2:
        best = min(pair_ranks)
        if best >= max_rank:
            break
        index = pair_ranks.index(best)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
        del pair_ranks[index]
        for left in (index - 1, index):  # the pairs that contain the new part
            if 0 <= left < len(pair_ranks):
                pair_ranks[left] = ranks.get(parts[left] + parts[left + 1], max_rank)
    return parts
