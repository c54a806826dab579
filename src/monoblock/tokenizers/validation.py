"""Check the content of a tokenizer.json from an untrusted source before the `tokenizers` library uses it.

The library accepts more than is safe: a regular expression with nested quantifiers may run forever, and a very large id
may take all memory. So only listed types of components and known regular expressions are allowed, and ids and sizes may
not be larger than a vocabulary needs.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from monoblock.errors import FileError
from monoblock.tokenizers.components import ALLOWED_REPLACE_PATTERNS, ALLOWED_SPLIT_PATTERNS

MAX_TOKENS = 2_000_000
MAX_COMPONENTS = 32
# Added tokens are compiled into one search automaton, which takes seconds for a million characters.
MAX_ADDED_TOKENS = 32_768
MAX_ADDED_CHARACTERS = 2**18
MAX_TEMPLATE_IDS = 16  # that a special token of a template stands for
MAX_TOKEN_LENGTH = 512  # of an added token, in characters
MAX_WORD_LENGTH = 200  # characters in a word of WordPiece, whose search takes cubic time
MAX_AFFIX_LENGTH = 8  # characters that a component may prepend or strip

# The types of components that each section may have, alone or inside a "Sequence".
ALLOWED_TYPES = {
    "normalizer": """Sequence NFC NFD NFKC NFKD Nmt Lowercase Strip StripAccents BertNormalizer Replace Prepend
        Precompiled ByteLevel""",
    "pre_tokenizer": """Sequence ByteLevel Metaspace Whitespace WhitespaceSplit BertPreTokenizer Punctuation Digits
        Split CharDelimiterSplit UnicodeScripts""",
    "post_processor": "Sequence ByteLevel BertProcessing RobertaProcessing TemplateProcessing",
    "decoder": "Sequence ByteLevel WordPiece Metaspace BPEDecoder CTC Fuse Strip Replace ByteFallback",
    "model": "BPE WordPiece WordLevel Unigram",
}
SEQUENCE_KEYS = ("normalizers", "pretokenizers", "processors", "decoders")


def validate_tokenizer_json(data: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Return the content of a tokenizer.json with the type of its model filled in.

    Raise FileError unless everything that the library would run or allocate has a known type and a limited size.
    """
    try:
        model = data["model"] = _with_model_type(data.get("model"))
        for section in ALLOWED_TYPES:
            if data.get(section) is not None:
                _check_component(section, data[section], depth=0)
        vocab = _check_vocab(model)
        _check_added_tokens(data.get("added_tokens", []))
        _check_model(model, vocab)
    except KeyError as problem:
        raise FileError(f"{path} cannot be used: it lacks {str(problem)[:60]}") from None
    except (AttributeError, TypeError, ValueError) as problem:  # also for a value of an unexpected type
        raise FileError(f"{path} cannot be used: {' '.join(str(problem).split())[:200]}") from None
    return data


def _with_model_type(model: Any) -> dict[str, Any]:
    """Return the model with its type, which early files such as GPT-2's lack; an unknown token of "" becomes None."""
    if not isinstance(model, Mapping):
        raise ValueError("it has no model")
    guess = "BPE" if "merges" in model else "Unigram" if isinstance(model.get("vocab"), list) else "WordLevel"
    guess = "WordPiece" if "max_input_chars_per_word" in model else guess
    return {"type": guess, **model} | ({"unk_token": None} if model.get("unk_token") == "" else {})


def _check_component(section: str, component: Any, depth: int) -> int:
    """Raise unless a component and all components inside it are allowed; return their number."""
    kind = component.get("type") if isinstance(component, Mapping) else None
    if not isinstance(kind, str) or kind not in ALLOWED_TYPES[section].split():
        raise ValueError(f"its {section} is of the type {kind!r:.40}, which is not allowed")
    _check_pattern(section, component)
    if kind == "TemplateProcessing":
        _check_template(component)
    if kind == "Precompiled":
        check_charsmap(component.get("precompiled_charsmap"))
    count = 1
    for key in SEQUENCE_KEYS:
        inner = component.get(key, [])
        if depth > 2 or not isinstance(inner, list) or len(inner) > MAX_COMPONENTS:
            raise ValueError(f"its {section} is nested too deep or too long")
        count += sum(_check_component(section, item, depth + 1) for item in inner)
    if count > MAX_COMPONENTS:
        raise ValueError(f"its {section} has more than {MAX_COMPONENTS} components")
    return count


