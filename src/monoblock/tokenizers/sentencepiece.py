"""A SentencePiece model (Kudo and Richardson 2018) read from its few fields, and laid out as a tokenizer.json.

The file is a protocol buffer. Seven kinds of field matter: the pieces with their scores, whether they are merged (BPE)
or chosen (Unigram), and how text is normalized before. All of it can be said in the words of the `tokenizers` library.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from monoblock.errors import FileError
from monoblock.tokenizers.patterns import ENDS

MOST_PIECES = 2_000_000
LONGEST_PIECE = 512  # bytes
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
SPACE = "▁"

Part = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What a SentencePiece model says."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    suffix: bool = False  # white space ends a word instead of beginning it
    charsmap: bytes = b""  # the compiled normalization rules; none: text is taken as it is
    dummy_prefix: bool = True  # a space is put before the text
    collapse: bool = True  # several spaces are one, and none stand at the ends
    unknown: int = field(default=0)

    def of_type(self, *types: int) -> list[str]:
        return [piece for piece, kind in zip(self.pieces, self.types, strict=True) if kind in types]


# -- the protocol buffer -----------------------------------------------------------------------------------------------


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number longer than ten bytes")


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """(number of a field, its value: an int, or bytes) of one message."""
    at, end = 0, len(raw)
    while at < end:
        tag, at = _varint(raw, at)
        match tag & 7:
            case 0:
                value, at = _varint(raw, at)
                yield tag >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, at = _varint(raw, at)
            case 5:
                size = 4
            case other:
                raise ValueError(f"a field of the kind {other}")
        if size > end - at:
            raise ValueError("a field that is longer than the file")
        yield tag >> 3, raw[at : at + size]
        at += size


def parse(raw: bytes, where: str) -> Pieces:
    """The model in the bytes of a tokenizer.model."""
    try:
        return _checked(_parsed(raw))
    except (ValueError, IndexError, struct.error, TypeError, UnicodeDecodeError) as problem:
        raise FileError(f"{where} is no SentencePiece model: {' '.join(str(problem).split())[:100]}") from None


def checked(model: Pieces, where: str) -> Pieces:
    """A model that was told in other words, if it can be."""
    try:
        return _checked(model)
    except ValueError as problem:
        raise FileError(f"{where} has no SentencePiece model: {problem}") from None


def _parsed(raw: bytes) -> Pieces:
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    said: dict[str, Any] = {}
    for number, value in _fields(raw):
        if number == 1:
            piece, score, kind = "", 0.0, NORMAL
            for inner, content in _fields(value):
                if inner == 1:
                    piece = content.decode() if len(content) <= LONGEST_PIECE else ""
                elif inner == 2:
                    (score,) = struct.unpack("<f", content)
                elif inner == 3:
                    kind = content
            pieces.append(piece)
            scores.append(score)
            types.append(kind)
            if len(pieces) > MOST_PIECES:
                raise ValueError(f"it has more than {MOST_PIECES:,} pieces")
        elif number == 2:
            names = {3: "model_type", 24: "suffix", 35: "byte_fallback"}
            said |= {names[inner]: content for inner, content in _fields(value) if inner in names}
        elif number == 3:
            names = {2: "charsmap", 3: "dummy_prefix", 4: "collapse"}
            said |= {names[inner]: content for inner, content in _fields(value) if inner in names}
    said |= {name: bool(said[name]) for name in ("suffix", "byte_fallback", "dummy_prefix", "collapse") if name in said}
    return Pieces(pieces=pieces, scores=scores, types=types, **said)


def _checked(model: Pieces) -> Pieces:
    unknown = [place for place, kind in enumerate(model.types) if kind == UNKNOWN]
    if not model.pieces or len(unknown) != 1:
        raise ValueError("it has no pieces, or not one for the unknown")
    if len(set(model.pieces)) != len(model.pieces) or not all(model.pieces):
        raise ValueError("it has a piece twice, or one of no or too many letters")
    if not all(math.isfinite(score) for score in model.scores):
        raise ValueError("a score is no number")
    if model.model_type not in (UNIGRAM, BPE) or not set(model.types) <= {NORMAL, UNKNOWN, CONTROL, USER, BYTE}:
        raise ValueError("it is neither BPE nor Unigram, or has pieces out of use; only those two are read")
    if model.suffix or not isinstance(model.charsmap, bytes):
        raise ValueError("it writes spaces after words, which is not read")
    bytes_ = [piece for piece, kind in zip(model.pieces, model.types, strict=True) if kind == BYTE]
    wanted = [f"<0x{value:02X}>" for value in range(256)]
    if model.byte_fallback != bool(bytes_) or (bytes_ and sorted(bytes_) != wanted):
        raise ValueError("its pieces for bytes are not the 256 there are")
    return replace(model, unknown=unknown[0])


# -- as a tokenizer.json -----------------------------------------------------------------------------------------------


def sections(model: Pieces, *, before: list[Part] | None = None, first_only: bool = False) -> Part:
    """normalizer, pre_tokenizer, decoder and model. `before` is done to a text first (lowercasing, say).

    The space before a text is put before each part of it where a special token parts it, and only before the first
    where `first_only` says so; that way has no place for a space which the text itself begins with.
    """
    normalizers = list(before or [])
    if model.charsmap:
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    if model.collapse:
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
        normalizers.append({"type": "Replace", "pattern": {"Regex": ENDS}, "content": ""})
    first_only = model.dummy_prefix and first_only
    if model.dummy_prefix and not first_only:
        normalizers.append({"type": "Prepend", "prepend": SPACE})
    if not first_only:
        normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    scheme = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
    decoders: list[Part] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    decoders += [{"type": "ByteFallback"}] if model.byte_fallback else []
    decoders += [{"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if model.dummy_prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": scheme if first_only else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(model) if model.model_type == BPE else _unigram(model),
    }


def _bpe(model: Pieces) -> Part:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": model.pieces[model.unknown],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece: place for place, piece in enumerate(model.pieces)},
        "merges": merges(model),
    }


def merges(model: Pieces) -> list[list[str]]:
    """Every way to join two pieces into a third, that with the best score first: so does SentencePiece."""
    ids = {piece: place for place, piece in enumerate(model.pieces) if model.types[place] == NORMAL}
    found = []
    for piece, place in ids.items():
        for cut in range(1, len(piece)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-model.scores[place], place, left, right))
    found.sort()
    return [[model.pieces[left], model.pieces[right]] for _, _, left, right in found]


def _unigram(model: Pieces) -> Part:
    # The library would find "</s>" in a text; so far below all others it is the last way to cut it.
    least = min(model.scores) - 100
    kept = (NORMAL, USER)
    rows = zip(model.pieces, model.scores, model.types, strict=True)
    vocab = [[piece, score if kind in kept else least] for piece, score, kind in rows]
    return {"type": "Unigram", "unk_id": model.unknown, "vocab": vocab, "byte_fallback": model.byte_fallback}
