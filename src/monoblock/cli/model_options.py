"""The options of every verb that runs a model: how it is loaded, and how it decodes; and what they do."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from monoblock.cli.output import echo
from monoblock.cli.verb import Option, argument, json_option, option, option_group
from monoblock.config.field_description import describe_fields, list_choices, type_words
from monoblock.errors import ConfigError, InputError
from monoblock.inference.settings import ENGINE_OPTIONS, Settings

if TYPE_CHECKING:
    from monoblock.parallel.world import World
    from monoblock.runs.pipeline import Pipeline


def device_option() -> Any:
    return option("cpu, cuda, cuda:1, …  [default: cuda if available, else cpu]")


def dtype_option() -> Any:
    return option("Weights in fp32, bf16 or fp16.  [default: bf16 on a GPU that supports it, else fp32]")


def batch_size_option() -> Any:
    about = "Batch size in lines.  [default: 64, or as many as suit a GPU]"
    return option(about, flags=("--batch-size", "--batch"), least=1)


def ensemble_option() -> Any:
    about = "A further model with the same tokenizer; the log-probabilities of all are averaged. May be repeated."
    return option(about, (), metavar="MODEL")


def nproc_option() -> Any:
    about = "Number of processes on this machine that share the weights of the model, each a part."
    return option(about, 1, least=1)


def interpolate_option() -> Any:
    about = "Vision models: read images of this width and height, by interpolating the position embeddings."
    return option(about, least=1, metavar="PIXELS")


def stop_option() -> Any:
    return option("End the text before this string; may be repeated.", ())


# Groups of options, by the names of the fields of Settings.
SEARCH = ("num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "length_penalty_form")
ONE_TARGET = (*SEARCH, "max_new_tokens", "temperature", "top_k", "top_p", "seed")


def decoding_options(only: Collection[str] = (), without: Collection[str] = ()) -> Any:
    """Declare an option for every field of Settings that is a number, a word or a choice of words.

    Those that are not given are as in the model's generation_config.json.
    """
    options = {}
    for field in describe_fields(Settings):
        kinds = {*type_words(field.hint), *map(type, list_choices(field.hint))}
        is_id = field.name.endswith("_token_id")
        is_wanted = field.name in (only or {field.name}) and field.name not in (*without, *ENGINE_OPTIONS)
        if kinds <= {"integer", "number", "string", str} and is_wanted and not is_id:
            options[field.name] = (field.hint, Option(help=f"{field.meaning[:1].upper()}{field.meaning[1:]}."))
    return option_group(options)


def resolve_settings(pipe: Pipeline, options: dict[str, Any]) -> Settings:
    """Merge command-line options into the decoding defaults of the model; raise ConfigError for an invalid value."""
    try:
        return pipe.resolve_settings(options)
    except InputError as problem:
        raise ConfigError(str(problem)) from None


# -- loading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelVerb:
    """The model of a verb, and the options for loading it."""

    model: str = argument()
    device: str | None = device_option()
    dtype: str | None = dtype_option()
    force: bool = option("Load the tokenizer of a published model even if it seems to belong to another one.", False)
    as_json: bool = json_option()

    def load(
        self, *, ensemble: Sequence[str] = (), world: World | None = None, interpolate: int | None = None
    ) -> Pipeline:
        """Load the model; print a warning if fields of generation_config.json are ignored.

        world: the processes that share the model.
        interpolate: the width and height of images, for which position embeddings are interpolated.
        """
        from monoblock.runs.device import resolve_device
        from monoblock.runs.load import load

        device, dtype = resolve_device(self.device, self.dtype)
        others = [Path(other) for other in ensemble]
        pipe = load(Path(self.model), device=device, dtype=dtype, force=self.force, ensemble=others, world=world)
        if pipe.defaults.ignored_fields:
            fields = ", ".join(pipe.defaults.ignored_fields)
            echo(f"warning: these fields of generation_config.json are not supported and ignored: {fields}", err=True)
        if interpolate is None:
            return pipe
        from monoblock.nn.interpolate_positions import interpolate as interpolate_positions

        model: Any = interpolate_positions(pipe.model, interpolate)  # type: ignore[type-var]  # which refuses an LSTM
        return replace(pipe, model=model)


@contextmanager
def join_processes(nproc: int, device: str | None) -> Iterator[World | None]:
    """Run the `with` block in every process that shares the model; yield None if there is only this one.

    Without torchrun, --nproc starts the command again in that many processes, and exits with their code. Only the main
    process prints, and an error is printed once.
    """
    if "LOCAL_RANK" not in os.environ:
        if nproc > 1:
            from monoblock.parallel.launch import launch

            context = click.get_current_context()
            known = context.obj or {}
            words = ["--debug"] * bool(known.get("debug")) + list(known.get("words", sys.argv[1:]))
            context.exit(launch(words, nproc, device or "auto"))
        yield None
        return
    if nproc not in (1, int(os.environ["WORLD_SIZE"])):
        raise ConfigError(f"torchrun has started {os.environ['WORLD_SIZE']} processes; leave out --nproc {nproc}")
    from monoblock.parallel import inference
    from monoblock.parallel.world import defer_worker_errors

    with defer_worker_errors(os.environ):
        world = inference.join_processes(device or "auto")
        with ExitStack() as stack:
            if not world.is_main:
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(redirect_stdout(nowhere))
                stack.enter_context(redirect_stderr(nowhere))
            yield world
        world.shut_down()