def _check_pattern(section: str, component: Mapping[str, Any]) -> None:
    """Raise unless the pattern of a component is a string or a known regular expression.

    Also raise if a Replace, Prepend or Strip could make a text much longer, or make the library panic.
    """
    pattern = component.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    allowed = ALLOWED_SPLIT_PATTERNS if component["type"] == "Split" else ALLOWED_REPLACE_PATTERNS
    if regex is not None and regex not in allowed:
        raise ValueError(f"its {section} has an unknown regular expression, {regex!r:.60}")
    match component["type"]:
        case "Replace":
            string: Any = pattern.get("String") if isinstance(pattern, Mapping) else pattern
            if len(component["content"]) > (1 if regex is not None else len(string)):
                raise ValueError(f"its {section} replaces {string!r:.20} by a longer text, which is not allowed")
        case "Strip" if section == "decoder":  # the library panics if there is nothing to strip from the end
            if component.get("start") not in range(MAX_AFFIX_LENGTH + 1) or component.get("stop") != 0:
                raise ValueError(f"its decoder may strip only from the start, at most {MAX_AFFIX_LENGTH} characters")
        case "Prepend" if not 0 < len(component["prepend"]) <= MAX_AFFIX_LENGTH:  # the library panics for ""
            raise ValueError(f"its {section} prepends not 1 to {MAX_AFFIX_LENGTH} characters")


def _check_template(component: Mapping[str, Any]) -> None:
    """Raise unless a template gives the ids of its special tokens, and its form for one text has no second text.

    Otherwise the library would panic, which prints a message of its own.
    """
    known, single = component["special_tokens"], component.get("single") or []
    rows = [*single, *(component.get("pair") or [])]
    if max(len(rows), len(known)) > MAX_COMPONENTS or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f"its post_processor is not a template of at most {MAX_COMPONENTS} parts and special tokens")
    if any(row["Sequence"]["id"] != "A" for row in single if "Sequence" in row):
        raise ValueError("its post_processor adds a second text to a single one")
    for name in (row["SpecialToken"]["id"] for row in rows if "SpecialToken" in row):
        if not isinstance(known.get(name), Mapping):
            raise ValueError("its post_processor adds a special token that is not in its special_tokens")
    for name, token in known.items():
        ids = token["ids"]
        if not isinstance(ids, list) or len(ids) > MAX_TEMPLATE_IDS:
            raise ValueError(f"the special token {name!r:.40} of its template has no list of ids, or a long one")
        for number in ids:
            _check_id(name, number)


def _check_vocab(model: Mapping[str, Any]) -> Mapping[str, int]:
    """Return a dict from tokens to ids; raise unless the ids are valid and distinct."""
    vocab = model.get("vocab")
    if model["type"] == "Unigram":
        if not isinstance(vocab, list) or not all(
            isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) and isinstance(row[1], int | float)
            for row in vocab
        ):
            raise ValueError("its vocabulary is not a list of pieces and scores")
        vocab = {piece: number for number, (piece, _) in enumerate(vocab)}
        if len(vocab) != len(model["vocab"]):
            raise ValueError("its vocabulary has a piece twice")
    if not isinstance(vocab, Mapping) or not 0 < len(vocab) <= MAX_TOKENS:
        raise ValueError(f"the tokenizer has no vocabulary, or one of more than {MAX_TOKENS:,} tokens")
    for token, number in vocab.items():
        _check_id(token, number)
    if len(set(vocab.values())) != len(vocab):
        raise ValueError("two tokens of its vocabulary have the same id")
    return vocab


def _check_id(token: Any, number: Any) -> None:
    if type(number) is not int or not 0 <= number < MAX_TOKENS:
        raise ValueError(
            f"the token {token!r:.40} has the id {number!r:.20}; an id is a whole number below {MAX_TOKENS:,}"
        )


