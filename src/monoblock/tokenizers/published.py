"""Vocabularies as they were published before there was a tokenizer.json, each laid out as one.

vocab.json + merges.txt      byte-level BPE (GPT-2, RoBERTa, Qwen)
vocab.txt                    WordPiece (BERT)
tokenizer.model              SentencePiece, BPE or Unigram (Llama, T5, ALBERT, XLM-R); or tiktoken (Llama 3)
*.tiktoken                   byte-level BPE by ranks
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from monoblock.errors import FileError, did_you_mean
from monoblock.tokenizers import sentencepiece, tiktoken
from monoblock.tokenizers.assembly import assemble, role
from monoblock.tokenizers.layouts import CUT_NAMES, CUTS, LAYOUTS, NAMES, Layout, Part, sequence
from monoblock.untrusted import MB, inside, present, read_bytes, read_json, shown

LARGEST = 64 * MB
MOST_TOKENS = 2_000_000
MOST_VALUES = 5_000_000
SPM_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")


def find(folder: Path) -> str | None:
    """The vocabulary file of a folder, or None."""
    candidates = [*SPM_FILES, "vocab.json", "vocab.txt", *sorted(n for n in _names(folder) if n.endswith(".tiktoken"))]
    return next((name for name in candidates if present(folder, name)), None)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def read(folder: Path, name: str, named: Mapping[str, Any]) -> tuple[Part, dict[str, Any]]:
    """The content of a tokenizer.json for the vocabulary file `name` of a folder, and its special tokens by role."""
    path = inside(folder, name)
    if name == "vocab.json":
        vocab = read_json(path, largest=LARGEST, most=MOST_VALUES)
        layout = _layout(folder, named, "gpt2")
        cut = byte_level(vocab, _merges(inside(folder, "merges.txt")), layout.cut, layout, named)
        return assemble(cut, layout, named), _roles(layout)
    if name == "vocab.txt":
        layout = _layout(folder, named, "bert")
        return assemble(_wordpiece(path, layout, named), layout, named), _roles(layout)
    raw = read_bytes(path, LARGEST)
    if name.endswith(".tiktoken") or tiktoken.looks_like(raw):
        layout = _layout(folder, named, "gpt2")
        vocab, merges = tiktoken.read(raw, str(path))
        return assemble(byte_level(vocab, merges, layout.cut, layout, named, ranks=True), layout, named), _roles(layout)
    layout = _layout(folder, named, "plain")
    return spm(sentencepiece.parse(raw, str(path)), layout, named), _roles(layout)


def _roles(layout: Layout) -> dict[str, Any]:
    return {f"{word}_token": token for word, token in layout.tokens.items()}


def _layout(folder: Path, named: Mapping[str, Any], default: str) -> Layout:
    """The row for a folder: by the class its tokenizer_config.json names, else by the model_type of its config.json."""
    said = named.get("tokenizer_class")
    if isinstance(said, str):
        said = said.removesuffix("Fast").removesuffix("Tokenizer").lower()
    elif present(folder, "config.json"):
        said = read_json(inside(folder, "config.json")).get("model_type")
    said = said or default
    if not isinstance(said, str) or said not in NAMES:
        guess = did_you_mean(str(said)[:40], NAMES)
        raise FileError(f"{folder}: how {shown(said)} cuts text is not known without a tokenizer.json{guess}")
    return LAYOUTS[NAMES[said]]


# -- the files ---------------------------------------------------------------------------------------------------------


def _lines(path: Path) -> list[str]:
    try:
        lines = read_bytes(path, LARGEST).decode().split("\n")
    except UnicodeDecodeError as problem:
        raise FileError(f"{path} is not UTF-8 text (byte {problem.start})") from None
    if len(lines) > MOST_TOKENS + 1:
        raise FileError(f"{path} has more than {MOST_TOKENS:,} lines; is it the right file?")
    return [line.removesuffix("\r") for line in lines]


def _merges(path: Path) -> list[list[str]]:
    lines = _lines(path)
    pairs = [line.split(" ") for line in lines[lines[0].startswith("#version") :] if line]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise FileError(f"{path}: {shown(' '.join(wrong))} is no pair of tokens")
    return pairs


def byte_level(
    vocab: Mapping[str, int],
    merges: list[list[str]],
    cut: str,
    layout: Layout,
    named: Mapping[str, Any],
    *,
    ranks: bool = False,
) -> Part:
    """Sections for a vocabulary of bytes and what they are merged to; by `ranks`, a word that is a token is not cut."""
    normalizers, cutters = CUTS[CUT_NAMES.get(cut, cut)]
    if named.get("add_prefix_space") is True:
        cutters = tuple(part | {"add_prefix_space": True} if part["type"] == "ByteLevel" else part for part in cutters)
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": layout.end,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ranks,
        "vocab": dict(vocab),
        "merges": merges,
    }
    return {
        "normalizer": sequence("normalizers", *normalizers),
        "pre_tokenizer": sequence("pretokenizers", *cutters),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }


def _wordpiece(path: Path, layout: Layout, named: Mapping[str, Any]) -> Part:
    lines = _lines(path)
    pieces = lines[:-1] if lines[-1] == "" else lines
    vocab = {piece: place for place, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        raise FileError(f"{path} has a piece twice")
    lowercase = named.get("do_lower_case", layout.lowercase)
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": named.get("tokenize_chinese_chars", True) is not False,
            "strip_accents": None if named.get("strip_accents") is None else bool(named["strip_accents"]),
            "lowercase": lowercase is True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": role(named, layout, "unk"),
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }


# -- SentencePiece -----------------------------------------------------------------------------------------------------


def spm(model: sentencepiece.Pieces, layout: Layout, named: Mapping[str, Any]) -> Part:
    """The content of a tokenizer.json for a SentencePiece model."""
    if layout.shifted:
        model = _shifted(model)
    before: list[Part] = []
    if layout is LAYOUTS["albert"]:
        before = [{"type": "Replace", "pattern": {"String": quotes}, "content": '"'} for quotes in ("``", "''")]
        if named.get("keep_accents") is not True:
            before += [{"type": "NFKD"}, {"type": "StripAccents"}]
        if named.get("do_lower_case", layout.lowercase) is True:
            before += [{"type": "Lowercase"}]
    cut = sentencepiece.sections(model, before=before, first_only=named.get("legacy") is False)
    specials = model.of_type(sentencepiece.CONTROL, sentencepiece.UNKNOWN)
    return assemble(cut, layout, named, specials=specials, plain=model.of_type(sentencepiece.USER))


def _shifted(model: sentencepiece.Pieces) -> sentencepiece.Pieces:
    """fairseq's order: <s> <pad> </s> <unk>, the pieces from the fourth on, and the mask."""
    front, kinds = ["<s>", "<pad>", "</s>", "<unk>"], [3, 3, 3, 2]
    if model.model_type != sentencepiece.UNIGRAM or any(kind != 1 for kind in model.types[3:]):
        raise FileError("a SentencePiece model with fairseq's ids is Unigram, with three special pieces in front")
    return replace(
        model,
        pieces=[*front, *model.pieces[3:], "<mask>"],
        scores=[0.0] * 4 + [*model.scores[3:], 0.0],
        types=[*kinds, *model.types[3:], 3],
        unknown=3,
    )
