"""Convert text to token ids and back.

    tokenizer = mb.Tokenizer.train("bpe", texts, vocab_size=4096)
    ids = tokenizer.encode("In the beginning")
    tokenizer.decode(ids)

Special tokens that are written out in a text, such as "</s>", are encoded as plain text, unless `allow_specials=True`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from monoblock.errors import FileError, InputError, did_you_mean
from monoblock.tokenizers import sampling
from monoblock.tokenizers.chat_template import render_chat
from monoblock.tokenizers.components import byte_symbols
from monoblock.tokenizers.special_tokens import UNKNOWN_CHARACTER, find_sentinels
from monoblock.tokenizers.tokenizer_json import (
    assign_roles,
    build_backend,
    find_chat_template,
    is_byte_level,
    read_tokenizer,
    tokenizer_kind,
    unknown_token,
    write_tokenizer,
)
from monoblock.tokenizers.train import check_text, check_texts, train_tokenizer
from monoblock.untrusted_files import reading

LONG_TEXT = 4096  # characters
BYTE_BY_SYMBOL = {symbol: value for value, symbol in enumerate(byte_symbols())}


class Piece(NamedTuple):
    """A token of a text: its spelling in the vocabulary, its id, and the span of characters it covers."""

    piece: str
    id: int
    start: int
    end: int


class Tokenizer:
    """A tokenizer, created by `train` or `from_pretrained`."""

    def __init__(self, data: Mapping[str, object], config: Mapping[str, object] | None = None) -> None:
        """Build a tokenizer from the content of a tokenizer.json (`data`) and of a tokenizer_config.json (`config`)."""
        # The caller truncates and pads, and only `sample` uses dropout.
        stored: Any = data["model"]
        model = {**stored, "dropout": None} if stored.get("type") == "BPE" else stored
        self._backend = build_backend({**data, "truncation": None, "padding": None, "model": model})
        self._backend.encode_special_tokens = True
        added = self._backend.get_added_tokens_decoder()
        self._special_tokens = {token.content: number for number, token in added.items() if token.special}
        self._plain_added_tokens = sorted(token.content for token in added.values() if not token.special)
        self.vocab_size: int = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())
        unknown = unknown_token(model)
        roles = assign_roles(self._special_tokens, config or {})
        self.special_tokens_map = roles | ({} if unknown is None else {"unk": unknown})
        self.kind = tokenizer_kind(data)
        self.chat_template = find_chat_template(config or {})
        self.pad_id, self.unk_id = self._role_id("pad"), self._role_id("unk")
        self.bos_id, self.eos_id = self._role_id("bos"), self._role_id("eos")
        self.cls_id, self.sep_id, self.mask_id = self._role_id("cls"), self._role_id("sep"), self._role_id("mask")

    # -- creating, loading and saving

    @classmethod
    def train(
        cls,
        kind: str,
        texts: Iterable[str],
        vocab_size: int = 4096,
        *,
        marker: str | None = None,
        specials: str | Sequence[str] = "causal_lm",
        lowercase: bool = False,
        min_frequency: int = 1,
    ) -> Tokenizer:
        """Train a tokenizer of kind char, byte, word, bpe, wordpiece or unigram.

        BPE is byte-level without a `marker`. With "@@", all pieces of a word but the last end in @@; with "▁", words
        begin with ▁. `specials` chooses the special tokens, which `vocab_size` includes: an objective ("causal_lm",
        "seq2seq", "masked_lm", "span_corruption", "none") or a list of roles ("pad"), "sentinels=20" and
        tags such as "<2hi>".
        """
        return cls(train_tokenizer(kind, texts, vocab_size, marker, specials, lowercase, min_frequency))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Tokenizer:
        """Load the tokenizer of a Hugging Face folder, from its tokenizer.json or older vocabulary files.

        `folder` may also be the path of a tokenizer.json or of a GGUF file.
        """
        return cls.from_content(*read_tokenizer(folder), folder)

    @classmethod
    def from_content(cls, data: dict[str, Any], config: dict[str, Any], source: str | Path) -> Tokenizer:
        """Build a tokenizer from the checked content of its two files, as `__init__` does; errors name `source`."""

        with reading(source):
            tokenizer = cls(data, config)
            tokenizer._check_added_ids(data.get("added_tokens", []), source)
            # Try known and unknown text, so that a faulty file raises an error here and not later.
            tokenizer.decode(tokenizer.encode("a b\U000f1e0f", add_specials=True))
            return tokenizer

    def _check_added_ids(self, rows: list[dict[str, Any]], source: str | Path) -> None:
        for row in rows:
            if self._backend.token_to_id(row["content"]) != row["id"]:
                raise FileError(
                    f"{source} cannot be used: its added token {row['content']!r:.40} cannot have the id {row['id']}, "
                    "because ids must not have gaps"
                )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write tokenizer.json, which the `tokenizers` library reads, and tokenizer_config.json."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | self._config
        write_tokenizer(folder, self._tokenizer_json, config)

    @property
    def _config(self) -> dict[str, Any]:
        """The special tokens and chat template, as in a tokenizer_config.json."""
        template = {} if self.chat_template is None else {"chat_template": self.chat_template}
        return {f"{role}_token": token for role, token in self.special_tokens_map.items()} | template

    def content(self) -> tuple[dict[str, object], dict[str, object]]:
        """Return the content of a tokenizer.json and of a tokenizer_config.json for this tokenizer."""
        return self._tokenizer_json, self._config

    @property
    def _tokenizer_json(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self._backend.to_str())
        return data

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of everything that decides how a text is encoded."""
        return compute_fingerprint(self._tokenizer_json)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling the library's tokenizer would lose its `encode_special_tokens`.
        return Tokenizer, (self._tokenizer_json, self._config)

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, {self.vocab_size:,} tokens, {self.fingerprint[:FINGERPRINT_DIGITS]})"

    # -- text to ids

    @cached_property
    def _special_tokens_backend(self) -> Any:
        """A second backend, which recognizes special tokens in text; a backend cannot switch this for each call."""
        return build_backend(self._tokenizer_json)

    def _select_backend(self, allow_specials: bool) -> Any:
        return self._special_tokens_backend if allow_specials else self._backend

    def encode(self, text: str, *, add_specials: bool = False, allow_specials: bool = False) -> list[int]:
        """Encode a text to ids.

        `add_specials` puts special tokens around the text, such as <s> and </s>. `allow_specials` encodes a special
        token that is written out in the text as this token, and not as plain text.
        """
        check_text(text)
        backend = self._select_backend(allow_specials)
        if len(text) > LONG_TEXT:  # without offsets it takes half as long, and other threads go on meanwhile
            encoding = backend.encode_batch_fast([text], add_special_tokens=add_specials)[0]
        else:
            encoding = backend.encode(text, add_special_tokens=add_specials)
        ids: list[int] = encoding.ids
        return ids

    def encode_batch(
        self, texts: Iterable[str], *, add_specials: bool = False, allow_specials: bool = False
    ) -> list[list[int]]:
        """Encode many texts on all cores; the options are those of `encode`."""
        backend = self._select_backend(allow_specials)
        encodings = backend.encode_batch_fast(check_texts(texts), add_special_tokens=add_specials)
        return [encoding.ids for encoding in encodings]

    def special_tokens_template(self, num_texts: int = 1) -> list[tuple[int | None, int]]:
        """Return what `add_specials` adds: (id, segment) for each special token, (None, segment) for each text."""
        encoding = self._backend.encode(*["a"] * num_texts, add_special_tokens=True)
        rows: list[tuple[int | None, int]] = []
        previous = None
        for number, sequence, segment in zip(encoding.ids, encoding.sequence_ids, encoding.type_ids, strict=True):
            if sequence is None or sequence != previous:
                rows.append((number if sequence is None else None, segment))
            previous = sequence
        return rows if sum(number is None for number, _ in rows) == num_texts else [(None, n) for n in range(num_texts)]

    def pieces(self, text: str, *, add_specials: bool = False, allow_specials: bool = False) -> list[Piece]:
        """Return the tokens of a text and the characters they cover; each byte token covers its whole character."""
        check_text(text)
        encoding = self._select_backend(allow_specials).encode(text, add_special_tokens=add_specials)
        return [
            Piece(self.token(number), number, start, end)
            for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    def sample(
        self,
        text: str,
        *,
        seed: int,
        epoch: int = 0,
        index: int = 0,
        dropout: float | None = None,
        alpha: float | None = None,
    ) -> list[int]:
        """Return the ids of a random segmentation, for training; it depends only on the arguments.

        `dropout` is the probability of skipping a BPE merge (0 gives the ids of `encode`); `alpha` is the exponent on
        the probability of a Unigram segmentation. Both default to 0.1.
        """
        check_text(text)
        strength = sampling.sampling_strength(self.kind, dropout, alpha)
        if self._plain_added_tokens:
            raise InputError(f"sampling cannot handle added tokens such as {self._plain_added_tokens[0]!r}; use encode")
        draw = sampling.seeded_random(seed, epoch, index, text).random
        segment = self._segmenter.segment
        return [number for word in self._pre_tokenize(text) for number in segment(word, strength, draw)]

    @cached_property
    def _segmenter(self) -> sampling.BpeSegmenter | sampling.UnigramSegmenter:
        model = self._tokenizer_json["model"]
        return sampling.BpeSegmenter(model) if self.kind == "bpe" else sampling.UnigramSegmenter(model)

    def _pre_tokenize(self, text: str) -> list[str]:
        """Normalize and split a text into the words that the model segments."""
        normalizer, pre_tokenizer = self._backend.normalizer, self._backend.pre_tokenizer
        text = normalizer.normalize_str(text) if normalizer is not None else text
        if pre_tokenizer is None:
            return [text] if text else []
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True, **variables: object
    ) -> str:
        """Write a conversation as text, by the tokenizer's chat template; encode it with `allow_specials=True`."""
        if self.chat_template is None:
            raise InputError("this tokenizer has no chat template; give the messages as one text")
        specials = {f"{role}_token": token for role, token in self.special_tokens_map.items()}
        return render_chat(
            self.chat_template, messages, specials, add_generation_prompt=add_generation_prompt, **variables
        )

    # -- ids to text

    def decode(self, ids: Iterable[int], *, skip_specials: bool = True) -> str:
        """Decode ids to text. Special tokens are left out, and unknown tokens become ⁇, unless skip_specials=False."""
        numbers = to_id_list(ids)
        outside = next((number for number in numbers if not 0 <= number < self.vocab_size), None)
        if outside is not None:
            raise InputError(f"id {outside} is not in this tokenizer; its ids are 0 to {self.vocab_size - 1}")
        if not skip_specials or self.unk_id is None or self.unk_id not in numbers:
            text: str = self._backend.decode(numbers, skip_special_tokens=skip_specials)
            return text
        tokens = [
            UNKNOWN_CHARACTER if number == self.unk_id else self._backend.id_to_token(number)
            for number in numbers
            if number == self.unk_id or number not in self.special_ids
        ]
        tokens = [token for token in tokens if token is not None]
        decoder = self._backend.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    def token_bytes(self, number: int) -> bytes | None:
        """Return the bytes that the token with this id stands for, or None if it stands for text or is special."""
        token = self._backend.id_to_token(number)
        if token is None or number in self.special_ids:
            return None
        if self._byte_spelling == "symbol":
            return bytes(map(BYTE_BY_SYMBOL.__getitem__, token)) if BYTE_BY_SYMBOL.keys() >= {*token} else None
        is_byte = self._byte_spelling == "number" and re.fullmatch("<0x[0-9A-F]{2}>", token)
        return bytes.fromhex(token[3:5]) if is_byte else None

    @cached_property
    def _byte_spelling(self) -> Literal["symbol", "number"] | None:
        """How tokens spell bytes: by printable symbols, or by their number as in <0x0A>, for bytes of unknown text."""
        data = self._tokenizer_json
        return "symbol" if is_byte_level(data["decoder"]) else "number" if data["model"].get("byte_fallback") else None

    # -- tokens

    def id(self, token: str) -> int:
        """Return the id of a token, given in the spelling that the method `token` returns."""
        number = self._backend.token_to_id(self._stored_spelling(token))
        if number is None:
            raise InputError(f"{token!r} is not a token of this tokenizer{did_you_mean(token, self._special_tokens)}")
        return int(number)

    def token(self, number: int) -> str:
        """Return the spelling of the token with this id, such as "Ġthe", "▁the", "##ing" or "transla@@"."""
        token = self._backend.id_to_token(number) if 0 <= number < self.vocab_size else None
        if token is None:
            raise InputError(f"id {number} is not in this tokenizer; its ids are 0 to {self.vocab_size - 1}")
        suffix = self._end_of_word_suffix
        if not suffix or number in self.special_ids:
            return str(token)
        return token.removesuffix(suffix) if token.endswith(suffix) else f"{token}@@"

    def _stored_spelling(self, token: str) -> str:
        if not self._end_of_word_suffix or token in self._special_tokens:
            return token
        return token.removesuffix("@@") if token.endswith("@@") and token != "@@" else token + self._end_of_word_suffix

    @cached_property
    def _end_of_word_suffix(self) -> str:
        """The suffix of a word's last piece in tokenizer.json, or ""; `token` shows @@ on the other pieces instead."""
        return self._tokenizer_json["model"].get("end_of_word_suffix") or ""

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._special_tokens.values())

    @cached_property
    def sentinel_ids(self) -> list[int]:
        """The ids of the sentinels <extra_id_0>, <extra_id_1> …, in this order."""
        return [self._special_tokens[token] for token in find_sentinels(self._special_tokens)]

    def _role_id(self, role: str) -> int | None:
        return self._backend.token_to_id(self.special_tokens_map[role]) if role in self.special_tokens_map else None


# -- the hash of everything that decides how a text is encoded ---------------------------------------------------------

FINGERPRINT_DIGITS = 12  # how many digits a message shows
ENCODING_SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "added_tokens", "model")


def compute_fingerprint(data: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the sections of a tokenizer.json that affect encoding."""
    canonical = json.dumps(_drop_unset({key: data[key] for key in ENCODING_SECTIONS}), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _drop_unset(value: Any) -> Any:
    """Drop settings that are None or False.

    A later version of the `tokenizers` library may write new settings; if they are unset, the fingerprint is the same.
    """
    if isinstance(value, dict):
        return {key: _drop_unset(item) for key, item in value.items() if item is not None and item is not False}
    return [_drop_unset(item) for item in value] if isinstance(value, list) else value


def to_id_list(ids: Any) -> list[int]:
    """Convert a list, a tensor or an array of ids to a list of int."""
    values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise InputError("ids are not a list of whole numbers; give one sequence at a time")
    return values
