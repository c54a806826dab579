"""Options of `evaluate` for few-shot prompting: number of examples, template, label words, calibration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from monoblock.errors import ConfigError

if TYPE_CHECKING:
    from monoblock.runs.pipeline import Pipeline
    from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest

FEWSHOT_OPTIONS = (
    click.option(
        "--shots",
        metavar="N,N",
        help="Evaluate few-shot classification with N examples in the prompt; a list such as 0,4,8 evaluates each.",
    ),
    click.option(
        "--template",
        help=r"With --shots: prompt for one example, as in 'Review: {text}\nSentiment: {label}\n\n'.  [default: "
        "depends on the corpus]",
    ),
    click.option(
        "--label",
        "label_words",
        multiple=True,
        metavar="LABEL=WORD",
        help="With --shots: write WORD for LABEL in prompts; may be repeated.",
    ),
    click.option(
        "--calibrate",
        is_flag=True,
        help="With --shots: divide the probabilities of labels by those for a text without content, such as N/A.",
    ),
    click.option(
        "--shots-seed",
        type=click.IntRange(min=0),
        default=0,
        help="With --shots: seed for choosing the examples.  [default: 0]",
    ),
)


def add_fewshot_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with FEWSHOT_OPTIONS."""
    for option in reversed(FEWSHOT_OPTIONS):
        command = option(command)
    return command


def check_fewshot_options(options: dict[str, Any]) -> None:
    """Raise ConfigError if an option that needs --shots is given without it."""
    values = {"--template": options["template"], "--label": options["label_words"], "--calibrate": options["calibrate"]}
    stray = next((name for name, value in values.items() if value), None)
    if stray is not None and options["shots"] is None:
        raise ConfigError(f"{stray} has no effect without --shots; write --shots 0,4 as well")


def evaluate_fewshot(pipe: Pipeline, request: EvaluationRequest, options: dict[str, Any]) -> Evaluation:
    """Evaluate by few-shot prompting, once for each number of examples in --shots."""
    from monoblock.tasks.fewshot import evaluate_few_shot

    template = options["template"].replace("\\n", "\n").replace("\\t", "\t") if options["template"] else None
    return evaluate_few_shot(
        pipe.loaded,
        request,
        _parse_shots(options["shots"]),
        template=template,
        words=dict(_parse_label_word(word) for word in options["label_words"]),
        calibrate=options["calibrate"],
        seed=options["shots_seed"],
    )


def _parse_shots(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"--shots {text} is not a list of whole numbers; write --shots 0,4,8")
    return [int(part) for part in parts]


def _parse_label_word(argument: str) -> tuple[str, str]:
    label, equals, word = argument.partition("=")
    if not equals or not word:
        raise ConfigError(f"--label {argument} has no word for the label; write LABEL=WORD, as in 1=positive")
    return label, word
