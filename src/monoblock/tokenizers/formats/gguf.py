"""Read the header of a GGUF file, llama.cpp's format, and read and write the tokenizer in its fields.

The file is untrusted: no length may exceed the size of the file, and no count may exceed what a model could need.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from monoblock.errors import FileError
from monoblock.tokenizers.components import JsonObject, component_sequence
from monoblock.tokenizers.formats import sentencepiece
from monoblock.tokenizers.formats.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from monoblock.tokenizers.formats.vocabulary_files import (
    PRE_TOKENIZER_ALIASES,
    PRE_TOKENIZERS,
    TokenizerFamily,
    assemble_tokenizer_json,
    byte_level_sections,
)
from monoblock.untrusted_files import short_repr

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_FIELDS = 10_000
MAX_TENSORS = 100_000
MAX_ARRAY_ITEMS = 4_000_000  # two million tokens, and as many merges
MAX_STRING_BYTES = 2**20
MAX_NAME_BYTES = 256
MAX_HEADER_BYTES = 32 * 2**20
MAX_DIMENSIONS = 4
SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING_TYPE, ARRAY_TYPE = 8, 9


class TensorInfo(NamedTuple):
    """The header's description of a tensor; `shape` is in PyTorch's order, the reverse of the order in the file."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int  # in bytes, from `data_offset`


class GgufHeader(NamedTuple):
    fields: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data_offset: int  # of the first tensor, in bytes from the start of the file
    file_size: int  # in bytes
    raw: mmap.mmap  # the file; what is written into it is not stored


class _ByteReader:
    """Read the values of a header one after the other, but never beyond `end` or MAX_HEADER_BYTES."""

    def __init__(self, raw: mmap.mmap, end: int) -> None:
        self.raw, self.offset, self.end = raw, 0, min(end, MAX_HEADER_BYTES)

    def advance(self, size: int) -> int:
        """Skip `size` bytes and return the offset where they begin."""
        if size > self.end - self.offset:
            raise ValueError("its header claims more bytes than there are, so it is damaged or incomplete")
        start = self.offset
        self.offset += size
        return start

    def read_number(self, code: str) -> Any:
        layout = f"<{code}"
        return struct.unpack_from(layout, self.raw, self.advance(struct.calcsize(layout)))[0]

    def read_string(self, max_bytes: int = MAX_STRING_BYTES) -> str:
        size = self.read_number("Q")
        if size > max_bytes:
            raise ValueError(f"a string claims {size:,} bytes, more than the limit of {max_bytes:,}")
        start = self.advance(size)
        return self.raw[start : start + size].decode()

    def read_value(self, value_type: int) -> Any:
        if value_type in SCALAR_FORMATS:
            return self.read_number(SCALAR_FORMATS[value_type])
        if value_type == STRING_TYPE:
            return self.read_string()
        if value_type != ARRAY_TYPE:
            raise ValueError(f"a field has the type {value_type}, which is unknown")
        item_type, count = self.read_number("I"), self.read_number("Q")
        if count > MAX_ARRAY_ITEMS:
            raise ValueError(f"an array claims {count:,} items, more than the limit of {MAX_ARRAY_ITEMS:,}")
        if item_type == STRING_TYPE:
            return [self.read_string() for _ in range(count)]
        if item_type not in SCALAR_FORMATS:
            raise ValueError("an array of arrays is not supported")
        layout = f"<{count}{SCALAR_FORMATS[item_type]}"
        return list(struct.unpack_from(layout, self.raw, self.advance(struct.calcsize(layout))))


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Read the fields and tensor descriptions of a GGUF file."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise ValueError(f"it has only {size} bytes, too few for a header")
            return _parse_header(_ByteReader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), size), size)
    except OSError as problem:
        raise FileError(f"{path} cannot be read: {problem.strerror or problem}") from None
    except (ValueError, struct.error, OverflowError) as problem:  # also text that is not UTF-8
        raise FileError(f"{path} is not a usable GGUF file: {' '.join(str(problem).split())[:120]}") from None


