"""The verbs that generate text: `generate`, `chat`, `translate` and `backtranslate`; and how they read lines."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from monoblock.cli.model_options import (
    ONE_TARGET,
    SEARCH,
    ModelVerb,
    batch_size_option,
    decoding_options,
    ensemble_option,
    join_processes,
    nproc_option,
    resolve_settings,
    stop_option,
)
from monoblock.cli.output import ProgressBar, dump_json, echo, print_json, report, suggest_next
from monoblock.cli.verb import REQUIRED, argument, json_option, option
from monoblock.errors import ConfigError, FileError, InputError
from monoblock.untrusted_files import MAX_BYTES, MB, bounded_lines, reading, standard_input

if TYPE_CHECKING:
    from monoblock.inference.streaming_text import TextChunk
    from monoblock.parallel.world import World
    from monoblock.runs.pipeline import Pipeline
    from monoblock.tasks.loaded_model import Hypothesis

T = TypeVar("T")
CHUNK_SIZE = 2048  # lines
SCORE_DECIMALS = 4  # the digits that do not depend on the batch size
RERANKED_HYPOTHESES = 5  # with --words, the best of this many hypotheses per line is printed


@dataclass(frozen=True, kw_only=True)
class Generate(ModelVerb):
    """Generate text with MODEL that continues PROMPT; - reads the prompt from standard input. Without PROMPT, a decoder
    begins at its start token. For an encoder-decoder, PROMPT is the source.

    Decoding options that are not given come from the model's generation_config.json.
    """

    prompt: str | None = argument(None)
    decoding: dict[str, Any] = decoding_options()
    stop: tuple[str, ...] = stop_option()
    nproc: int = nproc_option()

    def run(self) -> None:
        with join_processes(self.nproc, self.device) as world:
            text = self._read_prompt(world)
            pipe = self.load(world=world)
            self._print_texts(pipe, text)
            verb = "chat" if pipe.tokenizer.chat_template else "bench"
            suggest_next(f"{verb} {shlex.quote(self.model)}")

    def _read_prompt(self, world: World | None) -> str:
        """Return the prompt; if it is -, that of standard input, which only the main process reads."""
        if self.prompt != "-":
            return self.prompt or ""
        text = ""
        if world is None or world.is_main:
            raw = standard_input().read(MAX_BYTES + 1)
            if len(raw) > MAX_BYTES:
                raise InputError(
                    f"the prompt on standard input is longer than {MAX_BYTES / MB:g} MB; give a shorter one"
                )
            text = raw.decode("utf-8", errors="replace").replace("\r\n", "\n")
        if world is None:
            return text
        from monoblock.parallel.inference import broadcast_text

        return broadcast_text(text, world)

    def _print_texts(self, pipe: Pipeline, text: str) -> None:
        options = self.decoding | {"stop": self.stop}
        settings = resolve_settings(pipe, self.decoding)
        is_decoder = pipe.model.encoder is None
        if not is_decoder and not text:
            raise InputError(
                "an encoder-decoder needs a source text; give it as PROMPT, or write - to read it from standard input"
            )
        has_several = settings.num_return_sequences > 1 or (settings.num_beams > 1 and "num_beams" in options)
        if not self.as_json and not has_several:
            chunks = pipe.stream_chunks(text, **options)
            echo(text if is_decoder else "", nl=False)
            print_stream(pipe, chunks)
            return
        start = time.perf_counter()
        hypotheses = pipe.generate_hypotheses([text], **options)[0]
        seconds = time.perf_counter() - start
        if not self.as_json:
            for hypothesis in hypotheses:
                echo((text if is_decoder else "") + hypothesis.text)
            note_full_context(pipe, [hypothesis.finish_reason for hypothesis in hypotheses])
            return
        texts = [
            {"text": hypothesis.text, "tokens": hypothesis.num_tokens, "finished": hypothesis.finish_reason}
            | ({} if hypothesis.score is None else {"score": hypothesis.score})
            for hypothesis in hypotheses
        ]
        prompt = pipe.encode_prompt(text)
        prompt_tokens = len(prompt.source if prompt.source is not None else prompt.ids)
        print_json({"prompt": text, "prompt_tokens": prompt_tokens, "texts": texts, "seconds": seconds})


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


@dataclass(frozen=True, kw_only=True)
class Chat(ModelVerb):
    """Chat with MODEL, which must have a chat template: every line of input is a user message. The line /reset starts a
    new conversation, and /exit quits.
    """

    system: str | None = option("System message at the start of the conversation.")
    decoding: dict[str, Any] = decoding_options(without=(*SEARCH, "num_return_sequences"))
    stop: tuple[str, ...] = stop_option()
    as_json: bool = json_option("Print each reply as one JSON object: role and content.")

    def run(self) -> None:
        pipe = self.load()
        if pipe.model.encoder is not None or pipe.tokenizer.chat_template is None:
            verb = "translate" if pipe.model.encoder is not None else "generate"
            raise InputError(
                f"{self.model} has no chat template, so it cannot chat; use monoblock {verb} {self.model} instead"
            )
        resolve_settings(pipe, self.decoding)  # report invalid options before the first message is typed
        beginning = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = list(beginning)
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            echo("/reset starts over, /exit or Ctrl-D quits", err=True)
        while True:
            if is_terminal:
                echo("> ", err=True, nl=False)
            line = sys.stdin.readline()
            words = line.strip()
            if not line or words == "/exit":
                break
            if words == "/reset":
                messages = list(beginning)
                echo("new conversation", err=True)
            elif words:
                prompt = [*messages, {"role": "user", "content": words}]
                try:
                    messages = [*prompt, self._generate_reply(pipe, prompt)]
                except InputError as problem:  # usually because the conversation is longer than the context
                    if not is_terminal:
                        raise
                    echo(f"{problem} (/reset starts over)", err=True)
        suggest_next(f"bench {shlex.quote(self.model)}")

    def _generate_reply(self, pipe: Pipeline, messages: list[dict[str, str]]) -> dict[str, str]:
        chunks = pipe.chat_chunks(messages, stop=self.stop, **self.decoding)
        text = "".join(chunk.text for chunk in chunks) if self.as_json else print_stream(pipe, chunks)
        reply = {"role": "assistant", "content": text.strip()}
        if self.as_json:
            echo(dump_json(reply))
        return reply


@dataclass(frozen=True, kw_only=True)
class Translate(ModelVerb):
    """Translate TEXT, or each line of standard input; empty lines stay empty."""

    text: str | None = argument(None)
    decoding: dict[str, Any] = decoding_options(ONE_TARGET)
    n_best: int | None = option("Print N hypotheses per line, with scores.", least=1)
    alignment: bool = option("Also print the word alignment: source-target word indices, as in 0-0 2-1.", False)
    to: str | None = option("Target script, for a model that writes several: devanagari, tamil, latin, …")
    long: Literal["refuse", "split"] = option(
        "Refuse a line that is longer than the context, or split it into sentences.", "refuse"
    )
    words: Path | None = option(
        "Rerank the hypotheses by the word frequencies in this file, which `evaluate --save-words` writes."
    )
    batch_size: int | None = batch_size_option()
    ensemble: tuple[str, ...] = ensemble_option()
    as_json: bool = json_option("Print one JSON object per line.")

    def run(self) -> None:
        from monoblock.tasks.word_frequencies import WordFrequencies

        pipe = self.load(ensemble=self.ensemble)
        resolve_settings(pipe, self.decoding)
        if pipe.model.encoder is None:
            name = shlex.quote(self.model)
            raise ConfigError(
                f"{self.model} is not an encoder-decoder, so it cannot translate; use monoblock generate {name}"
            )
        frequencies = None if self.words is None else WordFrequencies.read(self.words)
        truncated = 0
        for first, sources in chunk_lines(read_lines([self.text] if self.text is not None else ())):
            for source, hypotheses in zip(sources, self._translate_lines(pipe, sources, first), strict=True):
                truncated += hypotheses[0].finish_reason in ("length", "context")
                ranked = hypotheses if frequencies is None else frequencies.rerank(hypotheses)
                self._print_hypotheses(pipe, source, ranked[: self.n_best or 1])
            sys.stdout.flush()
        if truncated:
            echo(f"warning: {truncated} targets were cut off at the length limit; raise --max-new-tokens", err=True)
        if self.text is not None:
            suggest_next(f"evaluate {shlex.quote(self.model)} DATA")

    def _translate_lines(self, pipe: Pipeline, lines: list[str], first: int) -> list[list[Hypothesis]]:
        from monoblock.tasks.loaded_model import Hypothesis

        n_best = self.n_best or (RERANKED_HYPOTHESES if self.words is not None else 1)
        options = self.decoding | {"batch": self.batch_size, "to": self.to, "long": self.long, "first_index": first}
        if self.decoding.get("temperature"):
            if n_best > 1:
                raise ConfigError(
                    "--n-best needs beam search, but --temperature turns on sampling; leave out one of them"
                )
            return [[Hypothesis(text, finish_reason="stop")] for text in pipe.translate(lines, **options)]
        try:
            return pipe.translate(lines, n_best=n_best, **options)
        except InputError as problem:
            raise name_option(problem) from None

    def _print_hypotheses(self, pipe: Pipeline, source: str, hypotheses: list[Hypothesis]) -> None:
        """Print the hypotheses of a source, as lines of text or as one JSON object."""
        from monoblock.tasks.word_alignment import align, format_pharaoh

        rows: list[dict[str, Any]] = []
        for hypothesis in hypotheses:
            score = None if hypothesis.score is None else round(hypothesis.score, SCORE_DECIMALS)
            row: dict[str, Any] = {"text": hypothesis.text, "score": score}
            if self.alignment:
                row["alignment"] = format_pharaoh(align(pipe, source, hypothesis.text, self.to))
            rows.append(row)
        if self.as_json:
            echo(dump_json({"source": source, "hypotheses": rows}))
            return
        for row in rows:
            cells = [] if self.n_best is None else [f"{row['score'] or 0.0:.{SCORE_DECIMALS}f}"]
            echo("\t".join([*cells, row["text"], *([row["alignment"]] if self.alignment else [])]))


@dataclass(frozen=True, kw_only=True)
class Backtranslate(ModelVerb):
    """Make synthetic training pairs from sentences in the target language.

    MONOLINGUAL is a text file with one target sentence per line, or - for standard input. MODEL translates from the
    target language into the source language; it generates the source of each pair. `monoblock train` reads the pairs
    with seq2seq.synthetic=FILE.
    """

    monolingual: str = argument()
    out: Path = option("File to write: source<TAB>target on each line.", REQUIRED)
    method: str = option(
        "How sources are generated: beam (beam search), sample, restricted (sample from the top k tokens) or noised "
        "(beam search, then noise).",
        "beam",
    )
    noise: str | None = option(
        "With --method noised: one or more of permutation, drop, blank, separated by commas.  [default: all three]"
    )
    tag: bool = option("Put the tag <bt> before every generated source.", False)
    seed: int = option("Seed of the sampling and the noise.", 1, least=0)
    num_beams: int | None = option("With --method beam or noised: number of beams.  [default: 5]", least=1)
    top_k: int | None = option(
        "With --method restricted: sample from the k most probable tokens.  [default: 10]", least=1
    )
    limit: int | None = option("Use only the first N lines.", least=1)
    batch_size: int | None = batch_size_option()

    def run(self) -> None:
        from monoblock.data.readers import text
        from monoblock.tasks.backtranslation import BacktranslationMethod, backtranslate, write_pairs

        noises = tuple(name.strip() for name in self.noise.split(",")) if self.noise else ()
        method = BacktranslationMethod(self.method, noises, self.tag)
        if self.out.exists():
            raise ConfigError(f"{self.out} already exists; give another file with --out, or remove this one")
        if (self.num_beams and self.method in ("sample", "restricted")) or (self.top_k and self.method != "restricted"):
            name = "--num-beams" if self.num_beams else "--top-k"
            raise ConfigError(f"{name} has no effect with --method {self.method}; leave it out")
        is_file = self.monolingual != "-"
        if is_file and not Path(self.monolingual).is_file():
            raise FileError(f"there is no file {self.monolingual}; give a text file with one sentence per line")
        sentences = islice(text.read_lines(self.monolingual) if is_file else read_lines(), self.limit)
        pipe = self.load()
        given = {"num_beams": self.num_beams, "top_k": self.top_k}
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        pairs = backtranslate(pipe, sentences, method, seed=self.seed, batch=self.batch_size, **options)
        with ProgressBar("lines") as progress:
            count, skipped = write_pairs(self.out, progress.count(pairs))
        note = f"; skipped {skipped:,} lines that are empty or longer than the context" if skipped else ""
        report(
            self.as_json,
            {"file": str(self.out), "pairs": count, "left_out": skipped, "method": self.method}
            | {"noise": list(method.noise)},
            lambda _: echo(f"Saved {self.out}: {count:,} pairs{note}"),
            f"train RECIPE seq2seq.synthetic={shlex.quote(str(self.out))} seq2seq.synthetic_ratio=1",
        )


# -- lines -------------------------------------------------------------------------------------------------------------


def read_lines(texts: Sequence[str] = (), file: Path | None = None) -> Iterator[str]:
    """Yield the lines of `texts` if there are any, else of `file` if it is given, else of standard input."""
    from monoblock.tasks.input_template import decode_lines

    if texts:
        for text in texts:
            yield from text.split("\n")
    elif file is not None:
        with reading(file), file.open("rb") as stream:
            yield from decode_lines(bounded_lines(stream, str(file)), str(file))
    else:
        yield from decode_lines(bounded_lines(standard_input(), "standard input"), "standard input")


def chunk_lines(lines: Iterable[T]) -> Iterator[tuple[int, list[T]]]:
    """Yield (index of the first line, lines) for chunks of CHUNK_SIZE lines.

    A chunk has one line if standard input is a terminal, so that each line is answered at once.
    """
    size, start, stream = 1 if sys.stdin.isatty() else CHUNK_SIZE, 0, iter(lines)
    while chunk := list(islice(stream, size)):
        yield start, chunk
        start += len(chunk)


def name_option(problem: InputError) -> InputError:
    """Return the error with the command-line option --long in place of the Python argument."""
    return InputError(re.sub(r"long='(\w+)'", r"--long \1", str(problem)))
