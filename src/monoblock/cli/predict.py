"""`monoblock predict MODEL [TEXT …]`: classify, tag, fill masks, answer questions or embed texts."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from monoblock.cli.model_options import ModelVerb, interpolate_option
from monoblock.cli.output import ProgressBar, dump_json, echo, suggest_next
from monoblock.cli.text import chunk_lines, name_option, read_lines
from monoblock.cli.verb import argument, json_option, option
from monoblock.data.readers.tables import LABEL_COLUMNS, check_width, read_table
from monoblock.errors import ConfigError, FileError, InputError
from monoblock.untrusted_files import reading

if TYPE_CHECKING:
    from monoblock.runs.pipeline import Pipeline

Row = tuple[str, ...]  # the texts of an input: of a line, or in the columns of a table
DECIMALS = 4  # of a probability: the digits that do not depend on the batch size
DEFAULT_NEIGHBOURS = 5
# Family of a model without a prediction head -> the verb that runs it.
VERB_BY_FAMILY = {"decoder-only": "generate", "encoder-decoder": "translate"}
# What is read -> for each text of an input, the names that its column may have, and how many a table must have.
COLUMNS: dict[str, tuple[tuple[Sequence[str], ...], int]] = {
    "classify": ((LABEL_COLUMNS["text"], LABEL_COLUMNS["text_pair"]), 1),
    "answer": ((("question",), ("context", "passage", "text")), 2),
    "image": ((("path", "file", "filename", "image", "picture"),), 1),
    "text": ((LABEL_COLUMNS["text"],), 1),
}


@dataclass(frozen=True, kw_only=True)
class Predict(ModelVerb):
    """Classify, tag, fill masks, answer questions or embed, depending on the head of MODEL.

    Reads one input per line, or per row of a table, from TEXT, --file or standard input, and prints one result per line
    in the same order; an empty line gives an empty result. A line is a text, or text<TAB>text for a classifier of text
    pairs, question<TAB>text for question answering, and the path of a picture or a .npz file for a vision model.
    """

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
    as_json: bool = json_option("Print one JSON object per line.")

    def run(self) -> None:
        if self.texts and self.file is not None:
            raise ConfigError("TEXT and --file are both given; give one of them")
        predict = LinePredictor(self.load(interpolate=self.interpolate), self)
        rows, header_lines = predict.read_rows(self.texts, self.file)
        num_rows = 0
        with ProgressBar("lines", len(self.texts) or count_lines(self.file)) as progress:
            for first, chunk in chunk_lines(rows):
                kept = [index for index, row in enumerate(chunk) if not is_empty(row)]
                numbers = [header_lines + first + index for index in kept]
                results = predict([chunk[index] for index in kept], progress, numbers)
                by_index = dict(zip(kept, results, strict=True))
                for index, row in enumerate(chunk):
                    value, text = predict.format_result(row, by_index.get(index))
                    echo(dump_json(value) if self.as_json else text)
                sys.stdout.flush()
                num_rows += len(chunk)
        if not num_rows:
            raise InputError("there is no input; give TEXT, --file, or lines on standard input")
        model = shlex.quote(self.model)
        suggest_next(f"account {model}" if predict.method == "embed" else f"evaluate {model} DATA")


class LinePredictor:
    """Call the Pipeline method for the model's head, or `embed` if it is asked for, on the texts of lines."""

    def __init__(self, pipe: Pipeline, options: Predict) -> None:
        self.pipe, self.options, self.has_noted_pairs = pipe, options, False
        self.is_vision = pipe.tokenizer is None
        self.method = "embed" if options.embed or options.nearest is not None else pipe.prediction_method
        if self.method not in FORMATS:
            model = options.model
            if self.method == "predict":
                raise ConfigError(f"{model} predicts numbers; use mb.load({model!r}).predict([text]) in Python")
            verb = VERB_BY_FAMILY.get(pipe.model.config.family, "account")
            raise ConfigError(f"{model} has no head for predictions; use monoblock {verb} {shlex.quote(model)} instead")
        if options.text_column and not any(map(is_table, (options.file, options.nearest))):
            raise ConfigError("--text-column names a column of a .csv or .tsv file; give one with --file")
        self.call_options: dict[str, Any] = {"batch": options.batch}
        if self.is_vision or self.method == "answer":  # inputs of any length can be read
            if options.long is not None:
                reason = "images have a fixed size" if self.is_vision else "long texts are read in windows"
                raise ConfigError(f"--long has no effect on this model, because {reason}; leave it out")
        else:
            self.call_options["long"] = options.long or "refuse"
        single_result = {"tag": "tagging", "embed": "embeddings without --nearest"}.get(self.method)
        if options.top is not None and single_result is not None and options.nearest is None:
            raise ConfigError(f"--top has no effect on {single_result}; leave it out")
        match self.method:
            case "tag":
                self.call_options["split_punctuation"] = options.words == "signs"
            case "embed":
                self.call_options["pooling"] = options.pooling
            case "answer":
                self.call_options["n_best"] = options.top or 1
            case _ if options.top is not None:
                self.call_options["top"] = options.top
        self.candidates: list[Row] = []  # the lines of --nearest
        if options.nearest is not None:
            self.candidates = [row for row in self.read_rows((), options.nearest)[0] if not is_empty(row)]
            if not self.candidates:
                raise InputError(f"{options.nearest} is empty; give a file with at least one line of text")
            with ProgressBar(f"lines of {options.nearest}", len(self.candidates)) as progress:
                self.candidate_vectors = self(self.candidates, progress)  # (lines, D)

    def read_rows(self, texts: Sequence[str], file: Path | None) -> tuple[Iterator[Row], int]:
        """Return the rows of a table, or the lines of TEXT, a file or standard input; and the lines of the header."""
        parts = COLUMNS["image" if self.is_vision else self.method if self.method in COLUMNS else "text"]
        indices = find_columns(file, self.options.text_column, *parts)
        if file is not None and indices is not None:
            return read_columns(file, indices), 1
        return map(self._parse_line, read_lines(texts, file)), 0

    def _parse_line(self, line: str) -> Row:
        text, tab, text_pair = line.partition("\t")
        if self.method == "answer" and line.strip() and not (text.strip() and text_pair.strip()):
            raise InputError(f"{line[:40]!r} is not a question and a text separated by a tab; write question<TAB>text")
        if not tab or self.method not in ("classify", "answer") or self.is_vision:
            return (line,)
        if self.method == "classify" and line.strip() and not self.has_noted_pairs:
            self.has_noted_pairs = True
            echo("note: a line with a tab is read as a pair of texts", err=True)
        return (text, text_pair)

    def __call__(self, rows: list[Row], progress: ProgressBar, numbers: Sequence[int] | None = None) -> Any:
        """Return one result per row, which is not empty.

        numbers: the indices of the lines in the whole input, for error messages.
        """
        if not rows:
            return []
        if self.is_vision:
            return getattr(self.pipe, self.method)([row[0].strip() for row in rows], **self.call_options)
        inputs = [row if len(row) == 2 else row[0] for row in rows]
        place = {"progress": progress} if numbers is None else {"progress": progress, "lines": numbers}
        try:
            return getattr(self.pipe, self.method)(inputs, **self.call_options, **place)
        except InputError as problem:
            raise (problem if numbers is None else name_option(problem)) from None

    def format_result(self, row: Row, result: Any) -> tuple[dict[str, Any], str]:
        """Return what is printed for a row, as a JSON object and as text; `result` is None for an empty line."""
        if not self.candidates or result is None:
            return FORMATS[self.method](self.options, row, result)
        from monoblock.tasks.embedding import find_nearest

        count = self.options.top or DEFAULT_NEIGHBOURS
        (neighbours,) = find_nearest(result[None], self.candidate_vectors, count)
        found = [
            {"line": one.row + 1, "text": show_row(self.candidates[one.row]), "cosine": round(one.cosine, DECIMALS)}
            for one in neighbours
        ]
        lines = [f"{one['cosine']:.{DECIMALS}f}\t{one['text']}" for one in found]
        return {"text": show_row(row), "nearest": found}, "\n".join(lines)


