"""`monoblock predict MODEL [TEXT …]`: classify, tag, fill masks, answer questions or embed texts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from monoblock.cli.lines import COLUMNS, chunk_lines, count_lines, has_columns, is_table, read_columns, read_lines
from monoblock.cli.model_options import (
    device_option,
    dtype_option,
    force_option,
    interpolate_option,
    load_pipeline,
    set_image_size,
)
from monoblock.cli.output import ProgressBar, dump_json, echo, suggest_next
from monoblock.cli.verb import argument, json_option, option
from monoblock.errors import ConfigError, InputError

if TYPE_CHECKING:
    from monoblock.runs.pipeline import Pipeline

Line = str | tuple[str, ...]  # a line of text, or the texts in the columns of a row
DECIMALS = 4  # of a probability: the digits that do not depend on the batch size
DEFAULT_NEIGHBOURS = 5
# Family of a model without a prediction head -> the verb that runs it.
VERB_BY_FAMILY = {"decoder-only": "generate", "encoder-decoder": "translate"}


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Classify, tag, fill masks, answer questions or embed, depending on the head of MODEL.

    Reads one input per line, or per row of a table, from TEXT, --file or standard input, and prints one result per line
    in the same order; an empty line gives an empty result. A line is a text, or text<TAB>text for a classifier of text
    pairs, question<TAB>text for question answering, and the path of a picture or a .npz file for a vision model.
    """

    model: str = argument()
    texts: tuple[str, ...] = argument((), metavar="[TEXT …]")
    file: Path | None = option(
        "Read lines from this file, or rows from a .csv or .tsv file whose first line names its columns.  [default: "
        "standard input]"
    )
    text_column: tuple[str, ...] = option(
        "Read this column of a .csv or .tsv file; twice for pairs.  [default: text, sentence, review …; text_pair, "
        "sentence2 …; question and context; path]",
        (),
        metavar="NAME",
    )
    top: int | None = option(
        "Print the N best results for a line, best first.  [default: 1 class or answer; 5 tokens or neighbours]",
        least=1,
    )
    embed: bool = option("Print an embedding of each line, whatever the head of MODEL is.", False)
    pooling: Literal["mean", "cls", "last"] | None = option(
        "An embedding is the mean of the token vectors, or the vector of the first (cls) or last token.  [default: as "
        "stored with the model, else mean, or last for a decoder-only model]"
    )
    nearest: Path | None = option(
        "Embed each line, and print the lines of this file that have the most similar embeddings."
    )
    words: Literal["signs", "spaces"] = option(
        "Tagging: treat punctuation marks as separate words (signs), or split at spaces only.", "signs"
    )
    columns: bool = option("Tagging: print one word per line, as in CoNLL files.", False)
    long: Literal["refuse", "cut", "split"] | None = option(
        "Refuse a text that is longer than the context, truncate it (cut), or split it into parts and combine their "
        "results.  [default: refuse]"
    )
    batch: int = option("Batch size in lines.", 64, flags=("--batch-size",), least=1)
    interpolate: int | None = interpolate_option()
    device: str | None = device_option()
    dtype: str | None = dtype_option()
    force: bool = force_option()
    as_json: bool = json_option("Print one JSON object per line.")

    def run(self) -> None:
        if self.texts and self.file is not None:
            raise ConfigError("TEXT and --file are both given; give one of them")
        pipe = load_pipeline(self.model, self.device, self.dtype, force=self.force)
        predictor = LinePredictor(set_image_size(pipe, self.interpolate), self)
        num_lines = 0
        with ProgressBar("lines", len(self.texts) or count_lines(self.file)) as progress:
            for first, lines in chunk_lines(predictor.read_inputs(self.texts, self.file)):
                for line, result in zip(lines, predictor(lines, first, progress), strict=True):
                    predictor.print_result(line, result)
                sys.stdout.flush()
                num_lines += len(lines)
        if not num_lines:
            raise InputError("there is no input; give TEXT, --file, or lines on standard input")
        model = shlex.quote(self.model)
        suggest_next(f"account {model}" if predictor.method == "embed" else f"evaluate {model} DATA")


