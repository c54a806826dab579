"""`monoblock translate MODEL [TEXT]`: translate lines of text, and print the results in the same order."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from monoblock.cli.lines import chunk_lines, read_lines
from monoblock.cli.model_options import (
    ONE_TARGET,
    decoding_options,
    device_option,
    dtype_option,
    ensemble_option,
    force_option,
    load_pipeline,
    resolve_settings,
)
from monoblock.cli.output import dump_json, echo, suggest_next
from monoblock.cli.verb import argument, json_option, option
from monoblock.errors import ConfigError, InputError

if TYPE_CHECKING:
    from monoblock.runs.pipeline import Pipeline
    from monoblock.tasks.loaded_model import Hypothesis

SCORE_DECIMALS = 4  # the digits that do not depend on the batch size
RERANKED_HYPOTHESES = 5  # with --words, the best of this many hypotheses per line is printed


@dataclass(frozen=True, kw_only=True)
class Translate:
    """Translate TEXT, or each line of standard input; empty lines stay empty."""

    model: str = argument()
    text: str | None = argument(None)
    decoding: dict[str, Any] = decoding_options(ONE_TARGET)
    n_best: int | None = option("Print N hypotheses per line, with scores.", least=1)
    alignment: bool = option("Also print the word alignment: source-target word indices, as in 0-0 2-1.", False)
    to: str | None = option("Target script, for a model that writes several: devanagari, tamil, latin, …")
    long: Literal["refuse", "split"] = option(
        "Refuse a line that is longer than the context, or split it into sentences.", "refuse"
    )
    words: Path | None = option(
        "Rerank the hypotheses by the word frequencies in this file, which `evaluate --save-words` writes."
    )
    batch_size: int | None = option(
        "Batch size in lines.  [default: 64, or as many as suit a GPU]", flags=("--batch-size", "--batch"), least=1
    )
    ensemble: tuple[str, ...] = ensemble_option()
    device: str | None = device_option()
    dtype: str | None = dtype_option()
    force: bool = force_option()
    as_json: bool = json_option("Print one JSON object per line.")

    def run(self) -> None:
        from monoblock.tasks.word_frequencies import WordFrequencies

        pipe = load_pipeline(self.model, self.device, self.dtype, force=self.force, ensemble=self.ensemble)
        resolve_settings(pipe, self.decoding)
        if pipe.model.encoder is None:
            name = shlex.quote(self.model)
            raise ConfigError(
                f"{self.model} is not an encoder-decoder, so it cannot translate; use monoblock generate {name}"
            )
        frequencies = None if self.words is None else WordFrequencies.read(self.words)
        truncated = 0
        for first, sources in chunk_lines(read_lines([self.text] if self.text is not None else ())):
            for source, hypotheses in zip(sources, self._translate_lines(pipe, sources, first), strict=True):
                truncated += hypotheses[0].finish_reason in ("length", "context")
                ranked = hypotheses if frequencies is None else frequencies.rerank(hypotheses)
                self._print_hypotheses(pipe, source, ranked[: self.n_best or 1])
            sys.stdout.flush()
        if truncated:
            echo(f"warning: {truncated} targets were cut off at the length limit; raise --max-new-tokens", err=True)
        if self.text is not None:
            suggest_next(f"evaluate {shlex.quote(self.model)} DATA")

    def _translate_lines(self, pipe: Pipeline, lines: list[str], first: int) -> list[list[Hypothesis]]:
        from monoblock.tasks.loaded_model import Hypothesis

        n_best = self.n_best or (RERANKED_HYPOTHESES if self.words is not None else 1)
        options = self.decoding | {"batch": self.batch_size, "to": self.to, "long": self.long, "first_index": first}
        if self.decoding.get("temperature"):
            if n_best > 1:
                raise ConfigError(
                    "--n-best needs beam search, but --temperature turns on sampling; leave out one of them"
                )
            return [[Hypothesis(text, finish_reason="stop")] for text in pipe.translate(lines, **options)]
        try:
            return pipe.translate(lines, n_best=n_best, **options)
        except InputError as problem:  # name the command-line option instead of the Python argument
            raise InputError(str(problem).replace("long='split'", "--long split")) from None

    def _print_hypotheses(self, pipe: Pipeline, source: str, hypotheses: list[Hypothesis]) -> None:
        """Print the hypotheses of a source, as lines of text or as one JSON object."""
        from monoblock.tasks.word_alignment import align, format_pharaoh

        rows: list[dict[str, Any]] = []
        for hypothesis in hypotheses:
            score = None if hypothesis.score is None else round(hypothesis.score, SCORE_DECIMALS)
            row: dict[str, Any] = {"text": hypothesis.text, "score": score}
            if self.alignment:
                row["alignment"] = format_pharaoh(align(pipe.loaded, source, hypothesis.text, self.to))
            rows.append(row)
        if self.as_json:
            echo(dump_json({"source": source, "hypotheses": rows}))
            return
        for row in rows:
            cells = [] if self.n_best is None else [f"{row['score'] or 0.0:.{SCORE_DECIMALS}f}"]
            echo("\t".join([*cells, row["text"], *([row["alignment"]] if self.alignment else [])]))
