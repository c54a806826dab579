"""`monoblock generate MODEL [PROMPT]`: continue a text, printed as it is generated."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING, Any

import click

from monoblock.cli._shared.decoding_options import (
    BEAM_OPTIONS,
    SAMPLING_OPTIONS,
    add_options,
    drop_unset,
    note_full_context,
    print_stream,
    resolve_settings,
    stop_option,
)
from monoblock.cli._shared.model_options import device_option, dtype_option, force_option, load_pipeline
from monoblock.cli._shared.output import echo, json_option, print_json, suggest_next
from monoblock.cli._shared.processes import join_processes, nproc_option
from monoblock.errors import InputError
from monoblock.untrusted_files import MAX_BYTES, MB, standard_input

if TYPE_CHECKING:
    from monoblock.parallel.world import World
    from monoblock.runs.pipeline import Pipeline


@click.command(
    name="generate",
    help="Generate text with MODEL that continues PROMPT; - reads the prompt from standard input. Without PROMPT, a "
    "decoder begins at its start token. For an encoder-decoder, PROMPT is the source.\n\nDecoding options that are not "
    "given come from the model's generation_config.json.",
)
@click.argument("model")
@click.argument("prompt", required=False)
@add_options(SAMPLING_OPTIONS, BEAM_OPTIONS)
@click.option("--num-return-sequences", "num_return_sequences", type=int, help="Number of texts to generate.")
@stop_option
@device_option
@dtype_option
@force_option
@nproc_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    prompt: str | None,
    stop: tuple[str, ...],
    device: str | None,
    dtype: str | None,
    force: bool,
    nproc: int,
    as_json: bool,
    **options: Any,
) -> None:
    with join_processes(ctx, nproc, device) as world:
        text = _read_prompt(prompt, world)
        pipe = load_pipeline(model, device, dtype, force=force, world=world)
        _print_texts(pipe, text, stop, drop_unset(options), as_json)
        suggest_next(f"chat {shlex.quote(model)}" if pipe.tokenizer.chat_template else f"bench {shlex.quote(model)}")


def _read_prompt(prompt: str | None, world: World | None) -> str:
    """Return the prompt; if it is -, that of standard input, which only the main process reads."""
    if prompt != "-":
        return prompt or ""
    if world is None:
        return _read_standard_input()
    from monoblock.parallel.inference import broadcast_text

    return broadcast_text(_read_standard_input() if world.is_main else "", world)


def _read_standard_input() -> str:
    raw = standard_input().read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise InputError(f"the prompt on standard input is longer than {MAX_BYTES / MB:g} MB; give a shorter one")
    return raw.decode("utf-8", errors="replace").replace("\r\n", "\n")


def _print_texts(pipe: Pipeline, text: str, stop: tuple[str, ...], options: dict[str, Any], as_json: bool) -> None:
    settings = resolve_settings(pipe, options)
    if pipe.model.encoder is not None and not text:
        raise InputError(
            "an encoder-decoder needs a source text; give it as PROMPT, or write - to read it from standard input"
        )
    if as_json:
        print_json(_generate_json(pipe, text, stop, options))
    elif settings.num_return_sequences > 1 or (settings.num_beams > 1 and "num_beams" in options):
        hypotheses = pipe.generate_hypotheses([text], stop=stop, **options)[0]
        for hypothesis in hypotheses:
            echo(_prompt_prefix(pipe, text) + hypothesis.text)
        note_full_context(pipe, [hypothesis.finish_reason for hypothesis in hypotheses])
    else:
        chunks = pipe.stream_chunks(text, stop=stop, **options)
        echo(_prompt_prefix(pipe, text), nl=False)
        print_stream(pipe, chunks)


def _prompt_prefix(pipe: Pipeline, text: str) -> str:
    """Return the text to print before the generated text: the prompt for a decoder, "" for an encoder-decoder."""
    return "" if pipe.model.encoder is not None else text


def _generate_json(pipe: Pipeline, text: str, stop: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    hypotheses = pipe.generate_hypotheses([text], stop=stop, **options)[0]
    seconds = time.perf_counter() - start
    texts = [
        {"text": hypothesis.text, "tokens": hypothesis.num_tokens, "finished": hypothesis.finish_reason}
        | ({} if hypothesis.score is None else {"score": hypothesis.score})
        for hypothesis in hypotheses
    ]
    prompt = pipe.encode_prompt(text)
    prompt_tokens = len(prompt.source if prompt.source is not None else prompt.ids)
    return {"prompt": text, "prompt_tokens": prompt_tokens, "texts": texts, "seconds": seconds}
