"""Train a tokenizer on texts; the same texts always give the same tokenizer.json, byte for byte.

The `tokenizers` library counts words in hash maps, whose order changes from run to run. This does not affect byte-level
BPE, but BPE with a marker would number its symbols in that order, and Unigram would add floating-point numbers in that
order. So the library's trainer gets all symbols in sorted order here, and Unigram is fitted in `unigram.py`.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from monoblock.errors import ConfigError, InputError
from monoblock.tokenizers import unigram
from monoblock.tokenizers.components import (
    CONTINUATION_PREFIX,
    END_OF_WORD,
    WORD_MARKER,
    JsonObject,
    bpe_model,
    build_sections,
    byte_symbols,
    join_sections,
    template_processing,
)
from monoblock.tokenizers.special_tokens import (
    ROLE_SPELLINGS,
    UNKNOWN_CHARACTER,
    resolve_special_tokens,
)
from monoblock.tokenizers.tokenizer_json import build_backend

UNK_TOKEN = ROLE_SPELLINGS["unk"][0]
# Anything but Unicode's White_Space, as in the library's WhitespaceSplit; str.split() also cuts at U+001C … U+001F.
_WORD_PATTERN = re.compile(r"[^\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")
MAX_WORD_LENGTH = 100  # characters; to WordPiece a longer word is unknown, as in BERT


def train_tokenizer(
    kind: str,
    texts: Iterable[str],
    vocab_size: int,
    marker: str | None,
    specials: str | Sequence[str],
    lowercase: bool,
    min_frequency: int,
) -> JsonObject:
    """Train a tokenizer with at most `vocab_size` tokens, including special tokens; return its tokenizer.json."""
    for name, value in (("vocab_size", vocab_size), ("min_frequency", min_frequency)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}={value!r} is too small or not an integer; write a whole number from 1")
    sections = build_sections(kind, marker, lowercase)
    special_tokens = resolve_special_tokens(specials)
    byte_level = kind == "byte" or (kind == "bpe" and marker is None)
    if not byte_level:
        special_tokens = [token for token in special_tokens if token != UNK_TOKEN]
    max_pieces = vocab_size - len(special_tokens)
    min_pieces = 256 if byte_level else 2
    if max_pieces < min_pieces:
        least = min_pieces + len(special_tokens)
        raise ConfigError(f"vocab_size={vocab_size} is too small; {kind} with these specials needs {least} or more")
    if kind == "byte":
        model = bpe_model({symbol: value for value, symbol in enumerate(byte_symbols())}, [])
    else:
        replacement = WORD_MARKER if kind == "unigram" or marker == WORD_MARKER else " "
        reserved = [*special_tokens, UNK_TOKEN, END_OF_WORD, UNKNOWN_CHARACTER]
        prepared = _prepare_texts(texts, sections["normalizer"], reserved, replacement)
        model = _train_model(kind, marker, prepared, sections, max_pieces, min_frequency)
    return _add_special_tokens(sections | {"model": model}, special_tokens)


def _add_special_tokens(sections: JsonObject, special_tokens: list[str]) -> JsonObject:
    """Return the content of a tokenizer.json in which the special tokens have the ids after those of the model."""
    vocab = sections["model"]["vocab"]
    pieces = [piece for piece, _ in vocab] if sections["model"]["type"] == "Unigram" else list(vocab)
    clash = set(pieces) & set(special_tokens)
    if clash:
        raise ConfigError(
            f"the special token {min(clash)!r} is also a token that was learned from the texts; choose another spelling"
        )
    ids = {token: len(pieces) + index for index, token in enumerate(special_tokens)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = ({UNK_TOKEN: 0} if pieces[0] == UNK_TOKEN else {}) | ids
    rows = [{"id": number, "content": token, **flags} for token, number in added.items()]
    # <cls> and <sep> around each text if there is a <cls>, otherwise <s> and </s>
    first, last = ("cls", "sep") if ROLE_SPELLINGS["cls"][0] in ids else ("bos", "eos")
    around = {role: ROLE_SPELLINGS[role][0] for role in (first, last) if ROLE_SPELLINGS[role][0] in ids}
    pair = (first, "A", last, "B:1", f"{last}:1")
    return join_sections(sections, rows, template_processing(pair[:3], pair, around, ids))


# -- text --------------------------------------------------------------------------------------------------------------


def _prepare_texts(
    texts: Iterable[str], normalizer: JsonObject | None, reserved: list[str], replacement: str
) -> list[str]:
    """Normalize texts and replace every reserved token in them by `replacement`, so that none of them is learned."""
    normalize = build_backend({"normalizer": normalizer}).normalizer.normalize_str if normalizer else None
    pattern = re.compile("|".join(re.escape(word) for word in sorted(set(reserved), key=len, reverse=True)))
    prepared = [pattern.sub(replacement, normalize(text) if normalize else text) for text in check_texts(texts)]
    if not any(prepared):
        raise InputError("there is no text to train on; give at least one character")
    return prepared


def _select_alphabet(texts: list[str], max_size: int, replacement: str) -> tuple[list[str], list[str]]:
    """Return the `max_size` most frequent characters, sorted, and the texts with all other characters replaced."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    candidates = {c: count for c, count in counts.items() if replacement == WORD_MARKER or not c.isspace()}
    alphabet = _most_frequent(candidates, max_size)
    table = {ord(character): replacement for character in counts.keys() - set(alphabet)}
    return sorted(alphabet), [text.translate(table) for text in texts] if table else texts


