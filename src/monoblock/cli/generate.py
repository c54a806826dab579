"""`monoblock generate MODEL [PROMPT]`: continue a text, printed as it is generated."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from monoblock.cli.model_options import (
    decoding_options,
    device_option,
    dtype_option,
    force_option,
    join_processes,
    load_pipeline,
    note_full_context,
    nproc_option,
    print_stream,
    resolve_settings,
    stop_option,
)
from monoblock.cli.output import echo, print_json, suggest_next
from monoblock.cli.verb import argument, json_option
from monoblock.errors import InputError
from monoblock.untrusted_files import MAX_BYTES, MB, standard_input

if TYPE_CHECKING:
    from monoblock.parallel.world import World
    from monoblock.runs.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Generate text with MODEL that continues PROMPT; - reads the prompt from standard input. Without PROMPT, a decoder
    begins at its start token. For an encoder-decoder, PROMPT is the source.

    Decoding options that are not given come from the model's generation_config.json.
    """

    model: str = argument()
    prompt: str | None = argument(None)
    decoding: dict[str, Any] = decoding_options()
    stop: tuple[str, ...] = stop_option()
    device: str | None = device_option()
    dtype: str | None = dtype_option()
    force: bool = force_option()
    nproc: int = nproc_option()
    as_json: bool = json_option()

    def run(self) -> None:
        with join_processes(self.nproc, self.device) as world:
            text = _read_prompt(self.prompt, world)
            pipe = load_pipeline(self.model, self.device, self.dtype, force=self.force, world=world)
            self._print_texts(pipe, text)
            verb = "chat" if pipe.tokenizer.chat_template else "bench"
            suggest_next(f"{verb} {shlex.quote(self.model)}")

    def _print_texts(self, pipe: Pipeline, text: str) -> None:
        options = self.decoding | {"stop": self.stop}
        settings = resolve_settings(pipe, self.decoding)
        is_decoder = pipe.model.encoder is None
        if not is_decoder and not text:
            raise InputError(
                "an encoder-decoder needs a source text; give it as PROMPT, or write - to read it from standard input"
            )
        if self.as_json:
            print_json(_generate_json(pipe, text, options))
        elif settings.num_return_sequences > 1 or (settings.num_beams > 1 and "num_beams" in options):
            hypotheses = pipe.generate_hypotheses([text], **options)[0]
            for hypothesis in hypotheses:
                echo((text if is_decoder else "") + hypothesis.text)
            note_full_context(pipe, [hypothesis.finish_reason for hypothesis in hypotheses])
        else:
            chunks = pipe.stream_chunks(text, **options)
            echo(text if is_decoder else "", nl=False)
            print_stream(pipe, chunks)


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


def _generate_json(pipe: Pipeline, text: str, options: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    hypotheses = pipe.generate_hypotheses([text], **options)[0]
    seconds = time.perf_counter() - start
    texts = [
        {"text": hypothesis.text, "tokens": hypothesis.num_tokens, "finished": hypothesis.finish_reason}
        | ({} if hypothesis.score is None else {"score": hypothesis.score})
        for hypothesis in hypotheses
    ]
    prompt = pipe.encode_prompt(text)
    prompt_tokens = len(prompt.source if prompt.source is not None else prompt.ids)
    return {"prompt": text, "prompt_tokens": prompt_tokens, "texts": texts, "seconds": seconds}
