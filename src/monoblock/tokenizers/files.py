"""tokenizer.json from and to a folder. A file is data from a stranger: nothing in it may run long, grow or crash.

What the library would run is held to a list of parts; a regular expression to the published ones, because a nested
quantifier hangs its engine; ids and sizes to what a vocabulary can be.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monoblock.errors import FileError
from monoblock.tokenizers import gguf_vocab, published
from monoblock.tokenizers.chat import LONGEST_TEMPLATE
from monoblock.tokenizers.patterns import REPLACED, SPLITS
from monoblock.untrusted import inside, present, read_bytes, read_json

FILE, ROLES_FILE = "tokenizer.json", "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
LARGEST = 64 * 2**20
LARGEST_ROLES = 16 * 2**20  # some hold a row for every added token, and a chat template
MOST_TOKENS = 2_000_000
MOST_VALUES = 5_000_000  # a merge is a list of two
MOST_PARTS = 32
LONGEST_TOKEN = 512  # of an added token, in characters
LONGEST_WORD = 200  # of WordPiece, in characters: its search is cubic in it

# Section -> the types it may have, those of the parts of a "Sequence" included.
TYPES = {
    "normalizer": """Sequence NFC NFD NFKC NFKD Nmt Lowercase Strip StripAccents BertNormalizer Replace Prepend
        Precompiled ByteLevel""",
    "pre_tokenizer": """Sequence ByteLevel Metaspace Whitespace WhitespaceSplit BertPreTokenizer Punctuation Digits
        Split CharDelimiterSplit UnicodeScripts""",
    "post_processor": "Sequence ByteLevel BertProcessing RobertaProcessing TemplateProcessing",
    "decoder": "Sequence ByteLevel WordPiece Metaspace BPEDecoder CTC Fuse Strip Replace ByteFallback",
    "model": "BPE WordPiece WordLevel Unigram",
}
PARTS = ("normalizers", "pretokenizers", "processors", "decoders")


class _Bad(Exception):
    """What is wrong with a file, to be said after its name."""


# -- reading -----------------------------------------------------------------------------------------------------------


def read(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checked content of tokenizer.json (of a folder, or that file itself), and what the files beside it name.

    Where there is none, it is made from the vocabulary files that a published folder has in its place.
    """
    given = Path(folder)
    if given.is_dir():
        named = read_named(given)
        older = None if present(given, FILE) else published.find(given)
        path = given / (older or FILE)
        if older is None and not present(given, FILE):
            raise FileError(f"{given} holds no tokenizer: it has no {FILE}")
        data, roles = published.read(given, older, named) if older else (_read(inside(given, FILE)), {})
        named = roles | named
    else:
        path = given
        if not path.is_file():
            raise FileError(f"{given} holds no tokenizer: there is no such folder or file")
        if path.suffix == ".gguf":
            data, named = gguf_vocab.read(path)
            return checked(data, path), named
        data, named = _read(path), read_named(path.parent) if path.name == FILE else {}
    return checked(data, path), named


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, largest=LARGEST, most=MOST_VALUES)


