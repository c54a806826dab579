"""Encode texts with the special tokens and segments that a model expects, and split texts that are too long for it.

The result is `<cls> text <sep>`, `<cls> text <sep> text <sep>`, or the template of a Hugging Face tokenizer. Training,
prediction and evaluation all encode here, so that a model never reads a format it was not trained on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from monoblock.errors import FileError, InputError

if TYPE_CHECKING:
    from monoblock.tokenizers.tokenizer import Tokenizer


BYTE_ORDER_MARK = "\ufeff"  # some editors write it at the start of a file
SENTENCE_END = re.compile(r"([.!?…।॥。！？][\"'”’»)]*)\s+")  # includes closing quotes and parentheses


class EncodedInput(NamedTuple):
    ids: list[int]
    segments: list[int]
    text_start: int = 0  # index of the first token of the first text
    num_truncated: int = 0  # number of tokens that were cut off


class InputTemplate:
    """Put special tokens around the ids of a text or of a pair of texts.

    max_length: the longest result in tokens, special tokens included; None means no limit.
    no_special_tokens: add no special tokens; the texts of a pair still have the segments 0 and 1.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int | None = None, *, no_special_tokens: bool = False) -> None:
        text: list[tuple[int | None, int]] = [(None, 0)]  # (token, segment); None stands for a text
        self.max_length = max_length
        self.single = text if no_special_tokens else tokenizer.special_tokens_template(1)
        self.pair = [*text, (None, 1)] if no_special_tokens else tokenizer.special_tokens_template(2)

    @property
    def text_start(self) -> int:
        """The number of special tokens before a single text."""
        return self.single.index((None, 0))

    def __call__(self, text: Sequence[int], pair: Sequence[int] | None = None) -> EncodedInput:
        """Encode a text or a pair; if it is too long, tokens are removed from the end of the longer text."""
        template = self.single if pair is None else self.pair
        texts = [list(text), *([] if pair is None else [list(pair)])]
        num_special = sum(token is not None for token, _ in template)
        room = None if self.max_length is None else self.max_length - num_special
        lengths = _truncate_lengths([len(ids) for ids in texts], room)
        num_truncated = sum(map(len, texts)) - sum(lengths)
        remaining = iter(ids[:length] for ids, length in zip(texts, lengths, strict=True))
        result: list[int] = []
        segments: list[int] = []
        for token, segment in template:
            ids = next(remaining) if token is None else [token]
            result += ids
            segments += [segment] * len(ids)
        start = next(index for index, (token, _) in enumerate(template) if token is None)
        return EncodedInput(result, segments, start, num_truncated)


def _truncate_lengths(lengths: list[int], max_total: int | None) -> list[int]:
    """Return the lengths to which one or two texts are truncated, so that their sum is at most `max_total`.

    Of two texts, the longer one is cut first.
    """
    if max_total is None or sum(lengths) <= max_total:
        return lengths
    max_total = max(0, max_total)  # the special tokens alone may be too many
    if len(lengths) == 1:
        return [max_total]
    first, second = lengths
    half = max_total // 2
    if second <= half:
        return [max_total - second, second]
    if first <= max_total - half:
        return [first, max_total - first]
    return [max_total - half, half]


class EncodedWords(NamedTuple):
    ids: list[int]
    word_positions: list[int]  # index of the first token of each word; words that were cut off have none


class WordEncoder:
    """Encode a list of words, each separately with a space before it, and record where each word begins."""

    def __init__(self, tokenizer: Tokenizer, template: InputTemplate) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.cache: dict[str, list[int]] = {}
        # The ids of a word that the tokenizer encodes as an empty list.
        self.fallback_ids = [
            next((n for n in (tokenizer.unk_id, tokenizer.mask_id, tokenizer.pad_id) if n is not None), 0)
        ]

    def encode_word(self, word: str) -> list[int]:
        if word not in self.cache:
            self.cache[word] = self.tokenizer.encode(f" {word}") or self.fallback_ids
        return self.cache[word]

    def encoded_length(self, words: Sequence[str]) -> int:
        """Return the number of ids that encode these words, special tokens included."""
        return len(self.template.single) - 1 + sum(len(self.encode_word(word)) for word in words)

    def __call__(self, words: Sequence[str]) -> EncodedWords:
        return self.encode_pieces([self.encode_word(word) for word in words])

    def encode_rows(self, rows: Sequence[Sequence[str]]) -> EncodedWords:
        """Encode several rows of words as one input, with a separator token between rows."""
        return self.encode_pieces(self.join_rows([[self.encode_word(word) for word in row] for row in rows]))

    def join_rows(self, rows: Sequence[Sequence[Sequence[int]]]) -> list[Sequence[int]]:
        """Concatenate rows of encoded words; the last word of each row but the last gets a separator token appended."""
        separator = [] if self.tokenizer.sep_id is None else [self.tokenizer.sep_id]
        joined: list[Sequence[int]] = []
        for row in rows:
            if joined:
                joined[-1] = [*joined[-1], *separator]
            joined += row
        return joined

    def encode_pieces(self, pieces: Sequence[Sequence[int]]) -> EncodedWords:
        """Encode words given as token ids, one list per word; leave out words beyond the maximum length."""
        num_special, max_length = len(self.template.single) - 1, self.template.max_length
        positions: list[int] = []
        ids: list[int] = []
        for word in pieces:
            if positions and max_length is not None and num_special + len(ids) + len(word) > max_length:
                break
            positions.append(self.template.text_start + len(ids))
            ids += word
        return EncodedWords(self.template(ids).ids, positions)


# -- lines and long texts ---------------------------------------------------------------------------------------------


def decode_lines(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 stream, without line ends; `name` is what error messages call the stream."""
    for number, raw in enumerate(stream, 1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as problem:
            location = f"{name}, line {number}, byte {problem.start + 1}"
            raise FileError(f"{location}: not UTF-8 (0x{raw[problem.start]:02x}); convert the text to UTF-8") from None
        line = line.removesuffix("\n").removesuffix("\r")
        yield line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line


def split_text(text: str, fits: Callable[[str], bool], *, pack: bool = True) -> list[str]:
    """Split a text into parts for which `fits` returns True; a text that fits is returned as a single part.

    The text is split between sentences, and a sentence that does not fit is split at spaces.

    pack: join neighbouring sentences into one part as long as it fits; False makes each sentence a separate part.
    """
    if fits(text):
        return [text]
    parts: list[str] = []
    for sentence in split_sentences(text):
        if fits(sentence):
            parts.append(sentence)
        else:
            parts += _pack(sentence.split(), fits)
    return _pack(parts, fits) if pack else parts


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences; only the white space between them is removed."""
    *pairs, last = SENTENCE_END.split(text)
    sentences = [f"{sentence}{end}" for sentence, end in zip(pairs[::2], pairs[1::2], strict=True)]
    return [sentence for sentence in (*sentences, last) if sentence.strip()]


def _pack(parts: Iterable[str], fits: Callable[[str], bool]) -> list[str]:
    """Join neighbouring parts, with a space between them, as long as they fit."""
    packed: list[str] = []
    for part in parts:
        if not fits(part):
            raise InputError(
                f"{part[:40]!r} is longer than the context of the model and has no space to split it at; shorten it"
            )
        if packed and fits(f"{packed[-1]} {part}"):
            packed[-1] = f"{packed[-1]} {part}"
        else:
            packed.append(part)
    return packed
