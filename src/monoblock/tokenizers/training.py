"""A tokenizer.json from texts. Training twice gives the same bytes.

The library counts words into hash maps whose order changes from run to run. Byte-level BPE does not show it; symbols
with a marker get their ids in that order, and Unigram adds floats in it. So every symbol is named to the trainer in
sorted order here, and Unigram is fitted in `unigram.py`.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from monoblock.errors import ConfigError, InputError
from monoblock.tokenizers import unigram
from monoblock.tokenizers.inputs import text_list
from monoblock.tokenizers.pipelines import END, INSIDE, Part, pipeline
from monoblock.tokenizers.specials import ROLES, UNKNOWN, resolve, template

UNK = ROLES["unk"][0]
# White_Space of Unicode, where the library's WhitespaceSplit cuts; str.split() also cuts at the separators 1C to 1F.
_WORD = re.compile(r"[^\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+")
LONGEST_WORD = 100  # characters; WordPiece takes a longer one as unknown (BERT)


def train(
    kind: str,
    texts: Iterable[str],
    vocab_size: int,
    marker: str | None,
    specials: str | Sequence[str],
    lowercase: bool,
    min_frequency: int,
) -> dict[str, Any]:
    """The content of a tokenizer.json with at most `vocab_size` tokens, special tokens included."""
    for name, value in (("vocab_size", vocab_size), ("min_frequency", min_frequency)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}={value!r} cannot be; write a whole number from 1")
    parts = pipeline(kind, marker, lowercase)
    spellings = resolve(specials)
    byte_level = kind == "byte" or (kind == "bpe" and marker is None)
    if not byte_level:
        spellings = [token for token in spellings if token != UNK]
    room = vocab_size - len(spellings)
    least = 256 if byte_level else 2
    if room < least:
        raise ConfigError(f"vocab_size={vocab_size} is too small; {kind} needs {least + len(spellings)} or more")
    if kind == "byte":
        model = _bpe({symbol: value for value, symbol in enumerate(byte_symbols())}, [])
    else:
        blank = "▁" if kind == "unigram" or marker == "▁" else " "
        prepared = _prepared(texts, parts["normalizer"], [*spellings, UNK, END, UNKNOWN], blank)
        model = _MODELS[kind](prepared, parts, room, marker, min_frequency)
    return _assembled(parts, model, spellings)


def _assembled(parts: Part, model: Part, spellings: list[str]) -> dict[str, Any]:
    """Pieces first, special tokens after them."""
    pieces = [piece for piece, _ in model["vocab"]] if model["type"] == "Unigram" else list(model["vocab"])
    clash = set(pieces) & set(spellings)
    if clash:
        raise ConfigError(f"the special token {min(clash)!r} is also a piece of this text; spell it otherwise")
    ids = {token: len(pieces) + place for place, token in enumerate(spellings)}
    added = ({UNK: 0} if pieces[0] == UNK else {}) | ids
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token, number in added.items()
        ],
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": template(ids),
        "decoder": parts["decoder"],
        "model": model,
    }


# -- text --------------------------------------------------------------------------------------------------------------


def _prepared(texts: Iterable[str], normalizer: Part | None, reserved: list[str], blank: str) -> list[str]:
    """Normalized texts, in which nothing spells a special token: what no text holds, no piece can become."""
    normalize = library({"normalizer": normalizer}).normalizer.normalize_str if normalizer else None
    taken = re.compile("|".join(re.escape(word) for word in sorted(set(reserved), key=len, reverse=True)))
    prepared = [taken.sub(blank, normalize(text) if normalize else text) for text in text_list(texts)]
    if not any(prepared):
        raise InputError("there is no text to train on; give at least one character")
    return prepared


def library(parts: Part) -> Any:
    """A tokenizer of the library from parts of a tokenizer.json."""
    from tokenizers import Tokenizer

    empty = {"version": "1.0", "added_tokens": [], "model": _bpe({}, [], unk=None)}
    keys = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return Tokenizer.from_str(json.dumps(dict.fromkeys(keys) | empty | parts))


def _alphabet(texts: list[str], most: int, blank: str) -> tuple[list[str], list[str]]:
    """The characters that words are made of, at most so many, sorted; and the texts with a blank for the others."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    inside = [character for character in counts if blank == "▁" or not character.isspace()]
    kept = _most_frequent({character: counts[character] for character in inside}, most)
    table = {ord(character): blank for character in counts.keys() - set(kept)}
    return sorted(kept), [text.translate(table) for text in texts] if table else texts


