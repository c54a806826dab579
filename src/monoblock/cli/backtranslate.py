"""`monoblock backtranslate MODEL MONOLINGUAL --out FILE`: generate a synthetic source for each target sentence."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from monoblock.cli.lines import read_lines
from monoblock.cli.model_options import device_option, dtype_option, load_pipeline
from monoblock.cli.output import ProgressBar, echo, report
from monoblock.cli.verb import REQUIRED, argument, json_option, option
from monoblock.errors import ConfigError, FileError


@dataclass(frozen=True, kw_only=True)
class Backtranslate:
    """Make synthetic training pairs from sentences in the target language.

    MONOLINGUAL is a text file with one target sentence per line, or - for standard input. MODEL translates from the
    target language into the source language; it generates the source of each pair. `monoblock train` reads the pairs
    with seq2seq.synthetic=FILE.
    """

    model: str = argument()
    monolingual: str = argument()
    out: Path = option("File to write: source<TAB>target on each line.", REQUIRED)
    method: str = option(
        "How sources are generated: beam (beam search), sample, restricted (sample from the top k tokens) or noised "
        "(beam search, then noise).",
        "beam",
    )
    noise: str | None = option(
        "With --method noised: one or more of permutation, drop, blank, separated by commas.  [default: all three]"
    )
    tag: bool = option("Put the tag <bt> before every generated source.", False)
    seed: int = option("Seed of the sampling and the noise.", 1, least=0)
    num_beams: int | None = option("With --method beam or noised: number of beams.  [default: 5]", least=1)
    top_k: int | None = option(
        "With --method restricted: sample from the k most probable tokens.  [default: 10]", least=1
    )
    limit: int | None = option("Use only the first N lines.", least=1)
    batch_size: int | None = option(
        "Batch size in lines.  [default: 64, or as many as suit a GPU]", flags=("--batch-size", "--batch"), least=1
    )
    device: str | None = device_option()
    dtype: str | None = dtype_option()
    as_json: bool = json_option()

    def run(self) -> None:
        from monoblock.tasks.backtranslation import BacktranslationMethod, backtranslate, write_pairs

        noises = tuple(name.strip() for name in self.noise.split(",")) if self.noise else ()
        method = BacktranslationMethod(self.method, noises, self.tag)
        if self.out.exists():
            raise ConfigError(f"{self.out} already exists; give another file with --out, or remove this one")
        if (self.num_beams and self.method in ("sample", "restricted")) or (self.top_k and self.method != "restricted"):
            name = "--num-beams" if self.num_beams else "--top-k"
            raise ConfigError(f"{name} has no effect with --method {self.method}; leave it out")
        sentences = islice(_read_sentences(self.monolingual), self.limit)
        pipe = load_pipeline(self.model, self.device, self.dtype)
        given = {"num_beams": self.num_beams, "top_k": self.top_k}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        pairs = backtranslate(pipe.loaded, sentences, method, seed=self.seed, batch=self.batch_size, **options)
        count, skipped = write_pairs(self.out, _with_progress(pairs))
        result = {"file": str(self.out), "pairs": count, "left_out": skipped, "method": self.method}
        report(
            self.as_json,
            result | {"noise": list(method.noise)},
            _print_result,
            f"train RECIPE seq2seq.synthetic={shlex.quote(str(self.out))} seq2seq.synthetic_ratio=1",
        )


def _print_result(result: dict[str, Any]) -> None:
    skipped = result["left_out"]
    note = f"; skipped {skipped:,} lines that are empty or longer than the context" if skipped else ""
    echo(f"Saved {result['file']}: {result['pairs']:,} pairs{note}")


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
