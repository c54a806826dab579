"""`monoblock chat MODEL`: chat with a model on the terminal, or send it one message per line of standard input."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from monoblock.cli._shared.decoding_options import (
    SAMPLING_OPTIONS,
    add_options,
    drop_unset,
    print_stream,
    resolve_settings,
    stop_option,
)
from monoblock.cli._shared.model_options import device_option, dtype_option, force_option, load_pipeline
from monoblock.cli._shared.output import dump_json, echo, suggest_next
from monoblock.errors import InputError

if TYPE_CHECKING:
    from monoblock.runs.pipeline import Pipeline

Message = dict[str, str]  # role and content


@click.command(
    name="chat",
    help="Chat with MODEL, which must have a chat template: every line of input is a user message. The line /reset "
    "starts a new conversation, and /exit quits.",
)
@click.argument("model")
@click.option("--system", help="System message at the start of the conversation.")
@add_options(SAMPLING_OPTIONS)
@stop_option
@device_option
@dtype_option
@force_option
@click.option("--json", "as_json", is_flag=True, help="Print each reply as one JSON object: role and content.")
def command(
    model: str,
    system: str | None,
    stop: tuple[str, ...],
    device: str | None,
    dtype: str | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    pipe = load_pipeline(model, device, dtype, force=force)
    if pipe.model.encoder is not None or pipe.tokenizer.chat_template is None:
        verb = "translate" if pipe.model.encoder is not None else "generate"
        raise InputError(f"{model} has no chat template, so it cannot chat; use monoblock {verb} {model} instead")
    options = drop_unset(options)
    resolve_settings(pipe, options)  # report invalid options before the first message is typed
    system_messages = [] if system is None else [{"role": "system", "content": system}]
    messages = list(system_messages)
    if sys.stdin.isatty():
        echo("/reset starts over, /exit or Ctrl-D quits", err=True)
    for line in _read_user_messages():
        if line == "/reset":
            messages = list(system_messages)
            echo("new conversation", err=True)
            continue
        prompt = [*messages, {"role": "user", "content": line}]
        try:
            messages = [*prompt, _generate_reply(pipe, prompt, stop, options, as_json)]
        except InputError as problem:  # usually because the conversation is longer than the context
            if not sys.stdin.isatty():
                raise
            echo(f"{problem} (/reset starts over)", err=True)
    suggest_next(f"bench {shlex.quote(model)}")


def _generate_reply(
    pipe: Pipeline, messages: list[Message], stop: tuple[str, ...], options: dict[str, Any], as_json: bool
) -> Message:
    chunks = pipe.chat_chunks(messages, stop=stop, **options)
    text = "".join(chunk.text for chunk in chunks) if as_json else print_stream(pipe, chunks)
    reply = {"role": "assistant", "content": text.strip()}
    if as_json:
        echo(dump_json(reply))
    return reply


def _read_user_messages() -> Iterator[str]:
    """Yield the non-empty lines of standard input, until it ends or a line is /exit."""
    while True:
        if sys.stdin.isatty():
            echo("> ", err=True, nl=False)
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return
        if line.strip():
            yield line.strip()