class LinePredictor:
    """Call the Pipeline method for the model's head, or `embed` if it is asked for, on lines, and print the results."""

    def __init__(self, pipe: Pipeline, options: Predict) -> None:
        self.pipe, self.options, self.has_noted_pairs = pipe, options, False
        self.header_lines = 0  # of the file that is read, for the line numbers in error messages
        self.is_vision = pipe.tokenizer is None
        self.method = "embed" if options.embed or options.nearest is not None else pipe.loaded.prediction_method
        if self.method not in PRINTERS:
            model = options.model
            if self.method == "predict":
                raise ConfigError(f"{model} predicts numbers; use mb.load({model!r}).predict([text]) in Python")
            verb = VERB_BY_FAMILY.get(pipe.model.config.family, "account")
            raise ConfigError(f"{model} has no head for predictions; use monoblock {verb} {shlex.quote(model)} instead")
        self._check_options()
        self.call_options: dict[str, Any] = {"batch": options.batch}
        if not self._reads_any_length():
            self.call_options["long"] = options.long or "refuse"
        self.candidate_lines: list[str] = []
        self.candidate_vectors: Any = None
        if options.nearest is not None:
            self.candidate_lines, self.candidate_vectors = self._embed_candidates(options.nearest)

    def _reads_any_length(self) -> bool:
        """Return whether inputs of any length can be read, so that --long has no effect.

        Images have a fixed size, and question answering reads long texts in sliding windows.
        """
        return self.is_vision or self.method == "answer"

    def _check_options(self) -> None:
        """Raise ConfigError for an option that has no effect on this model or on these files."""
        if self.options.text_column and not any(map(is_table, (self.options.file, self.options.nearest))):
            raise ConfigError("--text-column names a column of a .csv or .tsv file; give one with --file")
        if self._reads_any_length() and self.options.long is not None:
            reason = "images have a fixed size" if self.is_vision else "long texts are read in windows"
            raise ConfigError(f"--long has no effect on this model, because {reason}; leave it out")
        single_result = {"tag": "tagging", "embed": "embeddings without --nearest"}.get(self.method)
        if self.options.top is not None and single_result is not None and self.options.nearest is None:
            raise ConfigError(f"--top has no effect on {single_result}; leave it out")

    def read_inputs(self, texts: tuple[str, ...], file: Path | None) -> Iterator[Line]:
        """Yield the lines of TEXT, a file or standard input, or the texts in the columns of a table."""
        columns = COLUMNS["image" if self.is_vision else self.method if self.method in COLUMNS else "text"]
        named = self.options.text_column
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
                return {"split_punctuation": self.options.words == "signs"}
            case "embed":
                return {"pooling": self.options.pooling}
            case "answer":
                return {"n_best": self.options.top or 1}
        return {} if self.options.top is None else {"top": self.options.top}

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
            PRINTERS[self.method](self.options, line, result)
            return
        from monoblock.tasks.embedding import find_nearest

        count = self.options.top or DEFAULT_NEIGHBOURS
        (neighbours,) = find_nearest(result[None], self.candidate_vectors, count)
        rows = [(self.candidate_lines[neighbour.row], neighbour.row, neighbour.cosine) for neighbour in neighbours]
        print_neighbours(self.options, show_line(line), rows)


# -- printing ---------------------------------------------------------------------------------------------------------


def _print_json(value: dict[str, Any]) -> None:
    echo(dump_json(value))


def show_line(line: Line) -> str:
    return line if isinstance(line, str) else "\t".join(line)


def is_empty(line: Line) -> bool:
    return not show_line(line).strip()


def _split_pair(line: Line) -> tuple[str, str | None]:
    """Return the text of a line, and its second text if there is one."""
    if isinstance(line, tuple):
        return line[0], line[1] if len(line) > 1 else None
    text, tab, text_pair = line.partition("\t")
    return text, text_pair if tab else None


