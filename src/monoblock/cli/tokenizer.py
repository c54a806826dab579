"""`monoblock tokenizer`: train one from text files, show how one cuts a text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from monoblock.cli.common import as_json, next_verb, print_json, table
from monoblock.errors import ConfigError, FileError

if TYPE_CHECKING:
    from monoblock.tokenizers.tokenizer import Piece, Tokenizer

BLOCK = 2**16  # characters of a text given to the trainer at once, cut at the end of a line
BACKGROUNDS = ("blue", "green", "magenta", "cyan")
VISIBLE = {"\n": "↵\n", "\t": "→\t"}


# -- reading text ------------------------------------------------------------------------------------------------------


def blocks(names: tuple[str, ...]) -> Iterator[str]:
    """The text of files, `-` for the standard input, in blocks of whole lines."""
    for name in names:
        try:
            if name == "-":
                yield from _cut(sys.stdin)
            else:
                with open(name, encoding="utf-8", newline="") as file:
                    yield from _cut(file)
        except UnicodeDecodeError as problem:
            raise FileError(f"{name} is not UTF-8 text (byte {problem.start}); convert it first") from None
        except OSError as problem:
            raise FileError(f"{name} cannot be read: {problem.strerror or problem}") from None


def _cut(file: Any) -> Iterator[str]:
    gathered: list[str] = []
    size = 0
    for line in file:
        gathered.append(line)
        size += len(line)
        if size >= BLOCK:
            yield "".join(gathered)
            gathered, size = [], 0
    if gathered:
        yield "".join(gathered)


# -- showing -----------------------------------------------------------------------------------------------------------


def summary(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": tokenizer.fingerprint,
        "specials": {role: {"token": token, "id": tokenizer.id(token)} for role, token in tokenizer.roles.items()},
    }


def readable(tokenizer: Tokenizer, piece: Piece, text: str) -> str:
    """The characters a piece covers, or its bytes where it covers a part of a character."""
    raw = tokenizer.bytes_of(piece.id)
    if raw is None:
        return text[piece.start : piece.end] or piece.piece
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(f"<{byte:02X}>" for byte in raw)


def _show_pieces(tokenizer: Tokenizer, text: str, pieces: list[Piece]) -> None:
    shown = [readable(tokenizer, piece, text) for piece in pieces]
    if sys.stdout.isatty():
        for place, piece in enumerate(shown):
            for sign, visible in VISIBLE.items():
                piece = piece.replace(sign, visible)
            click.echo(click.style(piece, fg="black", bg=BACKGROUNDS[place % len(BACKGROUNDS)]), nl=False)
        click.echo()
    else:
        click.echo("|".join(shown))
    click.echo(" ".join(str(piece.id) for piece in pieces))
    rate = f", {len(text) / len(pieces):.2f} characters a piece" if pieces else ""
    click.echo(f"{len(pieces):,} pieces, {len(text):,} characters{rate}")


# -- the commands ------------------------------------------------------------------------------------------------------


@click.group(name="tokenizer", invoke_without_command=True, no_args_is_help=False)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Train a tokenizer; show how one cuts text."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@command.command(name="train", help="Train a tokenizer on text files, or on the standard input (-).")
@click.argument("data", nargs=-1, required=True)
@click.option("--kind", default="bpe", show_default=True, help="char, byte, word, bpe, wordpiece or unigram.")
@click.option("--vocab", type=click.IntRange(min=1), default=4096, show_default=True, help="Tokens, specials included.")
@click.option("--marker", help="Of bpe on characters: @@ (a word goes on) or ▁ (a word begins). [bytes]")
@click.option("--specials", default="causal", show_default=True, help="causal, seq2seq, masked, spans, none or a,b,…")
@click.option("--lowercase", is_flag=True, help="Read capitals as small letters.")
@click.option("--min-frequency", type=click.IntRange(min=1), default=1, show_default=True, help="Leave out rarer ones.")
@click.option("--out", default="runs/tokenizer", show_default=True, help="The folder to write.")
@click.option("--force", is_flag=True, help="Replace the tokenizer of a folder that exists.")
@as_json
def train(data: tuple[str, ...], out: str, force: bool, as_json: bool, **options: Any) -> None:
    if Path(out).exists() and not force:
        raise ConfigError(f"{out} exists; name another folder with --out, or replace its tokenizer with --force")
    from monoblock.tokenizers.specials import NEEDS
    from monoblock.tokenizers.tokenizer import Tokenizer

    wanted = options["specials"]
    tokenizer = Tokenizer.train(
        options["kind"],
        blocks(data),
        options["vocab"],
        marker=options["marker"],
        specials=wanted if wanted in NEEDS else [word for word in wanted.split(",") if word],
        lowercase=options["lowercase"],
        min_frequency=options["min_frequency"],
    )
    tokenizer.save_pretrained(out)
    if as_json:
        print_json({"folder": out, **summary(tokenizer)})
        return
    click.echo(f"Saved {out}: {tokenizer.kind}, {tokenizer.vocab_size:,} tokens, {tokenizer.fingerprint[:12]}")
    next_verb(f'tokenizer show {out} "In the beginning"')


@command.command(name="show", help="Show how the tokenizer of a folder cuts TEXT (- reads the standard input).")
@click.argument("folder")
@click.argument("text", required=False)
@as_json
def show(folder: str, text: str | None, as_json: bool) -> None:
    from monoblock.tokenizers.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(folder)
    text = "".join(blocks(("-",))) if text == "-" else text
    pieces = tokenizer.pieces(text) if text is not None else []
    if as_json:
        rows = [{**piece._asdict(), "text": readable(tokenizer, piece, text or "")} for piece in pieces]
        print_json(summary(tokenizer) | ({"pieces": rows, "characters": len(text)} if text is not None else {}))
        return
    if text is None:
        about = summary(tokenizer)
        click.echo(f"{about['kind']}, {about['vocab_size']:,} tokens, {about['fingerprint'][:12]}")
        if about["specials"]:
            table(("role", "token", "id"), [(role, *one.values()) for role, one in about["specials"].items()])
        next_verb(f'tokenizer show {folder} "In the beginning"')
        return
    _show_pieces(tokenizer, text, pieces)
    next_verb("ls presets")
