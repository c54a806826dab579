"""`monoblock translate MODEL [TEXT]`: translate lines of text, and print the results in the same order."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from monoblock.cli._shared.decoding_options import SEARCH_OPTIONS, add_options, drop_unset, resolve_settings
from monoblock.cli._shared.line_reader import chunk_lines, read_lines
from monoblock.cli._shared.model_options import (
    device_option,
    dtype_option,
    ensemble_option,
    force_option,
    load_pipeline,
)
from monoblock.cli._shared.output import dump_json, echo, suggest_next
from monoblock.errors import ConfigError, InputError

if TYPE_CHECKING:
    from monoblock.runs.pipeline import Pipeline
    from monoblock.tasks.loaded_model import Hypothesis

SCORE_DECIMALS = 4  # the digits that do not depend on the batch size
RERANKED_HYPOTHESES = 5  # with --words, the best of this many hypotheses per line is printed


@click.command(name="translate", help="Translate TEXT, or each line of standard input; empty lines stay empty.")
@click.argument("model")
@click.argument("text", required=False)
@add_options(SEARCH_OPTIONS)
@click.option("--n-best", type=click.IntRange(min=1), help="Print N hypotheses per line, with scores.")
@click.option(
    "--alignment", is_flag=True, help="Also print the word alignment: source-target word indices, as in 0-0 2-1."
)
@click.option("--to", help="Target script, for a model that writes several: devanagari, tamil, latin, …")
@click.option(
    "--long",
    type=click.Choice(["refuse", "split"]),
    default="refuse",
    show_default=True,
    help="Refuse a line that is longer than the context, or split it into sentences.",
)
@click.option(
    "--words",
    type=click.Path(path_type=Path),
    help="Rerank the hypotheses by the word frequencies in this file, which `evaluate --save-words` writes.",
)
@click.option(
    "--batch-size",
    "--batch",
    type=click.IntRange(min=1),
    help="Batch size in lines.  [default: 64, or as many as suit a GPU]",
)
@ensemble_option
@device_option
@dtype_option
@force_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def command(
    model: str,
    text: str | None,
    n_best: int | None,
    alignment: bool,
    to: str | None,
    long: str,
    words: Path | None,
    batch_size: int | None,
    ensemble: tuple[str, ...],
    device: str | None,
    dtype: str | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    pipe = load_pipeline(model, device, dtype, force=force, ensemble=ensemble)
    search = drop_unset(options)
    resolve_settings(pipe, search)
    if pipe.model.encoder is None:
        raise ConfigError(
            f"{model} is not an encoder-decoder, so it cannot translate; use monoblock generate {shlex.quote(model)}"
        )
    printer = HypothesisPrinter(pipe, n_best, alignment, to, words, as_json)
    search |= {"batch": batch_size, "to": to, "long": long}
    truncated = 0
    for first, sources in chunk_lines(read_lines([text] if text is not None else ())):
        hypotheses = _translate_lines(pipe, sources, printer.num_hypotheses, first, search)
        for source, source_hypotheses in zip(sources, hypotheses, strict=True):
            printer(source, source_hypotheses)
            truncated += source_hypotheses[0].finish_reason in ("length", "context")
        sys.stdout.flush()
    if truncated:
        echo(f"warning: {truncated} targets were cut off at the length limit; raise --max-new-tokens", err=True)
    if text is not None:
        suggest_next(f"evaluate {shlex.quote(model)} DATA")


def _translate_lines(
    pipe: Pipeline, lines: list[str], n_best: int, first: int, options: dict[str, Any]
) -> list[list[Hypothesis]]:
    if options.get("temperature"):
        if n_best > 1:
            raise ConfigError("--n-best needs beam search, but --temperature turns on sampling; leave out one of them")
        from monoblock.tasks.loaded_model import Hypothesis

        texts = pipe.translate(lines, first_index=first, **options)
        return [[Hypothesis(text, finish_reason="stop")] for text in texts]
    try:
        return pipe.translate(lines, n_best=n_best, first_index=first, **options)
    except InputError as problem:  # name the command-line option instead of the Python argument
        raise InputError(str(problem).replace("long='split'", "--long split")) from None


class HypothesisPrinter:
    """Print the hypotheses of a source, as lines of text or as one JSON object."""

    def __init__(
        self, pipe: Pipeline, n_best: int | None, alignment: bool, to: str | None, words: Path | None, as_json: bool
    ) -> None:
        self.pipe, self.n_best, self.alignment, self.to, self.as_json = pipe, n_best, alignment, to, as_json
        self.frequencies = None
        if words is not None:
            from monoblock.tasks.word_frequencies import WordFrequencies

            self.frequencies = WordFrequencies.read(words)
        self.num_hypotheses = n_best or (RERANKED_HYPOTHESES if self.frequencies is not None else 1)

    def __call__(self, source: str, hypotheses: list[Hypothesis]) -> None:
        if self.frequencies is not None:
            hypotheses = self.frequencies.rerank(hypotheses)
        hypotheses = hypotheses[: self.n_best or 1]
        if self.as_json:
            rows = [self._hypothesis_json(source, hypothesis) for hypothesis in hypotheses]
            echo(dump_json({"source": source, "hypotheses": rows}))
            return
        for hypothesis in hypotheses:
            cells = [hypothesis.text]
            if self.n_best is not None:
                cells.insert(0, f"{hypothesis.score or 0.0:.{SCORE_DECIMALS}f}")
            if self.alignment:
                cells.append(self._alignment_text(source, hypothesis))
            echo("\t".join(cells))

    def _hypothesis_json(self, source: str, hypothesis: Hypothesis) -> dict[str, Any]:
        score = None if hypothesis.score is None else round(hypothesis.score, SCORE_DECIMALS)
        row = {"text": hypothesis.text, "score": score}
        return row | ({"alignment": self._alignment_text(source, hypothesis)} if self.alignment else {})

    def _alignment_text(self, source: str, hypothesis: Hypothesis) -> str:
        from monoblock.tasks.word_alignment import align, format_pharaoh

        return format_pharaoh(align(self.pipe.loaded, source, hypothesis.text, self.to))