def _parse_header(reader: _ByteReader, size: int) -> GgufHeader:
    start = reader.advance(4)
    if reader.raw[start : start + 4] != MAGIC:
        raise ValueError("it is not a GGUF file")
    version = reader.read_number("I")
    if version not in VERSIONS:
        raise ValueError(f"it has version {version}; only little-endian files of versions 2 and 3 are supported")
    tensor_count, field_count = reader.read_number("Q"), reader.read_number("Q")
    if tensor_count > MAX_TENSORS or field_count > MAX_FIELDS:
        raise ValueError(f"it claims {tensor_count:,} tensors and {field_count:,} fields, more than any model has")
    fields: dict[str, Any] = {}
    for _ in range(field_count):
        name = reader.read_string(MAX_NAME_BYTES)
        if name in fields:
            raise ValueError(f"the field {short_repr(name)} occurs twice")
        fields[name] = reader.read_value(reader.read_number("I"))
    tensors: dict[str, TensorInfo] = {}
    for _ in range(tensor_count):
        name = reader.read_string(MAX_NAME_BYTES)
        if name in tensors:
            raise ValueError(f"the tensor {short_repr(name)} occurs twice")
        tensors[name] = _parse_tensor_info(reader, name)
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 2**16 or alignment % 8:
        raise ValueError(f"its alignment is {short_repr(alignment)}, not a multiple of 8 from 8 to {2**16}")
    return GgufHeader(fields, tensors, -(-reader.offset // alignment) * alignment, size, reader.raw)


def _parse_tensor_info(reader: _ByteReader, name: str) -> TensorInfo:
    axes = reader.read_number("I")
    if not 0 < axes <= MAX_DIMENSIONS:
        raise ValueError(f"the tensor {short_repr(name)} has {axes:,} axes, not 1 to {MAX_DIMENSIONS}")
    shape = [reader.read_number("Q") for _ in range(axes)]
    elements = 1
    for axis in shape:
        elements *= axis
        if not 0 < elements < 2**48:
            raise ValueError(
                f"the tensor {short_repr(name)} has the shape {short_repr(shape)}, which is empty or too large"
            )
    return TensorInfo(tuple(reversed(shape)), reader.read_number("I"), reader.read_number("Q"))


# -- tokenizers: byte-level BPE ("gpt2") and SentencePiece's BPE ("llama") ---------------------------------------------

PREFIX = "tokenizer.ggml"
TOKEN_ID_FIELDS = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
PLAIN_FAMILY = TokenizerFamily()
NO_TOKENIZER = "no_vocab"  # tokenizer.ggml.model of a file without a tokenizer
WITHOUT_TOKENIZER = "write the file without the tokenizer: --no-tokenizer (in Python, tokenizer=None)"


def has_tokenizer(fields: Mapping[str, Any]) -> bool:
    """Return whether the fields of a GGUF header contain a tokenizer."""
    return fields.get(f"{PREFIX}.model", NO_TOKENIZER) != NO_TOKENIZER


def from_fields(fields: Mapping[str, Any], where: str) -> tuple[JsonObject, dict[str, Any]]:
    """Convert the fields of a GGUF header to the content of a tokenizer.json and of a tokenizer_config.json.

    Errors call the file `where`.
    """
    if not has_tokenizer(fields):
        raise FileError(f"{where} contains no tokenizer; load its model alone with Transformer.from_pretrained")
    tokens = _string_list(fields, f"{PREFIX}.tokens", where)
    if len(set(tokens)) != len(tokens):
        raise FileError(f"{where} cannot be used: its vocabulary has a token twice")
    types = fields.get(f"{PREFIX}.token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens) or not set(types) <= set(range(7)):
        raise FileError(f"{where} cannot be used: its {PREFIX}.token_type is not a list of one type per token")
    kind = fields.get(f"{PREFIX}.model", NO_TOKENIZER)
    if kind not in ("gpt2", "llama"):
        raise FileError(f"{where}: its tokenizer is of the kind {short_repr(kind)}; only gpt2 and llama are supported")
    config = _tokenizer_config(fields, tokens, add_bos=kind == "llama")
    if kind == "llama":
        sections = _llama_sections(fields, tokens, types, where)
    else:
        sections = _gpt2_sections(fields, tokens, where)
    data = assemble_tokenizer_json(
        sections,
        PLAIN_FAMILY,
        config,
        special_tokens=[t for t, kind in zip(tokens, types, strict=True) if kind in (CONTROL, UNUSED, UNKNOWN)],
        plain_tokens=[t for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED],
    )
    return data, config


def _string_list(fields: Mapping[str, Any], name: str, where: str) -> list[str]:
    strings = fields.get(name)
    if not isinstance(strings, list) or not strings or not all(isinstance(item, str) and item for item in strings):
        raise FileError(f"{where} cannot be used: its {name} is not a list of strings")
    return strings


def _tokenizer_config(fields: Mapping[str, Any], tokens: list[str], add_bos: bool) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for role, field in TOKEN_ID_FIELDS.items():
        number = fields.get(f"{PREFIX}.{field}")
        if type(number) is int and 0 <= number < len(tokens):
            config[f"{role}_token"] = tokens[number]
    config["add_bos_token"] = fields.get(f"{PREFIX}.add_bos_token", add_bos) is True
    config["add_eos_token"] = fields.get(f"{PREFIX}.add_eos_token", False) is True
    template = fields.get("tokenizer.chat_template")
    return config | ({"chat_template": template} if isinstance(template, str) else {})


def _gpt2_sections(fields: Mapping[str, Any], tokens: list[str], where: str) -> JsonObject:
    name = fields.get(f"{PREFIX}.pre", "default")
    if not isinstance(name, str) or PRE_TOKENIZER_ALIASES.get(name, name) not in PRE_TOKENIZERS:
        known = ", ".join(sorted({*PRE_TOKENIZERS, *PRE_TOKENIZER_ALIASES}))
        raise FileError(f"{where} has the unknown pre-tokenizer {short_repr(name)}; known are {known}")
    merges = [merge.split(" ") for merge in _string_list(fields, f"{PREFIX}.merges", where)]
    vocab = {token: number for number, token in enumerate(tokens)}
    config = {"add_prefix_space": fields.get(f"{PREFIX}.add_space_prefix") is True}
    ignore_merges = PRE_TOKENIZER_ALIASES.get(name, name) == "llama-bpe"
    return byte_level_sections(vocab, merges, name, PLAIN_FAMILY, config, ignore_merges=ignore_merges)


def _llama_sections(fields: Mapping[str, Any], tokens: list[str], types: list[int], where: str) -> JsonObject:
    scores = fields.get(f"{PREFIX}.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise FileError(f"{where} cannot be used: its {PREFIX}.scores is not a list of one score per token")
    unknown = fields.get(f"{PREFIX}.unknown_token_id", 0)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise FileError(f"{where} cannot be used: its unknown token is not one of its tokens")
    types_read = [CONTROL if kind in (UNUSED, UNKNOWN) else kind for kind in types]
    types_read[unknown] = UNKNOWN
    model = sentencepiece.SentencePieceModel(
        pieces=tokens,
        scores=scores,
        types=types_read,
        model_type=sentencepiece.BPE,
        byte_fallback=BYTE in types,
        dummy_prefix=fields.get(f"{PREFIX}.add_space_prefix", True) is True,
        collapse=fields.get(f"{PREFIX}.remove_extra_whitespaces", False) is True,
    )
    return sentencepiece.to_sections(sentencepiece.validate(model, where))


# -- writing -----------------------------------------------------------------------------------------------------------


def to_fields(data: JsonObject, config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Convert the content of a tokenizer.json and of a tokenizer_config.json to GGUF fields.

    If the model has more embeddings (`vocab_size`) than the tokenizer has tokens, the rest are unused tokens [PAD…].
    """
    model = data["model"]
    if model["type"] != "BPE":
        raise FileError(f"GGUF cannot hold a {model['type']} tokenizer, only BPE; {WITHOUT_TOKENIZER}")
    ids = dict(model["vocab"]) | {row["content"]: row["id"] for row in data["added_tokens"]}
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, number in ids.items():
        tokens[number], types[number] = token, NORMAL
    for row in data["added_tokens"]:
        types[row["id"]] = CONTROL if row["special"] else USER_DEFINED
    fields: dict[str, Any] = {f"{PREFIX}.tokens": tokens, f"{PREFIX}.token_type": types}
    if model.get("byte_fallback"):
        fields[f"{PREFIX}.model"], fields[f"{PREFIX}.pre"] = "llama", "default"
        fields[f"{PREFIX}.scores"] = _piece_scores(model, tokens, types)
        fields[f"{PREFIX}.add_space_prefix"] = "'Prepend'" in str(data["normalizer"]) or bool(data["pre_tokenizer"])
    else:
        fields[f"{PREFIX}.model"], fields[f"{PREFIX}.pre"] = "gpt2", _pre_tokenizer_name(data)
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        fields[f"{PREFIX}.merges"] = merges
    for role, field in TOKEN_ID_FIELDS.items():
        if config.get(f"{role}_token") in ids:
            fields[f"{PREFIX}.{field}"] = ids[config[f"{role}_token"]]
    template = (data["post_processor"] or {}).get("single", [])
    added = {row["SpecialToken"]["id"] for row in template if "SpecialToken" in row}
    for role in ("bos", "eos"):
        fields[f"{PREFIX}.add_{role}_token"] = config.get(f"{role}_token") in added
    chat_template = config.get("chat_template")
    return fields | ({"tokenizer.chat_template": chat_template} if isinstance(chat_template, str) else {})


def _piece_scores(model: JsonObject, tokens: list[str], types: list[int]) -> list[float]:
    """Return the score of each token: the negative rank of the first merge that creates it.

    Also write the types of byte tokens and of the unknown token into `types`.
    """
    scores: dict[str, float] = {}
    for rank, merge in enumerate(model["merges"]):
        scores.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), -float(rank))
    for number, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[number] = BYTE
        elif token == model.get("unk_token"):
            types[number] = UNKNOWN
    return [scores.get(token, -1e6) if kind == NORMAL else 0.0 for token, kind in zip(tokens, types, strict=True)]


def _pre_tokenizer_name(data: JsonObject) -> str:
    """Return GGUF's name for the normalizer and pre-tokenizer of a tokenizer.json."""
    for name, (normalizers, pre_tokenizers) in PRE_TOKENIZERS.items():
        normalizer = component_sequence("normalizers", *normalizers)
        pre_tokenizer = component_sequence("pretokenizers", *pre_tokenizers)
        if (normalizer, pre_tokenizer) == (data["normalizer"], data["pre_tokenizer"]):
            return name
    names = ", ".join(PRE_TOKENIZERS)
    raise FileError(f"GGUF has no name for this tokenizer's pre-tokenizer, only for {names}; {WITHOUT_TOKENIZER}")
