"""What the verbs that make text share: loading a model, and the options that say how tokens are chosen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from monoblock.errors import ConfigError, InputError

# Option -> (word of Settings, type, help). Without one, the folder's generation_config.json decides.
OPTIONS: dict[str, tuple[str, Any, str]] = {
    "--max-new-tokens": ("max_new_tokens", int, "At most so many new tokens."),
    "--min-new-tokens": ("min_new_tokens", int, "At least so many."),
    "--temperature": ("temperature", float, "0 is greedy; about 0.8 is lively."),
    "--top-k": ("top_k", int, "Draw from the k most probable."),
    "--top-p": ("top_p", float, "Draw from the most probable that make up this share."),
    "--min-p": ("min_p", float, "Draw from what is at least so probable, relative to the best."),
    "--typical-p": ("typical_p", float, "Draw from what is about as surprising as expected."),
    "--repetition-penalty": ("repetition_penalty", float, "Above 1 discourages what was said."),
    "--no-repeat-ngram-size": ("no_repeat_ngram_size", int, "No n-gram of this size twice."),
    "--seed": ("seed", int, "The same seed gives the same text."),
    "--draft": ("draft", str, "8-bit, 4-bit: a copy of the model in so many bits runs ahead; the same text, sooner."),
}
BEAMS: dict[str, tuple[str, Any, str]] = {
    "--num-beams": ("num_beams", int, "Search with so many beams; the text then comes at once."),
    "--length-penalty": ("length_penalty", float, "Above 0 prefers long texts."),
}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def choosing(*tables: dict[str, tuple[str, Any, str]]) -> Callable[[Any], Any]:
    """The options of these tables, for a command; they arrive under the words of Settings."""

    def decorate(command: Any) -> Any:
        rows = [item for table in tables for item in table.items()]
        for option, (word, kind, said) in reversed(rows):
            command = click.option(option, word, type=kind, help=said)(command)
        return command

    return decorate


stops = click.option("--stop", multiple=True, help="End the text before this string; may be given several times.")
device = click.option("--device", help="cpu, cuda, cuda:1 …  [the best there is]")
dtype = click.option("--dtype", help="fp32, bf16, fp16.  [bf16 on a GPU that has it, else fp32]")


def where(device: str | None, dtype: str | None) -> tuple[str, Any]:
    """The device and the torch dtype that were asked for, or those chosen here."""
    import torch

    from monoblock.cli.env import choose_device, choose_dtype

    place = device or choose_device().value
    place = "cpu" if place == "mps" else place
    form = dtype or choose_dtype(place.partition(":")[0]).value
    if form not in {*DTYPES, *DTYPES.values()}:
        raise ConfigError(f"--dtype {form} is no format for weights; write {', '.join(DTYPES)}")
    return place, getattr(torch, DTYPES.get(form, form))


def load(model: str, device: str | None, dtype: str | None) -> Any:
    """The model, its tokenizer and its defaults; words of its generation_config.json that do nothing are named."""
    from monoblock.tasks.pipeline import load as read

    place, form = where(device, dtype)
    pipe = read(Path(model), device=place, dtype=form)
    if pipe.defaults.ignored:
        click.echo(f"generation_config.json: nothing is done about {', '.join(pipe.defaults.ignored)}", err=True)
    return pipe


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {word: value for word, value in options.items() if value is not None}


def settings(pipe: Any, options: dict[str, Any]) -> Any:
    """How tokens will be chosen; what cannot be was typed by the user, and is a matter of usage."""
    try:
        return pipe.settings(options)
    except InputError as problem:
        raise ConfigError(str(problem)) from None


def show(parts: Iterable[str]) -> str:
    """Print a text as it comes; the whole of it."""
    said = []
    for part in parts:
        sys.stdout.write(part)
        sys.stdout.flush()
        said.append(part)
    sys.stdout.write("\n")
    return "".join(said)