def _most_frequent(counts: Mapping[str, int], max_count: int, min_frequency: int = 1) -> list[str]:
    """Return the `max_count` most frequent keys, most frequent first; equally frequent keys are in code point order."""
    frequent = [word for word, count in counts.items() if count >= min_frequency]
    return sorted(frequent, key=lambda word: (-counts[word], word))[:max_count]


# -- models ------------------------------------------------------------------------------------------------------------


def _train_model(
    kind: str, marker: str | None, texts: list[str], sections: JsonObject, max_pieces: int, min_frequency: int
) -> JsonObject:
    if kind in ("char", "word"):
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text if kind == "char" else _WORD_PATTERN.findall(text))
        pieces = _most_frequent(counts, max_pieces - 1, min_frequency)
        pieces = [UNK_TOKEN, *(sorted(pieces) if kind == "char" else pieces)]
        vocab = {piece: number for number, piece in enumerate(pieces)}
        if kind == "char":
            return bpe_model(vocab, [], unk_token=UNK_TOKEN)
        return {"type": "WordLevel", "vocab": vocab, "unk_token": UNK_TOKEN}
    if kind == "unigram":
        return _train_unigram(texts, sections, max_pieces, min_frequency)
    train = partial(_train_merges, sections["pre_tokenizer"], max_pieces, min_frequency)
    if kind == "bpe" and marker is None:
        return bpe_model(*train(texts, sorted(byte_symbols())))
    if kind == "bpe" and marker == WORD_MARKER:
        alphabet, texts = _select_alphabet(texts, max_pieces - 1, WORD_MARKER)
        return bpe_model(*train(texts, [UNK_TOKEN, *alphabet]), unk_token=UNK_TOKEN)
    # Every letter is a symbol in both forms, because one that never began or ended a word so far may do so later.
    alphabet, texts = _select_alphabet(texts, (max_pieces - 1) // 2, " ")
    if kind == "bpe":
        symbols = [UNK_TOKEN, *alphabet, *(character + END_OF_WORD for character in alphabet)]
        merges = train(texts, symbols, end_of_word_suffix=END_OF_WORD)
        return bpe_model(*merges, unk_token=UNK_TOKEN, end_of_word_suffix=END_OF_WORD)
    symbols = [UNK_TOKEN, *alphabet, *(CONTINUATION_PREFIX + character for character in alphabet)]
    vocab, _ = train(texts, symbols, continuing_subword_prefix=CONTINUATION_PREFIX)
    return {
        "type": "WordPiece",
        "unk_token": UNK_TOKEN,
        "continuing_subword_prefix": CONTINUATION_PREFIX,
        "max_input_chars_per_word": MAX_WORD_LENGTH,
        "vocab": vocab,
    }


def _train_merges(
    pre_tokenizer: JsonObject, size: int, min_frequency: int, texts: list[str], symbols: list[str], **affixes: str
) -> tuple[dict[str, int], list[Any]]:
    """Train BPE with the `tokenizers` library; return its vocabulary and merges.

    `symbols` lists all initial symbols in the order of their ids.
    """
    from tokenizers.trainers import BpeTrainer

    backend = build_backend({"pre_tokenizer": pre_tokenizer})
    options: dict[str, Any] = {"special_tokens": symbols, "show_progress": False, **affixes}
    backend.train_from_iterator(texts, BpeTrainer(vocab_size=size, min_frequency=min_frequency, **options))
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], model["merges"]


def _train_unigram(texts: list[str], sections: JsonObject, max_pieces: int, min_frequency: int) -> JsonObject:
    alphabet, texts = _select_alphabet(texts, max_pieces - 1, WORD_MARKER)
    pre_tokenize = build_backend({"pre_tokenizer": sections["pre_tokenizer"]}).pre_tokenizer.pre_tokenize_str
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word for word, _ in pre_tokenize(text))
    pieces = unigram.fit(counts, alphabet, max_pieces - 1, min_frequency)
    # A score far below all others, so that "<unk>" written out in a text is segmented into its letters.
    unk_score = min(score for _, score in pieces) - 100
    vocab = [[UNK_TOKEN, unk_score], *map(list, pieces)]
    return {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False}


# -- texts ------------------------------------------------------------------------------------------------------------


def check_text(text: Any, name: str = "the text") -> None:
    """Raise InputError unless `text` is a str without lone surrogates, which the `tokenizers` library rejects.

    The error calls the text `name`.
    """
    if not isinstance(text, str):
        raise InputError(f"{name} is a {type(text).__name__}; give a str")
    if text.isascii():  # a flag that every str stores, so that most texts are not scanned
        return
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        code = ord(text[problem.start])
        raise InputError(
            f"{name} holds half a surrogate pair (U+{code:04X} at {problem.start}), which is no character; remove it"
        ) from None


def check_texts(texts: Iterable[str]) -> list[str]:
    """Check each text with `check_text` and return the texts as a list."""
    if isinstance(texts, str):
        raise InputError("texts is one string, which would be read letter by letter; write [text]")
    texts = list(texts)
    for index, text in enumerate(texts):
        check_text(text, "the text" if len(texts) == 1 else f"text {index}")
    return texts
