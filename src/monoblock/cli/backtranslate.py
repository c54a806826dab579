"""`monoblock backtranslate MODEL MONOLINGUAL --out FILE`: sources for target sentences, made by the other direction."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click

from monoblock.cli.common import as_json, next_verb, print_json
from monoblock.cli.speaking import device, dtype, load
from monoblock.errors import ConfigError, FileError

TOLD_EVERY = 5.0  # seconds


@click.command(name="backtranslate", help="Make a source for each line of MONOLINGUAL (- is standard input).")
@click.argument("model")
@click.argument("monolingual")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The file of pairs, source<TAB>target.")
@click.option("--method", default="beam", show_default=True, help="beam, sample, restricted or noised.")
@click.option("--noise", help="With --method noised: permutation, drop, blank, with commas.  [all three]")
@click.option("--tag", is_flag=True, help="Put <bt> at the head of every made source.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True)
@click.option("--num-beams", type=click.IntRange(min=1), help="Of beam and noised.  [5]")
@click.option("--top-k", type=click.IntRange(min=1), help="Of restricted.  [10]")
@click.option("--limit", type=click.IntRange(min=1), help="Only so many lines.")
@click.option(
    "--batch-size", "--batch", type=click.IntRange(min=1), default=64, show_default=True, help="Lines at once."
)
@device
@dtype
@as_json
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
    batch_size: int,
    device: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    from monoblock.tasks.backtranslation import Method, backtranslate, write_pairs

    kinds = tuple(word.strip() for word in noise.split(",")) if noise else ()
    how = Method(method, kinds, tag)
    if out.exists():
        raise ConfigError(f"{out} is there already; name another with --out, or remove it")
    if (num_beams and method in ("sample", "restricted")) or (top_k and method != "restricted"):
        raise ConfigError(f"--method {method} has no {'beams' if num_beams else 'top-k'}; leave the option out")
    lines = islice(_lines(monolingual), limit)
    pipe = load(model, device, dtype)
    options: dict[str, Any] = {key: value for key, value in (("num_beams", num_beams), ("top_k", top_k)) if value}
    made = backtranslate(pipe, lines, how, seed=seed, batch=batch_size, **options)
    count, missing = write_pairs(out, _told(made))
    if as_json:
        print_json({"file": str(out), "pairs": count, "left_out": missing, "method": method, "noise": list(how.noise)})
    else:
        left = f"; {missing:,} lines were empty or beyond the context and are left out" if missing else ""
        click.echo(f"Saved {out}: {count:,} pairs{left}")
    next_verb(f"train RECIPE data.synthetic={shlex.quote(str(out))} data.ratio=1")


def _lines(monolingual: str) -> Iterable[str]:
    if monolingual == "-":
        from monoblock.tasks.lines import decoded

        return decoded(sys.stdin.buffer, "standard input")
    from monoblock.data.readers import read_lines

    if not Path(monolingual).is_file():
        raise FileError(f"there is no file {monolingual}; give a text with a sentence a line")
    return read_lines(monolingual)


def _told(pairs: Iterable[Any]) -> Iterator[Any]:
    """A plain line now and then."""
    since = told = time.monotonic()
    for number, pair in enumerate(pairs, 1):
        if time.monotonic() - told >= TOLD_EVERY:
            told = time.monotonic()
            click.echo(f"{number:,} lines, {number / (told - since):.0f} a second", err=True)
        yield pair
