"""Encode large amounts of text: words that were encoded before are looked up in a cache.

Most words of a large text are among some hundred thousand, and looking one up is several times faster than segmenting
it. A text may be divided into words only where the tokenizer never joins characters: `find_word_rule` knows these
places for the usual pre-tokenizers. Other tokenizers encode whole texts.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from monoblock.tokenizers.components import (
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    O200K_PATTERN,
    QWEN2_PATTERN,
    TEKKEN_PATTERN,
    WORD_PATTERN,
    byte_level,
)
from monoblock.tokenizers.tokenizer import Tokenizer

# Where a text may be cut: between any character and white space, or not between punctuation and a line break.
WordRule = Literal["before spaces", "not before line breaks"]
# In these patterns a match that begins with a character other than white space ends before white space, and the
# lookahead (?!\S) does not reach beyond the white space that follows.
RULE_BY_PATTERN: dict[str, WordRule] = {
    WORD_PATTERN: "before spaces",
    GPT2_PATTERN: "before spaces",
    # Here line breaks belong to the punctuation before them.
    **dict.fromkeys((LLAMA3_PATTERN, QWEN2_PATTERN, O200K_PATTERN, TEKKEN_PATTERN), "not before line breaks"),
}
WORD = re.compile(r"\s*\S+|\s+")
WORD_AND_LINE_BREAKS = re.compile(r"\s*\S+(?:(?<![^\W_])[\r\n]\s*\S*)*|\s+")
SEPARATOR = "\x1f"
PYTHON_ONLY_SPACES = "\x1c\x1d\x1e\x1f"  # white space for Python's \s, but not for Unicode
ASCII_SPACES = "\t\r\v\f"  # without the space and \n
OTHER_SPACES = "\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
LONG_SPACES = ("  \n", " \n ", " \n\n", "\n  ", "\n \n", "\n\n ", "\n\n\n", "   ")
MAX_CACHED_LENGTH = 64  # characters of a word
MAX_CACHED_WORDS = 2**19
MAX_GROUP = 2**18  # characters of texts whose new words are encoded together
MAX_BATCH = 2**16  # characters encoded at a time, because the library needs a hundred bytes and more for each token


class BulkEncoder:
    """Encode texts to the bytes of arrays of ids, in the byte order of this machine.

    The ids are those of `Tokenizer.encode_batch`.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> None:
        self.tokenizer, self.dtype = tokenizer, dtype
        self.rule = find_word_rule(tokenizer)
        self._typecode = dtype.char
        self._cache: dict[str, bytes] = {}

    def __call__(self, texts: Sequence[str]) -> list[bytes]:
        if self.rule is None:
            return self._encode(texts)
        return [row for group in _group_texts(texts, MAX_GROUP) for row in self._encode_words(group)]

    def _encode_words(self, texts: Sequence[str]) -> list[bytes]:
        words = [split_words(text, self.rule) for text in texts]
        rows: list[list[bytes | None]] = [list(map(self._cache.get, row)) for row in words]
        missing = [_positions_of_none(row) for row in rows]
        new_words = sorted({words[text][index] for text, indices in enumerate(missing) for index in indices})
        if new_words:
            found = dict(zip(new_words, self._encode(new_words), strict=True))
            if len(self._cache) > MAX_CACHED_WORDS:
                self._cache.clear()
            self._cache.update((word, ids) for word, ids in found.items() if len(word) <= MAX_CACHED_LENGTH)
            for text, indices in enumerate(missing):
                for index in indices:
                    rows[text][index] = found[words[text][index]]
        return [b"".join(row) for row in rows]  # type: ignore[arg-type]

    def _encode(self, texts: Sequence[str]) -> list[bytes]:
        batches = map(self.tokenizer.encode_batch, _group_texts(texts, MAX_BATCH))
        # For a few ids, an `array` is several times faster than a numpy array.
        return [array(self._typecode, ids).tobytes() for batch in batches for ids in batch]


def _group_texts(texts: Sequence[str], size: int) -> Iterator[list[str]]:
    """Yield the texts in groups, each ended by the text with which it has at least `size` characters."""
    group: list[str] = []
    characters = 0
    for text in texts:
        group.append(text)
        characters += len(text)
        if characters >= size:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _positions_of_none(rows: list[bytes | None]) -> list[int]:
    """Return the indices of all None; `list.index` finds the few among many rows faster than a loop."""
    positions: list[int] = []
    try:
        while True:
            positions.append(rows.index(None, positions[-1] + 1 if positions else 0))
    except ValueError:
        return positions


def split_words(text: str, rule: WordRule | None) -> list[str]:
    """Split a text into words with the white space before them; their ids, joined, are those of the text."""
    if rule is None or _contains_any(text, PYTHON_ONLY_SPACES):
        return [text]
    if rule != "before spaces":
        return WORD_AND_LINE_BREAKS.findall(text)
    others = ASCII_SPACES if text.isascii() else ASCII_SPACES + OTHER_SPACES
    # If all white space is " " and "\n", at most two in a row and at most one at the end, this is several times faster
    # than a regular expression: of two before a word, the patterns match the first alone, so that a cut may be between.
    if not _contains_any(text, (*others, *LONG_SPACES)) and not (text[-1:].isspace() and text[-2:-1].isspace()):
        return text.replace(" ", f"{SEPARATOR} ").replace("\n", f"{SEPARATOR}\n").split(SEPARATOR)
    return WORD.findall(text)


def _contains_any(text: str, parts: Sequence[str]) -> bool:
    return any(part in text for part in parts)


def find_word_rule(tokenizer: Tokenizer) -> WordRule | None:
    """Return where a text may be cut so that its ids are those of its parts; None if that is unknown."""
    data, _ = tokenizer.content()
    added: Any = data["added_tokens"]
    # NFC never joins a character and the white space before or after it.
    if data["normalizer"] not in (None, {"type": "NFC"}) or not all(token["special"] for token in added):
        return None
    match data["pre_tokenizer"]:
        case {"type": "WhitespaceSplit"} | {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return "before spaces"
        case {"type": "Sequence", "pretokenizers": [{"type": "Split"} as words, symbols]}:
            if symbols == byte_level() | {"trim_offsets": symbols.get("trim_offsets")}:
                isolated = words["behavior"] == "Isolated" and not words["invert"]
                return RULE_BY_PATTERN.get(words["pattern"].get("Regex")) if isolated else None
    return None
