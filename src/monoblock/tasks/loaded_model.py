"""A loaded model with what prediction and evaluation need: its tokenizer, its labels and how it was trained.

Predictors and evaluators take a `LoadedModel`; `mb.load` (runs/load.py) reads one from a folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from monoblock.decoding.engine import Engine
from monoblock.decoding.prompt import Prompt
from monoblock.decoding.settings import Settings, parse_settings
from monoblock.decoding.streaming_text import StreamingText, TextChunk, stream_chunks
from monoblock.errors import InputError
from monoblock.nn.lstm import Recurrent
from monoblock.nn.transformer import Transformer
from monoblock.recipes.schema import DataSection
from monoblock.tasks.image_inputs import ImageNormalization
from monoblock.tasks.input_template import InputTemplate
from monoblock.tasks.seq2seq.normalizers import NORMALIZERS
from monoblock.tasks.seq2seq.section import Seq2SeqSection
from monoblock.tasks.tags import TagAwareEncoder
from monoblock.tokenizers.tokenizer import Tokenizer

S = TypeVar("S")
MAX_SEQUENCES = 512  # decoded at once, beams included
DEFAULT_MAX_NEW_TOKENS = 256  # where neither the folder nor the call gives a limit
# Kind of head -> the method of a pipeline that uses it.
HEAD_METHODS = {
    "classifier": "classify",
    "tagger": "tag",
    "masked_lm": "fill",
    "spans": "answer",
    "pooled": "embed",
    "regression": "predict",
}


@dataclass(frozen=True)
class GenerationDefaults:
    """The default decoding options of a model folder."""

    options: dict[str, Any] = field(default_factory=dict)  # fields of Settings
    decoder_start_token_id: int | None = None  # the first token of a target, for models with an encoder
    ignored_fields: tuple[str, ...] = ()  # fields of generation_config.json that have no meaning here
    from_recipe: bool = False  # a run folder: texts are encoded as in its training

    def merge(self, overrides: Mapping[str, object]) -> Settings:
        """Return the settings of a call: options override defaults, also defaults that contradict an option."""
        options = {**self.options, **overrides}
        explicit = {name for name, value in overrides.items() if value is not None}
        if exceeds(options.get("num_beams"), 1) and exceeds(options.get("temperature"), 0):
            if "num_beams" in explicit and "temperature" not in explicit:
                options["temperature"] = 0.0
            elif "temperature" in explicit and "num_beams" not in explicit:
                options["num_beams"] = 1
        return parse_settings({name: value for name, value in options.items() if value is not None})


def exceeds(value: object, threshold: float) -> bool:
    """Return whether a value, whose type was not checked, is a number above a threshold."""
    return isinstance(value, (int, float)) and value > threshold


@dataclass
class Hypothesis:
    """One generated text."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None  # "stop": an end token or a stop string; "length": no more room
    score: float | None = None  # sum of log-probabilities / length ** length_penalty
    ids: tuple[int, ...] = ()  # including a final end token