def _check_added_tokens(added: Any) -> None:
    if not isinstance(added, list) or len(added) > MAX_ADDED_TOKENS:
        raise ValueError(f"its added_tokens are not a list of at most {MAX_ADDED_TOKENS:,}")
    for row in added:
        content = row.get("content") if isinstance(row, Mapping) else None
        if not isinstance(content, str) or not 0 < len(content) <= MAX_TOKEN_LENGTH:
            raise ValueError(f"one of its added_tokens is not a token of 1 to {MAX_TOKEN_LENGTH} characters")
        _check_id(content, row.get("id"))
    if sum(len(row["content"]) for row in added) > MAX_ADDED_CHARACTERS:
        raise ValueError(f"its added_tokens have more than {MAX_ADDED_CHARACTERS:,} characters")


def _check_model(model: Mapping[str, Any], vocab: Mapping[str, int]) -> None:
    unknown = model.get("unk_token")
    match model["type"]:
        case "Unigram":
            number = model.get("unk_id")  # without it, unknown text is an error
            if type(number) is not int or not 0 <= number < len(vocab):
                raise ValueError("its unk_id is not in its vocabulary")
        case "BPE":
            _check_merges(model, vocab)
            if unknown is not None and unknown not in vocab:
                raise ValueError("its unknown token is not in its vocabulary")
        case _:
            if unknown not in vocab:
                raise ValueError("its unknown token is not in its vocabulary")
            max_length = model.get("max_input_chars_per_word", 100)
            if type(max_length) is not int or not 0 < max_length <= MAX_WORD_LENGTH:
                raise ValueError(f"its max_input_chars_per_word is not from 1 to {MAX_WORD_LENGTH}")


def _check_merges(model: Mapping[str, Any], vocab: Mapping[str, int]) -> None:
    merges, prefix = model.get("merges"), model.get("continuing_subword_prefix") or ""
    if not isinstance(merges, list) or len(merges) > MAX_TOKENS:
        raise ValueError("its merges are not a list")
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(side, str) for side in pair):
            raise ValueError(f"the merge {merge!r:.40} is not a pair of tokens")
        left, right = pair
        has_prefix = right.startswith(prefix)  # the library removes this prefix without checking for it
        if not has_prefix or left not in vocab or right not in vocab or left + right[len(prefix) :] not in vocab:
            raise ValueError(f"the merge {merge!r:.40} has or gives a token that is not in its vocabulary")


# -- the compiled normalization rules of SentencePiece -----------------------------------------------------------------

MAX_BYTES = 4 * 2**20
VALUE_MASK = 0x7FFF_FFFF


def check_charsmap(encoded: object) -> None:
    """Raise ValueError unless the library can normalize every text with these rules, given in base 64.

    They are a number of bytes, a double array of that length (Aoe 1989, in the layout of Darts-clone) and the texts
    that replace characters, each of which ends in a zero byte.  A node of the double array is 32 bits: a value if bit
    31 is set, otherwise a label (bits 0 to 7), whether it has a value (bit 8) and the offset of its children (bits 10
    to 30, times 256 if bit 9 is set).  A value, the first of the children, is where the replacement begins.
    """
    if not isinstance(encoded, str) or len(encoded) > MAX_BYTES:
        raise ValueError("its charsmap is not a string of base 64, or too long")
    try:
        raw = base64.b64decode(encoded, validate=True)
    except ValueError:
        raise ValueError("its charsmap is not base 64") from None
    size = int.from_bytes(raw[:4], "little")
    if len(raw) < 4 or size == 0 or size % 4 or size > len(raw) - 4:
        raise ValueError("its charsmap states a size that it does not have")
    try:
        raw[4 + size :].decode()
    except UnicodeDecodeError:
        raise ValueError("the texts of its charsmap are not UTF-8") from None
    array, texts = np.frombuffer(raw, "<u4", size // 4, 4).astype(np.int64), np.frombuffer(raw, np.uint8, -1, 4 + size)
    is_node = array >> 31 == 0
    is_node[0] = True  # the search begins there whatever its bits are
    numbers = np.flatnonzero(is_node)
    nodes = array[numbers]
    children = numbers ^ (nodes >> 10 << ((nodes & 1 << 9) >> 6))
    if (children | 0xFF).max(initial=0) >= len(array):
        raise ValueError("its charsmap has a rule that leads out of it")
    starts = array[children[nodes >> 8 & 1 == 1]] & VALUE_MASK
    if len(starts) and (starts.max() >= len(texts) or bool(((texts[starts] & 0xC0) == 0x80).any())):
        raise ValueError("a rule of its charsmap points outside of its texts")
