"""Encode large amounts of text: words that were encoded before are looked up in a cache.

Most words of a large text are among some hundred thousand, and looking one up is several times faster than segmenting
it. A text may be divided into words only if the tokenizer never joins characters across the cuts: `cuts_before_spaces`
says so for the tokenizers whose pre-tokenizer is known to separate words there. Other tokenizers encode whole texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from monoblock.tokenizers.components import byte_level
from monoblock.tokenizers.pipelines import WORD_PATTERN
from monoblock.tokenizers.tokenizer import Tokenizer

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# In these patterns a match that begins with a character other than white space ends before white space, and no
# lookahead reaches beyond the white space that follows.
WORD_PATTERNS = (WORD_PATTERN, GPT2_PATTERN)
WORD = re.compile(r"\s*\S+|\s+")
PYTHON_ONLY_SPACES = re.compile("[\x1c-\x1f]")  # white space for Python's \s, but not for Unicode
MAX_CACHED_LENGTH = 64  # characters of a word
MAX_CACHED_WORDS = 2**18
MAX_BATCH = 2**16  # characters encoded at a time, because the library needs a hundred bytes and more for each token


class BulkEncoder:
    """Encode texts to the bytes of arrays of ids; the result is that of `Tokenizer.encode_batch`."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> None:
        self.tokenizer, self.dtype = tokenizer, dtype
        self.uses_cache = cuts_before_spaces(tokenizer)
        self._cache: dict[str, bytes] = {}

    def __call__(self, texts: Sequence[str]) -> list[bytes]:
        if not self.uses_cache:
            return self._encode_batches(texts)
        return [self._encode_words(text) for text in texts]

    def _encode_words(self, text: str) -> bytes:
        if PYTHON_ONLY_SPACES.search(text):
            return self._encode_batches([text])[0]
        words: list[str] = WORD.findall(text)
        rows = list(map(self._cache.get, words))
        if None in rows:
            missing = list(dict.fromkeys(word for word, row in zip(words, rows, strict=True) if row is None))
            found = dict(zip(missing, self._encode_batches(missing), strict=True))
            rows = [found[word] if row is None else row for word, row in zip(words, rows, strict=True)]
            if len(self._cache) > MAX_CACHED_WORDS:
                self._cache.clear()
            self._cache.update((word, ids) for word, ids in found.items() if len(word) <= MAX_CACHED_LENGTH)
        return b"".join(rows)  # type: ignore[arg-type]

    def _encode_batches(self, texts: Sequence[str]) -> list[bytes]:
        rows: list[bytes] = []
        batch: list[str] = []
        size = 0
        for text in texts:
            batch.append(text)
            size += len(text)
            if size >= MAX_BATCH:
                rows += self._encode_batch(batch)
                batch, size = [], 0
        return rows + self._encode_batch(batch)

    def _encode_batch(self, texts: Sequence[str]) -> list[bytes]:
        return [np.array(ids, self.dtype).tobytes() for ids in self.tokenizer.encode_batch(texts)]


def cuts_before_spaces(tokenizer: Tokenizer) -> bool:
    """Return whether the ids of a text are those of its parts, if it is cut between a character and white space."""
    data, _ = tokenizer.content()
    added: Any = data["added_tokens"]
    if data["normalizer"] is not None or not all(token["special"] for token in added):
        return False
    match data["pre_tokenizer"]:
        case {"type": "WhitespaceSplit"}:
            return True
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return True
        case {"type": "Sequence", "pretokenizers": [words, symbols]}:
            return _is_word_split(words) and _without_offsets(symbols) == _without_offsets(byte_level())
    return False


def _is_word_split(component: Any) -> bool:
    match component:
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            return pattern in WORD_PATTERNS
    return False


def _without_offsets(component: Any) -> dict[str, Any]:
    return {key: value for key, value in component.items() if key != "trim_offsets"}
