"""The options of decoding, from the fields of `Settings`, and the printing of generated text."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from monoblock.cli.output import echo
from monoblock.cli.verb import Option, option, option_group
from monoblock.config.field_description import describe_fields, list_choices, type_words
from monoblock.errors import ConfigError, InputError
from monoblock.inference.settings import ENGINE_OPTIONS, Settings

if TYPE_CHECKING:
    from monoblock.inference.streaming_text import TextChunk
    from monoblock.runs.pipeline import Pipeline

# Groups of options, by the names of the fields of Settings.
SEARCH = ("num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "length_penalty_form")
ONE_TARGET = (*SEARCH, "max_new_tokens", "temperature", "top_k", "top_p", "seed")


def decoding_options(only: Collection[str] = (), without: Collection[str] = ()) -> Any:
    """Declare an option for every field of Settings that is a number, a word or a choice of words.

    Those that are not given are as in the model's generation_config.json.
    """
    options = {}
    for field in describe_fields(Settings):
        is_plain = set(type_words(field.hint)) <= {"integer", "number", "string"} and True not in list_choices(
            field.hint
        )
        is_offered = is_plain and field.name not in ENGINE_OPTIONS and not field.name.endswith("_token_id")
        if is_offered and field.name in (only or {field.name}) and field.name not in without:
            options[field.name] = (field.hint, Option(help=f"{field.meaning[:1].upper()}{field.meaning[1:]}."))
    return option_group(options)


def stop_option() -> Any:
    return option("End the text before this string; may be repeated.", ())


def resolve_settings(pipe: Pipeline, options: dict[str, Any]) -> Settings:
    """Merge command-line options into the decoding defaults of the model; raise ConfigError for an invalid value."""
    try:
        return pipe.resolve_settings(options)
    except InputError as problem:
        raise ConfigError(str(problem)) from None


def print_stream(pipe: Pipeline, chunks: Iterable[TextChunk]) -> str:
    """Print the chunks of a text as they are generated; return the whole text."""
    printed, ends = [], []
    for chunk in chunks:
        echo(chunk.text, nl=False)
        printed.append(chunk.text)
        ends.append(chunk.finish_reason)
    echo()
    note_full_context(pipe, ends)
    return "".join(printed)


def note_full_context(pipe: Pipeline, ends: Iterable[str | None]) -> None:
    """Print a note if a text has ended because the context is full; `ends` are the finish reasons."""
    if "context" in ends:
        context = pipe.model.config.context
        echo(f"note: the text ends here because its context of {context} tokens, prompt included, is full", err=True)
