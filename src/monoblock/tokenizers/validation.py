"""Check the content of a tokenizer.json from an untrusted source before the `tokenizers` library uses it.

The library accepts more than is safe: a regular expression with nested quantifiers may run forever, and a very large id
may take all memory. So only listed types of components and known regular expressions are allowed, and ids and sizes may
not be larger than a vocabulary needs.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monoblock.errors import FileError
from monoblock.tokenizers.pipelines import ALLOWED_REPLACE_PATTERNS, ALLOWED_SPLIT_PATTERNS

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


class _InvalidTokenizer(Exception):
    """An invalid tokenizer.json; `validate_tokenizer_json` puts its path before the message."""


def validate_tokenizer_json(data: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Return the content of a tokenizer.json with the type of its model filled in; raise FileError if it is unsafe."""
    try:
        data["model"] = _with_model_type(data.get("model"))
        check_tokenizer_json(data)
    except _InvalidTokenizer as problem:
        raise FileError(f"{path} cannot be used: {problem}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as problem:  # a value of an unexpected type
        raise FileError(f"{path} cannot be used: {' '.join(str(problem).split())[:120]}") from None
    return data


def _with_model_type(model: Any) -> dict[str, Any]:
    """Return the model with its type, which early files such as GPT-2's lack; an unknown token of "" becomes None."""
    if not isinstance(model, Mapping):
        raise _InvalidTokenizer("it has no model")
    guess = "BPE" if "merges" in model else "Unigram" if isinstance(model.get("vocab"), list) else "WordLevel"
    guess = "WordPiece" if "max_input_chars_per_word" in model else guess
    return {"type": guess, **model} | ({"unk_token": None} if model.get("unk_token") == "" else {})


def check_tokenizer_json(data: Mapping[str, Any]) -> None:
    """Raise unless everything that the library would run or allocate has a known type and a limited size."""
    model = data["model"]
    for section in ALLOWED_TYPES:
        if data.get(section) is not None:
            _check_component(section, data[section], depth=0)
    vocab = _check_vocab(model)
    _check_added_tokens(data.get("added_tokens", []))
    _MODEL_CHECKS[model["type"]](model, vocab)


def _check_component(section: str, component: Any, depth: int) -> int:
    """Raise unless a component and all components inside it are allowed; return their number."""
    kind = component.get("type") if isinstance(component, Mapping) else None
    if not isinstance(kind, str) or kind not in ALLOWED_TYPES[section].split():
        raise _InvalidTokenizer(f"its {section} is of the type {kind!r:.40}, which is not allowed")
    _check_pattern(section, component)
    if kind == "TemplateProcessing":
        _check_template(component)
    if kind == "Precompiled":
        check_charsmap(component.get("precompiled_charsmap"))
    count = 1
    for key in SEQUENCE_KEYS:
        inner = component.get(key, [])
        if depth > 2 or not isinstance(inner, list) or len(inner) > MAX_COMPONENTS:
            raise _InvalidTokenizer(f"its {section} is nested too deep or too long")
        count += sum(_check_component(section, item, depth + 1) for item in inner)
    if count > MAX_COMPONENTS:
        raise _InvalidTokenizer(f"its {section} has more than {MAX_COMPONENTS} components")
    return count


def _check_pattern(section: str, component: Mapping[str, Any]) -> None:
    """Raise unless the pattern of a component is a string or a known regular expression.

    Also raise if a Replace, Prepend or Strip could make a text much longer, or make the library panic.
    """
    pattern = component.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    string = pattern.get("String") if isinstance(pattern, Mapping) else pattern
    allowed = ALLOWED_SPLIT_PATTERNS if component["type"] == "Split" else ALLOWED_REPLACE_PATTERNS
    if regex is not None and regex not in allowed:
        raise _InvalidTokenizer(f"its {section} has an unknown regular expression, {regex!r:.60}")
    if component["type"] == "Replace":
        content = component.get("content")
        max_length = 1 if regex is not None else len(string) if isinstance(string, str) else 0
        if not isinstance(content, str) or len(content) > max_length:
            raise _InvalidTokenizer(f"its {section} replaces {string!r:.20} by a longer text, which is not allowed")
    # The library panics if there is nothing to strip from the end.
    if section == "decoder" and component["type"] == "Strip" and not _strips_only_front(component):
        raise _InvalidTokenizer(f"its decoder may strip only from the start, and at most {MAX_AFFIX_LENGTH} characters")
    if component["type"] == "Prepend":
        prefix = component.get("prepend")
        if not isinstance(prefix, str) or not 0 < len(prefix) <= MAX_AFFIX_LENGTH:  # the library panics for ""
            raise _InvalidTokenizer(f"its {section} prepends not 1 to {MAX_AFFIX_LENGTH} characters")


def _strips_only_front(component: Mapping[str, Any]) -> bool:
    return component.get("start") in range(MAX_AFFIX_LENGTH + 1) and component.get("stop") == 0


def _check_template(component: Mapping[str, Any]) -> None:
    """Raise unless a template gives the ids of its special tokens, and its form for one text has no second text.

    Otherwise the library would panic, which prints a message of its own.
    """
    known = component.get("special_tokens")
    rows = [row for key in ("single", "pair") for row in component.get(key) or []]
    if (
        not isinstance(known, Mapping)
        or len(rows) > MAX_COMPONENTS
        or not all(isinstance(row, Mapping) for row in rows)
    ):
        raise _InvalidTokenizer("its post_processor is not a valid template")
    texts = [row["Sequence"] for row in component.get("single") or [] if "Sequence" in row]
    if any(text.get("id") != "A" if isinstance(text, Mapping) else True for text in texts):
        raise _InvalidTokenizer("its post_processor adds a second text to a single one")
    tokens = [row["SpecialToken"] for row in rows if "SpecialToken" in row]
    names = [token.get("id") if isinstance(token, Mapping) else None for token in tokens]
    if not all(isinstance(name, str) and isinstance(known.get(name), Mapping) for name in names):
        raise _InvalidTokenizer("its post_processor adds a special token that is not in its special_tokens")
    if len(known) > MAX_COMPONENTS:
        raise _InvalidTokenizer(f"its post_processor has more than {MAX_COMPONENTS} special tokens")
    for name, token in known.items():
        ids = token.get("ids") if isinstance(token, Mapping) else None
        if not isinstance(ids, list) or len(ids) > MAX_TEMPLATE_IDS:
            raise _InvalidTokenizer(f"the special token {name!r:.40} of its template has no list of ids, or a long one")
        for number in ids:
            _check_id(name, number)


def _check_vocab(model: Mapping[str, Any]) -> Mapping[str, int]:
    """Return a dict from tokens to ids; raise unless the ids are valid and distinct."""
    vocab = model.get("vocab")
    if model["type"] == "Unigram":
        if not isinstance(vocab, list) or not all(isinstance(row, list) and len(row) == 2 for row in vocab):
            raise _InvalidTokenizer("its vocabulary is not a list of pieces and scores")
        if not all(isinstance(piece, str) and isinstance(score, (int, float)) for piece, score in vocab):
            raise _InvalidTokenizer("its vocabulary is not a list of pieces and scores")
        vocab = {piece: number for number, (piece, _) in enumerate(vocab)}
        if len(vocab) != len(model["vocab"]):
            raise _InvalidTokenizer("its vocabulary has a piece twice")
    if not isinstance(vocab, Mapping) or not vocab:
        raise _InvalidTokenizer("the tokenizer has no vocabulary")
    if len(vocab) > MAX_TOKENS:
        raise _InvalidTokenizer(f"its vocabulary has more than {MAX_TOKENS:,} tokens")
    for token, number in vocab.items():
        _check_id(token, number)
    if len(set(vocab.values())) != len(vocab):
        raise _InvalidTokenizer("two tokens of its vocabulary have the same id")
    return vocab


def _check_id(token: Any, number: Any) -> None:
    if type(number) is not int or not 0 <= number < MAX_TOKENS:
        raise _InvalidTokenizer(
            f"the token {token!r:.40} has the id {number!r:.20}; an id is a whole number below {MAX_TOKENS:,}"
        )


def _check_added_tokens(added: Any) -> None:
    if not isinstance(added, list) or len(added) > MAX_ADDED_TOKENS:
        raise _InvalidTokenizer(f"its added_tokens are not a list of at most {MAX_ADDED_TOKENS:,}")
    characters = 0
    for row in added:
        content = row.get("content") if isinstance(row, Mapping) else None
        if not isinstance(content, str) or not 0 < len(content) <= MAX_TOKEN_LENGTH:
            raise _InvalidTokenizer(f"one of its added_tokens is not a token of 1 to {MAX_TOKEN_LENGTH} characters")
        _check_id(content, row.get("id"))
        characters += len(content)
    if characters > MAX_ADDED_CHARACTERS:
        raise _InvalidTokenizer(f"its added_tokens have more than {MAX_ADDED_CHARACTERS:,} characters")


# -- the four models ---------------------------------------------------------------------------------------------------


def _check_bpe(model: Mapping[str, Any], vocab: Mapping[str, int]) -> None:
    merges = model.get("merges")
    if not isinstance(merges, list) or len(merges) > MAX_TOKENS:
        raise _InvalidTokenizer("its merges are not a list")
    prefix = model.get("continuing_subword_prefix") or ""
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(side, str) for side in pair):
            raise _InvalidTokenizer(f"the merge {merge!r:.40} is not a pair of tokens")
        left, right = pair
        has_prefix = right.startswith(prefix)  # the library removes this prefix without checking for it
        if not has_prefix or left not in vocab or right not in vocab or left + right[len(prefix) :] not in vocab:
            raise _InvalidTokenizer(f"the merge {merge!r:.40} has or gives a token that is not in its vocabulary")
    if model.get("unk_token") is not None and model["unk_token"] not in vocab:
        raise _InvalidTokenizer("its unknown token is not in its vocabulary")