def _most_frequent(counts: Mapping[str, int], most: int, least: int = 1) -> list[str]:
    """Frequent before rare, and among equals in the order of their code points."""
    enough = [word for word, count in counts.items() if count >= least]
    return sorted(enough, key=lambda word: (-counts[word], word))[:most]


# -- models ------------------------------------------------------------------------------------------------------------


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each byte value (Radford et al. 2019)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(value) if value in plain else chr(next(others)) for value in range(256)]


def _bpe(vocab: dict[str, int], merges: list[Any], *, unk: str | None = None, end: str | None = None) -> Part:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": end,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    }


def _merge(
    texts: list[str], parts: Part, symbols: list[str], size: int, least: int, **marks: Any
) -> tuple[dict[str, int], list[Any]]:
    """Vocabulary and merges by the library's trainer, every symbol it will meet already numbered."""
    from tokenizers.trainers import BpeTrainer

    learner = library({"pre_tokenizer": parts["pre_tokenizer"]})
    trainer = BpeTrainer(vocab_size=size, min_frequency=least, special_tokens=symbols, show_progress=False, **marks)
    learner.train_from_iterator(texts, trainer)
    model = json.loads(learner.to_str())["model"]
    return model["vocab"], model["merges"]


def _train_bpe(texts: list[str], parts: Part, room: int, marker: str | None, least: int) -> Part:
    if marker is None:
        return _bpe(*_merge(texts, parts, sorted(byte_symbols()), room, least))
    if marker == "▁":
        kept, texts = _alphabet(texts, room - 1, "▁")
        return _bpe(*_merge(texts, parts, [UNK, *kept], room, least), unk=UNK)
    # A letter that never ended a word may end one tomorrow: each has both forms.
    kept, texts = _alphabet(texts, (room - 1) // 2, " ")
    symbols = [UNK, *kept, *(character + END for character in kept)]
    return _bpe(*_merge(texts, parts, symbols, room, least, end_of_word_suffix=END), unk=UNK, end=END)


def _train_wordpiece(texts: list[str], parts: Part, room: int, marker: str | None, least: int) -> Part:
    kept, texts = _alphabet(texts, (room - 1) // 2, " ")
    symbols = [UNK, *kept, *(INSIDE + character for character in kept)]
    vocab, _ = _merge(texts, parts, symbols, room, least, continuing_subword_prefix=INSIDE)
    return {
        "type": "WordPiece",
        "unk_token": UNK,
        "continuing_subword_prefix": INSIDE,
        "max_input_chars_per_word": LONGEST_WORD,
        "vocab": vocab,
    }


def _train_char(texts: list[str], parts: Part, room: int, marker: str | None, least: int) -> Part:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    return _bpe(_numbered(sorted(_most_frequent(counts, room - 1, least))), [], unk=UNK)


def _train_word(texts: list[str], parts: Part, room: int, marker: str | None, least: int) -> Part:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_WORD.findall(text))
    return {"type": "WordLevel", "vocab": _numbered(_most_frequent(counts, room - 1, least)), "unk_token": UNK}


def _train_unigram(texts: list[str], parts: Part, room: int, marker: str | None, least: int) -> Part:
    kept, texts = _alphabet(texts, room - 1, "▁")
    cut = library({"pre_tokenizer": parts["pre_tokenizer"]}).pre_tokenizer.pre_tokenize_str
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word for word, _ in cut(text))
    pieces = unigram.fit(counts, kept, room - 1, least)
    # Far below the worst piece, so that a text that spells it is cut into its letters.
    unknown = min(score for _, score in pieces) - 100
    return {"type": "Unigram", "unk_id": 0, "vocab": [[UNK, unknown], *map(list, pieces)], "byte_fallback": False}


def _numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: place for place, piece in enumerate([UNK, *pieces])}


_MODELS = {
    "char": _train_char,
    "word": _train_word,
    "bpe": _train_bpe,
    "wordpiece": _train_wordpiece,
    "unigram": _train_unigram,
}
