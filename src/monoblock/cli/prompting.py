"""The options of `evaluate` for models that are prompted, and for images of another size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from monoblock.errors import ConfigError

OPTIONS = (
    click.option("--shots", metavar="N,N", help="Prompt a decoder for labels, with so many examples: 0,4,8."),
    click.option("--template", help=r"Of a prompt: 'Review: {text}\nSentiment: {label}\n\n'.  [by the corpus]"),
    click.option(
        "--label", "label_words", multiple=True, metavar="LABEL=WORD", help="The word that stands for a label."
    ),
    click.option("--calibrate", is_flag=True, help="Divide by what a text that says nothing gets."),
    click.option("--shots-seed", type=click.IntRange(min=0), default=0, help="Draws the examples.  [0]"),
)
interpolate = click.option(
    "--interpolate",
    type=click.IntRange(min=1),
    metavar="PIXELS",
    help="Look at images of another size: the places of patches are interpolated.",
)


def prompting(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options above."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def check_prompting(words: dict[str, Any]) -> None:
    """One line for options that belong to --shots and stand without it."""
    given = {"--template": words["template"], "--label": words["label_words"], "--calibrate": words["calibrate"]}
    stray = next((name for name, value in given.items() if value), None)
    if stray is not None and words["shots"] is None:
        raise ConfigError(f"{stray} is for prompting; write --shots 0,4 as well")


def prompted(pipe: Any, asked: Any, words: dict[str, Any]) -> Any:
    """Figures by the number of examples."""
    from monoblock.tasks.fewshot import few_shot

    given = dict(_named(word) for word in words["label_words"])
    template = words["template"].replace("\\n", "\n").replace("\\t", "\t") if words["template"] else None
    how = {"template": template, "words": given, "calibrate": words["calibrate"], "seed": words["shots_seed"]}
    return few_shot(pipe, asked, _counts(words["shots"]), **how)


def resized(pipe: Any, pixels: int | None) -> Any:
    """The same, looking at images of so many pixels a side."""
    from dataclasses import replace

    from monoblock.resizing import interpolated

    return pipe if pixels is None else replace(pipe, model=interpolated(pipe.model, pixels))


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"--shots {text} cannot be; write whole numbers, as in 0,4,8")
    return [int(part) for part in parts]


def _named(word: str) -> tuple[str, str]:
    label, equals, said = word.partition("=")
    if not equals or not said:
        raise ConfigError(f"--label {word} names no word; write LABEL=WORD, as in 1=positive")
    return label, said
