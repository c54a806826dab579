"""`monoblock evaluate MODEL DATA`: compute the metrics of the model's task on a corpus."""

from __future__ import annotations

import shlex
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from monoblock.cli._shared.data_options import FOLDER_HELP, folder_type, resolve_data_folder
from monoblock.cli._shared.decoding_options import SEARCH_OPTIONS, add_options, drop_unset, resolve_settings
from monoblock.cli._shared.fewshot_options import add_fewshot_options, check_fewshot_options, evaluate_fewshot
from monoblock.cli._shared.image_options import interpolate_option, set_image_size
from monoblock.cli._shared.model_options import (
    device_option,
    dtype_option,
    ensemble_option,
    force_option,
    load_pipeline,
)
from monoblock.cli._shared.output import echo, json_option, print_json, print_table, suggest_next
from monoblock.cli._shared.processes import join_processes, nproc_option
from monoblock.errors import ConfigError, did_you_mean
from monoblock.metrics.format import format_cell, format_change, format_metric, is_fraction

if TYPE_CHECKING:
    from monoblock.runs.pipeline import Pipeline
    from monoblock.tasks.evaluation_report import Evaluation

CHECK_FAILED = 3  # exit code


class Bound(NamedTuple):
    """The value that a metric must reach (--at-least) or must not exceed (--at-most)."""

    name: str
    value: float
    is_lower: bool


@click.command(
    name="evaluate",
    help="Evaluate MODEL on DATA: a corpus from `monoblock ls corpora`, a file or a folder. The metrics depend on the "
    "task of the model: perplexity, BLEU, accuracy, F1 and others.",
)
@click.argument("model")
@click.argument("data", metavar="DATA")
@add_options(SEARCH_OPTIONS)
@click.option(
    "--split",
    type=click.Choice(["train", "valid", "test", "all"]),
    help="Split to use.  [default: test if there is one, else valid]",
)
@click.option("--limit", type=click.IntRange(min=1), help="Use only the first N rows.")
@click.option("--samples", type=click.IntRange(min=0), default=0, help="Print N inputs with reference and prediction.")
@click.option(
    "--n-best",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Transliteration: the k of top-k accuracy.",
)
@click.option("--lowercase", is_flag=True, help="Compute BLEU on lower-cased text.")
@click.option(
    "--language",
    help="Translation: target language, for the Moses tokenizer of BLEU.  [default: from the file names, else en]",
)
@click.option(
    "--rescore",
    is_flag=True,
    help="Transliteration: also rerank the hypotheses by how often each word is a target in the training split.",
)
@click.option(
    "--save-words",
    type=click.Path(path_type=Path),
    help="As --rescore, and save the word frequencies to this file, for `translate --words`.",
)
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    help="Language models: evaluate in windows that begin N tokens apart.  [default: windows do not overlap]",
)
@click.option(
    "--context",
    type=click.IntRange(min=2),
    help="Language models: tokens in a window.  [default: the context length of the model]",
)
@click.option(
    "--batch-size",
    "batch",
    type=click.IntRange(min=1),
    help="Batch size.  [default: 64, and more if a GPU generates text]",
)
@add_fewshot_options
@interpolate_option
@click.option("--at-least", multiple=True, metavar="METRIC=NUMBER", help="Exit with code 3 if METRIC is lower.")
@click.option("--at-most", multiple=True, metavar="METRIC=NUMBER", help="Exit with code 3 if METRIC is higher.")
@click.option("--card", is_flag=True, help="Add the metrics to the model card of the run folder.")
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="Classification and tagging: plot the confusion matrix and the worst mistakes to this file.",
)
@click.option("--data", "folder", type=folder_type, help=FOLDER_HELP)
@ensemble_option
@device_option
@dtype_option
@force_option
@nproc_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    device: str | None,
    dtype: str | None,
    force: bool,
    nproc: int,
    as_json: bool,
    **options: Any,
) -> None:
    bounds = [_parse_bound(text, is_lower=True) for text in options["at_least"]]
    bounds += [_parse_bound(text, is_lower=False) for text in options["at_most"]]
    check_fewshot_options(options)
    with join_processes(ctx, nproc, device) as world:
        pipe = load_pipeline(model, device, dtype, force=force, ensemble=options["ensemble"], world=world)
        pipe = set_image_size(pipe, options["interpolate"])
        _check_options(pipe, options)
        start = time.perf_counter()
        evaluation = _run_evaluation(pipe, options)
        seconds = time.perf_counter() - start
        if world is None or world.is_main:
            _save_outputs(evaluation, Path(model), options)
        _print_report(evaluation, seconds, as_json)
        failures = _failed_bounds(evaluation.metrics, bounds)
        for line in failures:
            echo(f"check failed: {line}", err=True)
        if not failures:
            suggest_next(f"account {shlex.quote(model)}")
    if failures:
        ctx.exit(CHECK_FAILED)


