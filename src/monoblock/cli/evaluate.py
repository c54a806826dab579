"""`monoblock evaluate MODEL DATA`: what a model is worth on a corpus, by its task."""

from __future__ import annotations

import shlex
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from monoblock.cli.common import as_json, next_verb, print_json, table
from monoblock.cli.prompting import check_prompting, interpolate, prompted, prompting, resized
from monoblock.cli.speaking import choosing, device, dtype, given, load, settings
from monoblock.cli.train import data_folder
from monoblock.cli.translate import SEARCH
from monoblock.errors import ConfigError, did_you_mean

FAILED = 3  # exit code of a check that failed


@click.command(name="evaluate", help="Measure MODEL on DATA: a corpus of `monoblock ls corpora`, a file or a folder.")
@click.argument("model")
@click.argument("data", metavar="DATA")
@choosing(SEARCH)
@click.option("--split", type=click.Choice(["train", "valid", "test", "all"]), help="[test, or valid without one]")
@click.option("--limit", type=click.IntRange(min=1), help="Only so many rows.")
@click.option(
    "--samples", type=click.IntRange(min=0), default=0, help="Show so many sources with what was made of them."
)
@click.option("--n-best", type=click.IntRange(min=1), default=5, show_default=True, help="Words: the k of top-k.")
@click.option("--lowercase", is_flag=True, help="BLEU of lower-cased texts.")
@click.option("--language", help="Of the targets, for Moses' tokenizer.  [by the files' endings, or en]")
@click.option("--rescore", is_flag=True, help="Words: order hypotheses by a list of the training targets, too.")
@click.option("--save-words", type=click.Path(path_type=Path), help="Keep that list for `translate --words`.")
@click.option("--stride", type=click.IntRange(min=1), help="Language models: windows that move on by so many tokens.")
@click.option("--context", type=click.IntRange(min=2), help="Language models: tokens in a block.")
@click.option(
    "--batch-size", "batch", type=click.IntRange(min=1), default=64, show_default=True, help="Sources at once."
)
@prompting
@interpolate
@click.option("--at-least", multiple=True, metavar="FIGURE=NUMBER", help="Fail (exit 3) below it.")
@click.option("--at-most", multiple=True, metavar="FIGURE=NUMBER", help="Fail (exit 3) above it.")
@click.option("--card", is_flag=True, help="Write the figures into the model card of a run folder.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw the confusion matrix and the worst mistakes.")
@click.option("--data", "folder", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Of corpora.")
@device
@dtype
@as_json
@click.pass_context
def command(ctx: click.Context, model: str, device: str | None, dtype: str | None, as_json: bool, **words: Any) -> None:
    wanted = [(*_bound(word), 1) for word in words["at_least"]] + [(*_bound(word), -1) for word in words["at_most"]]
    check_prompting(words)
    pipe = resized(load(model, device, dtype), words["interpolate"])
    _check(pipe, words)
    begun = time.perf_counter()
    measured = _measured(pipe, words)
    seconds = time.perf_counter() - begun
    _keep(measured, Path(model), words)
    _report(measured, seconds, as_json)
    failed = _failures(measured.figures, wanted)
    for line in failed:
        click.echo(f"not reached: {line}", err=True)
    if failed:
        ctx.exit(FAILED)
    next_verb(f"account {shlex.quote(model)}")


def _check(pipe: Any, words: dict[str, Any]) -> None:
    """What does nothing for this model is refused before anything is measured."""
    from monoblock.tasks.drawn import check_place
    from monoblock.tasks.predicting import method_of

    method = method_of(pipe)
    if words["stride"] is not None and (method or pipe.model.config.family == "encoder-decoder"):
        raise ConfigError("--stride is for language models that go on from a text; leave it out")
    if words["picture"] is not None:
        if method not in ("classify", "tag") or words["shots"] is not None:
            raise ConfigError("--picture draws how classes are confused, and this task has none; leave it out")
        check_place(words["picture"])


def _measured(pipe: Any, words: dict[str, Any]) -> Any:
    """The options go by the words of `Asked` and of `Settings`; what belongs to neither says what is kept."""
    from monoblock.tasks.evaluation import Asked, evaluate

    search = given({name: words[name] for name, _, _ in SEARCH.values()})
    settings(pipe, search)
    asked = {name: words[name] for name in (field.name for field in fields(Asked)) if name in words}
    changed = {"folder": data_folder(words["folder"]), "rescore": words["rescore"] or words["save_words"] is not None}
    wanted = Asked(**{**asked, **changed, "options": search})
    return evaluate(pipe, wanted) if words["shots"] is None else prompted(pipe, wanted, words)


def _keep(measured: Any, model: Path, words: dict[str, Any]) -> None:
    """Files that were asked for: the list of words, the picture, the figures in the model card."""
    if words["save_words"] is not None and measured.words is not None:
        measured.words.write(words["save_words"])
    if words["picture"] is not None:
        click.echo(f"drawn: {measured.picture(words['picture'])}", err=True)
    if words["card"]:
        from monoblock.tasks.card import add_figures

        add_figures(model, words["data"], measured.figures)


def _report(measured: Any, seconds: float, as_json: bool) -> None:
    for note in measured.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"measured in {seconds:.1f} s", err=True)
    if as_json:
        print_json(measured.figures | {"samples": measured.samples})
        return
    figures = dict(measured.figures)
    rescored, signatures = figures.pop("rescored", None), figures.pop("signatures", {})
    figures.pop("signature", None)
    plain = {name: value for name, value in figures.items() if not isinstance(value, dict | list)}
    rows: list[list[object]] = [[name, value] for name, value in plain.items()]
    if rescored is not None:
        table(["figure", "value", "rescored"], [[*row, rescored.get(str(row[0]))] for row in rows])
        told = f"gain {rescored['gain']:+.2f} by a list of the training targets, weight {rescored['weight']:g}"
        click.echo(told)
    else:
        table(["figure", "value"], rows)
    for one in measured.tables:
        click.echo()
        table(one.columns, one.rows)
    for name, signature in signatures.items():
        click.echo(f"{name}: {signature}")
    for one in measured.samples:
        click.echo(f"\n  source     {one['source']}\n  reference  {one['reference']}\n  hypothesis {one['hypothesis']}")


def _bound(word: str) -> tuple[str, float]:
    name, _, text = word.partition("=")
    try:
        return name, float(text)
    except ValueError:
        raise ConfigError(f"{word!r} is no bound; write FIGURE=NUMBER, as in bleu=38") from None


def _failures(figures: dict[str, Any], wanted: list[tuple[str, float, int]]) -> list[str]:
    """What was asked for and not reached; a figure that was not measured is a matter of usage."""
    numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
    found = []
    for name, bound, sign in wanted:
        if name not in numbers:
            listed = ", ".join(numbers)
            raise ConfigError(f"{name} was not measured{did_you_mean(name, numbers)}; there is {listed}")
        if not sign * numbers[name] >= sign * bound:  # a figure that is no number fails as well
            found.append(f"{name} {numbers[name]:.4g} is {'below' if sign > 0 else 'above'} {bound:g}")
    return found
