"""The components of a tokenizer.json as JSON objects, those of each kind that we train, and the regular expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monoblock.errors import ConfigError, did_you_mean
from monoblock.tokenizers.special_tokens import UNKNOWN_CHARACTER

JsonObject = dict[str, Any]


def component_sequence(key: str, *components: JsonObject | None) -> JsonObject | None:
    """Return a "Sequence" that applies components one after the other; `key` is the key of its list of components.

    Components that are None are left out. A single component is returned unchanged; without any, return None.
    """
    present = [component for component in components if component is not None]
    return {"type": "Sequence", key: present} if len(present) > 1 else (present[0] if present else None)


def split_regex(pattern: str, behavior: str = "Isolated", invert: bool = False) -> JsonObject:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def replace_string(old: str, new: str) -> JsonObject:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def replace_regex(pattern: str, new: str) -> JsonObject:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": new}


def byte_level(*, add_prefix_space: bool = False, use_regex: bool = False) -> JsonObject:
    """Return the component that maps bytes to `byte_symbols`; `use_regex` first splits the text by GPT-2's pattern."""
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": use_regex}


def bpe_model(
    vocab: dict[str, int],
    merges: list[Any],
    *,
    unk_token: str | None = None,
    end_of_word_suffix: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> JsonObject:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": end_of_word_suffix,
        "fuse_unk": fuse_unk,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }


def join_sections(
    sections: JsonObject, added_tokens: list[JsonObject], post_processor: JsonObject | None
) -> JsonObject:
    """Return the content of a tokenizer.json; `sections` has the keys normalizer, pre_tokenizer, decoder and model."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": sections["normalizer"],
        "pre_tokenizer": sections["pre_tokenizer"],
        "post_processor": post_processor,
        "decoder": sections["decoder"],
        "model": sections["model"],
    }


def template_processing(
    single: Sequence[str], pair: Sequence[str], tokens: Mapping[str, str | None], ids: Mapping[str, int]
) -> JsonObject | None:
    """Return the post_processor that puts special tokens around one text or two, or None if there are none to add.

    single, pair: the roles of tokens and the texts A and B in order, as in "cls A sep B:1 sep:1" where ":1" marks the
    second segment; roles that are not in `tokens` are left out.
    tokens, ids: the token of each role, and the id of each token.
    """
    if not tokens:
        return None

    def rows(items: Sequence[str]) -> list[JsonObject]:
        parts = [item.partition(":") for item in items]
        kinds = {name: "Sequence" if name in "AB" else "SpecialToken" for name, _, _ in parts}
        return [
            {kinds[name]: {"id": tokens.get(name, name), "type_id": int(segment or 0)}}
            for name, _, segment in parts
            if name in "AB" or name in tokens
        ]

    described = {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in tokens.values() if token}
    return {"type": "TemplateProcessing", "single": rows(single), "pair": rows(pair), "special_tokens": described}


def byte_symbols() -> list[str]:
    """Return GPT-2's printable symbol for each byte value (Radford et al. 2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(value) if value in printable else chr(next(substitutes)) for value in range(256)]


# -- the normalizer, pre-tokenizer and decoder of each kind of tokenizer that we train ---------------------------------

KINDS = ("char", "byte", "word", "bpe", "wordpiece", "unigram")
MARKERS = ("@@", "▁")
WORD_MARKER = "▁"  # replaces spaces (Kudo and Richardson 2018)
END_OF_WORD = "</w>"  # stored on the last piece of a word; shown as "@@" on the others (Sennrich et al. 2016)
CONTINUATION_PREFIX = "##"  # marks a piece that does not begin its word, in WordPiece

# Combining marks (\p{M}) belong to their letter; GPT-2's pattern separates every Indic vowel sign from its consonant.
WORD_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?[\p{L}\p{M}]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"
# The unknown character is a word of its own, so that a decoded text, when encoded again, is split around it as before.
MARKED_WORD_PATTERN = (
    rf"{UNKNOWN_CHARACTER}|▁?[\p{{L}}\p{{M}}]+|▁?\p{{N}}+|▁?[^\s\p{{L}}\p{{M}}\p{{N}}▁{UNKNOWN_CHARACTER}]+"
    r"|▁+(?=▁)|▁|\s+"
)


