"""`monoblock evaluate MODEL DATA`: compute the metrics of the model's task on a corpus."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from monoblock.cli.model_options import (
    ONE_TARGET,
    ModelVerb,
    decoding_options,
    ensemble_option,
    interpolate_option,
    join_processes,
    nproc_option,
    resolve_settings,
)
from monoblock.cli.output import echo, print_json, print_table, suggest_next
from monoblock.cli.verb import argument, data_folder_option, option, resolve_data_folder
from monoblock.errors import ConfigError, did_you_mean
from monoblock.metrics.table import format_cell, format_change, format_metric, is_fraction

if TYPE_CHECKING:
    from monoblock.runs.pipeline import Pipeline
    from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest

CHECK_FAILED = 3  # exit code


class Bound(NamedTuple):
    """The value that a metric must reach (--at-least) or must not exceed (--at-most)."""

    name: str
    value: float
    is_lower: bool

    @classmethod
    def parse(cls, text: str, *, is_lower: bool) -> Bound:
        name, _, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            raise ConfigError(f"{text!r} is not a bound; write METRIC=NUMBER, as in bleu=38") from None
        if is_fraction(name) and not 0 <= value <= 1:
            fraction = value / 100 if 1 < value <= 100 else 0.9
            raise ConfigError(f"{name} is a fraction from 0 to 1; write {name}={fraction:g}")
        return cls(name, value, is_lower)


@dataclass(frozen=True, kw_only=True)
class Evaluate(ModelVerb):
    """Evaluate MODEL on DATA: a corpus from `monoblock ls corpora`, a file or a folder. The metrics depend on the task
    of the model: perplexity, BLEU, accuracy, F1 and others.
    """

    data: str = argument()
    decoding: dict[str, Any] = decoding_options(ONE_TARGET)
    split: Literal["train", "valid", "test", "all"] | None = option(
        "Split to use.  [default: test if there is one, else valid]"
    )
    limit: int | None = option("Use only the first N rows.", least=1)
    samples: int = option("Print N inputs with reference and prediction.", 0, least=0)
    n_best: int = option("Transliteration: the k of top-k accuracy.", 5, least=1)
    lowercase: bool = option("Compute BLEU on lower-cased text.", False)
    language: str | None = option(
        "Translation: target language, for the Moses tokenizer of BLEU.  [default: from the file names, else en]"
    )
    rescore: bool = option(
        "Transliteration: also rerank the hypotheses by how often each word is a target in the training split.", False
    )
    save_words: Path | None = option(
        "As --rescore, and save the word frequencies to this file, for `translate --words`."
    )
    stride: int | None = option(
        "Language models: evaluate in windows that begin N tokens apart.  [default: windows do not overlap]", least=1
    )
    context: int | None = option(
        "Language models: tokens in a window.  [default: the context length of the model]", least=2
    )
    batch: int | None = option(
        "Batch size.  [default: 64, and more if a GPU generates text]", flags=("--batch-size",), least=1
    )
    shots: str | None = option(
        "Evaluate few-shot classification with N examples in the prompt; a list such as 0,4,8 evaluates each.",
        metavar="N,N",
    )
    template: str | None = option(
        r"prompt for one example, as in 'Review: {text}\nSentiment: {label}\n\n'.  [default: depends on the corpus]",
        needs=("shots",),
    )
    label: tuple[str, ...] = option(
        "write WORD for LABEL in prompts; may be repeated.", (), metavar="LABEL=WORD", needs=("shots",)
    )
    calibrate: bool = option(
        "divide the probabilities of labels by those for a text without content, such as N/A.", False, needs=("shots",)
    )
    shots_seed: int = option("seed for choosing the examples.", least=0, needs=("shots",), otherwise=0)
    interpolate: int | None = interpolate_option()
    at_least: tuple[str, ...] = option("Exit with code 3 if METRIC is lower.", (), metavar="METRIC=NUMBER")
    at_most: tuple[str, ...] = option("Exit with code 3 if METRIC is higher.", (), metavar="METRIC=NUMBER")
    card: bool = option("Add the metrics to the model card of the run folder.", False)
    picture: Path | None = option(
        "Classification and tagging: plot the confusion matrix and the worst mistakes to this file."
    )
    folder: Path | None = data_folder_option()
    ensemble: tuple[str, ...] = ensemble_option()
    nproc: int = nproc_option()

    def run(self) -> int | None:
        bounds = [Bound.parse(text, is_lower=True) for text in self.at_least]
        bounds += [Bound.parse(text, is_lower=False) for text in self.at_most]
        with join_processes(self.nproc, self.device) as world:
            pipe = self.load(ensemble=self.ensemble, world=world, interpolate=self.interpolate)
            self._check_options(pipe)
            start = time.perf_counter()
            evaluation = self._evaluate(pipe)
            seconds = time.perf_counter() - start
            if world is None or world.is_main:
                self._save_outputs(evaluation)
            _print_report(evaluation, seconds, self.as_json)
            failures = _failed_bounds(evaluation.metrics, bounds)
            for line in failures:
                echo(f"check failed: {line}", err=True)
            if not failures:
                suggest_next(f"account {shlex.quote(self.model)}")
        return CHECK_FAILED if failures else None

    def _check_options(self, pipe: Pipeline) -> None:
        """Raise ConfigError for an option that has no effect on this model."""
        from monoblock.plots.figure import check_plot_path

        method = pipe.prediction_method
        if self.stride is not None and (method or pipe.model.config.family == "encoder-decoder"):
            raise ConfigError("--stride is for models that predict the next token, and this is not one; leave it out")
        if self.picture is not None:
            if method not in ("classify", "tag") or self.shots is not None:
                raise ConfigError("--picture plots a confusion matrix, and this task has none; leave it out")
            check_plot_path(self.picture)

    def _evaluate(self, pipe: Pipeline) -> Evaluation:
        """Build an EvaluationRequest from the options of the same names as its fields, and evaluate it."""
        from monoblock.runs.evaluate import evaluate_request
        from monoblock.tasks.evaluation_report import EvaluationRequest

        resolve_settings(pipe, self.decoding)
        values = {
            field.name: getattr(self, field.name) for field in fields(EvaluationRequest) if hasattr(self, field.name)
        }
        values |= {"folder": resolve_data_folder(self.folder), "options": self.decoding}
        request = EvaluationRequest(**values | {"rescore": self.rescore or self.save_words is not None})
        return evaluate_request(pipe, request) if self.shots is None else self._evaluate_few_shot(pipe, request)

    def _evaluate_few_shot(self, pipe: Pipeline, request: EvaluationRequest) -> Evaluation:
        """Evaluate by few-shot prompting, once for each number of examples in --shots."""
        from monoblock.tasks.fewshot import evaluate_few_shot

        assert self.shots is not None
        counts = self.shots.split(",")
        if not all(count.strip().isdecimal() for count in counts):
            raise ConfigError(f"--shots {self.shots} is not a list of whole numbers; write --shots 0,4,8")
        words = {}
        for pair in self.label:
            label, _, word = pair.partition("=")
            if not word:
                raise ConfigError(f"--label {label} has no word for the label; write LABEL=WORD, as in 1=positive")
            words[label] = word
        return evaluate_few_shot(
            pipe,
            request,
            [int(count) for count in counts],
            template=self.template.replace("\\n", "\n").replace("\\t", "\t") if self.template else None,
            words=words,
            calibrate=self.calibrate,
            seed=self.shots_seed,
        )

    def _save_outputs(self, evaluation: Evaluation) -> None:
        """Write what the options ask for: word frequencies, the plot, the metrics in the model card."""
        if self.save_words is not None and evaluation.word_frequencies is not None:
            evaluation.word_frequencies.write(self.save_words)
        if self.picture is not None and evaluation.save_plot is not None:
            echo(f"saved {evaluation.save_plot(self.picture)}", err=True)
        if self.card:
            from monoblock.runs.run import add_metrics

            add_metrics(Path(self.model), self.data, evaluation.metrics)


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