def show_row(row: Row) -> str:
    return "\t".join(row)


def is_empty(row: Row) -> bool:
    return not show_row(row).strip()


# -- results, as a JSON object and as text -----------------------------------------------------------------------------


def _choices_json(choices: Sequence[Any], name: str) -> list[dict[str, Any]]:
    return [{name: choice.label, "probability": round(choice.probability, DECIMALS)} for choice in choices]


def format_classes(options: Predict, row: Row, result: Any) -> tuple[dict[str, Any], str]:
    texts = dict(zip(("text", "text_pair"), row, strict=False))
    text = "\t".join(f"{choice.label}\t{choice.probability:.{DECIMALS}f}" for choice in result or [])
    return texts | {"labels": _choices_json(result or [], "label")}, text


def format_tags(options: Predict, row: Row, result: Any) -> tuple[dict[str, Any], str]:
    """Return the text with punctuation restored, else with entities in brackets, else word/LABEL.

    With --columns, return `word<TAB>label` on a line for each word instead.
    """
    words, entities, restored = result if result is not None else ([], [], None)
    value = {"text": show_row(row)} | {
        name: [item._asdict() | {"probability": round(item.probability, DECIMALS)} for item in items]
        for name, items in (("words", words), ("entities", entities))
    }
    if restored:
        value["restored"] = restored
    if options.columns:
        return value, "".join(f"{word.word}\t{word.label}\n" for word in words)
    if restored is not None:
        return value, restored
    if not entities:
        return value, " ".join(word.word if word.label == "O" else f"{word.word}/{word.label}" for word in words)
    marked = [word.word for word in words]  # [PER Peter Blackburn] writes from [LOC Brussels]
    for entity in reversed(entities):
        marked[entity.start : entity.end] = [f"[{entity.label} {entity.text}]"]
    return value, " ".join(marked)


