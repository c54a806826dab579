"""Read a SentencePiece model (Kudo and Richardson 2018) and convert it to the sections of a tokenizer.json.

The file is a protocol buffer. The fields that matter are the pieces with their scores and types, the algorithm (BPE or
Unigram) and the normalization; all of them can be expressed by components of the `tokenizers` library.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from monoblock.errors import FileError
from monoblock.tokenizers.components import (
    EDGE_SPACE_PATTERN,
    WORD_MARKER,
    JsonObject,
    bpe_model,
    replace_regex,
    replace_string,
)

MAX_PIECES = 2_000_000
MAX_PIECE_BYTES = 512
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # the types of pieces, also in GGUF
UNIGRAM, BPE = 1, 2  # the types of models


@dataclass(frozen=True, kw_only=True)
class SentencePieceModel:
    """The fields of a SentencePiece model."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    suffix: bool = False  # the ▁ for a space ends a word instead of beginning it
    charsmap: bytes = b""  # the compiled normalization rules; empty if there are none
    dummy_prefix: bool = True  # add a space before the text
    collapse: bool = True  # collapse repeated spaces, and strip them at the ends
    unknown: int = 0  # the id of the unknown piece

    def pieces_of_type(self, *types: int) -> list[str]:
        return [piece for piece, kind in zip(self.pieces, self.types, strict=True) if kind in types]


# -- protocol buffer ---------------------------------------------------------------------------------------------------