def _choices_json(choices: Sequence[Any], name: str = "label") -> list[dict[str, Any]]:
    return [{name: choice.label, "probability": round(choice.probability, DECIMALS)} for choice in choices]


def print_classes(options: Predict, line: Line, result: Any) -> None:
    choices = result or []
    if options.as_json:
        text, text_pair = _split_pair(line)
        _print_json(
            {"text": text, **({} if text_pair is None else {"text_pair": text_pair}), "labels": _choices_json(choices)}
        )
        return
    echo("\t".join(f"{choice.label}\t{choice.probability:.{DECIMALS}f}" for choice in choices))


def print_tags(options: Predict, line: Line, result: Any) -> None:
    """Print the tags of a line: the text with punctuation restored, else with entities in brackets, else word/LABEL.

    With --columns, print `word<TAB>label` on a line for each word instead.
    """
    words, entities, restored = result if result is not None else ([], [], None)
    if options.as_json:
        rounded = [
            [item._asdict() | {"probability": round(item.probability, DECIMALS)} for item in items]
            for items in (words, entities)
        ]
        restored_json = {"restored": restored} if restored else {}
        _print_json({"text": show_line(line), "words": rounded[0], "entities": rounded[1], **restored_json})
    elif options.columns:
        echo("".join(f"{word.word}\t{word.label}\n" for word in words))
    elif restored is not None:
        echo(restored)
    elif entities:
        echo(bracket_entities([word.word for word in words], entities))
    else:
        echo(" ".join(word.word if word.label == "O" else f"{word.word}/{word.label}" for word in words))


def bracket_entities(words: Sequence[str], entities: Sequence[Any]) -> str:
    """Return the text with its entities marked: [PER Peter Blackburn] writes from [LOC Brussels]."""
    marked = list(words)
    for entity in reversed(entities):
        marked[entity.start : entity.end] = [f"[{entity.label} {entity.text}]"]
    return " ".join(marked)


def print_fills(options: Predict, line: Line, result: Any) -> None:
    text, masks = result if result is not None else ("", [])
    if options.as_json:
        _print_json(
            {"text": show_line(line), "filled": text, "masks": [_choices_json(choices, "token") for choices in masks]}
        )
        return
    cells = [" ".join(f"{choice.label} {choice.probability:.{DECIMALS}f}" for choice in choices) for choices in masks]
    echo("\t".join([text, *cells]))


def print_answers(options: Predict, line: Line, result: Any) -> None:
    """Print the answers to one question on one line as `answer<TAB>probability`, best first; "" means no answer."""
    answers = result or []
    if options.as_json:
        question, context = _split_pair(line)
        rows = [
            {
                "text": answer.text,
                "start": answer.start,
                "end": answer.end,
                "probability": round(answer.probability, DECIMALS),
            }
            for answer in answers
        ]
        _print_json({"question": question, "context": context or "", "answers": rows})
        return
    echo("\t".join(f"{answer.text}\t{answer.probability:.{DECIMALS}f}" for answer in answers))


def print_embedding(options: Predict, line: Line, result: Any) -> None:
    vector = [] if result is None else [round(value, 6) for value in result.tolist()]
    if options.as_json:
        _print_json({"text": show_line(line), "embedding": vector})
    else:
        echo(dump_json(vector))


def print_neighbours(options: Predict, line: str, neighbours: Sequence[tuple[str, int, float]]) -> None:
    """Print the neighbours (text, line index, cosine) of a line as `cosine<TAB>text`, nearest first."""
    if options.as_json:
        rows = [
            {"line": number + 1, "text": text, "cosine": round(cosine, DECIMALS)} for text, number, cosine in neighbours
        ]
        _print_json({"text": line, "nearest": rows})
        return
    for text, _, cosine in neighbours:
        echo(f"{cosine:.{DECIMALS}f}\t{text}")


# Method of Pipeline -> function that prints its result.
PRINTERS: dict[str, Callable[[Predict, Line, Any], None]] = {
    "classify": print_classes,
    "tag": print_tags,
    "fill": print_fills,
    "embed": print_embedding,
    "answer": print_answers,
}