def format_fills(options: Predict, row: Row, result: Any) -> tuple[dict[str, Any], str]:
    text, masks = result if result is not None else ("", [])
    value = {"text": show_row(row), "filled": text, "masks": [_choices_json(choices, "token") for choices in masks]}
    cells = [" ".join(f"{choice.label} {choice.probability:.{DECIMALS}f}" for choice in choices) for choices in masks]
    return value, "\t".join([text, *cells])


def format_answers(options: Predict, row: Row, result: Any) -> tuple[dict[str, Any], str]:
    """Return the answers to one question as `answer<TAB>probability`, best first; "" means no answer."""
    answers = [
        {name: getattr(answer, name) for name in ("text", "start", "end")}
        | {"probability": round(answer.probability, DECIMALS)}
        for answer in result or []
    ]
    text = "\t".join(f"{answer['text']}\t{answer['probability']:.{DECIMALS}f}" for answer in answers)
    return {"question": row[0], "context": row[1] if len(row) > 1 else "", "answers": answers}, text


def format_embedding(options: Predict, row: Row, result: Any) -> tuple[dict[str, Any], str]:
    vector = [] if result is None else [round(value, 6) for value in result.tolist()]
    return {"text": show_row(row), "embedding": vector}, dump_json(vector)


# Method of Pipeline -> function that formats its result.
FORMATS: dict[str, Callable[[Predict, Row, Any], tuple[dict[str, Any], str]]] = {
    "classify": format_classes,
    "tag": format_tags,
    "fill": format_fills,
    "embed": format_embedding,
    "answer": format_answers,
}


# -- tables and files --------------------------------------------------------------------------------------------------


def is_table(file: Path | None) -> bool:
    return file is not None and file.suffix.lower() in (".csv", ".tsv")


def count_lines(file: Path | None) -> int | None:
    """Return the number of lines of a file; None for standard input or a pipe, which can be read only once."""
    if file is None or not file.is_file():
        return None
    with file.open("rb") as stream:
        return sum(1 for _ in stream)


def find_columns(
    file: Path | None, named: Sequence[str], parts: Sequence[Sequence[str]], required: int
) -> list[int] | None:
    """Return the indices of the columns to read; None for a file that is no table, or whose columns have no names.

    named: what --text-column gives.
    parts: for each text of an input, the names that its column may have; the first `required` must be there.
    """
    if file is None or not is_table(file):
        return None
    with reading(file):
        header = [cell.strip() for cell in next(read_table(file)).cells]
    cells = [cell.casefold() for cell in header]
    if named:
        if not required <= len(named) <= len(parts):
            count = str(required) if required == len(parts) else f"{required} or {len(parts)}"
            raise ConfigError(
                f"--text-column is given {len(named)} times, but this model reads {count} columns; give {count}"
            )
        for name in named:
            if cells.count(name.casefold()) != 1:
                has = repr(", ".join(header))
                raise ConfigError(
                    f"--text-column {name}: the first line of {file} is {has:.80}; give one of these names"
                )
        return [cells.index(name.casefold()) for name in named]
    found = [[index for index, cell in enumerate(cells) if cell in names] for names in parts]
    if file.suffix.lower() == ".tsv" and not (len(cells) > 1 and all(found[:required])):
        return None
    for number, (names, places) in enumerate(zip(parts, found, strict=True)):
        if len(places) > 1:
            several = " and ".join(header[index] for index in places[:2])
            advice = f"say which to read: --text-column {header[places[0]]:.30}"
            raise FileError(f"{file} has the columns {several:.60}; {advice}")
        if not places and number < required:
            raise FileError(
                f"{file}: the first line {', '.join(header)!r:.60} has no column named {' or '.join(names[:3])}; "
                "name the column to read: --text-column NAME"
            )
    return [index for places in found for index in places]


def read_columns(file: Path, indices: Sequence[int]) -> Iterator[Row]:
    with reading(file):
        rows = read_table(file)
        header = next(rows).cells
        for row in rows:
            check_width(file, row, header)
            yield tuple(row.cells[index] for index in indices)
