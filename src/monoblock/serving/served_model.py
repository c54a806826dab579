"""A model that is served: its pipeline, its engine in a thread, and the texts of requests as they grow."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from monoblock.errors import ConfigError, InputError, with_article
from monoblock.inference.engine import Engine
from monoblock.inference.optimized import optimize
from monoblock.inference.scheduler import Prompt, TokenScores
from monoblock.inference.settings import Settings, check_effects
from monoblock.inference.streaming_text import StreamingText
from monoblock.inference.supported_models import reason_not_to_optimize
from monoblock.model import Transformer
from monoblock.runs.pipeline import Pipeline
from monoblock.serving.constraints import Constraint, ConstraintTokenizer, spell
from monoblock.serving.engine_loop import EngineLoop
from monoblock.serving.inspect_request import MAX_NUMBERS, MAX_TOKENS, Inspection
from monoblock.serving.requests import DecodingBody
from monoblock.tasks.translate import script_tag_for
from monoblock.tasks.word_alignment import align
from monoblock.tokenizers.tokenizer import Tokenizer

MAX_ROWS = 256  # sequences that are decoded at a time; their pages are what limits the memory
LEAST_TEMPERATURE = 1e-5  # a lower one always chooses the most probable token
CREATIVE = {"temperature": 1.0}  # OpenAI's default, where neither the request nor the model's folder says another


class OutOfTime(InputError):
    """An answer that was not ready within the timeout of its request."""


class TooLong(InputError):
    """A prompt that the context of the model does not hold."""


@dataclass(frozen=True)
class Piece:
    """New text of one sequence."""

    index: int
    text: str
    tokens: tuple[int, ...] = ()
    scores: tuple[TokenScores, ...] = ()
    prompt_scores: tuple[TokenScores, ...] = ()
    num_cached: int = 0  # tokens of the prompt that were found in pages
    finish_reason: str | None = None
    score: float | None = None  # of a beam search
    seen: dict[str, Any] | None = None  # what an inspection has shown when the token was chosen


@dataclass(frozen=True)
class Job:
    """One prompt with its settings, ready for the engine."""

    prompt: Prompt
    settings: Settings
    copies: int = 1  # how often each sequence is returned: greedy decoding gives the same text n times
    salt: str | None = None
    inspection: Inspection | None = None  # what to look into
    new_text: bool = False  # whether the text begins anew, as an answer in a chat, or goes on from the prompt


class ServedModel:
    """A pipeline under a name; `loop` decodes, and runs what is not decoding between its steps."""

    def __init__(
        self, name: str, pipe: Pipeline, *, exact: bool = False, max_rows: int | None = None, max_queue: int = 256
    ) -> None:
        self.name, self.pipe, self.created = name, pipe, int(time.time())
        model = pipe.model
        if not isinstance(model, Transformer):
            raise InputError(f"{name} is an LSTM, which is not served; give a Transformer")
        self.model = model
        self.decodes = not pipe.prediction_method and model.decoder is not None
        engine: Any = _NoEngine()
        if self.decodes:
            capacity = model.config.context or 4096
            is_fast = exact or reason_not_to_optimize(model) is None
            engine = Engine(
                optimize(model, exact=exact) if is_fast else model,
                max_rows=max_rows or MAX_ROWS,
                capacity=capacity,
                tokenizer=pipe.tokenizer,
            )
        self.loop = EngineLoop(engine, max_queue=max_queue)

    # -- what it can do -------------------------------------------------------------------------------------------

    @property
    def abilities(self) -> list[str]:
        """What may be asked of the model: the last words of the routes that take it."""
        method = self.pipe.prediction_method
        if method:
            return {"classify": ["classify"], "embed": ["embeddings"], "fill": ["fill", "embeddings"]}.get(method, [])
        if self.pipe.model.encoder is not None:
            return ["translate", "completions"]
        chat = ["chat/completions", "responses"] if self.pipe.tokenizer.chat_template else []
        return ["completions", *chat, "embeddings"]

    def check(self, ability: str) -> None:
        if ability not in self.abilities:
            kind = with_article(self.pipe.model.config.family)
            offered = ", ".join(f"/v1/{name}" for name in self.abilities) or "no route"
            why = ""
            if ability in ("chat/completions", "responses") and "completions" in self.abilities:
                why = " without a chat template"
            raise InputError(f"{self.name} is {kind} model{why}; it answers {offered}")

    @cached_property
    def constraint_tokenizer(self) -> ConstraintTokenizer:
        return ConstraintTokenizer(self.pipe.tokenizer, self.loop.engine.limits.vocab_size)

    @cached_property
    def weights_digest(self) -> str:
        """The SHA-256 of the weights: of their names, shapes, dtypes and bytes."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            tensor = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    # -- prompts and settings -------------------------------------------------------------------------------------

    def encode(self, text: str | Sequence[int]) -> Prompt:
        """Return a text or token ids as a prompt."""
        if isinstance(text, str):
            return self.pipe.encode_prompt(text)
        if self.pipe.model.encoder is not None:
            raise InputError("an encoder-decoder takes its source as a text; write it as a string")
        return Prompt(tuple(text))

    def encode_source(self, text: str, to: str | None) -> Prompt:
        """Return the source of a translation; `to` is the script of the target, for a model that writes several."""
        tag = script_tag_for(self.pipe, text, to)
        return self.pipe.encode_prompt(f"{tag} {text}".strip())

    def align(self, source: str, target: str, to: str | None) -> list[tuple[int, int]]:
        """Return which word of a source each word of its translation stands for."""
        return align(self.pipe, source, target, to)

    @property
    def text_tokenizer(self) -> Tokenizer:
        if self.pipe.tokenizer is None:
            raise InputError(f"{self.name} reads images and has no tokenizer")
        return self.pipe.tokenizer

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Prompt:
        tokenizer = self.pipe.tokenizer
        text = tokenizer.apply_chat_template(messages, **variables)
        return Prompt(tuple(tokenizer.encode(text, allow_specials=True)))

    def jobs(self, body: DecodingBody, prompts: Sequence[Prompt], **options: Any) -> list[Job]:
        """Return what decodes each prompt of a request; a constraint may take a while."""
        constraint = None
        if (said := body.constraint()) is not None:
            if body.receipt:
                raise InputError("an answer with a constraint has no receipt yet; leave out receipt, or the constraint")
            constraint = Constraint(self.constraint_tokenizer, *said)
        if body.inspect is not None and len(prompts) > 1:
            raise InputError("inspect looks into one text; send one prompt")
        if body.receipt:
            _ = self.weights_digest  # computed once, and not in the event loop
        return [
            self.job(body, prompt, constraint=constraint and constraint.after(len(prompt.ids)), **options)
            for prompt in prompts
        ]

    def job(
        self,
        body: DecodingBody,
        prompt: Prompt,
        *,
        constraint: Constraint | None = None,
        extra: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Job:
        """Return what decodes a prompt as a request says: its options, then the model's own, then OpenAI's."""
        room = self.loop.engine.capacity - len(prompt.ids)
        if room < 1:
            raise TooLong(
                f"this prompt has {len(prompt.ids)} tokens, but the context of {self.name} has room for "
                f"{self.loop.engine.capacity}, those of the answer included; shorten it"
            )
        said = {**body.options(), **(extra or {})}
        options = {**CREATIVE, **self.pipe.defaults.options, "num_return_sequences": 1, **said}
        if "num_beams" not in said:
            options["num_beams"] = 1
        elif options["num_beams"] > 1 and "temperature" not in said:
            options["temperature"] = 0.0
        options.setdefault("max_new_tokens", room)
        if self.pipe.tokenizer.eos_id is not None:
            options.setdefault("eos_token_id", (self.pipe.tokenizer.eos_id,))
        options["max_new_tokens"] = min(options["max_new_tokens"], room)
        copies = 1
        if options["temperature"] < LEAST_TEMPERATURE:
            options["temperature"] = 0.0
        if not options["temperature"] and options["num_beams"] == 1:
            copies, options["num_return_sequences"] = options["num_return_sequences"], 1
        options["num_beams"] = max(options["num_beams"], 1)
        known = {name: value for name, value in options.items() if name in Settings.__dataclass_fields__}
        if constraint is not None:
            known["logits_processor"] = constraint
        if body.inspect is not None:
            more["inspection"] = Inspection(self.model, body.inspect)
            several = known.get("num_return_sequences", 1) > 1 or known["num_beams"] > 1
            if known["max_new_tokens"] > MAX_TOKENS or several:
                raise InputError(
                    f"inspect looks into one text of at most {MAX_TOKENS} new tokens, without beams; write max_tokens"
                )
            numbers = len(body.inspect.attention) * known["max_new_tokens"] * self.loop.engine.capacity
            if numbers > MAX_NUMBERS:
                raise InputError(
                    f"inspect.attention may return {numbers:,} numbers, and at most {MAX_NUMBERS:,} are; "
                    "ask for fewer heads or tokens"
                )
        settings = Settings(**known)
        check_effects(settings, said)
        return Job(prompt, settings, copies, **more)

    # -- texts ----------------------------------------------------------------------------------------------------

    async def pieces(self, job: Job) -> AsyncGenerator[Piece, None]:
        """Yield the texts of a job as they grow; closing the iterator ends its request."""
        context = () if job.new_text or job.prompt.source is not None else job.prompt.ids
        settings, tokenizer = job.settings, self.pipe.tokenizer
        texts = [StreamingText(tokenizer, settings.stop, context) for _ in range(settings.num_return_sequences)]
        look, options = job.inspection, dict[str, Any](salt=job.salt)
        if look is not None:
            options |= {"edits": look.edits, "capture": look.capture}
        async with self.loop.run(job.prompt, settings, **options) as outputs, aclosing(outputs):
            async for output in outputs:
                tokens, last = output.tokens, output.tokens[-1:]
                if output.finish_reason == "stop" and last and last[0] in settings.eos_token_id:
                    tokens = tokens[:-1]
                text = texts[output.sequence_index]
                new = text.add(*tokens) + (text.finish() if output.finish_reason else "")
                reason = output.finish_reason
                piece = Piece(
                    output.sequence_index,
                    new,
                    output.tokens,
                    output.scores,
                    output.prompt_scores,
                    output.num_cached,
                    "length" if reason == "context" else reason,
                    output.score,
                )
                if look is not None and output.captured and output.tokens:
                    piece = replace(piece, seen=await asyncio.to_thread(look.read, output.captured, self.spell_text))
                for copy in range(job.copies):
                    yield replace(piece, index=piece.index * job.copies + copy)

    def spell_text(self, token: int) -> str:
        return self.spell(token).decode("utf-8", "replace")

    def spell(self, token: int) -> bytes:
        """Return the bytes of a token in the middle of a text."""
        return spell(self.pipe.tokenizer, token)


def load_models(models: Sequence[str], load: Callable[[str], Pipeline], **options: Any) -> list[ServedModel]:
    """Load models under the names of their folders; FOLDER=NAME gives another name."""
    served: list[ServedModel] = []
    for given in models:
        folder, _, name = given.partition("=")
        name = name or Path(folder).name
        if name in {one.name for one in served}:
            raise ConfigError(f"two models are called {name}; write {given}=NAME to give this one another name")
        served.append(ServedModel(name, load(folder), **options))
    return served


class _NoEngine:
    """Stands where a model decodes nothing: its thread only runs what is called between steps."""

    busy, max_rows = False, 1


async def merge(sources: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Yield what several iterators yield, with the number of each, in the order in which it comes."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for piece in only:
                yield 0, piece
        return
    items: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue()

    async def read(number: int, source: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(source):
                async for piece in source:
                    items.put_nowait((number, piece))
            items.put_nowait((number, None))
        except Exception as problem:
            items.put_nowait((number, problem))

    tasks = [asyncio.create_task(read(number, source)) for number, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            number, item = await items.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def split_seed(job: Job, number: int) -> Job:
    """Return the job of prompt `number` of a request: its seed is the request's plus this number."""
    seed = job.settings.seed
    return job if seed is None or not number else replace(job, settings=replace(job.settings, seed=seed + number))