def build_sections(kind: str, marker: str | None, lowercase: bool) -> JsonObject:
    """Return the normalizer, pre_tokenizer and decoder for a `kind` in KINDS.

    `marker` is None; for bpe it may also be one of MARKERS.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r} is none of {', '.join(KINDS)}{did_you_mean(str(kind), KINDS)}")
    if marker is not None and (kind != "bpe" or marker not in MARKERS):
        raise ConfigError(f"marker={marker!r} does not fit kind={kind!r}; bpe takes '@@' or '▁', other kinds no marker")
    normalizer: JsonObject | None = {"type": "Lowercase"} if lowercase else None
    pre_tokenizer: JsonObject | None = {"type": "WhitespaceSplit"}
    decoder: JsonObject | None = None
    match kind:
        case "char":
            pre_tokenizer, decoder = None, {"type": "Fuse"}
        case "word":
            pass
        case "wordpiece":
            # strip_accents would also strip the vowel signs of Indic scripts.
            normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
            normalizer |= {"strip_accents": False, "lowercase": lowercase}
            pre_tokenizer = {"type": "BertPreTokenizer"}
            # The clean-up of the `tokenizers` library would turn "do not" into "don't".
            decoder = {"type": "WordPiece", "prefix": CONTINUATION_PREFIX, "cleanup": False}
        case "bpe" if marker == "@@":
            decoder = {"type": "BPEDecoder", "suffix": END_OF_WORD}
        case "bpe" | "byte" if marker is None:
            words = split_regex(WORD_PATTERN) if kind == "bpe" else None
            pre_tokenizer, decoder = component_sequence("pretokenizers", words, byte_level()), byte_level()
        case _:
            # ▁ stands before a text and in place of its spaces, so that the first word is segmented like any other.
            prepend = {"type": "Prepend", "prepend": WORD_MARKER}
            normalizer = component_sequence("normalizers", normalizer, prepend, replace_string(" ", WORD_MARKER))
            pre_tokenizer = split_regex(MARKED_WORD_PATTERN)
            strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
            decoder = component_sequence("decoders", replace_string(WORD_MARKER, " "), {"type": "Fuse"}, strip)
    return {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder}


# -- regular expressions: those of our own tokenizers and of published ones --------------------------------------------

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MIXED_CASE_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER_CASE_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_PUNCTUATION_SLASH_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
EDGE_SPACE_PATTERN = r"\A | \z"  # one space at either end of a text
LLAMA3_PATTERN = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
QWEN2_PATTERN = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_SPACE}"
# GPT-4o and Mistral's tekken
O200K_PATTERN = (
    rf"{_MIXED_CASE_WORD}{_CONTRACTIONS}?|{_UPPER_CASE_WORD}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|"
    + _PUNCTUATION_SLASH_AND_SPACE
)
TEKKEN_PATTERN = rf"{_MIXED_CASE_WORD}|{_UPPER_CASE_WORD}|\p{{N}}|{_PUNCTUATION_SLASH_AND_SPACE}"
CLIP_PATTERN = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"

ALLOWED_SPLIT_PATTERNS = frozenset(
    {
        WORD_PATTERN,
        MARKED_WORD_PATTERN,
        GPT2_PATTERN,
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        LLAMA3_PATTERN,  # and GPT-4 (cl100k)
        QWEN2_PATTERN,  # and Qwen 3
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        + _PUNCTUATION_AND_SPACE,
        O200K_PATTERN,
        TEKKEN_PATTERN,
        # DeepSeek, and digits alone
        r"\p{N}{1,3}",
        r"\p{N}",
        r"[0-9]",
        r"\s?[\p{L}]+",
        r"\s?\p{L}+",
        # CLIP
        r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
        CLIP_PATTERN,
        # BLOOM
        r" ?[^(\s|[.,!?…。，、।۔،])]+",
    }
)

ALLOWED_REPLACE_PATTERNS = frozenset({r" {2,}", r"\s+", r"\s{2,}", EDGE_SPACE_PATTERN})
