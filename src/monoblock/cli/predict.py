"""`monoblock predict MODEL [TEXT …]`: what a text is, whom it names, what is missing in it, where it stands."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click

from monoblock.cli.common import next_verb
from monoblock.cli.ongoing import Ongoing
from monoblock.cli.prompting import interpolate, resized
from monoblock.cli.shown import SHOW, Shown, show_nearest
from monoblock.cli.speaking import device, dtype, load
from monoblock.errors import ConfigError, InputError

CHUNK = 2048  # lines that are sorted by length together
OTHER = {"decoder-only": "generate", "encoder-decoder": "translate"}  # the verb for a model that predicts nothing


@click.command(name="predict", help="Classify, label, fill in or embed TEXT, by what MODEL was made for.")
@click.argument("model")
@click.argument("texts", metavar="[TEXT …]", nargs=-1)
@click.option("--file", type=click.Path(path_type=Path), help="Read the lines of this file.  [standard input]")
@click.option(
    "--top", type=click.IntRange(min=1), help="So many answers, best first.  [1 class, 5 words or neighbours]"
)
@click.option("--embed", is_flag=True, help="Embed, whatever the head.")
@click.option("--pooling", type=click.Choice(["mean", "cls"]), help="Of embeddings.  [as the folder says, else mean]")
@click.option("--nearest", type=click.Path(path_type=Path), help="Embed, and show the nearest lines of this file.")
@click.option("--words", type=click.Choice(["signs", "spaces"]), default="signs", help="What parts words.  [signs]")
@click.option("--columns", is_flag=True, help="Labels: a word a line, as in CoNLL files.")
@click.option("--long", type=click.Choice(["refuse", "cut", "split"]), help="What is beyond the context.  [refuse]")
@click.option("--batch-size", "batch", type=click.IntRange(min=1), default=64, show_default=True, help="Lines at once.")
@interpolate
@device
@dtype
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def command(model: str, texts: tuple[str, ...], device: str | None, dtype: str | None, **words: Any) -> None:
    """A line in, a result out, in the order they came; an empty line has an empty result.

    For a classifier of pairs a line is text<TAB>text, for answers question<TAB>text, for images it is the path of a
    .npz or .png file.
    """
    if texts and words["file"] is not None:
        raise ConfigError("give TEXT or --file, not both")
    pipe = resized(load(model, device, dtype), words["interpolate"])
    ask = Asking(pipe, model, words)
    with Ongoing("lines", len(texts) or _count(words["file"])) as tell:
        for first, lines in _chunks(_lines(texts, words["file"])):
            for line, found in zip(lines, ask(lines, first, tell), strict=True):
                ask.show(line, found)
            sys.stdout.flush()
            ask.seen += len(lines)
    if not ask.seen:
        raise InputError("there is no text; give TEXT, --file, or lines on standard input")
    next_verb(f"evaluate {shlex.quote(model)} DATA" if ask.method != "embed" else f"account {shlex.quote(model)}")


class Asking:
    """One method of the pipeline for all lines, and how its results are shown."""

    def __init__(self, pipe: Any, model: str, words: dict[str, Any]) -> None:
        from monoblock.tasks.predicting import method_of

        self.pipe, self.words, self.seen, self.pairs = pipe, words, 0, False
        self.method = "embed" if words["embed"] or words["nearest"] is not None else method_of(pipe)
        if self.method not in SHOW:
            verb = OTHER.get(pipe.model.config.family, "account")
            raise ConfigError(f"{model} has no head that predicts; write monoblock {verb} {shlex.quote(model)}")
        anyway = pipe.tokenizer is None or self.method == "answer"  # of any length: a long text is read in windows
        self.how = {"batch": words["batch"]} | ({} if anyway else {"long": words["long"] or "refuse"})
        if anyway and words["long"] is not None:
            read = "images are of one size" if pipe.tokenizer is None else "texts of any length are read in windows"
            raise ConfigError(f"--long does nothing here: {read}; leave it out")
        single = {"tag": "labels of words", "embed": "embeddings without --nearest"}.get(self.method)
        if words["top"] is not None and single is not None and words["nearest"] is None:
            raise ConfigError(f"--top does nothing for {single}; leave it out")
        self.shown = Shown(words["as_json"], words["columns"])
        self.others: list[str]
        self.vectors: Any
        self.others, self.vectors = self._embedded() if words["nearest"] is not None else ([], None)

    def __call__(self, lines: list[str], first: int, tell: Callable[[int], None]) -> list[Any]:
        """A result for each line; None for an empty one."""
        kept = [number for number, line in enumerate(lines) if line.strip()]
        given = [self._given(lines[number]) for number in kept]
        more = {} if self.pipe.tokenizer is None else {"lines": [first + number for number in kept], "tell": tell}
        try:
            found = getattr(self.pipe, self.method)(given, **self._options(), **self.how, **more) if given else []
        except InputError as problem:  # the words of the command line
            said = str(problem).replace("long='split'", "--long split").replace("long='cut'", "--long cut")
            raise InputError(said) from None
        results: list[Any] = [None] * len(lines)
        for number, result in zip(kept, found, strict=True):
            results[number] = result
        return results

    def _given(self, line: str) -> Any:
        if self.pipe.tokenizer is None:
            from monoblock.tasks.seeing import read_pixels

            found = read_pixels(line.strip(), self.pipe.model.config.input)
            if len(found) > 1:
                raise InputError(
                    f"{line.strip()} holds {len(found)} images; `monoblock evaluate` measures many at once"
                )
            return found[0]
        one, tab, other = line.partition("\t")
        if self.method == "answer" and not (one.strip() and other.strip()):
            raise InputError(f"{line[:40]!r} is no question and text; write question<TAB>text")
        if tab and self.method == "classify" and not self.pairs:
            self.pairs = True
            click.echo("note: a line with a tab is read as a pair of texts", err=True)
        return (one, other) if tab and self.method in ("classify", "answer") else line

    def _options(self) -> dict[str, Any]:
        top = {} if self.words["top"] is None else {"top": self.words["top"]}
        match self.method:
            case "tag":
                return {"apart": self.words["words"] == "signs"}
            case "embed":
                return {"pooling": self.words["pooling"]}
            case "answer":
                return {"n_best": self.words["top"] or 1}
        return top

    def _embedded(self) -> tuple[list[str], Any]:
        """The lines that are compared with, and where they or the images they name stand."""
        place = self.words["nearest"]
        with place.open("rb") as file:
            lines = [line for line in _decoded(file, str(place)) if line.strip()]
        if not lines:
            raise InputError(f"{place} is empty; give a file with at least one line of text")
        with Ongoing(f"lines of {place}", len(lines)) as tell:
            more = {} if self.pipe.tokenizer is None else {"tell": tell}
            given = [self._given(line) for line in lines]
            return lines, self.pipe.embed(given, pooling=self.words["pooling"], **self.how, **more)

    def show(self, line: str, found: Any) -> None:
        if self.vectors is None or found is None:
            SHOW[self.method](self.shown, line, found)
            return
        from monoblock.tasks.neighbours import nearest

        (near,) = nearest(found[None], self.vectors, self.words["top"] or 5)
        show_nearest(self.shown, line, [(self.others[one.number], one.number, one.cosine) for one in near])


def _lines(texts: tuple[str, ...], file: Path | None) -> Iterator[str]:
    if texts:
        for text in texts:
            yield from text.split("\n")
    elif file is not None:
        with file.open("rb") as stream:
            yield from _decoded(stream, str(file))
    else:
        yield from _decoded(sys.stdin.buffer, "standard input")


def _decoded(stream: Iterable[bytes], name: str) -> Iterator[str]:
    from monoblock.tasks.lines import decoded

    return decoded(stream, name)


def _count(file: Path | None) -> int | None:
    if file is None or not file.is_file():  # a pipe can be read once
        return None
    with file.open("rb") as stream:
        return sum(1 for _ in stream)


def _chunks(lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """Some lines at a time with the number of the first; from a terminal one by one."""
    count, first = 1 if sys.stdin.isatty() else CHUNK, 0
    while some := list(islice(lines, count)):
        yield first, some
        first += len(some)
