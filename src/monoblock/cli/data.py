"""The verbs of data: `data` prepares and shows token shards, `tokenizer` trains and shows a tokenizer."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from monoblock.cli.machine import usable_cores
from monoblock.cli.output import ProgressBar, echo, format_bytes, format_count, print_table, report
from monoblock.cli.verb import REQUIRED, argument, json_option, option, ray_option
from monoblock.errors import ConfigError, FileError
from monoblock.untrusted_files import bounded_lines, open_regular, standard_input

if TYPE_CHECKING:
    from monoblock.data.token_folder import ShardManifest
    from monoblock.tokenizers.tokenizer import Piece, Tokenizer

FIRST_TOKENS = 64  # of a folder that are shown
BLOCK_SIZE = 2**16  # bytes passed to the trainer at once, rounded up to whole lines
MAX_EXAMPLE = 40  # characters of the text in a suggested command
BACKGROUNDS = ("blue", "green", "magenta", "cyan")
VISIBLE_WHITESPACE = {"\n": "↵\n", "\t": "→\t"}


@dataclass(frozen=True, kw_only=True)
class PrepareData:
    """Encode TEXT in parallel and write token shards to the folder --out, to train with data.corpus=FOLDER. TEXT are
    .txt and .jsonl files ({"text": "…"} on each line), also with .gz or .zst, folders of them, or - for standard input.
    If it is interrupted, run the same command again: it continues, and writes the same bytes.
    """

    text: tuple[str, ...] = argument()
    out: Path = option("Folder to write.", REQUIRED)
    tokenizer: str | None = option("Folder of a tokenizer or of a model, or a tokenizer.json.  [default: train one]")
    kind: str | None = option(
        "Algorithm of a new tokenizer: char, byte, word, bpe, wordpiece, unigram.  [default: bpe]"
    )
    vocab: int | None = option("Size of a new vocabulary.  [default: 8192]", least=1)
    documents: Literal["file", "line"] = option(
        "What counts as a document in a .txt file; the end token follows each document.", "file"
    )
    validation: float = option(
        "Share of the documents, or of pieces of a running text, to hold out for validation.",
        0.01,
        least=0,
        most=1,
        is_open=(False, True),
    )
    shard_tokens: int = option("Number of tokens in a file.", 2**27, least=1)
    jobs: int | None = option("Number of processes.  [default: the number of cores]", least=1)
    ray: str | None = ray_option()
    as_json: bool = json_option()

    def run(self) -> None:
        if self.tokenizer is not None and (self.kind is not None or self.vocab is not None):
            raise ConfigError("--kind and --vocab are for a new tokenizer; leave them out, or leave out --tokenizer")
        from monoblock.cli.ray_cluster import connect
        from monoblock.data.prepare import TokenizerPlan, prepare_tokens
        from monoblock.data.token_folder import is_token_folder
        from monoblock.tokenizers.tokenizer import Tokenizer

        loaded = None if self.tokenizer is None else Tokenizer.from_pretrained(self.tokenizer)
        if loaded is None and not is_token_folder(self.out):
            echo(f"Training a {self.kind or 'bpe'} tokenizer on a sample of the text …", err=True)
        bar = ProgressBar("bytes")

        def show_start(total: int | None, done: int) -> None:
            bar.total, bar.done, bar.first, bar.start_time = total, done, done, time.monotonic()
            if done:
                echo(f"{self.out} is not complete; continuing after {format_bytes(done)}", err=True)

        with connect(self.ray) as cluster, bar:
            result = prepare_tokens(
                self.text,
                self.out,
                tokenizer=TokenizerPlan(loaded, self.kind or "bpe", self.vocab or 8192),
                jobs=self.jobs or (usable_cores() if cluster is None else cluster.num_cores),
                workers=None if cluster is None else cluster.encoders,
                documents=self.documents,
                validation=self.validation,
                shard_tokens=self.shard_tokens,
                on_start=show_start,
                on_progress=bar,
            )
        seconds = time.monotonic() - bar.start_time

        def print_result(_: Any) -> None:
            if result.was_complete:
                echo(f"{self.out} is already complete")
            _print_splits(result.manifest)
            if self.validation and result.manifest.valid is None:
                echo("warning: nothing was drawn for validation; write a larger --validation, or 0", err=True)
            rate = format_bytes(int((bar.done - bar.first) / max(1e-9, seconds)))
            echo(f"Saved {self.out}" + ("" if result.was_complete else f" ({rate} per second)"))

        summary = _summary(self.out, result.manifest) | {"seconds": seconds}
        report(self.as_json, summary, print_result, f"train gpt-tiny data.corpus={self.out}")


@dataclass(frozen=True, kw_only=True)
class ShowData:
    """Show the splits, tokenizer and first tokens of a FOLDER that `prepare` wrote."""

    folder: Path = argument()
    split: str = option("Split whose first tokens are shown: train, valid.", "train")
    verify: bool = option("Read all files, and compare their SHA-256 with the manifest.", False)
    as_json: bool = json_option()

    def run(self) -> None:
        from monoblock.data.token_folder import TokenDataset, read_manifest, verify_files
        from monoblock.tokenizers.tokenizer import Tokenizer

        manifest = read_manifest(self.folder)
        tokens = TokenDataset(self.folder, self.split)
        for name in manifest.splits:
            TokenDataset(self.folder, name)  # checks the sizes of the files
        if self.verify:
            with ProgressBar("bytes", sum(path.stat().st_size for path in self.folder.glob("*.bin"))) as bar:
                for files in manifest.splits.values():
                    verify_files(self.folder, files, bar)
        tokenizer = Tokenizer.from_pretrained(self.folder)
        ids = tokens.read(0, min(FIRST_TOKENS, len(tokens))).tolist()
        text = tokenizer.decode(ids)

        def print_result(_: Any) -> None:
            echo(f"{tokenizer.kind}, {manifest.vocab:,} tokens, {(manifest.fingerprint or '')[:12]}, {manifest.dtype}")
            _print_splits(manifest)
            echo(f"The first {len(ids)} tokens of {self.split}: {text!r}")
            if self.verify:
                echo("All files have the SHA-256 of the manifest.")

        result = _summary(self.folder, manifest) | {"verified": self.verify, "first_ids": ids, "first_text": text}
        report(self.as_json, result, print_result, f"train gpt-tiny data.corpus={self.folder}")


def _print_splits(manifest: ShardManifest) -> None:
    rows = []
    for name, files in manifest.splits.items():
        ratio, count = files.bytes / files.tokens, len(files.shards)
        rows.append((name, format_count(files.tokens), files.num_documents, format_bytes(files.bytes), ratio, count))
    print_table(("split", "tokens", "documents", "text", "bytes per token", "files"), rows)


def _summary(folder: Path, manifest: ShardManifest) -> dict[str, Any]:
    splits = {
        name: {
            "tokens": files.tokens,
            "documents": files.num_documents,
            "bytes": files.bytes,
            "unknown": files.unknown,
            "files": [shard.file for shard in files.shards],
        }
        for name, files in manifest.splits.items()
    }
    return {
        "folder": str(folder),
        "vocab": manifest.vocab,
        "dtype": manifest.dtype,
        "fingerprint": manifest.fingerprint,
        "splits": splits,
        "sources": len(manifest.settings.sources) if manifest.settings is not None else None,
    }


@dataclass(frozen=True, kw_only=True)
class TrainTokenizer:
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
class ShowTokenizer:
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


def read_blocks(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the text of files in blocks of whole lines; the name `-` means standard input."""
    for name in names:
        is_file = name != "-"
        try:
            with open_regular(name) if is_file else nullcontext(standard_input()) as file:
                lines: list[bytes] = []
                size = 0
                for line in bounded_lines(file, name if is_file else "standard input"):
                    lines.append(line)
                    size += len(line)
                    if size >= BLOCK_SIZE:
                        yield b"".join(lines).decode()
                        lines, size = [], 0
                if lines:
                    yield b"".join(lines).decode()
        except UnicodeDecodeError as problem:
            raise FileError(f"{name} is not UTF-8 text (see byte {problem.start}); convert it to UTF-8 first") from None
        except OSError as problem:
            raise FileError(f"{name} cannot be read: {problem.strerror or problem}") from None


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


COMMANDS = {
    "data": {"prepare": PrepareData, "show": ShowData},
    "tokenizer": {"train": TrainTokenizer, "show": ShowTokenizer},
}
