"""`monoblock data`: prepare token shards from any amount of text, or show and verify such a folder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from monoblock.cli.env import usable_cores
from monoblock.cli.output import ProgressBar, echo, format_bytes, format_count, print_table, report
from monoblock.cli.verb import REQUIRED, argument, json_option, option
from monoblock.errors import ConfigError

if TYPE_CHECKING:
    from monoblock.data.token_folder import ShardManifest

FIRST_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Encode TEXT in parallel and write token shards to the folder --out, to train with data.corpus=FOLDER. TEXT are
    .txt and .jsonl files ({"text": "…"} on each line), also with .gz or .zst, folders of them, or - for standard input.
    If it is interrupted, run the same command again: it goes on, and writes the same bytes.
    """

    text: tuple[str, ...] = argument()
    out: Path = option("Folder to write.", REQUIRED)
    tokenizer: str | None = option("Folder of a tokenizer or of a model, or a tokenizer.json.  [default: train one]")
    kind: str | None = option(
        "Algorithm of a new tokenizer: char, byte, word, bpe, wordpiece, unigram.  [default: bpe]"
    )
    vocab: int | None = option("Size of a new vocabulary.  [default: 8192]", least=1)
    documents: Literal["file", "line"] = option(
        "What a document of a .txt file is; the end token follows each document.", "file"
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
    as_json: bool = json_option()

    def run(self) -> None:
        if self.tokenizer is not None and (self.kind is not None or self.vocab is not None):
            raise ConfigError("--kind and --vocab are for a new tokenizer; leave them out, or leave out --tokenizer")
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
                echo(f"{self.out} is not complete; going on after {format_bytes(done)}", err=True)

        with bar:
            result = prepare_tokens(
                self.text,
                self.out,
                tokenizer=TokenizerPlan(loaded, self.kind or "bpe", self.vocab or 8192),
                jobs=self.jobs or usable_cores(),
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
class Show:
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


COMMANDS = {"prepare": Prepare, "show": Show}


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
