"""`monoblock generate MODEL [PROMPT]`: a text goes on, shown as it comes."""

from __future__ import annotations

import shlex
import sys
import time
from typing import Any

import click

from monoblock.cli.common import as_json, next_verb, print_json
from monoblock.cli.speaking import BEAMS, OPTIONS, choosing, device, dtype, given, load, settings, show, stops
from monoblock.errors import InputError


@click.command(name="generate", help="Continue PROMPT (- reads it from a pipe; without one, from the start token).")
@click.argument("model")
@click.argument("prompt", required=False)
@choosing(OPTIONS, BEAMS)
@click.option("--num-return-sequences", "num_return_sequences", type=int, help="So many texts.  [1]")
@stops
@device
@dtype
@as_json
def command(
    model: str,
    prompt: str | None,
    stop: tuple[str, ...],
    device: str | None,
    dtype: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    text = sys.stdin.read() if prompt == "-" else (prompt or "")
    pipe = load(model, device, dtype)
    chosen = given(options)
    asked = settings(pipe, chosen)
    if pipe.model.encoder is not None and not text:
        raise InputError("an encoder-decoder answers to a source; give a PROMPT, or - to read it from a pipe")
    if as_json:
        print_json(_answered(pipe, text, stop, chosen))
    elif asked.num_return_sequences > 1 or (asked.num_beams > 1 and "num_beams" in chosen):
        for answer in pipe.answers([text], stop=stop, **chosen)[0]:
            click.echo(_before(pipe, text) + answer.text)
    else:
        parts = pipe.stream(text, stop=stop, **chosen)
        sys.stdout.write(_before(pipe, text))
        show(parts)
    next_verb(f"chat {shlex.quote(model)}" if pipe.tokenizer.chat_template else f"bench {shlex.quote(model)}")


def _before(pipe: Any, text: str) -> str:
    """A decoder's text is the prompt and what follows; an encoder-decoder's is the answer alone."""
    return "" if pipe.model.encoder is not None else text


def _answered(pipe: Any, text: str, stop: tuple[str, ...], chosen: dict[str, Any]) -> dict[str, Any]:
    begun = time.perf_counter()
    answers = pipe.answers([text], stop=stop, **chosen)[0]
    seconds = time.perf_counter() - begun
    texts = [
        {"text": one.text, "tokens": one.tokens, "finished": one.finished}
        | ({} if one.score is None else {"score": one.score})
        for one in answers
    ]
    prompt = pipe.prompt(text)
    read = len(prompt.source if prompt.source is not None else prompt.ids)
    return {"prompt": text, "prompt_tokens": read, "texts": texts, "seconds": seconds}