@dataclass
class LoadedModel:
    model: Transformer | Recurrent
    tokenizer: Tokenizer
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    data_section: DataSection | None = None  # of the recipe it was trained by, if any
    objective: str | None = None  # of that recipe
    task_section: object = None  # of that recipe: the keys of its task
    labels: list[str] = field(default_factory=list)  # of a classifier or tagger
    pooling: str = "mean"  # how texts are embedded
    image_normalization: ImageNormalization = field(default_factory=ImageNormalization)

    def section(self, kind: type[S]) -> S:
        """Return the keys of the task that the model was trained with; the defaults of `kind` for another task."""
        return self.task_section if isinstance(self.task_section, kind) else kind()

    @property
    def prediction_method(self) -> str:
        """The Pipeline method that fits the head of the model, such as "classify"; "" if there is none."""
        head = getattr(self.model.config, "head", None)
        if head is None:
            return "embed" if getattr(self.model.config, "family", "") in ("encoder-only", "vision") else ""
        return HEAD_METHODS.get(head.kind, "")

    def check_head(self, kind: str) -> None:
        """Raise InputError unless the model has a head of this kind."""
        head = getattr(self.model.config, "head", None)
        actual = "none" if head is None else head.kind
        if actual != kind:
            advice = f"; call {self.prediction_method}" if self.prediction_method else ""
            raise InputError(
                f"{HEAD_METHODS[kind]} needs a model with the head {kind!r}, and this one has {actual!r}{advice}"
            )

    @property
    def trained_on_documents(self) -> bool:
        """Whether a masked language model was trained on single documents rather than on blocks of running text."""
        packing = "stream" if self.data_section is None else self.data_section.packing
        return self.objective == "masked_lm" and packing == "documents"

    def input_template(self, max_length: int | None = None) -> InputTemplate:
        """Return the template of special tokens around a text; empty if the model was trained on running text."""
        blocks = self.defaults.from_recipe and self.objective == "masked_lm" and not self.trained_on_documents
        return InputTemplate(self.tokenizer, max_length, no_special_tokens=blocks)

    # -- prompts and settings -----------------------------------------------------------------------------------------

    def resolve_settings(self, options: Mapping[str, object], *, streaming: bool = False) -> Settings:
        """Merge the options of a call into the defaults of the folder; streaming ignores a default of several beams."""
        settings = self.defaults.merge(options)
        if streaming and settings.num_beams > 1 and "num_beams" not in options:
            settings = replace(settings, num_beams=1)
        if streaming and settings.rows_per_prompt > 1:
            raise InputError(
                "a stream is a single text without beam search, which returns its text only at the end; call generate"
            )
        if "max_new_tokens" not in {**self.defaults.options, **options}:
            settings = replace(settings, max_new_tokens=DEFAULT_MAX_NEW_TOKENS)
        return settings

    @cached_property
    def source_encoder(self) -> TagAwareEncoder:
        return TagAwareEncoder(self.tokenizer)

    def _normalize(self, text: str) -> str:
        return NORMALIZERS[self.section(Seq2SeqSection).normalize](text)

    def normalize_source(self, text: str) -> tuple[str, int]:
        """Return a source normalized as in training and without its leading tags, and the number of tags removed."""
        return self.source_encoder.strip_leading_tags(self._normalize(text)) if self.defaults.from_recipe else (text, 0)

    def encode_prompt(self, text: str) -> Prompt:
        """Encode a text to continue or, for a model with an encoder, a source with the first token of the target."""
        tokenizer, from_recipe = self.tokenizer, self.defaults.from_recipe
        if self.model.encoder is not None:
            end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
            if from_recipe:
                source = [*self.source_encoder(self._normalize(text)), *end]
            else:
                source = tokenizer.encode(text, add_specials=True)
            start = self.defaults.decoder_start_token_id
            return Prompt((start if start is not None else 0,), tuple(source))
        ids = tokenizer.encode(text, add_specials=not from_recipe)
        if ids and not from_recipe and ids[-1] == tokenizer.eos_id:
            ids.pop()  # a text to be continued has not ended
        return Prompt(tuple(ids or self._start_ids()))

    def _start_ids(self) -> list[int]:
        """Return the ids of an empty prompt: the start token or, if there is none, the end token."""
        for token in (self.tokenizer.bos_id, self.tokenizer.eos_id):
            if token is not None:
                return [token]
        raise InputError("this tokenizer has no start token to begin with; give a prompt of at least one word")

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> Prompt:
        """Encode a conversation with the chat template of the tokenizer."""
        if self.model.encoder is not None:
            raise InputError(f"chat is for decoders; call translate on this {self.model.config.family} model")
        return Prompt(tuple(self.tokenizer.encode(self.tokenizer.apply_chat_template(messages), allow_specials=True)))

    # -- generation ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        settings: Settings | Sequence[Settings],
        stop: str | Sequence[str] = (),
        *,
        new_text: bool = False,
    ) -> list[list[Hypothesis]]:
        """Return `num_return_sequences` hypotheses for each prompt; arguments as in `stream_chunks`."""
        settings = [settings] * len(prompts) if isinstance(settings, Settings) else list(settings)
        hypotheses = [[Hypothesis() for _ in range(own.num_return_sequences)] for own in settings]
        for chunk in self.stream_chunks(prompts, settings, stop, new_text=new_text):
            hypothesis = hypotheses[chunk.prompt_index][chunk.sequence_index]
            hypothesis.text += chunk.text
            hypothesis.num_tokens += chunk.num_tokens
            hypothesis.ids += chunk.ids
            hypothesis.finish_reason, hypothesis.score = chunk.finish_reason, chunk.score
        return hypotheses

    def stream_chunks(
        self,
        prompts: Sequence[Prompt],
        settings: Sequence[Settings],
        stop: str | Sequence[str] = (),
        *,
        new_text: bool = False,
    ) -> Iterator[TextChunk]:
        """Decode prompts together, each with its own settings; yield chunks of text as they are generated.

        An invalid prompt or setting raises an error before the first chunk.
        stop: strings at which a text ends.
        new_text: detokenize the new tokens as a text of their own, as after a chat turn; otherwise as a continuation of
        the prompt, on which a leading space can depend.
        """
        limit = self.model.config.context
        lengths = [len(prompt.ids) + own.max_new_tokens for prompt, own in zip(prompts, settings, strict=True)]
        capacity = max(lengths) if limit is None else min(max(lengths), limit)
        max_rows = max(MAX_SEQUENCES, *(own.rows_per_prompt for own in settings))
        engine = Engine(self.model, max_rows=max_rows, capacity=capacity)
        prompt_of_request = {
            engine.add(prompt.ids, own, prompt.source): index
            for index, (prompt, own) in enumerate(zip(prompts, settings, strict=True))
        }
        new_text = new_text or self.model.encoder is not None
        texts = {
            (request, sequence): StreamingText(self.tokenizer, stop, () if new_text else prompts[index].ids)
            for request, index in prompt_of_request.items()
            for sequence in range(settings[index].num_return_sequences)
        }
        return stream_chunks(engine, prompt_of_request, texts, settings[0].eos_token_id)
