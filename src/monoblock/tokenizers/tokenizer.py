"""Text to ids and back.

    tokenizer = mb.Tokenizer.train("bpe", texts, vocab_size=4096)
    ids = tokenizer.encode("In the beginning")
    tokenizer.decode(ids)

Text that spells a special token is text: only `allow_specials=True` reads "<mask>" as the mask.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from monoblock.errors import InputError, did_you_mean
from monoblock.tokenizers import files, sampling, training
from monoblock.tokenizers.chat import render, template_of
from monoblock.tokenizers.identity import SHOWN, fingerprint_of, kind_of, unknown_of, uses_bytes
from monoblock.tokenizers.inputs import check_text, id_list, text_list
from monoblock.tokenizers.specials import UNKNOWN, roles_of, sentinels_of

_BYTE_OF = {symbol: value for value, symbol in enumerate(training.byte_symbols())}


class Piece(NamedTuple):
    """A token of a text: how the vocabulary spells it, its id, and which characters it covers."""

    piece: str
    id: int
    start: int
    end: int


class Tokenizer:
    """A tokenizer.json in use. Made by `train` or `from_pretrained`."""

    def __init__(self, data: dict[str, Any], named: dict[str, Any] | None = None) -> None:
        """`data` is the content of a tokenizer.json, `named` of a tokenizer_config.json."""
        # A length to cut or pad to is no part of how text is cut into tokens, and chance only of training.
        model = {**data["model"], "dropout": None} if data["model"].get("type") == "BPE" else data["model"]
        self._library = training.library({**data, "truncation": None, "padding": None, "model": model})
        self._library.encode_special_tokens = True
        added = self._library.get_added_tokens_decoder()
        self._specials = {token.content: number for number, token in added.items() if token.special}
        self._plain_added = sorted(token.content for token in added.values() if not token.special)
        self.vocab_size: int = 1 + max(self._library.get_vocab(with_added_tokens=True).values())
        unknown = unknown_of(model)
        self.roles = roles_of(self._specials, named or {}) | ({"unk": unknown} if unknown is not None else {})
        self.kind = kind_of(data)
        self.chat_template = template_of(named or {})
        self.pad_id, self.unk_id = self._role("pad"), self._role("unk")
        self.bos_id, self.eos_id = self._role("bos"), self._role("eos")
        self.cls_id, self.sep_id, self.mask_id = self._role("cls"), self._role("sep"), self._role("mask")

    # -- made and kept

    @classmethod
    def train(
        cls,
        kind: str,
        texts: Iterable[str],
        vocab_size: int = 4096,
        *,
        marker: str | None = None,
        specials: str | Sequence[str] = "causal",
        lowercase: bool = False,
        min_frequency: int = 1,
    ) -> Tokenizer:
        """Kinds: char, byte, word, bpe, wordpiece, unigram.

        BPE is byte-level; marker "@@" ends a piece that its word goes on after (words are what white space parts),
        "▁" begins a word. `specials` is a row of NEEDS ("causal", "seq2seq", "masked", "spans", "none") or a list of
        roles, "sentinels=20" and tags such as "<2hi>". `vocab_size` counts them.
        """
        return cls(training.train(kind, texts, vocab_size, marker, specials, lowercase, min_frequency))

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Tokenizer:
        """From a folder, ours or a published one: its tokenizer.json, or the vocabulary files it has in its place."""
        data, named = files.read(folder)
        return cls.from_parts(data, named, folder)

    @classmethod
    def from_parts(cls, data: dict[str, Any], named: dict[str, Any], source: str | Path) -> Tokenizer:
        """From the checked content of a tokenizer.json and of a tokenizer_config.json; `source` is named in errors."""

        def build() -> Tokenizer:
            made = cls(data, named)
            made._check_added(data.get("added_tokens", []))
            made.decode(made.encode("a b\U000f1e0f", add_specials=True))  # known and unknown: what fails, fails here
            return made

        built: Tokenizer = files.guarded(source, build)
        return built

    def _check_added(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if self._library.token_to_id(row["content"]) != row["id"]:
                raise ValueError(
                    f"its added token {row['content']!r} cannot have the id {row['id']}; ids must follow on"
                )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write tokenizer.json, which the `tokenizers` library reads as it is, and tokenizer_config.json beside it."""
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        files.write(folder, self._data, described | self._named)

    @property
    def _named(self) -> dict[str, Any]:
        """What this tokenizer would say in a tokenizer_config.json."""
        template = {} if self.chat_template is None else {"chat_template": self.chat_template}
        return {f"{role}_token": token for role, token in self.roles.items()} | template

    def content(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What its tokenizer.json and its tokenizer_config.json hold."""
        return self._data, self._named

    @property
    def _data(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self._library.to_str())
        return data

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides which ids a text becomes."""
        return fingerprint_of(self._data)

    def __reduce__(self) -> tuple[Any, ...]:
        # The library does not take its switch for special tokens along to another process.
        return Tokenizer, (self._data, self._named)

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, {self.vocab_size:,} tokens, {self.fingerprint[:SHOWN]})"

    # -- text to ids

    @cached_property
    def _with_specials(self) -> Any:
        """A second tokenizer of the library that sees special tokens in text: the switch is a state of the whole."""
        return training.library(self._data)

    def _encoder(self, allow_specials: bool) -> Any:
        return self._with_specials if allow_specials else self._library

    def encode(self, text: str, *, add_specials: bool = False, allow_specials: bool = False) -> list[int]:
        """Ids of a text. `add_specials` puts <s> … </s> or <cls> … <sep> around it, by what this tokenizer has."""
        check_text(text)
        ids: list[int] = self._encoder(allow_specials).encode(text, add_special_tokens=add_specials).ids
        return ids

    def encode_batch(
        self, texts: Iterable[str], *, add_specials: bool = False, allow_specials: bool = False
    ) -> list[list[int]]:
        """Ids of many texts, on all cores."""
        found = self._encoder(allow_specials).encode_batch_fast(text_list(texts), add_special_tokens=add_specials)
        return [encoding.ids for encoding in found]

    def frame(self, texts: int = 1) -> list[tuple[int | None, int]]:
        """What `add_specials` makes of one text or of two: (id, segment), and (None, segment) for a text itself."""
        found = self._library.encode(*["a"] * texts, add_special_tokens=True)
        rows: list[tuple[int | None, int]] = []
        before = None
        for number, sequence, segment in zip(found.ids, found.sequence_ids, found.type_ids, strict=True):
            if sequence is None or sequence != before:
                rows.append((number if sequence is None else None, segment))
            before = sequence
        return rows if sum(number is None for number, _ in rows) == texts else [(None, n) for n in range(texts)]

    def pieces(self, text: str, *, add_specials: bool = False, allow_specials: bool = False) -> list[Piece]:
        """The tokens of a text with the characters each covers; bytes of one character cover it together."""
        check_text(text)
        found = self._encoder(allow_specials).encode(text, add_special_tokens=add_specials)
        return [
            Piece(self.token(number), number, start, end)
            for number, (start, end) in zip(found.ids, found.offsets, strict=True)
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
        """One of the ways to cut a text, for training: a pure function of (seed, epoch, index, text).

        `dropout` leaves out merges of BPE (0 is `encode`), `alpha` sharpens or flattens Unigram; both 0.1 if not given.
        """
        check_text(text)
        strength = self._strength(dropout, alpha)
        draw = sampling.generator(seed, epoch, index, text).random
        segment = self._segmenter.segment
        return [number for word in self._words(text) for number in segment(word, strength, draw)]

    def _strength(self, dropout: float | None, alpha: float | None) -> float:
        if self.kind not in ("bpe", "unigram"):
            raise InputError(f"a {self.kind} tokenizer has one way to cut a text; sampling needs bpe or unigram")
        if self._plain_added:
            raise InputError(f"sampling cannot cut around added tokens such as {self._plain_added[0]!r}")
        name, other = ("dropout", "alpha") if self.kind == "bpe" else ("alpha", "dropout")
        value, wrong = (dropout, alpha) if self.kind == "bpe" else (alpha, dropout)
        if wrong is not None:
            raise InputError(f"{other}={wrong} says nothing to {self.kind}; write {name}=")
        value = 0.1 if value is None else value
        if not 0 <= value <= (1 if name == "dropout" else 1e6):
            raise InputError(f"{name}={value} cannot be; write a number from 0{' to 1' if name == 'dropout' else ''}")
        return float(value)

    @cached_property
    def _segmenter(self) -> sampling.BpeSegmenter | sampling.UnigramSegmenter:
        model = self._data["model"]
        return sampling.BpeSegmenter(model) if self.kind == "bpe" else sampling.UnigramSegmenter(model)

    def _words(self, text: str) -> list[str]:
        """What the model sees: the text normalized and cut, but in no pieces yet."""
        normalizer, splitter = self._library.normalizer, self._library.pre_tokenizer
        text = normalizer.normalize_str(text) if normalizer is not None else text
        if splitter is None:
            return [text] if text else []
        return [word for word, _ in splitter.pre_tokenize_str(text)]

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **more: Any) -> str:
        """A conversation as text, by the model's own template; encode it with `allow_specials=True`."""
        if self.chat_template is None:
            raise InputError("this tokenizer has no chat template; give the messages as one text")
        specials = {f"{role}_token": token for role, token in self.roles.items()}
        return render(self.chat_template, messages, specials, add_generation_prompt=add_generation_prompt, **more)

    # -- ids to text

    def decode(self, ids: Iterable[int], *, skip_specials: bool = True) -> str:
        """The text of ids. The unknown becomes ⁇ unless special tokens are spelled out."""
        numbers = id_list(ids)
        outside = next((number for number in numbers if not 0 <= number < self.vocab_size), None)
        if outside is not None:
            raise InputError(f"id {outside} is not in this tokenizer; its ids are 0 to {self.vocab_size - 1}")
        if not skip_specials or self.unk_id is None or self.unk_id not in numbers:
            text: str = self._library.decode(numbers, skip_special_tokens=skip_specials)
            return text
        token_of, special = self._library.id_to_token, self.special_ids
        tokens = [
            UNKNOWN if number == self.unk_id else token_of(number)
            for number in numbers
            if number == self.unk_id or number not in special
        ]
        tokens = [token for token in tokens if token is not None]
        decoder = self._library.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    def bytes_of(self, number: int) -> bytes | None:
        """The bytes a token stands for where tokens are bytes (byte-level, or <0x0A> of byte fallback), or None."""
        token = self._library.id_to_token(number)
        if token is None or number in self.special_ids:
            return None
        if self._byte_level:
            return bytes(_BYTE_OF[symbol] for symbol in token) if all(s in _BYTE_OF for s in token) else None
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return None

    @cached_property
    def _byte_level(self) -> bool:
        return uses_bytes(self._data["decoder"])

    @cached_property
    def _byte_fallback(self) -> bool:
        return bool(self._data["model"].get("byte_fallback"))

    # -- tokens

    def id(self, token: str) -> int:
        """The id of a token, spelled as `token` gives it."""
        number = self._library.token_to_id(self._stored(token))
        if number is None:
            raise InputError(f"{token!r} is no token of this tokenizer{did_you_mean(token, self._specials)}")
        return int(number)

    def token(self, number: int) -> str:
        """How a token is spelled: "Ġthe", "▁the", "##ing", "transla@@"."""
        token = self._library.id_to_token(number) if 0 <= number < self.vocab_size else None
        if token is None:
            raise InputError(f"id {number} is not in this tokenizer; its ids are 0 to {self.vocab_size - 1}")
        if not self._ends or number in self.special_ids:
            return str(token)
        return token.removesuffix(self._ends) if token.endswith(self._ends) else f"{token}@@"

    def _stored(self, token: str) -> str:
        if not self._ends or token in self._specials:
            return token
        return token.removesuffix("@@") if token.endswith("@@") and token != "@@" else token + self._ends

    @cached_property
    def _ends(self) -> str:
        """How the last piece of a word is marked in the file, where that is marked: shown is "@@" on the others."""
        return self._data["model"].get("end_of_word_suffix") or ""

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._specials.values())

    @cached_property
    def sentinel_ids(self) -> list[int]:
        """The ids of <extra_id_0>, <extra_id_1> …"""
        return [self._specials[token] for token in sentinels_of(self._specials)]

    def _role(self, role: str) -> int | None:
        return self._library.token_to_id(self.roles[role]) if role in self.roles else None