def _check_options(pipe: Pipeline, options: dict[str, Any]) -> None:
    """Raise ConfigError for an option that has no effect on this model."""
    from monoblock.plots.figure import check_plot_path

    method = pipe.loaded.prediction_method
    if options["stride"] is not None and (method or pipe.model.config.family == "encoder-decoder"):
        raise ConfigError("--stride is for models that predict the next token, and this is not one; leave it out")
    if options["picture"] is not None:
        if method not in ("classify", "tag") or options["shots"] is not None:
            raise ConfigError("--picture plots a confusion matrix, and this task has none; leave it out")
        check_plot_path(options["picture"])


def _run_evaluation(pipe: Pipeline, options: dict[str, Any]) -> Evaluation:
    """Build an EvaluationRequest from the options of the same names as its fields, and evaluate it."""
    from monoblock.runs.evaluate import evaluate_request
    from monoblock.tasks.evaluation_report import EvaluationRequest

    search = drop_unset({field: options[field] for field, _, _ in SEARCH_OPTIONS.values()})
    resolve_settings(pipe, search)
    values = {field.name: options[field.name] for field in fields(EvaluationRequest) if field.name in options}
    values["folder"] = resolve_data_folder(options["folder"])
    values["rescore"] = options["rescore"] or options["save_words"] is not None
    request = EvaluationRequest(**{**values, "options": search})
    return evaluate_request(pipe, request) if options["shots"] is None else evaluate_fewshot(pipe, request, options)


def _save_outputs(evaluation: Evaluation, model: Path, options: dict[str, Any]) -> None:
    """Write what the options ask for: word frequencies, the plot, the metrics in the model card."""
    if options["save_words"] is not None and evaluation.word_frequencies is not None:
        evaluation.word_frequencies.write(options["save_words"])
    if options["picture"] is not None and evaluation.save_plot is not None:
        echo(f"saved {evaluation.save_plot(options['picture'])}", err=True)
    if options["card"]:
        from monoblock.runs.model_card import add_metrics

        add_metrics(model, options["data"], evaluation.metrics)


def _print_report(evaluation: Evaluation, seconds: float, as_json: bool) -> None:
    for note in evaluation.notes:
        echo(f"note: {note}", err=True)
    echo(f"evaluated in {seconds:.1f} s", err=True)
    if as_json:
        print_json(evaluation.metrics | {"samples": evaluation.samples})
        return
    metrics = dict(evaluation.metrics)
    rescored, signatures = metrics.pop("rescored", None), metrics.pop("signatures", {})
    metrics.pop("signature", None)
    names = [name for name, value in metrics.items() if not isinstance(value, dict | list)]
    columns = [metrics] if rescored is None else [metrics, rescored]
    rows = [[name, *(format_cell(name, column.get(name)) for column in columns)] for name in names]
    if rescored is not None:
        print_table(["metric", "value", "rescored"], rows)
        change = format_change("accuracy", rescored["gain"])
        echo(f"reranking by word frequencies changes accuracy by {change} (weight {rescored['weight']:g})")
    else:
        print_table(["metric", "value"], rows)
    for table in evaluation.tables:
        echo()
        cells = [[format_cell(*cell) for cell in zip(table.columns, row, strict=True)] for row in table.rows]
        print_table(table.columns, cells)
    for name, signature in signatures.items():
        echo(f"{name}: {signature}")
    for sample in evaluation.samples:
        echo(f"\n  source     {sample['source']}")
        echo(f"  reference  {sample['reference']}\n  hypothesis {sample['hypothesis']}")


def _parse_bound(text: str, *, is_lower: bool) -> Bound:
    name, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        raise ConfigError(f"{text!r} is not a bound; write METRIC=NUMBER, as in bleu=38") from None
    if is_fraction(name) and not 0 <= value <= 1:
        fraction = value / 100 if 1 < value <= 100 else 0.9
        raise ConfigError(f"{name} is a fraction from 0 to 1; write {name}={fraction:g}")
    return Bound(name, value, is_lower)


def _failed_bounds(metrics: dict[str, Any], bounds: list[Bound]) -> list[str]:
    """Return a message for each bound that a metric does not meet; NaN meets no bound.

    Raise ConfigError if a bound names a metric that this evaluation does not have.
    """
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    failures = []
    for name, limit, is_lower in bounds:
        if name not in numbers:
            raise ConfigError(
                f"there is no metric {name!r}{did_you_mean(name, numbers)}; this evaluation has {', '.join(numbers)}"
            )
        value = numbers[name]
        if not (value >= limit if is_lower else value <= limit):
            side = "below" if is_lower else "above"
            failures.append(f"{name} {format_metric(name, value)} is {side} {format_metric(name, limit, 'g')}")
    return failures
