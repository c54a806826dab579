"""How each kind cuts text before its model sees it and joins the pieces after, in the words of a tokenizer.json."""

from typing import Any

from monoblock.errors import ConfigError, did_you_mean
from monoblock.tokenizers.specials import UNKNOWN

KINDS = ("char", "byte", "word", "bpe", "wordpiece", "unigram")
MARKERS = ("@@", "▁")
END = "</w>"  # how a word's last piece is stored where "@@" marks the others (Sennrich et al. 2016)
INSIDE = "##"  # marks a WordPiece that does not begin its word

# A mark (\p{M}) belongs to its letter: GPT-2's pattern cuts every Indic vowel sign from its consonant.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)| ?[\p{L}\p{M}]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"
# The sign for the unknown stands alone, so that decoding and encoding again cuts around it where it was cut before.
MARKED_WORDS = rf"{UNKNOWN}|▁?[\p{{L}}\p{{M}}]+|▁?\p{{N}}+|▁?[^\s\p{{L}}\p{{M}}\p{{N}}▁{UNKNOWN}]+|▁+(?=▁)|▁|\s+"

Part = dict[str, Any]


def _sequence(key: str, *parts: Part | None) -> Part | None:
    given = [part for part in parts if part is not None]
    return {"type": "Sequence", key: given} if len(given) > 1 else (given[0] if given else None)


def _split(pattern: str) -> Part:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _replace(old: str, new: str) -> Part:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


_BYTES: Part = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _bytes(lowercase: Part | None, words: bool) -> Part:
    split = _sequence("pretokenizers", _split(WORDS), _BYTES) if words else _BYTES
    return {"normalizer": lowercase, "pre_tokenizer": split, "decoder": _BYTES}


def _marked(lowercase: Part | None) -> Part:
    """A ▁ before the text and for every space: the first word is cut like any other, and no space is lost."""
    return {
        "normalizer": _sequence("normalizers", lowercase, {"type": "Prepend", "prepend": "▁"}, _replace(" ", "▁")),
        "pre_tokenizer": _split(MARKED_WORDS),
        "decoder": _sequence(
            "decoders", _replace("▁", " "), {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        ),
    }


def _spaced(lowercase: Part | None, decoder: Part | None) -> Part:
    return {"normalizer": lowercase, "pre_tokenizer": {"type": "WhitespaceSplit"}, "decoder": decoder}


def _wordpiece(lowercase: bool) -> Part:
    return {
        # strip_accents would take the vowel signs of Indic scripts with it
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": False,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        # its clean-up would turn "do not" into "don't"
        "decoder": {"type": "WordPiece", "prefix": INSIDE, "cleanup": False},
    }


def pipeline(kind: str, marker: str | None, lowercase: bool) -> Part:
    """The normalizer, pre_tokenizer and decoder of a kind."""
    if kind not in KINDS:
        raise ConfigError(f"kind={kind!r} is none of {', '.join(KINDS)}{did_you_mean(str(kind), KINDS)}")
    if marker is not None and (kind != "bpe" or marker not in MARKERS):
        raise ConfigError(f"marker={marker!r} cannot be with kind={kind!r}; bpe takes '@@' or '▁', the others none")
    lower: Part | None = {"type": "Lowercase"} if lowercase else None
    match kind:
        case "char":
            return {"normalizer": lower, "pre_tokenizer": None, "decoder": {"type": "Fuse"}}
        case "word":
            return _spaced(lower, None)
        case "wordpiece":
            return _wordpiece(lowercase)
        case "bpe" if marker == "@@":
            return _spaced(lower, {"type": "BPEDecoder", "suffix": END})
        case "bpe" | "byte" if marker is None:
            return _bytes(lower, words=kind == "bpe")
        case _:
            return _marked(lower)
