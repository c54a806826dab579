"""`monoblock tokenizer`: train a tokenizer on text files, or show how a tokenizer splits a text."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from monoblock.cli._shared.output import echo, json_option, print_json, print_table, suggest_next
from monoblock.errors import ConfigError, FileError
from monoblock.untrusted_files import bounded_lines, open_regular, standard_input

if TYPE_CHECKING:
    from monoblock.tokenizers.tokenizer import Piece, Tokenizer

BLOCK_SIZE = 2**16  # bytes passed to the trainer at once, rounded up to whole lines
MAX_EXAMPLE = 40  # characters of the text in a suggested command
BACKGROUNDS = ("blue", "green", "magenta", "cyan")
VISIBLE_WHITESPACE = {"\n": "↵\n", "\t": "→\t"}


# -- reading text ------------------------------------------------------------------------------------------------------


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


# -- printing ----------------------------------------------------------------------------------------------------------


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


def _print_pieces(tokenizer: Tokenizer, text: str, pieces: list[Piece]) -> None:
    texts = [piece_text(tokenizer, piece, text) for piece in pieces]
    if sys.stdout.isatty():
        for index, piece_string in enumerate(texts):
            for character, visible in VISIBLE_WHITESPACE.items():
                piece_string = piece_string.replace(character, visible)
            echo(piece_string, nl=False, fg="black", bg=BACKGROUNDS[index % len(BACKGROUNDS)])
        echo()
    else:
        echo("|".join(texts))
    echo(" ".join(str(piece.id) for piece in pieces))
    rate = f", {len(text) / len(pieces):.2f} characters per piece" if pieces else ""
    echo(f"{len(pieces):,} pieces, {len(text):,} characters{rate}")


# -- the commands ------------------------------------------------------------------------------------------------------


@click.group(name="tokenizer", invoke_without_command=True, no_args_is_help=False)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Train a tokenizer, or show how a tokenizer splits a text."""
    if ctx.invoked_subcommand is None:
        echo(ctx.get_help())


@command.command(name="train", help="Train a tokenizer on DATA: text files, or - for standard input.")
@click.argument("data", nargs=-1, required=True)
@click.option("--kind", default="bpe", show_default=True, help="Algorithm: char, byte, word, bpe, wordpiece, unigram.")
@click.option(
    "--vocab",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Size of the vocabulary, special tokens included.",
)
@click.option(
    "--marker",
    help="Train BPE on characters instead of bytes, with one of two marks: @@ after every piece but the last of a "
    "word, or ▁ before the first piece of a word.",
)
@click.option(
    "--specials",
    default="causal_lm",
    show_default=True,
    help="Special tokens: those of an objective (causal_lm, seq2seq, masked_lm, span_corruption, none), "
    "or a list such as pad,eos.",
)
@click.option("--lowercase", is_flag=True, help="Convert all text to lower case before encoding it.")
@click.option(
    "--min-frequency",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Leave out tokens that are rarer than this.",
)
@click.option("--out", default="runs/tokenizer", show_default=True, help="Folder to write.")
@click.option("--force", is_flag=True, help="Write even if the folder --out exists already.")
@json_option
def train(data: tuple[str, ...], out: str, force: bool, as_json: bool, **options: Any) -> None:
    if Path(out).exists() and not force:
        raise ConfigError(f"{out} already exists; give another folder with --out, or overwrite it with --force")
    from monoblock.tokenizers.special_tokens import ROLES_BY_OBJECTIVE
    from monoblock.tokenizers.tokenizer import Tokenizer

    specials = options["specials"]
    is_objective = specials in ROLES_BY_OBJECTIVE
    tokenizer = Tokenizer.train(
        options["kind"],
        read_blocks(data),
        options["vocab"],
        marker=options["marker"],
        specials=specials if is_objective else [name for name in specials.split(",") if name],
        lowercase=options["lowercase"],
        min_frequency=options["min_frequency"],
    )
    tokenizer.save_pretrained(out)
    if as_json:
        print_json({"folder": out, **describe_tokenizer(tokenizer)})
        return
    echo(f"Saved {out}: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, {tokenizer.fingerprint[:12]}")
    words = " ".join(next(read_blocks(data), "").split()[:3]) if "-" not in data else "TEXT"
    suggest_next(f"tokenizer show {shlex.quote(out)} {shlex.quote(words[:MAX_EXAMPLE] or 'TEXT')}")


@command.command(
    name="show",
    help="Show how the tokenizer in FOLDER splits TEXT (- reads standard input); without TEXT, describe it.",
)
@click.argument("folder")
@click.argument("text", required=False)
@json_option
def show(folder: str, text: str | None, as_json: bool) -> None:
    from monoblock.tokenizers.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(folder)
    text = "".join(read_blocks(("-",))) if text == "-" else text
    pieces = tokenizer.pieces(text) if text is not None else []
    if as_json:
        rows = [{**piece._asdict(), "text": piece_text(tokenizer, piece, text or "")} for piece in pieces]
        print_json(
            describe_tokenizer(tokenizer) | ({"pieces": rows, "characters": len(text)} if text is not None else {})
        )
        return
    if text is None:
        description = describe_tokenizer(tokenizer)
        specials = description["specials"]
        echo(f"{description['kind']}, {description['vocab_size']:,} tokens, {description['fingerprint'][:12]}")
        if specials:
            print_table(("role", "token", "id"), [(role, *token.values()) for role, token in specials.items()])
        suggest_next(f"tokenizer show {shlex.quote(folder)} TEXT")
        return
    _print_pieces(tokenizer, text, pieces)
    suggest_next("ls presets")
