"""`monoblock tokenizer`: train a tokenizer on text files, or show how a tokenizer splits a text."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from monoblock.cli.output import echo, print_table, report
from monoblock.cli.verb import argument, json_option, option
from monoblock.errors import ConfigError, FileError
from monoblock.untrusted_files import bounded_lines, open_regular, standard_input

if TYPE_CHECKING:
    from monoblock.tokenizers.tokenizer import Piece, Tokenizer

BLOCK_SIZE = 2**16  # bytes passed to the trainer at once, rounded up to whole lines
MAX_EXAMPLE = 40  # characters of the text in a suggested command
BACKGROUNDS = ("blue", "green", "magenta", "cyan")
VISIBLE_WHITESPACE = {"\n": "↵\n", "\t": "→\t"}


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a tokenizer on DATA: text files, or - for standard input."""

    data: tuple[str, ...] = argument()
    kind: str = option("Algorithm: char, byte, word, bpe, wordpiece, unigram.", "bpe")
    vocab: int = option("Size of the vocabulary, special tokens included.", 4096, least=1)
    marker: str | None = option(
        "Train BPE on characters instead of bytes, with one of two marks: @@ after every piece but the last of a "
        "word, or ▁ before the first piece of a word."
    )
    specials: str = option(
        "Special tokens: those of an objective (causal_lm, seq2seq, masked_lm, span_corruption, none), "
        "or a list such as pad,eos.",
        "causal_lm",
    )
    lowercase: bool = option("Convert all text to lower case before encoding it.", False)
    min_frequency: int = option("Leave out tokens that are rarer than this.", 1, least=1)
    out: str = option("Folder to write.", "runs/tokenizer")
    force: bool = option("Write even if the folder --out exists already.", False)
    as_json: bool = json_option()

    def run(self) -> None:
        if Path(self.out).exists() and not self.force:
            raise ConfigError(
                f"{self.out} already exists; give another folder with --out, or overwrite it with --force"
            )
        from monoblock.tokenizers.special_tokens import ROLES_BY_OBJECTIVE
        from monoblock.tokenizers.tokenizer import Tokenizer

        names = [name for name in self.specials.split(",") if name]
        tokenizer = Tokenizer.train(
            self.kind,
            read_blocks(self.data),
            self.vocab,
            marker=self.marker,
            specials=self.specials if self.specials in ROLES_BY_OBJECTIVE else names,
            lowercase=self.lowercase,
            min_frequency=self.min_frequency,
        )
        tokenizer.save_pretrained(self.out)
        words = " ".join(next(read_blocks(self.data), "").split()[:3]) if "-" not in self.data else "TEXT"
        example = shlex.quote(words[:MAX_EXAMPLE] or "TEXT")
        summary = f"Saved {self.out}: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, {tokenizer.fingerprint[:12]}"
        result = {"folder": self.out, **describe_tokenizer(tokenizer)}
        report(self.as_json, result, lambda _: echo(summary), f"tokenizer show {shlex.quote(self.out)} {example}")


@dataclass(frozen=True, kw_only=True)
class Show:
    """Show how the tokenizer in FOLDER splits TEXT (- reads standard input); without TEXT, describe it."""

    folder: str = argument()
    text: str | None = argument(None)
    as_json: bool = json_option()

    def run(self) -> None:
        from monoblock.tokenizers.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_pretrained(self.folder)
        description = describe_tokenizer(tokenizer)
        if self.text is None:
            report(self.as_json, description, _print_description, f"tokenizer show {shlex.quote(self.folder)} TEXT")
            return
        text = "".join(read_blocks(("-",))) if self.text == "-" else self.text
        pieces = [{**piece._asdict(), "text": piece_text(tokenizer, piece, text)} for piece in tokenizer.pieces(text)]
        result = description | {"pieces": pieces, "characters": len(text)}
        report(self.as_json, result, _print_pieces, "ls presets")


COMMANDS = {"train": Train, "show": Show}


def read_blocks(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the text of files in blocks of whole lines; the name `-` means standard input."""
    for name in names:
        try:
            if name == "-":
                yield from _split_blocks(standard_input(), "standard input")
            else:
                with open_regular(name) as file:
                    yield from _split_blocks(file, name)
        except UnicodeDecodeError as problem:
            raise FileError(f"{name} is not UTF-8 text (see byte {problem.start}); convert it to UTF-8 first") from None
        except OSError as problem:
            raise FileError(f"{name} cannot be read: {problem.strerror or problem}") from None


def _split_blocks(file: BinaryIO, name: str) -> Iterator[str]:
    lines: list[bytes] = []
    size = 0
    for line in bounded_lines(file, name):
        lines.append(line)
        size += len(line)
        if size >= BLOCK_SIZE:
            yield b"".join(lines).decode()
            lines, size = [], 0
    if lines:
        yield b"".join(lines).decode()


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": tokenizer.fingerprint,
        "specials": {
            role: {"token": token, "id": tokenizer.id(token)} for role, token in tokenizer.special_tokens_map.items()
        },
    }


def piece_text(tokenizer: Tokenizer, piece: Piece, text: str) -> str:
    """Return the text of a piece; if it is only a part of a UTF-8 character, return its bytes in the form <E2><82>."""
    raw = tokenizer.token_bytes(piece.id)
    if raw is None:
        return text[piece.start : piece.end] or piece.piece
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(f"<{byte:02X}>" for byte in raw)


def _print_description(description: dict[str, Any]) -> None:
    echo(f"{description['kind']}, {description['vocab_size']:,} tokens, {description['fingerprint'][:12]}")
    if specials := description["specials"]:
        print_table(("role", "token", "id"), [(role, *token.values()) for role, token in specials.items()])


def _print_pieces(result: dict[str, Any]) -> None:
    pieces, count = result["pieces"], result["characters"]
    if sys.stdout.isatty():
        for index, piece in enumerate(pieces):
            text = piece["text"]
            for character, visible in VISIBLE_WHITESPACE.items():
                text = text.replace(character, visible)
            echo(text, nl=False, fg="black", bg=BACKGROUNDS[index % len(BACKGROUNDS)])
        echo()
    else:
        echo("|".join(piece["text"] for piece in pieces))
    echo(" ".join(str(piece["id"]) for piece in pieces))
    rate = f", {count / len(pieces):.2f} characters per piece" if pieces else ""
    echo(f"{len(pieces):,} pieces, {count:,} characters{rate}")
