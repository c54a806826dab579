"""`monoblock translate MODEL [TEXT]`: lines in, lines out, in the order they came."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click

from monoblock.cli.common import next_verb
from monoblock.cli.speaking import choosing, device, dtype, given, load, settings
from monoblock.errors import ConfigError, InputError

CHUNK = 2048  # lines that are sorted by length together
# Option -> (word of Settings, type, help). Without one, the folder's generation_config.json decides.
SEARCH: dict[str, tuple[str, Any, str]] = {
    "--num-beams": ("num_beams", click.IntRange(min=1), "Search with so many beams; 1 is greedy."),
    "--length-penalty": ("length_penalty", float, "Above 0 prefers long targets."),
    "--max-new-tokens": ("max_new_tokens", int, "At most so many tokens a target."),
    "--temperature": ("temperature", float, "Above 0 draws a target instead of searching for the best."),
    "--top-k": ("top_k", int, "Draw from the k most probable."),
    "--top-p": ("top_p", float, "Draw from the most probable that make up this share."),
    "--seed": ("seed", int, "Line n is drawn by seed + n."),
}
SHOWN = 4  # decimals of a score: what batches of other sizes agree on


@click.command(name="translate", help="Translate TEXT, or the lines of standard input; an empty line stays empty.")
@click.argument("model")
@click.argument("text", required=False)
@choosing(SEARCH)
@click.option("--n-best", type=click.IntRange(min=1), help="So many hypotheses a line, with scores.")
@click.option("--alignment", is_flag=True, help="Also say which source word each target word comes from: 0-0 2-1.")
@click.option("--to", help="The script to write, where a model knows several: devanagari, tamil, latin …")
@click.option("--long", type=click.Choice(["refuse", "split"]), default="refuse", show_default=True)
@click.option("--words", type=click.Path(path_type=Path), help="Order hypotheses by this list of `evaluate`, too.")
@click.option(
    "--batch-size", "--batch", type=click.IntRange(min=1), default=64, show_default=True, help="Lines at once."
)
@device
@dtype
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def command(
    model: str,
    text: str | None,
    n_best: int | None,
    alignment: bool,
    to: str | None,
    long: str,
    words: Path | None,
    batch_size: int,
    device: str | None,
    dtype: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    pipe = load(model, device, dtype)
    chosen = given(options)
    settings(pipe, chosen)
    if pipe.model.encoder is None:
        raise ConfigError(f"{model} continues texts and translates none; write monoblock generate {shlex.quote(model)}")
    say = Saying(pipe, n_best, alignment, to, words, as_json)
    how = {"batch": batch_size, "to": to, "long": long, **chosen}
    short = 0
    for first, lines in _chunks(_lines(text)):
        for source, answers in zip(lines, _translated(pipe, lines, say.wanted, first, how), strict=True):
            say(source, answers)
            short += answers[0].finished == "length"
        sys.stdout.flush()
    if short:
        click.echo(f"warning: {short} targets ended for want of room; give more with --max-new-tokens", err=True)
    if text is not None:
        next_verb(f"evaluate {shlex.quote(model)} DATA")


def _lines(text: str | None) -> Iterable[str]:
    if text is not None:
        return text.split("\n")
    from monoblock.tasks.lines import decoded

    return decoded(sys.stdin.buffer, "standard input")


def _chunks(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Some lines at a time with the number of the first; from a terminal one by one."""
    count, first, stream = 1 if sys.stdin.isatty() else CHUNK, 0, iter(lines)
    while some := list(islice(stream, count)):
        yield first, some
        first += len(some)


def _translated(pipe: Any, lines: list[str], n_best: int, first: int, how: dict[str, Any]) -> Any:
    drawn = how.get("temperature")
    if drawn and n_best > 1:
        raise ConfigError("--n-best are the best of a search; leave out --temperature")
    if drawn:
        from monoblock.tasks.translating import Answer

        return [[Answer(text, finished="stop")] for text in pipe.translate(lines, first=first, **how)]
    try:
        return pipe.translate(lines, n_best=n_best, first=first, **how)
    except InputError as problem:  # the words of the command line
        raise InputError(str(problem).replace("long='split'", "--long split")) from None


class Saying:
    """How a line's hypotheses are printed."""

    def __init__(
        self, pipe: Any, n_best: int | None, alignment: bool, to: str | None, words: Path | None, as_json: bool
    ) -> None:
        self.pipe, self.n_best, self.alignment, self.to, self.as_json = pipe, n_best, alignment, to, as_json
        self.words = None
        if words is not None:
            from monoblock.tasks.rescoring import Frequencies

            self.words = Frequencies.read(words)
        # A list of words needs something to choose from.
        self.wanted = n_best or (5 if self.words is not None else 1)

    def __call__(self, source: str, answers: list[Any]) -> None:
        if self.words is not None:
            answers = self.words.order(answers)
        shown = answers[: self.n_best or 1]
        if self.as_json:
            hypotheses = [self._object(source, answer) for answer in shown]
            click.echo(json.dumps({"source": source, "hypotheses": hypotheses}, ensure_ascii=False))
            return
        for answer in shown:
            cells = [answer.text] if self.n_best is None else [f"{answer.score or 0.0:.{SHOWN}f}", answer.text]
            click.echo("\t".join([*cells, *([self._aligned(source, answer)] if self.alignment else [])]))

    def _object(self, source: str, answer: Any) -> dict[str, Any]:
        score = None if answer.score is None else round(answer.score, SHOWN)
        told = {"text": answer.text, "score": score}
        return told | ({"alignment": self._aligned(source, answer)} if self.alignment else {})

    def _aligned(self, source: str, answer: Any) -> str:
        from monoblock.tasks.alignment import align, pharaoh

        return pharaoh(align(self.pipe, source, answer.text, self.to))
