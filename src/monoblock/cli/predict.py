"""`monoblock predict MODEL [TEXT …]`: classify, tag, fill masks, answer questions or embed texts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from monoblock.cli._shared.image_options import interpolate_option, set_image_size
from monoblock.cli._shared.line_reader import chunk_lines, count_lines, read_lines
from monoblock.cli._shared.model_options import device_option, dtype_option, force_option, load_pipeline
from monoblock.cli._shared.output import echo, suggest_next
from monoblock.cli._shared.predict_output import PRINTERS, Line, OutputFormat, is_empty, print_neighbours, show_line
from monoblock.cli._shared.progress import ProgressBar
from monoblock.cli._shared.table_lines import COLUMNS, has_columns, is_table, read_columns
from monoblock.errors import ConfigError, InputError

if TYPE_CHECKING:
    from monoblock.runs.pipeline import Pipeline

DEFAULT_NEIGHBOURS = 5
# Family of a model without a prediction head -> the verb that runs it.
VERB_BY_FAMILY = {"decoder-only": "generate", "encoder-decoder": "translate"}


@click.command(
    name="predict",
    help="Classify, tag, fill masks, answer questions or embed, depending on the head of MODEL.\n\n"
    "Reads one input per line, or per row of a table, from TEXT, --file or standard input, and prints one result per "
    "line in the same order; an empty line gives an empty result. A line is a text, or text<TAB>text for a classifier "
    "of text pairs, question<TAB>text for question answering, and the path of a picture or a .npz file for a vision "
    "model.",
)
@click.argument("model")
@click.argument("texts", metavar="[TEXT …]", nargs=-1)
@click.option(
    "--file",
    type=click.Path(path_type=Path),
    help="Read lines from this file, or rows from a .csv or .tsv file whose first line names its columns.  [default: "
    "standard input]",
)
@click.option(
    "--text-column",
    "text_columns",
    metavar="NAME",
    multiple=True,
    help="Read this column of a .csv or .tsv file; twice for pairs.  [default: text, sentence, review …; text_pair, "
    "sentence2 …; question and context; path]",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    help="Print the N best results for a line, best first.  [default: 1 class or answer; 5 tokens or neighbours]",
)
@click.option("--embed", is_flag=True, help="Print an embedding of each line, whatever the head of MODEL is.")
@click.option(
    "--pooling",
    type=click.Choice(["mean", "cls", "last"]),
    help="An embedding is the mean of the token vectors, or the vector of the first (cls) or last token.  [default: as "
    "stored with the model, else mean, or last for a decoder-only model]",
)
@click.option(
    "--nearest",
    type=click.Path(path_type=Path),
    help="Embed each line, and print the lines of this file that have the most similar embeddings.",
)
@click.option(
    "--words",
    type=click.Choice(["signs", "spaces"]),
    default="signs",
    help="Tagging: treat punctuation marks as separate words (signs), or split at spaces only.  [default: signs]",
)
@click.option("--columns", is_flag=True, help="Tagging: print one word per line, as in CoNLL files.")
@click.option(
    "--long",
    type=click.Choice(["refuse", "cut", "split"]),
    help="Refuse a text that is longer than the context, truncate it (cut), or split it into parts and combine their "
    "results.  [default: refuse]",
)
@click.option(
    "--batch-size", "batch", type=click.IntRange(min=1), default=64, show_default=True, help="Batch size in lines."
)
@interpolate_option
@device_option
@dtype_option
@force_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def command(
    model: str, texts: tuple[str, ...], device: str | None, dtype: str | None, force: bool, **options: Any
) -> None:
    if texts and options["file"] is not None:
        raise ConfigError("TEXT and --file are both given; give one of them")
    pipe = set_image_size(load_pipeline(model, device, dtype, force=force), options["interpolate"])
    predictor = LinePredictor(pipe, model, options)
    num_lines = 0
    with ProgressBar("lines", len(texts) or count_lines(options["file"])) as progress:
        for first, lines in chunk_lines(predictor.read_inputs(texts, options["file"])):
            for line, result in zip(lines, predictor(lines, first, progress), strict=True):
                predictor.print_result(line, result)
            sys.stdout.flush()
            num_lines += len(lines)
    if not num_lines:
        raise InputError("there is no input; give TEXT, --file, or lines on standard input")
    verb = f"account {shlex.quote(model)}" if predictor.method == "embed" else f"evaluate {shlex.quote(model)} DATA"
    suggest_next(verb)


class LinePredictor:
    """Call the Pipeline method for the model's head, or `embed` if it is asked for, on lines, and print the results."""

    def __init__(self, pipe: Pipeline, model: str, options: dict[str, Any]) -> None:

        self.pipe, self.options, self.has_noted_pairs = pipe, options, False
        self.header_lines = 0  # of the file that is read, for the line numbers in error messages
        self.is_vision = pipe.tokenizer is None
        self.method = "embed" if options["embed"] or options["nearest"] is not None else pipe.loaded.prediction_method
        if self.method not in PRINTERS:
            if self.method == "predict":
                raise ConfigError(f"{model} predicts numbers; use mb.load({model!r}).predict([text]) in Python")
            verb = VERB_BY_FAMILY.get(pipe.model.config.family, "account")
            raise ConfigError(f"{model} has no head for predictions; use monoblock {verb} {shlex.quote(model)} instead")
        self._check_options()
        self.call_options = {"batch": options["batch"]}
        if not self._reads_any_length():
            self.call_options["long"] = options["long"] or "refuse"
        self.output_format = OutputFormat(options["as_json"], options["columns"])
        self.candidate_lines: list[str] = []
        self.candidate_vectors: Any = None
        if options["nearest"] is not None:
            self.candidate_lines, self.candidate_vectors = self._embed_candidates(options["nearest"])

    def _reads_any_length(self) -> bool:
        """Return whether inputs of any length can be read, so that --long has no effect.

        Images have a fixed size, and question answering reads long texts in sliding windows.
        """
        return self.is_vision or self.method == "answer"

    def _check_options(self) -> None:
        """Raise ConfigError for an option that has no effect on this model or on these files."""
        if self.options["text_columns"] and not any(map(is_table, (self.options["file"], self.options["nearest"]))):
            raise ConfigError("--text-column names a column of a .csv or .tsv file; give one with --file")
        if self._reads_any_length() and self.options["long"] is not None:
            reason = "images have a fixed size" if self.is_vision else "long texts are read in windows"
            raise ConfigError(f"--long has no effect on this model, because {reason}; leave it out")
        single_result = {"tag": "tagging", "embed": "embeddings without --nearest"}.get(self.method)
        if self.options["top"] is not None and single_result is not None and self.options["nearest"] is None:
            raise ConfigError(f"--top has no effect on {single_result}; leave it out")

    def read_inputs(self, texts: tuple[str, ...], file: Path | None) -> Iterator[Line]:
        """Yield the lines of TEXT, a file or standard input, or the texts in the columns of a table."""
        columns = COLUMNS["image" if self.is_vision else self.method if self.method in COLUMNS else "text"]
        named = self.options["text_columns"]
        if has_columns(file, named, columns):
            assert file is not None
            self.header_lines = 1
            yield from read_columns(file, named, columns)
        else:
            self.header_lines = 0
            yield from read_lines(texts, file)

    def __call__(self, lines: list[Line], first: int, progress: Callable[[int], None]) -> list[Any]:
        """Return one result per line; None for an empty line.

        first: the index of lines[0] in the whole input, for the line numbers in error messages.
        """
        kept = [index for index, line in enumerate(lines) if not is_empty(line)]
        results: list[Any] = [None] * len(lines)
        inputs = [self._parse_line(lines[index]) for index in kept]
        if not inputs:
            return results
        options = self._method_options() | self.call_options
        if not self.is_vision:
            options |= {"lines": [self.header_lines + first + index for index in kept], "progress": progress}
        try:
            predictions = getattr(self.pipe, self.method)(inputs, **options)
        except InputError as problem:  # name the command-line option instead of the Python argument
            message = str(problem).replace("long='split'", "--long split").replace("long='cut'", "--long cut")
            raise InputError(message) from None
        for index, prediction in zip(kept, predictions, strict=True):
            results[index] = prediction
        return results

    def _parse_line(self, line: Line) -> Any:
        if isinstance(line, tuple) and len(line) == 2:
            return line
        if isinstance(line, tuple):
            return line[0].strip() if self.is_vision else line[0]
        if self.is_vision:
            return line.strip()
        text, tab, text_pair = line.partition("\t")
        if self.method == "answer" and not (text.strip() and text_pair.strip()):
            raise InputError(f"{line[:40]!r} is not a question and a text separated by a tab; write question<TAB>text")
        if tab and self.method == "classify" and not self.has_noted_pairs:
            self.has_noted_pairs = True
            echo("note: a line with a tab is read as a pair of texts", err=True)
        return (text, text_pair) if tab and self.method in ("classify", "answer") else line

    def _method_options(self) -> dict[str, Any]:
        match self.method:
            case "tag":
                return {"split_punctuation": self.options["words"] == "signs"}
            case "embed":
                return {"pooling": self.options["pooling"]}
            case "answer":
                return {"n_best": self.options["top"] or 1}
        return {} if self.options["top"] is None else {"top": self.options["top"]}

    def _embed_candidates(self, path: Path) -> tuple[list[str], Any]:
        """Return the non-empty lines of a file and their embeddings (lines, D).

        For a vision model, each line is the path of an image.
        """
        lines = [line for line in self.read_inputs((), path) if not is_empty(line)]
        if not lines:
            raise InputError(f"{path} is empty; give a file with at least one line of text")
        with ProgressBar(f"lines of {path}", len(lines)) as progress:
            inputs = [self._parse_line(line) for line in lines]
            options: dict[str, Any] = self._method_options() | self.call_options
            if not self.is_vision:
                options["progress"] = progress
            return [show_line(line) for line in lines], self.pipe.embed(inputs, **options)

    def print_result(self, line: Line, result: Any) -> None:
        if self.candidate_vectors is None or result is None:
            PRINTERS[self.method](self.output_format, line, result)
            return
        from monoblock.tasks.embedding import find_nearest

        count = self.options["top"] or DEFAULT_NEIGHBOURS
        (neighbours,) = find_nearest(result[None], self.candidate_vectors, count)
        rows = [(self.candidate_lines[neighbour.row], neighbour.row, neighbour.cosine) for neighbour in neighbours]
        print_neighbours(self.output_format, show_line(line), rows)
