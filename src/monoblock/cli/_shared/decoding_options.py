"""Options that control how text is generated: sampling, beam search, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from monoblock.cli._shared.output import echo
from monoblock.errors import ConfigError, InputError

if TYPE_CHECKING:
    from monoblock.inference.settings import Settings
    from monoblock.inference.streaming_text import TextChunk
    from monoblock.runs.pipeline import Pipeline

# Option -> (field of Settings, type, help). Options not given fall back to the folder's generation_config.json.
OptionTable = dict[str, tuple[str, Any, str]]
SAMPLING_OPTIONS: OptionTable = {
    "--max-new-tokens": ("max_new_tokens", int, "Generate at most this many tokens."),
    "--min-new-tokens": ("min_new_tokens", int, "Generate at least this many tokens."),
    "--temperature": ("temperature", float, "0 always takes the most probable token; higher values are more random."),
    "--top-k": ("top_k", int, "Sample from the k most probable tokens."),
    "--top-p": ("top_p", float, "Sample from the most probable tokens whose probabilities add up to p."),
    "--min-p": ("min_p", float, "Drop tokens with less than p times the probability of the most probable token."),
    "--typical-p": ("typical_p", float, "Locally typical sampling with probability mass p."),
    "--repetition-penalty": ("repetition_penalty", float, "Values above 1 discourage repeating earlier tokens."),
    "--presence-penalty": ("presence_penalty", float, "Lower the logits of tokens that the new text has."),
    "--frequency-penalty": ("frequency_penalty", float, "The same, for each time that it has them."),
    "--no-repeat-ngram-size": ("no_repeat_ngram_size", int, "Never repeat an n-gram of this size."),
    "--seed": ("seed", int, "Seed of the sampling; the same seed gives the same text."),
    "--draft": ("draft", str, "8-bit or 4-bit: speculative decoding with a quantized copy; same text, faster."),
}
BEAM_OPTIONS: OptionTable = {
    "--num-beams": ("num_beams", int, "Beam search with this many beams; the text is printed when it is complete."),
    "--length-penalty": ("length_penalty", float, "Beam search: values above 0 favour longer texts."),
}
SEARCH_OPTIONS: OptionTable = {
    "--num-beams": ("num_beams", click.IntRange(min=1), "Number of beams in beam search; 1 is greedy decoding."),
    "--length-penalty": ("length_penalty", float, "Beam search: values above 0 favour longer targets."),
    "--length-penalty-form": (
        "length_penalty_form",
        click.Choice(["length", "gnmt"]),
        "Beam search divides by length ** penalty, or by ((5 + length) / 6) ** penalty.",
    ),
    "--max-new-tokens": ("max_new_tokens", int, "Generate at most this many tokens per target."),
    "--temperature": ("temperature", float, "Values above 0 sample the target instead of using beam search."),
    "--top-k": ("top_k", int, "Sample from the k most probable tokens."),
    "--top-p": ("top_p", float, "Sample from the most probable tokens whose probabilities add up to p."),
    "--seed": ("seed", int, "Seed of the sampling; line n uses seed + n."),
}

stop_option = click.option("--stop", multiple=True, help="End the text before this string; may be repeated.")


def add_options(*tables: OptionTable) -> Callable[[Any], Any]:
    """Decorate a command with the options of these tables; their values are passed by the names of Settings fields."""

    def decorate(command: Any) -> Any:
        rows = [item for table in tables for item in table.items()]
        for option, (field, kind, help_text) in reversed(rows):
            command = click.option(option, field, type=kind, help=help_text)(command)
        return command

    return decorate


def drop_unset(options: dict[str, Any]) -> dict[str, Any]:
    """Return only the options that were given, that is, those that are not None."""
    return {name: value for name, value in options.items() if value is not None}


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
