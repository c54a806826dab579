"""Model, tokenizer and generation defaults together: text in, text out.

    pipe = mb.load("runs/demo")
    pipe.generate("In the beginning")
    for part in pipe.stream("In the beginning", temperature=0.8, stop="\n"): ...
    pipe.chat([{"role": "user", "content": "Hello"}])
    pipe.translate(["Guten Tag"], n_best=3)
    pipe.classify / .tag / .fill / .embed / .answer          # by the model's head

The options are those of `model.generate`, and `stop`: strings that end a text and are no part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast, overload

import torch

from monoblock.decoding.engine import Engine
from monoblock.decoding.rows import Prompt
from monoblock.decoding.settings import Settings
from monoblock.decoding.text import Text
from monoblock.errors import FileError, InputError
from monoblock.interop.hub import at_hand
from monoblock.model import Transformer
from monoblock.recurrent import Recurrent
from monoblock.tasks import answering, filling, opening, predicting, recipe, tagging
from monoblock.tasks.defaults import Defaults, read
from monoblock.tasks.folder import RECIPE
from monoblock.tasks.pairing import NORMALIZE
from monoblock.tasks.parts import Part, parts_of, texts_of
from monoblock.tasks.seeing import Normal
from monoblock.tasks.tags import Reader
from monoblock.tasks.translating import Answer, translated
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.untrusted import present

ROWS = 512  # sequences at once, beams counted
LONGEST = 256  # new tokens where neither the model nor the call says


def load(folder: str | Path, *, device: str | None = None, dtype: torch.dtype | str = torch.float32) -> Pipeline:
    """The model of a folder (a run, a Hugging Face folder, a GGUF file) with its tokenizer, ready to use."""
    folder = at_hand(folder)
    if not folder.exists():
        raise FileError(f"there is no {folder}; train a model first, or give the folder of one")
    device = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    found = opening.found_in(folder, device, dtype)
    tokenizer = cast(Tokenizer, found.tokenizer)  # a vision model has none
    defaults = read(folder, tokenizer) if tokenizer is not None else Defaults(here=present(folder, RECIPE))
    made = recipe.read(str(folder / RECIPE)) if defaults.here else None
    data, objective = (made.data, made.train.objective) if made is not None else (None, None)
    return Pipeline(found.model, tokenizer, defaults, data, objective, found.labels, found.pooling, found.pixels)


@dataclass
class Pipeline:
    """Made by `mb.load`."""

    model: Transformer | Recurrent
    tokenizer: Tokenizer
    defaults: Defaults = field(default_factory=Defaults)
    part: recipe.DataPart | None = None  # how texts were read in training, where a recipe says it
    objective: str | None = None
    labels: list[str] = field(default_factory=list)  # of a classifier or tagger
    pooling: str = "mean"  # how the folder says that a text is embedded
    pixels: Normal = field(default_factory=Normal)  # how an image becomes what the model looks at

    # -- continuing a text ------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str, *, stop: str | Sequence[str] = (), **options: Any) -> str: ...
    @overload
    def generate(self, prompt: Sequence[str], *, stop: str | Sequence[str] = (), **options: Any) -> list[str]: ...
    def generate(self, prompt: str | Sequence[str], *, stop: str | Sequence[str] = (), **options: Any) -> Any:
        """What follows a prompt (or each of several); with num_return_sequences above 1, a list of texts for it."""
        several = not isinstance(prompt, str)
        found = [
            [answer.text for answer in each] if len(each) > 1 else each[0].text
            for each in self.answers([prompt] if isinstance(prompt, str) else prompt, stop=stop, **options)
        ]
        return found if several else found[0]

    def stream(self, prompt: str, *, stop: str | Sequence[str] = (), **options: Any) -> Iterator[str]:
        """What follows a prompt, bit by bit, in whole characters; put together it is what `generate` gives."""
        chosen = self.settings(options, streamed=True)
        return texts_of(self._run([self.prompt(prompt)], [chosen], stop))

    def answers(self, prompts: Sequence[str], *, stop: str | Sequence[str] = (), **options: Any) -> list[list[Answer]]:
        """For each prompt the texts asked for, with counts, reasons and scores."""
        return self._collect([self.prompt(text) for text in prompts], self.settings(options), stop)

    # -- talking ----------------------------------------------------------------------------------------------------

    def chat(self, messages: Sequence[Mapping[str, Any]], *, stop: str | Sequence[str] = (), **options: Any) -> str:
        """The next thing the assistant says; messages are {"role": "user", "content": "…"}."""
        return self._collect([self.turn(messages)], self.settings(options), stop, fresh=True)[0][0].text

    def chat_stream(
        self, messages: Sequence[Mapping[str, Any]], *, stop: str | Sequence[str] = (), **options: Any
    ) -> Iterator[str]:
        """The same, bit by bit."""
        run = self._run([self.turn(messages)], [self.settings(options, streamed=True)], stop, fresh=True)
        return texts_of(run)

    def turn(self, messages: Sequence[Mapping[str, Any]]) -> Prompt:
        """A conversation as the model reads it."""
        self._decoder("chat")
        return Prompt(tuple(self.tokenizer.encode(self.tokenizer.chat(messages), allow_specials=True)))

    # -- translating ------------------------------------------------------------------------------------------------

    @overload
    def translate(self, text: str, *, n_best: None = None, **more: Any) -> str: ...
    @overload
    def translate(self, text: str, *, n_best: int, **more: Any) -> list[Answer]: ...
    @overload
    def translate(self, text: Iterable[str], *, n_best: None = None, **more: Any) -> list[str]: ...
    @overload
    def translate(self, text: Iterable[str], *, n_best: int, **more: Any) -> list[list[Answer]]: ...
    def translate(
        self,
        text: str | Iterable[str],
        *,
        n_best: int | None = None,
        batch: int = 64,
        to: str | None = None,
        long: str = "refuse",
        first: int = 0,
        **options: Any,
    ) -> Any:
        """The target of a source or of many; `n_best` asks for so many hypotheses with scores, best first.

        Many are sorted by length and read `batch` at a time; the order they came in is kept, and an empty text gives an
        empty one.  `to` asks a model of several scripts for one of them.  A text beyond the context is refused, or
        with long="split" cut at sentences and translated part by part.  With a seed, text n is drawn by seed + n,
        counted from `first`.
        """
        if self.model.encoder is None:
            raise InputError(f"a {self.model.config.family} model continues texts and translates none; call generate")
        if n_best is not None:
            beams = max(n_best, options.get("num_beams") or self.defaults.options.get("num_beams", 1))
            options |= {"num_return_sequences": n_best, "num_beams": beams}
        texts = [text] if isinstance(text, str) else list(text)
        chosen = self.settings(options)
        found = translated(self, texts, chosen, max(1, batch), to, long, first, scores=n_best is not None)
        plain = [each[0].text if n_best is None else each for each in found]
        return plain[0] if isinstance(text, str) else plain

    # -- labels, missing words, embeddings ----------------------------------------------------------------------------

    def classify(self, text: Any, *, top: int = 1, **how: Any) -> Any:
        """The `top` most probable classes of a text, a pair (text, text) or an image; a list gives a list of those.

        `how`: batch, and long="refuse" ("cut", "split") for what is beyond the context.
        """
        alone = isinstance(text, str | tuple) or hasattr(text, "ndim")
        rows = [text] if alone else list(text)
        ask: Any = predicting.image_probabilities if self.tokenizer is None else predicting.probabilities
        found = [predicting.choices(self.labels, row, top) for row in ask(self, rows, **how)] if rows else []
        return found[0] if alone else found

    def tag(self, text: Any, *, apart: bool = True, **how: Any) -> Any:
        """Every word of a text with its label, entities together; a list of texts, or of lists of words, gives a list.

        `apart`: signs are words of their own; without, spaces part words.
        """
        rows = [text] if isinstance(text, str) else list(text)
        found = tagging.tagged(self, [tagging.words_of(self, row, apart) for row in rows], **how)
        return found[0] if isinstance(text, str) else found

    def fill(self, text: Any, *, top: int = 5, **how: Any) -> Any:
        """The most probable tokens for each [MASK] of a text; a list gives a list."""
        found = filling.filled(self, [text] if isinstance(text, str) else list(text), top=top, **how)
        return found[0] if isinstance(text, str) else found

    def embed(self, text: Any, *, pooling: str | None = None, normalize: bool = True, **how: Any) -> torch.Tensor:
        """(width,) of a text, (texts, width) of a list, of length one; pooling="mean" or "cls"."""
        alone = isinstance(text, str) or hasattr(text, "ndim")
        ask: Any = predicting.image_embeddings if self.tokenizer is None else predicting.embeddings
        found: torch.Tensor = ask(self, [text] if alone else list(text), pooling=pooling, normalize=normalize, **how)
        return found[0] if alone else found

    def answer(self, question: Any, context: Any = None, *, n_best: int | None = None, **how: Any) -> Any:
        """The part of a context that answers a question, or "" for no answer; lists, or one of pairs, give a list.

        `n_best` asks for so many with place and probability.  `how`: longest (tokens of an answer), impossible, batch.
        """
        alone = isinstance(question, str)
        both = (
            [(question, context)]
            if alone
            else list(question if context is None else zip(question, context, strict=True))
        )
        found = answering.answered(self, both, n_best=n_best or 1, **how) if both else []
        plain = [each if n_best else each[0].text for each in found]
        return plain[0] if alone else plain

    # -- prompts and settings ---------------------------------------------------------------------------------------

    def settings(self, options: Mapping[str, Any], *, streamed: bool = False) -> Settings:
        """What the folder says, and instead of it what is asked for."""
        chosen = self.defaults.merged(options)
        if streamed and chosen.num_beams > 1 and "num_beams" not in options:
            chosen = replace(chosen, num_beams=1)  # a default for whole texts; beams know theirs only at the end
        if streamed and chosen.rows > 1:
            raise InputError("a stream is one text, and beams know theirs only at the end; call generate instead")
        if "max_new_tokens" not in {**self.defaults.options, **options}:
            chosen = replace(chosen, max_new_tokens=LONGEST)
        return chosen

    def plain(self, text: str) -> tuple[str, int]:
        """A source as it is cut into tokens: normalised and without the tags at its head, and how many those are."""
        if not self.defaults.here:
            return text, 0
        clean = text if self.part is None else NORMALIZE[self.part.normalize](text)
        return self.read.without_tags(clean)

    @cached_property
    def read(self) -> Reader:
        return Reader(self.tokenizer)

    def prompt(self, text: str) -> Prompt:
        """A text as the model reads it: the prompt it goes on from, or the source beside the start of a target."""
        here, tokenizer = self.defaults.here, self.tokenizer
        if self.model.encoder is not None:
            ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
            clean = text if self.part is None else NORMALIZE[self.part.normalize](text)
            source = [*self.read(clean), *ends] if here else tokenizer.encode(text, add_specials=True)
            start = self.defaults.start
            return Prompt((start if start is not None else 0,), tuple(source))
        ids = tokenizer.encode(text, add_specials=not here)
        if ids and not here and ids[-1] == tokenizer.eos_id:
            ids.pop()  # a text that goes on has not ended
        return Prompt(tuple(ids or self._start()))

    def _start(self) -> list[int]:
        """What a text begins with that has no beginning: the start token, or the end of the text before."""
        for token in (self.tokenizer.bos_id, self.tokenizer.eos_id):
            if token is not None:
                return [token]
        raise InputError("this tokenizer has no start token to begin with; give a prompt of at least one word")

    def _decoder(self, what: str) -> None:
        if self.model.encoder is not None:
            raise InputError(f"{what} is for decoders; call translate on this {self.model.config.family} model")

    # -- running ----------------------------------------------------------------------------------------------------

    def _collect(
        self, prompts: list[Prompt], chosen: Settings, stop: str | Sequence[str] = (), *, fresh: bool = False
    ) -> list[list[Answer]]:
        return self.collect(prompts, [chosen] * len(prompts), stop, fresh=fresh)

    def collect(
        self, prompts: list[Prompt], each: list[Settings], stop: str | Sequence[str] = (), *, fresh: bool = False
    ) -> list[list[Answer]]:
        """The texts of prompts that may each have settings of their own."""
        found = [[Answer() for _ in range(chosen.num_return_sequences)] for chosen in each]
        for part in self._run(prompts, each, stop, fresh=fresh):
            answer = found[part.prompt][part.number]
            answer.text += part.text
            answer.tokens += part.tokens
            answer.ids += part.ids
            answer.finished, answer.score = part.finished, part.score
        return found

    def _run(
        self, prompts: list[Prompt], each: list[Settings], stop: str | Sequence[str] = (), *, fresh: bool = False
    ) -> Iterator[Part]:
        """Put the prompts to an engine, which refuses what cannot be now and not when the first part is asked for.

        A fresh text begins anew after its prompt; others go on from it, with a space between where there is one.
        """
        limit = self.model.config.context
        wanted = max(len(prompt.ids) + chosen.max_new_tokens for prompt, chosen in zip(prompts, each, strict=True))
        capacity = wanted if limit is None else min(wanted, limit)
        engine = Engine(self.model, rows=max(ROWS, *(chosen.rows for chosen in each)), capacity=capacity)
        both = zip(prompts, each, strict=True)
        order = {engine.add(prompt.ids, chosen, prompt.source): n for n, (prompt, chosen) in enumerate(both)}
        fresh = fresh or self.model.encoder is not None
        texts = {
            (request, number): Text(self.tokenizer, stop, () if fresh else prompts[place].ids)
            for request, place in order.items()
            for number in range(each[place].num_return_sequences)
        }
        return parts_of(engine, order, texts, each[0].eos_token_id)