def _read_varint(raw: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[offset]
        value |= (byte & 0x7F) << shift
        offset += 1
        if byte < 0x80:
            return value, offset
        shift += 7
        if shift > 63:
            raise ValueError("a number is longer than ten bytes")


def _iterate_fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) for each field of a protocol buffer message; values are int or bytes."""
    offset, end = 0, len(raw)
    while offset < end:
        tag, offset = _read_varint(raw, offset)
        match tag & 7:
            case 0:
                value, offset = _read_varint(raw, offset)
                yield tag >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, offset = _read_varint(raw, offset)
            case 5:
                size = 4
            case wire_type:
                raise ValueError(f"a field has the wire type {wire_type}, which is not supported")
        if size > end - offset:
            raise ValueError("a field is longer than the file")
        yield tag >> 3, raw[offset : offset + size]
        offset += size


# Field numbers of the protocol buffer.
TRAINER_FIELDS = {3: "model_type", 24: "suffix", 35: "byte_fallback"}
NORMALIZER_FIELDS = {2: "charsmap", 3: "dummy_prefix", 4: "collapse"}
BOOLEAN_FIELDS = ("suffix", "byte_fallback", "dummy_prefix", "collapse")


def parse_model(raw: bytes, where: str) -> SentencePieceModel:
    """Parse the content of a tokenizer.model; errors call the file `where`."""
    pieces, scores, types, options = list[str](), list[float](), list[int](), dict[str, Any]()
    try:
        for number, value in _iterate_fields(raw):
            if number == 1:
                piece, score, kind = _parse_piece(value)
                pieces.append(piece)
                scores.append(score)
                types.append(kind)
                if len(pieces) > MAX_PIECES:
                    raise ValueError(f"it has more than {MAX_PIECES:,} pieces")
            elif number in (2, 3):
                names = TRAINER_FIELDS if number == 2 else NORMALIZER_FIELDS
                options |= {names[inner]: content for inner, content in _iterate_fields(value) if inner in names}
        options |= {name: bool(options[name]) for name in BOOLEAN_FIELDS if name in options}
        return _validate(SentencePieceModel(pieces=pieces, scores=scores, types=types, **options))
    except (ValueError, IndexError, struct.error, TypeError, UnicodeDecodeError) as problem:
        raise FileError(f"{where} is not a SentencePiece model: {' '.join(str(problem).split())[:100]}") from None


def validate(model: SentencePieceModel, where: str) -> SentencePieceModel:
    """Check and return a model that was read from another format, such as GGUF; errors call the file `where`."""
    try:
        return _validate(model)
    except ValueError as problem:
        raise FileError(f"{where} has no valid SentencePiece model: {problem}") from None


def _parse_piece(raw: bytes) -> tuple[str, float, int]:
    piece, score, kind = "", 0.0, NORMAL
    for number, value in _iterate_fields(raw):
        if number == 1:
            piece = value.decode() if len(value) <= MAX_PIECE_BYTES else ""
        elif number == 2:
            (score,) = struct.unpack("<f", value)
        elif number == 3:
            kind = value
    return piece, score, kind


def _validate(model: SentencePieceModel) -> SentencePieceModel:
    unknown = [number for number, kind in enumerate(model.types) if kind == UNKNOWN]
    if not model.pieces or len(unknown) != 1:
        raise ValueError("it has no pieces, or not exactly one unknown piece")
    if len(set(model.pieces)) != len(model.pieces) or not all(model.pieces):
        raise ValueError("it has a piece twice, or one that is empty or too long")
    if not all(math.isfinite(score) for score in model.scores):
        raise ValueError("a score is not finite")
    if model.model_type not in (UNIGRAM, BPE) or not set(model.types) <= {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE}:
        raise ValueError("it is neither BPE nor Unigram, or has pieces of an unsupported type")
    if model.suffix or not isinstance(model.charsmap, bytes):
        raise ValueError("it marks white space after words, which is not supported")
    byte_pieces = model.pieces_of_type(BYTE)
    expected = [f"<0x{value:02X}>" for value in range(256)]
    if model.byte_fallback != bool(byte_pieces) or (byte_pieces and sorted(byte_pieces) != expected):
        raise ValueError("its byte pieces are not <0x00> to <0xFF>, or do not match its byte_fallback")
    return replace(model, unknown=unknown[0])


# -- tokenizer.json ----------------------------------------------------------------------------------------------------


def to_sections(
    model: SentencePieceModel, *, extra_normalizers: list[JsonObject] | None = None, prefix_first_only: bool = False
) -> JsonObject:
    """Convert a SentencePiece model to the normalizer, pre_tokenizer, decoder and model of a tokenizer.json.

    `extra_normalizers` are applied first. The dummy prefix, a space, is added to each part of a text between special
    tokens; with `prefix_first_only`, it is added only to the first part, and only if this does not begin with a space.
    """
    normalizers = list(extra_normalizers or [])
    if model.charsmap:
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode()})
    if model.collapse:
        normalizers += [replace_regex(" {2,}", " "), replace_regex(EDGE_SPACE_PATTERN, "")]
    prefix_first_only = model.dummy_prefix and prefix_first_only
    if model.dummy_prefix and not prefix_first_only:
        normalizers.append({"type": "Prepend", "prepend": WORD_MARKER})
    if not prefix_first_only:
        normalizers.append(replace_string(" ", WORD_MARKER))
    metaspace = {"type": "Metaspace", "replacement": WORD_MARKER, "prepend_scheme": "first", "split": False}
    decoders: list[JsonObject] = [replace_string(WORD_MARKER, " ")]
    decoders += [{"type": "ByteFallback"}] if model.byte_fallback else []
    decoders += [{"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if model.dummy_prefix else []
    if model.model_type == BPE:
        converted = bpe_model(
            {piece: number for number, piece in enumerate(model.pieces)},
            build_merges(model),
            unk_token=model.pieces[model.unknown],
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
        )
    else:
        # The library would also match special pieces such as "</s>" in a text; a very low score prevents that.
        low = min(model.scores) - 100
        rows = zip(model.pieces, model.scores, model.types, strict=True)
        vocab = [[piece, score if kind in (NORMAL, USER_DEFINED) else low] for piece, score, kind in rows]
        converted = {"type": "Unigram", "unk_id": model.unknown, "vocab": vocab, "byte_fallback": model.byte_fallback}
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": metaspace if prefix_first_only else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": converted,
    }


def build_merges(model: SentencePieceModel) -> list[list[str]]:
    """Return every pair of pieces whose concatenation is also a piece, in the order in which SentencePiece merges them.

    This order is by the score of the concatenation, the highest first.
    """
    ids = {piece: number for number, piece in enumerate(model.pieces) if model.types[number] == NORMAL}
    merges = []
    for piece, number in ids.items():
        for cut in range(1, len(piece)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None:
                merges.append((-model.scores[number], number, left, right))
    merges.sort()
    return [[model.pieces[left], model.pieces[right]] for _, _, left, right in merges]
