"""`monoblock chat MODEL`: chat with a model on the terminal, or send it one message per line of standard input."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monoblock.cli.model_options import (
    SEARCH,
    decoding_options,
    device_option,
    dtype_option,
    force_option,
    load_pipeline,
    print_stream,
    resolve_settings,
    stop_option,
)
from monoblock.cli.output import dump_json, echo, suggest_next
from monoblock.cli.verb import argument, json_option, option
from monoblock.errors import InputError

if TYPE_CHECKING:
    from monoblock.runs.pipeline import Pipeline

Message = dict[str, str]  # role and content


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Chat with MODEL, which must have a chat template: every line of input is a user message. The line /reset starts a
    new conversation, and /exit quits.
    """

    model: str = argument()
    system: str | None = option("System message at the start of the conversation.")
    decoding: dict[str, Any] = decoding_options(without=(*SEARCH, "num_return_sequences"))
    stop: tuple[str, ...] = stop_option()
    device: str | None = device_option()
    dtype: str | None = dtype_option()
    force: bool = force_option()
    as_json: bool = json_option("Print each reply as one JSON object: role and content.")

    def run(self) -> None:
        pipe = load_pipeline(self.model, self.device, self.dtype, force=self.force)
        if pipe.model.encoder is not None or pipe.tokenizer.chat_template is None:
            verb = "translate" if pipe.model.encoder is not None else "generate"
            raise InputError(
                f"{self.model} has no chat template, so it cannot chat; use monoblock {verb} {self.model} instead"
            )
        resolve_settings(pipe, self.decoding)  # report invalid options before the first message is typed
        system_messages = [] if self.system is None else [{"role": "system", "content": self.system}]
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
                messages = [*prompt, self._generate_reply(pipe, prompt)]
            except InputError as problem:  # usually because the conversation is longer than the context
                if not sys.stdin.isatty():
                    raise
                echo(f"{problem} (/reset starts over)", err=True)
        suggest_next(f"bench {shlex.quote(self.model)}")

    def _generate_reply(self, pipe: Pipeline, messages: list[Message]) -> Message:
        chunks = pipe.chat_chunks(messages, stop=self.stop, **self.decoding)
        text = "".join(chunk.text for chunk in chunks) if self.as_json else print_stream(pipe, chunks)
        reply = {"role": "assistant", "content": text.strip()}
        if self.as_json:
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
