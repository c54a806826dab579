"""`monoblock chat MODEL`: a conversation in the terminal, or one line of a pipe after the other."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import click

from monoblock.cli.common import next_verb
from monoblock.cli.speaking import OPTIONS, choosing, device, dtype, given, load, settings, show, stops
from monoblock.errors import InputError

HELP = "/reset begins anew, /exit ends; so does Ctrl-D"


@click.command(name="chat", help="Talk with a model that has a chat template; /reset begins anew, /exit ends.")
@click.argument("model")
@click.option("--system", help="What the model is told before the conversation.")
@choosing(OPTIONS)
@stops
@device
@dtype
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line: role and content.")
def command(
    model: str,
    system: str | None,
    stop: tuple[str, ...],
    device: str | None,
    dtype: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    pipe = load(model, device, dtype)
    if pipe.model.encoder is not None or pipe.tokenizer.chat_template is None:
        verb = "translate" if pipe.model.encoder is not None else "generate"
        raise InputError(f"{model} has no chat template, so it was not taught to talk; write monoblock {verb} {model}")
    settings(pipe, given(options))  # what cannot be is said before anybody types
    first = [] if system is None else [{"role": "system", "content": system}]
    messages = list(first)
    if sys.stdin.isatty():
        click.echo(HELP, err=True)
    for line in _lines():
        if line == "/reset":
            messages = list(first)
            click.echo("a new conversation", err=True)
            continue
        turn = [*messages, {"role": "user", "content": line}]
        try:
            messages = [*turn, _reply(pipe, turn, stop, given(options), as_json)]
        except InputError as problem:  # mostly: the conversation no longer fits
            if not sys.stdin.isatty():
                raise
            click.echo(f"{problem} (/reset begins anew)", err=True)
    next_verb(f"bench {shlex.quote(model)}")


def _reply(
    pipe: Any, messages: list[dict[str, str]], stop: tuple[str, ...], options: dict[str, Any], as_json: bool
) -> dict[str, str]:
    parts = pipe.chat_stream(messages, stop=stop, **options)
    said = "".join(parts) if as_json else show(parts)
    reply = {"role": "assistant", "content": said.strip()}
    if as_json:
        click.echo(json.dumps(reply, ensure_ascii=False))
    return reply


def _lines() -> Iterator[str]:
    """What is typed or piped, a line a turn, until the end or /exit; empty lines are no turn."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return
        if line.strip():
            yield line.strip()