def checked(data: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """The content of a tokenizer.json that the library may be given."""
    try:
        data["model"] = _typed(data.get("model"))
        check(data)
    except _Bad as problem:
        raise FileError(f"{path} cannot be used: {problem}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as problem:  # a value of a type no such file has
        raise FileError(f"{path} cannot be used: {' '.join(str(problem).split())[:120]}") from None
    return data


def read_named(folder: Path) -> dict[str, Any]:
    """What tokenizer_config.json says, and, where it is silent, special_tokens_map.json and the older small files."""
    named: dict[str, Any] = {}
    for name in (ROLES_FILE, "special_tokens_map.json"):
        if present(folder, name):
            named = read_json(inside(folder, name), largest=LARGEST_ROLES) | named
    if present(folder, TEMPLATE_FILE):
        named["chat_template"] = read_bytes(inside(folder, TEMPLATE_FILE), LONGEST_TEMPLATE).decode(errors="replace")
    if "added_tokens_decoder" not in named and present(folder, "added_tokens.json"):
        rows = read_json(inside(folder, "added_tokens.json"), largest=LARGEST_ROLES)
        named["added_tokens_decoder"] = {str(number): {"content": token} for token, number in rows.items()}
    return named


def _typed(model: Any) -> dict[str, Any]:
    """The model with its type, which early files (GPT-2's) leave to be guessed, and with no "" for no token."""
    if not isinstance(model, Mapping):
        raise _Bad("it has no model")
    guess = "BPE" if "merges" in model else "Unigram" if isinstance(model.get("vocab"), list) else "WordLevel"
    guess = "WordPiece" if "max_input_chars_per_word" in model else guess
    return {"type": guess, **model} | ({"unk_token": None} if model.get("unk_token") == "" else {})


def check(data: Mapping[str, Any]) -> None:
    """Raise unless everything the library would run or allocate is of a known kind and size."""
    model = data["model"]
    for section in TYPES:
        if data.get(section) is not None:
            _check_part(section, data[section], depth=0)
    vocab = _check_vocab(model)
    _check_added(data.get("added_tokens", []))
    _CHECKS[model["type"]](model, vocab)


def _check_part(section: str, part: Any, depth: int) -> int:
    """Raise unless a part and all it is made of is known; the number of parts."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in TYPES[section].split():
        raise _Bad(f"its {section} is of a kind we do not run, {kind!r:.40}")
    _check_pattern(section, part)
    if kind == "TemplateProcessing":
        _check_template(part)
    count = 1
    for key in PARTS:
        inner = part.get(key, [])
        if depth > 2 or not isinstance(inner, list) or len(inner) > MOST_PARTS:
            raise _Bad(f"its {section} is nested too deep or too long")
        count += sum(_check_part(section, one, depth + 1) for one in inner)
    if count > MOST_PARTS:
        raise _Bad(f"its {section} has more than {MOST_PARTS} parts")
    return count


def _check_pattern(section: str, part: Mapping[str, Any]) -> None:
    """A Split or Replace may use a string or a published regular expression, and may not make text longer."""
    pattern = part.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    string = pattern.get("String") if isinstance(pattern, Mapping) else pattern
    if regex is not None and regex not in (SPLITS if part["type"] == "Split" else REPLACED):
        raise _Bad(f"its {section} has a regular expression we do not know, {regex!r:.60}")
    if part["type"] == "Replace":
        content = part.get("content")
        longest = 1 if regex is not None else len(string) if isinstance(string, str) else 0
        if not isinstance(content, str) or len(content) > longest:
            raise _Bad(f"its {section} replaces {string!r:.20} by something longer")
    # The library panics when there is nothing to strip the end of.
    if section == "decoder" and part["type"] == "Strip" and not _strips_front(part):
        raise _Bad("its decoder strips more than 8 characters, or from the end")
    if part["type"] == "Prepend" and not (isinstance(part.get("prepend"), str) and len(part["prepend"]) <= 8):
        raise _Bad(f"its {section} prepends more than 8 characters")


def _strips_front(part: Mapping[str, Any]) -> bool:
    return part.get("start") in range(9) and part.get("stop") == 0


def _check_template(part: Mapping[str, Any]) -> None:
    """Every special token that a template puts must be told its ids: the library panics where one is not."""
    known = part.get("special_tokens")
    rows = [row for key in ("single", "pair") for row in part.get(key) or []]
    if not isinstance(known, Mapping) or len(rows) > MOST_PARTS or not all(isinstance(row, Mapping) for row in rows):
        raise _Bad("its post_processor is no template")
    put = [row["SpecialToken"] for row in rows if "SpecialToken" in row]
    names = [one.get("id") if isinstance(one, Mapping) else None for one in put]
    if not all(isinstance(name, str) and isinstance(known.get(name), Mapping) for name in names):
        raise _Bad("its post_processor puts a special token that it does not describe")


def _check_vocab(model: Mapping[str, Any]) -> Mapping[str, int]:
    """Token -> id, every id one of its own."""
    vocab = model.get("vocab")
    if model["type"] == "Unigram":
        if not isinstance(vocab, list) or not all(isinstance(row, list) and len(row) == 2 for row in vocab):
            raise _Bad("its vocabulary is no list of pieces and scores")
        if not all(isinstance(piece, str) and isinstance(score, (int, float)) for piece, score in vocab):
            raise _Bad("its vocabulary is no list of pieces and scores")
        vocab = {piece: place for place, (piece, _) in enumerate(vocab)}
        if len(vocab) != len(model["vocab"]):
            raise _Bad("its vocabulary has a piece twice")
    if not isinstance(vocab, Mapping) or not vocab:
        raise _Bad("it has no vocabulary")
    if len(vocab) > MOST_TOKENS:
        raise _Bad(f"its vocabulary has more than {MOST_TOKENS:,} tokens")
    for token, number in vocab.items():
        _check_id(token, number)
    if len(set(vocab.values())) != len(vocab):
        raise _Bad("two tokens of its vocabulary have the same id")
    return vocab


def _check_id(token: Any, number: Any) -> None:
    if type(number) is not int or not 0 <= number < MOST_TOKENS:
        raise _Bad(f"the token {token!r:.40} has the id {number!r:.20}; an id is a whole number below {MOST_TOKENS:,}")


def _check_added(added: Any) -> None:
    if not isinstance(added, list) or len(added) > MOST_TOKENS:
        raise _Bad("its added_tokens are no list")
    for row in added:
        content = row.get("content") if isinstance(row, Mapping) else None
        if not isinstance(content, str) or not 0 < len(content) <= LONGEST_TOKEN:
            raise _Bad(f"one of its added_tokens is no token of 1 to {LONGEST_TOKEN} characters")
        _check_id(content, row.get("id"))


# -- the four models ---------------------------------------------------------------------------------------------------


def _check_bpe(model: Mapping[str, Any], vocab: Mapping[str, int]) -> None:
    merges = model.get("merges")
    if not isinstance(merges, list) or len(merges) > MOST_TOKENS:
        raise _Bad("its merges are no list")
    prefix = model.get("continuing_subword_prefix") or ""
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(side, str) for side in pair):
            raise _Bad(f"the merge {merge!r:.40} is no pair")
        left, right = pair
        inside = right.startswith(prefix)  # the library cuts it off unseen
        if not inside or left not in vocab or right not in vocab or left + right[len(prefix) :] not in vocab:
            raise _Bad(f"the merge {merge!r:.40} is of tokens that are not in its vocabulary")
    if model.get("unk_token") is not None and model["unk_token"] not in vocab:
        raise _Bad("its unknown token is not in its vocabulary")


def _check_words(model: Mapping[str, Any], vocab: Mapping[str, int]) -> None:
    if model.get("unk_token") not in vocab:
        raise _Bad("its unknown token is not in its vocabulary")
    longest = model.get("max_input_chars_per_word", 100)
    if type(longest) is not int or not 0 < longest <= LONGEST_WORD:
        raise _Bad(f"its max_input_chars_per_word is not from 1 to {LONGEST_WORD}")


def _check_unigram(model: Mapping[str, Any], vocab: Mapping[str, int]) -> None:
    unknown = model.get("unk_id")
    if type(unknown) is not int or not 0 <= unknown < len(vocab):  # without one, unknown text would be an exception
        raise _Bad("its unk_id is not in its vocabulary")


_CHECKS = {"BPE": _check_bpe, "WordPiece": _check_words, "WordLevel": _check_words, "Unigram": _check_unigram}


# -- writing -----------------------------------------------------------------------------------------------------------


def write(folder: str | Path, data: Mapping[str, Any], named: Mapping[str, Any]) -> None:
    """Both files, each written beside its old version and then put in its place."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in ((ROLES_FILE, named), (FILE, data)):
            beside = folder / f"{name}.tmp"
            with open(beside, "w", encoding="utf-8", newline="\n") as file:
                json.dump(content, file, ensure_ascii=False, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, folder / name)
    except OSError as problem:
        raise FileError(f"the tokenizer cannot be written to {folder}: {problem.strerror or problem}") from None


def guarded(path: str | Path, build: Any) -> Any:
    """What `build` gives; whatever the library makes of a damaged file, a panic too, is one line."""
    try:
        return build()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as problem:  # its panics are no Exception
        raise FileError(f"{path} cannot be used: {' '.join(str(problem).split())[:120]}") from None
