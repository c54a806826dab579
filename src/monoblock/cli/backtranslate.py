"""`monoblock backtranslate MODEL MONOLINGUAL --out FILE`: generate a synthetic source for each target sentence."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click

from monoblock.cli._shared.decoding_options import drop_unset
from monoblock.cli._shared.line_reader import read_lines
from monoblock.cli._shared.model_options import device_option, dtype_option, load_pipeline
from monoblock.cli._shared.output import echo, json_option, print_json, suggest_next
from monoblock.cli._shared.progress import ProgressBar
from monoblock.errors import ConfigError, FileError


@click.command(
    name="backtranslate",
    help="Make synthetic training pairs from sentences in the target language.\n\nMONOLINGUAL is a text file with one "
    "target sentence per line, or - for standard input. MODEL translates from the target language into the source "
    "language; it generates the source of each pair. `monoblock train` reads the pairs with seq2seq.synthetic=FILE.",
)
@click.argument("model")
@click.argument("monolingual")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="File to write: source<TAB>target on each line."
)
@click.option(
    "--method",
    default="beam",
    show_default=True,
    help="How sources are generated: beam (beam search), sample, restricted (sample from the top k tokens) or noised "
    "(beam search, then noise).",
)
@click.option(
    "--noise",
    help="With --method noised: one or more of permutation, drop, blank, separated by commas.  [default: all three]",
)
@click.option("--tag", is_flag=True, help="Put the tag <bt> before every generated source.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Seed of the sampling and the noise."
)
@click.option(
    "--num-beams", type=click.IntRange(min=1), help="With --method beam or noised: number of beams.  [default: 5]"
)
@click.option(
    "--top-k",
    type=click.IntRange(min=1),
    help="With --method restricted: sample from the k most probable tokens.  [default: 10]",
)
@click.option("--limit", type=click.IntRange(min=1), help="Use only the first N lines.")
@click.option(
    "--batch-size",
    "--batch",
    type=click.IntRange(min=1),
    help="Batch size in lines.  [default: 64, or as many as suit a GPU]",
)
@device_option
@dtype_option
@json_option
def command(
    model: str,
    monolingual: str,
    out: Path,
    method: str,
    noise: str | None,
    tag: bool,
    seed: int,
    num_beams: int | None,
    top_k: int | None,
    limit: int | None,
    batch_size: int | None,
    device: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    from monoblock.tasks.backtranslation import BacktranslationMethod, backtranslate, write_pairs

    noises = tuple(name.strip() for name in noise.split(",")) if noise else ()
    backtranslation = BacktranslationMethod(method, noises, tag)
    if out.exists():
        raise ConfigError(f"{out} already exists; give another file with --out, or remove this one")
    if (num_beams and method in ("sample", "restricted")) or (top_k and method != "restricted"):
        option = "--num-beams" if num_beams else "--top-k"
        raise ConfigError(f"{option} has no effect with --method {method}; leave it out")
    sentences = islice(_read_sentences(monolingual), limit)
    pipe = load_pipeline(model, device, dtype)
    options: dict[str, Any] = drop_unset({"num_beams": num_beams, "top_k": top_k})
    pairs = backtranslate(pipe.loaded, sentences, backtranslation, seed=seed, batch=batch_size, **options)
    count, skipped = write_pairs(out, _with_progress(pairs))
    if as_json:
        noise_list = list(backtranslation.noise)
        print_json({"file": str(out), "pairs": count, "left_out": skipped, "method": method, "noise": noise_list})
    else:
        note = f"; skipped {skipped:,} lines that are empty or longer than the context" if skipped else ""
        echo(f"Saved {out}: {count:,} pairs{note}")
    suggest_next(f"train RECIPE seq2seq.synthetic={shlex.quote(str(out))} seq2seq.synthetic_ratio=1")


def _read_sentences(monolingual: str) -> Iterable[str]:
    if monolingual == "-":
        return read_lines()
    from monoblock.data.readers import text

    if not Path(monolingual).is_file():
        raise FileError(f"there is no file {monolingual}; give a text file with one sentence per line")
    return text.read_lines(monolingual)


def _with_progress(pairs: Iterable[Any]) -> Iterator[Any]:
    with ProgressBar("lines") as progress:
        for pair in pairs:
            progress(1)
            yield pair
