"""`monoblock quantize MODEL --bits 8|4 --out DIR`: a smaller model folder, and what it costs in perplexity."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import click

from monoblock.cli.common import as_json, human_bytes, next_verb, print_json, table
from monoblock.cli.train import data_folder
from monoblock.errors import ConfigError, FileError

CORPUS = "kjv"  # the text that is always here
BESIDE = ("generation_config.json", "recipe.toml", "labels.json")  # what makes a model usable
MOST = 50_000


def _progress(what: str) -> Any:
    """A line on stderr every tenth of the way."""
    shown = -1

    def watch(done: int, of: int) -> None:
        nonlocal shown
        if (tenth := min(10, 10 * done // max(of, 1))) > shown:
            shown = tenth
            click.echo(f"{what} {10 * tenth} %", err=True)

    return watch


def tokenizer_of(model: Path) -> Any:
    """The tokenizer beside a model or in its GGUF file, None where there is none."""
    from monoblock.tokenizers.tokenizer import Tokenizer

    try:
        return Tokenizer.from_pretrained(model)
    except FileError:
        return None


def documents(tokenizer: Any, text: str, data: Path | None) -> list[list[int]]:
    """A text as the ids of the model's own tokenizer: a file, or the validation part of a corpus."""
    from monoblock.data import corpora

    split = "all" if Path(text).is_file() else "valid"
    return tokenizer.encode_batch(list(corpora.load(text, split, folder=data).texts()))  # type: ignore[arg-type]


def measured(before: Any, after: Any, given: list[list[int]], most: int) -> dict[str, Any]:
    """Loss and perplexity of both models on one text."""
    from monoblock.quantize.measure import loss

    total = min(most, sum(map(len, given)))
    found = {}
    for name, model in (("before", before), ("after", after)):
        found[name] = loss(model, given, most=most, watch=partial(_progress(f"reading the text, {name}"), of=total))
    old, new = found["before"], found["after"]
    return {
        "tokens": old.tokens,
        "loss": {name: one.nats for name, one in found.items()},
        "perplexity": {name: one.perplexity for name, one in found.items()},
        "perplexity_loss": new.perplexity / old.perplexity - 1,
    }


@click.command(name="quantize", help="Store a model's matrices in 8 or 4 bits; says what that costs in perplexity.")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--bits", type=click.Choice(["8", "4"]), default="8", show_default=True)
@click.option("--group", type=int, help="Weights that share a scale.  [64 at 8 bits, 32 at 4]")
@click.option(
    "--table-bits", type=click.Choice(["8", "4"]), default="8", show_default=True, help="Of tokens and output."
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="The new model folder.")
@click.option("--text", default=CORPUS, show_default=True, help="A text file or a corpus to measure perplexity on.")
@click.option("--data", type=click.Path(path_type=Path, exists=True), help="A folder of corpora, or a text file.")
@click.option("--tokens", type=click.IntRange(min=1), default=MOST, show_default=True, help="Read at most so many.")
@as_json
def command(
    model: Path,
    bits: str,
    group: int | None,
    table_bits: str,
    out: Path,
    text: str,
    data: Path | None,
    tokens: int,
    as_json: bool,
) -> None:
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is there already; name another folder with --out")
    if data is not None and data.is_file():
        text, data = str(data), None
    from monoblock.model import Transformer
    from monoblock.quantize.convert import quantized
    from monoblock.quantize.measure import tensor_bytes

    before = Transformer.from_pretrained(model).eval()
    speaks = before.config.family == "decoder-only" and before.config.head is not None
    tokenizer = tokenizer_of(model)
    given = documents(tokenizer, text, data_folder(data)) if speaks and tokenizer is not None else None
    options: dict[str, Any] = {"bits": int(bits), "group": group, "table_bits": int(table_bits)}
    after = quantized(before, **options, watch=_progress("quantising"))
    found: dict[str, Any] = {"folder": str(out), **options, "group": after.config.quantize.group}  # type: ignore[union-attr]
    found["bytes"] = {"before": tensor_bytes(before), "after": tensor_bytes(after)}
    found |= {"text": text, **measured(before, after, given, tokens)} if given is not None else {}
    save(after, tokenizer, model, out)
    if as_json:
        print_json(found)
    else:
        report(found)
    next_verb(f'generate {out} "In the beginning"' if speaks else f"account {out}")


def save(made: Any, tokenizer: Any, model: Path, out: Path) -> None:
    made.save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    for name in BESIDE:
        if (model / name).is_file():
            try:
                shutil.copyfile(model / name, out / name)
            except OSError as problem:
                raise FileError(f"{name} cannot be copied to {out}: {problem.strerror}") from None


def report(found: dict[str, Any]) -> None:
    size = found["bytes"]
    rows: list[tuple[object, ...]] = [("weights", human_bytes(size["before"]), human_bytes(size["after"]))]
    change = [f"{size['before'] / size['after']:.2f} times smaller"]
    if "perplexity" in found:
        both = found["perplexity"]
        rows.append((f"perplexity on {found['text']}", f"{both['before']:.4f}", f"{both['after']:.4f}"))
        change.append(f"{100 * found['perplexity_loss']:+.3f} %")
    rows = [(*row, said) for row, said in zip(rows, change, strict=True)]
    table(("", "before", f"{found['bits']} bits, groups of {found['group']}", "change"), rows)
    if "perplexity" not in found:
        click.echo("No perplexity: only a decoder with its tokenizer beside it continues a text.", err=True)
    click.echo(f"Saved {found['folder']}")
