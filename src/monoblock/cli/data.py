"""`monoblock data`: prepare token shards from any amount of text, or show and verify such a folder."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from monoblock.cli._shared.number_types import NumberRange
from monoblock.cli._shared.output import (
    echo,
    format_bytes,
    format_count,
    json_option,
    print_json,
    print_table,
    suggest_next,
)
from monoblock.cli._shared.progress import ProgressBar
from monoblock.errors import ConfigError

if TYPE_CHECKING:
    from monoblock.data.batching.manifest import ShardManifest

FIRST_TOKENS = 64


@click.group(name="data", invoke_without_command=True, no_args_is_help=False)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Prepare token shards from any amount of text, or show them."""
    if ctx.invoked_subcommand is None:
        echo(ctx.get_help())


@command.command(
    name="prepare",
    help="Encode TEXT in parallel and write token shards to the folder --out, to train with data.corpus=FOLDER. TEXT "
    'are .txt and .jsonl files ({"text": "…"} on each line), also with .gz or .zst, folders of them, or - for '
    "standard input. If it is interrupted, run the same command again: it goes on, and writes the same bytes.",
)
@click.argument("text", nargs=-1, required=True)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--tokenizer", help="Folder of a tokenizer or of a model, or a tokenizer.json.  [default: train one]")
@click.option("--kind", help="Algorithm of a new tokenizer: char, byte, word, bpe, wordpiece, unigram.  [default: bpe]")
@click.option("--vocab", type=click.IntRange(min=1), help="Size of a new vocabulary.  [default: 8192]")
@click.option(
    "--documents",
    type=click.Choice(["file", "line"]),
    default="file",
    show_default=True,
    help="What a document of a .txt file is; the end token follows each document.",
)
@click.option(
    "--validation",
    type=NumberRange(0, 1, max_open=True),
    default=0.01,
    show_default=True,
    help="Share of the documents, or of pieces of a running text, to hold out for validation.",
)
@click.option(
    "--shard-tokens", type=click.IntRange(min=1), default=2**27, show_default=True, help="Number of tokens in a file."
)
@click.option("--jobs", type=click.IntRange(min=1), help="Number of processes.  [default: the number of cores]")
@json_option
def prepare(
    text: tuple[str, ...],
    out: Path,
    tokenizer: str | None,
    kind: str | None,
    vocab: int | None,
    jobs: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    if tokenizer is not None and (kind is not None or vocab is not None):
        raise ConfigError("--kind and --vocab are for a new tokenizer; leave them out, or leave out --tokenizer")
    from monoblock.data.batching.manifest import is_token_folder
    from monoblock.data.preparation.prepare import TokenizerPlan, prepare_tokens
    from monoblock.tokenizers.tokenizer import Tokenizer

    loaded = None if tokenizer is None else Tokenizer.from_pretrained(tokenizer)
    jobs = len(os.sched_getaffinity(0)) if jobs is None and hasattr(os, "sched_getaffinity") else jobs
    if loaded is None and not is_token_folder(out):
        echo(f"Training a {kind or 'bpe'} tokenizer on a sample of the text …", err=True)
    bar = ProgressBar("bytes")

    def show_start(total: int | None, done: int) -> None:
        bar.total, bar.done, bar.first, bar.start_time = total, done, done, time.monotonic()
        if done:
            echo(f"{out} is not complete; going on after {format_bytes(done)}", err=True)

    with bar:
        result = prepare_tokens(
            text,
            out,
            tokenizer=TokenizerPlan(loaded, kind or "bpe", vocab or 8192),
            jobs=jobs or os.cpu_count() or 1,
            on_start=show_start,
            on_progress=bar,
            **options,
        )
    seconds, summary = time.monotonic() - bar.start_time, _summary(out, result.manifest)
    if as_json:
        print_json(summary | {"seconds": seconds})
        return
    if result.was_complete:
        echo(f"{out} is already complete")
    _print_splits(result.manifest)
    if options["validation"] and result.manifest.valid is None:
        echo("warning: nothing was drawn for validation; write a larger --validation, or 0", err=True)
    rate = (bar.done - bar.first) / max(1e-9, seconds)
    echo(f"Saved {out}" + ("" if result.was_complete else f" ({format_bytes(int(rate))} per second)"))
    suggest_next(f"train gpt-tiny data.corpus={out}")


@command.command(name="show", help="Show the splits, tokenizer and first tokens of a FOLDER that `prepare` wrote.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--split", default="train", show_default=True, help="Split whose first tokens are shown: train, valid.")
@click.option("--verify", is_flag=True, help="Read all files, and compare their SHA-256 with the manifest.")
@json_option
def show(folder: Path, split: str, verify: bool, as_json: bool) -> None:
    from monoblock.data.batching.manifest import read_manifest, verify_files
    from monoblock.data.batching.shards import TokenDataset
    from monoblock.tokenizers.tokenizer import Tokenizer

    manifest = read_manifest(folder)
    tokens = TokenDataset(folder, split)
    for name in manifest.splits:
        TokenDataset(folder, name)  # checks the sizes of the files
    if verify:
        with ProgressBar("bytes", sum(path.stat().st_size for path in folder.glob("*.bin"))) as bar:
            for files in manifest.splits.values():
                verify_files(folder, files, bar)
    tokenizer = Tokenizer.from_pretrained(folder)
    ids = tokens.read(0, min(FIRST_TOKENS, len(tokens))).tolist()
    text = tokenizer.decode(ids)
    if as_json:
        print_json(_summary(folder, manifest) | {"verified": verify, "first_ids": ids, "first_text": text})
        return
    echo(f"{tokenizer.kind}, {manifest.vocab:,} tokens, {(manifest.fingerprint or '')[:12]}, {manifest.dtype}")
    _print_splits(manifest)
    echo(f"The first {len(ids)} tokens of {split}: {text!r}")
    if verify:
        echo("All files have the SHA-256 of the manifest.")
    suggest_next(f"train gpt-tiny data.corpus={folder}")


def _print_splits(manifest: ShardManifest) -> None:
    columns = ("split", "tokens", "documents", "text", "bytes per token", "files")
    rows = [
        (
            name,
            format_count(files.tokens),
            files.num_documents,
            format_bytes(files.bytes),
            files.bytes / files.tokens,
            len(files.shards),
        )
        for name, files in manifest.splits.items()
    ]
    print_table(columns, rows)


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