def _check_word_model(model: Mapping[str, Any], vocab: Mapping[str, int]) -> None:
    if model.get("unk_token") not in vocab:
        raise _InvalidTokenizer("its unknown token is not in its vocabulary")
    max_length = model.get("max_input_chars_per_word", 100)
    if type(max_length) is not int or not 0 < max_length <= MAX_WORD_LENGTH:
        raise _InvalidTokenizer(f"its max_input_chars_per_word is not from 1 to {MAX_WORD_LENGTH}")


def _check_unigram(model: Mapping[str, Any], vocab: Mapping[str, int]) -> None:
    unk_id = model.get("unk_id")
    if type(unk_id) is not int or not 0 <= unk_id < len(vocab):  # without it, unknown text is an error
        raise _InvalidTokenizer("its unk_id is not in its vocabulary")


_MODEL_CHECKS = {
    "BPE": _check_bpe,
    "WordPiece": _check_word_model,
    "WordLevel": _check_word_model,
    "Unigram": _check_unigram,
}


# -- the compiled normalization rules of SentencePiece -----------------------------------------------------------------
# They are a number of bytes, a double array of that length (Aoe 1989, in the layout of Darts-clone) and the texts that
# replace characters, each of which ends in a zero byte.  A node of the double array is 32 bits: a label (bits 0 to 7
# and 31), whether it has a value (bit 8) and the offset of its children (bits 10 to 30, times 256 if bit 9 is set).
# The value of a key, in a node of its own, is where its replacement begins.

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
