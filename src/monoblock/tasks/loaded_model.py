"""The class `LoadedModel`: a model with its tokenizer, its labels, the settings it was trained with and its decoding.

The functions that predict and evaluate take a `LoadedModel`; `mb.load` (runs/load.py) reads one from a folder, with the
methods of a `Pipeline`. Its default decoding options are those of generation_config.json, in run folders and in Hugging
Face folders; fields of that file that are not supported are ignored and reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

from monoblock.baselines.generate import MAX_ROWS, Decoder
from monoblock.baselines.lstm import Recurrent
from monoblock.config.model import PatchConfig
from monoblock.errors import FileError, InputError
from monoblock.inference.engine import Engine
from monoblock.inference.generate import score_texts, truncated_length
from monoblock.inference.optimized import optimize
from monoblock.inference.pages import default_max_rows
from monoblock.inference.prepared_model import GenerativeModel
from monoblock.inference.scheduler import Prompt
from monoblock.inference.settings import ENGINE_OPTIONS, Settings, check_effects, parse_settings
from monoblock.inference.streaming_text import StreamingText, TextChunk, stream_chunks
from monoblock.inference.supported_models import reason_not_to_optimize
from monoblock.interop.generation import UNREPORTED_FIELDS, is_neutral
from monoblock.interop.model_folder import CONFIG_FILE, GENERATION_CONFIG_FILE, ModelFolder
from monoblock.model import Transformer
from monoblock.recipes.schema import DataSection
from monoblock.tasks.images import ImagePreprocessing
from monoblock.tasks.input_template import InputTemplate
from monoblock.tasks.tags import NORMALIZERS, TagAwareEncoder
from monoblock.tasks.task_data import special_token_ids
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training.collate import SpecialTokenIds
from monoblock.untrusted_files import short_repr

S = TypeVar("S")
DEFAULT_BATCH = 64  # number of inputs processed at once
DEFAULT_MAX_NEW_TOKENS = 256  # used if neither the model folder nor the call sets max_new_tokens
DECODER_START_KEY = "decoder_start_token_id"
SETTINGS_FIELDS = {field.name for field in fields(Settings)} - {"seed", "logits_processor", *ENGINE_OPTIONS}
# Maps each kind of head to the `Pipeline` method that uses it.
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

    options: dict[str, Any] = field(default_factory=dict)  # values for fields of `Settings`
    decoder_start_token_id: int | None = None  # the first token of a target, for models with an encoder
    ignored_fields: tuple[str, ...] = ()  # fields of generation_config.json that are not supported
    from_recipe: bool = False  # whether the folder is a run folder, so that texts are encoded as in training

    def merge(self, overrides: Mapping[str, object]) -> Settings:
        """Return the default settings with `overrides`, the options of a call, applied to them.

        Beam search and a temperature above 0 exclude each other: if a call asks for one of them, a default for the
        other is ignored.
        """
        options = {"temperature": 0.0, "num_beams": 1, **self.options, **overrides}
        explicit = {name for name, value in overrides.items() if value is not None}
        beams, temperature = options["num_beams"], options["temperature"]  # of any type: they are not checked yet
        is_number = isinstance(beams, int | float) and isinstance(temperature, int | float)
        if is_number and beams > 1 and temperature > 0:
            if "num_beams" in explicit and "temperature" not in explicit:
                options["temperature"] = 0.0
            elif "temperature" in explicit and "num_beams" not in explicit:
                options["num_beams"] = 1
        settings = parse_settings({name: value for name, value in options.items() if value is not None})
        check_effects(settings, explicit - {"length_penalty"})  # `translate` also scores a greedy text with it
        return settings


@dataclass
class Hypothesis:
    """One generated text."""

    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None  # see FINISH_REASONS in inference/scheduler.py
    score: float | None = None  # sum of log-probabilities / length ** length_penalty
    ids: tuple[int, ...] = ()  # the generated tokens, including the end token
    token_scores: tuple[float, ...] | None = None  # their log-probabilities, if asked for


@dataclass
class LoadedModel:
    model: Transformer | Recurrent
    tokenizer: Tokenizer
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    data_section: DataSection | None = None  # [data] of the recipe that the model was trained with, if there is one
    objective: str | None = None  # train.objective of that recipe
    task_section: object = None  # the section of that recipe with the keys of the task
    labels: list[str] = field(default_factory=list)  # the class names of a classifier or tagger
    pooling: str | None = None  # the pooling of embeddings that is stored with the model: "mean", "cls" or "last"
    image_preprocessing: ImagePreprocessing = field(default_factory=ImagePreprocessing)
    ensemble: tuple[Transformer | Recurrent, ...] = ()  # further models; generation averages their log-probabilities
    optimize: bool = False  # whether to generate with optimized copies, made at the first text (see `mb.optimize`)

    @cached_property
    def _generators(self) -> list[GenerativeModel]:
        """The Transformers that generate: optimized, where that is wanted and possible."""
        models = [model for model in (self.model, *self.ensemble) if isinstance(model, Transformer)]
        return [
            optimize(model) if self.optimize and reason_not_to_optimize(model) is None else model for model in models
        ]

    def _make_engine(self, prompts: Sequence[Prompt], settings: Sequence[Settings]) -> Engine | Decoder:
        """Return what decodes these prompts: the engine, or for an LSTM, also one in an ensemble, its own decoder."""
        models = (self.model, *self.ensemble)
        if not all(isinstance(model, Transformer) for model in models):
            return Decoder(models)
        lengths = [len(prompt.ids) + own.max_new_tokens for prompt, own in zip(prompts, settings, strict=True)]
        capacity = self._limit_length(max(lengths))
        max_rows = max(self._default_rows(capacity), *(own.rows_per_prompt for own in settings))
        model, *ensemble = self._generators
        return Engine(model, max_rows=max_rows, capacity=capacity, ensemble=ensemble)

    def _default_rows(self, capacity: int) -> int:
        return default_max_rows(self.model, capacity) if isinstance(self.model, Transformer) else MAX_ROWS

    def section(self, kind: type[S]) -> S:
        """Return the task section of the training recipe if it has the type `kind`, else a `kind` with its defaults."""
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
                f"{HEAD_METHODS[kind]} needs a model with the head {kind!r}, but this model has {actual!r}{advice}"
            )

    @property
    def reads_images(self) -> bool:
        return isinstance(getattr(self.model.config, "input", None), PatchConfig)

    @property
    def is_multi_label(self) -> bool:
        """Whether a text may have several of the classes."""
        head = getattr(self.model.config, "head", None)
        return head is not None and head.multi_label

    @property
    def trained_on_documents(self) -> bool:
        """Whether a masked language model was trained on single documents rather than on blocks of running text."""
        packing = "stream" if self.data_section is None else self.data_section.packing
        return self.prediction_method == "fill" and packing == "documents"

    @property
    def special_tokens(self) -> SpecialTokenIds:
        return special_token_ids(self.tokenizer)

    def training_length(self, context: int | None = None) -> int | None:
        """Return the maximum length of an input as in training, and at most the context; None means no limit."""
        own = None if self.data_section is None else self.data_section.max_length
        limits = (context or self.model.config.context, own)
        return min((limit for limit in limits if limit is not None), default=None)

    def input_template(self, max_length: int | None = None) -> InputTemplate:
        """Return the template that puts special tokens around a text; it adds none for a model trained on running text.

        max_length: the most tokens of a text with its special tokens; None means no limit.
        """
        blocks = self.prediction_method == "fill" and not self.trained_on_documents
        continues_text = self.model.encoder is None and self.prediction_method == ""
        without = self.defaults.from_recipe and (blocks or continues_text)
        return InputTemplate(self.tokenizer, max_length, no_special_tokens=without)

    # -- prompts and settings -----------------------------------------------------------------------------------------

    def resolve_settings(self, options: Mapping[str, object], *, streaming: bool = False) -> Settings:
        """Return the settings of a call: its options, and the defaults of the model folder for all others.

        With `streaming`, beam search is turned off if it is only a default; if the call asks for it, raise InputError.
        """
        settings = self.defaults.merge(options)
        if streaming and settings.num_beams > 1 and "num_beams" not in options:
            settings = replace(settings, num_beams=1)
        if streaming and settings.rows_per_prompt > 1:
            raise InputError(
                "only a single text without beam search can be streamed, because beam search chooses its text only at "
                "the end; call generate"
            )
        if "max_new_tokens" not in {**self.defaults.options, **options}:
            settings = replace(settings, max_new_tokens=DEFAULT_MAX_NEW_TOKENS)
        return settings

    @cached_property
    def source_encoder(self) -> TagAwareEncoder:
        return TagAwareEncoder(self.tokenizer)

    def _normalize(self, text: str) -> str:
        return NORMALIZERS[getattr(self.task_section, "normalize", "none")](text)

    def normalize_source(self, text: str) -> tuple[str, int]:
        """Return a source normalized as in training and without its leading tags, and the number of tags removed.

        For a model that was not trained with a recipe, return the text unchanged and 0.
        """
        if not self.defaults.from_recipe:
            return text, 0
        return self.source_encoder.strip_leading_tags(self._normalize(text))

    def encode_prompt(self, text: str) -> Prompt:
        """Encode a text as a prompt, which a model without an encoder continues.

        For a model with an encoder, the text is the source, and the prompt is the first token of the target.
        """
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
        if not ids:  # an empty prompt is the start token or, if there is none, the end token
            ids = [token for token in (tokenizer.bos_id, tokenizer.eos_id) if token is not None][:1]
        if not ids:
            raise InputError("this tokenizer has no start token to begin with; give a prompt of at least one word")
        return Prompt(tuple(ids))

    def truncate(self, prompt: Prompt, truncation: str | None, max_new_tokens: int) -> Prompt:
        """Return the prompt without its first tokens if `truncation` is "left" and it is too long for the context."""
        limit, context, has_encoder = None, self.model.config.context, self.model.encoder is not None
        if truncation is not None:
            limit = truncated_length(truncation, max_new_tokens, context, has_encoder=has_encoder)
        return prompt if limit is None else Prompt(prompt.ids[-limit:], prompt.source)

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> Prompt:
        """Encode a conversation with the chat template of the tokenizer."""
        if self.model.encoder is not None:
            raise InputError(
                f"chat needs a decoder-only model, but this model is {self.model.config.family}; call translate"
            )
        return Prompt(tuple(self.tokenizer.encode(self.tokenizer.apply_chat_template(messages), allow_specials=True)))

    # -- generation ---------------------------------------------------------------------------------------------------

    def decode(
        self,
        prompts: Sequence[Prompt],
        settings: Settings | Sequence[Settings],
        stop: str | Sequence[str] = (),
        *,
        new_text: bool = False,
        return_scores: bool = False,
    ) -> list[list[Hypothesis]]:
        """Return `num_return_sequences` hypotheses for each prompt; the arguments are those of `decode_chunks`."""
        settings = [settings] * len(prompts) if isinstance(settings, Settings) else list(settings)
        hypotheses = [[Hypothesis() for _ in range(own.num_return_sequences)] for own in settings]
        for chunk in self.decode_chunks(prompts, settings, stop, new_text=new_text):
            hypothesis = hypotheses[chunk.prompt_index][chunk.sequence_index]
            hypothesis.text += chunk.text
            hypothesis.num_tokens += chunk.num_tokens
            hypothesis.ids += chunk.ids
            hypothesis.finish_reason, hypothesis.score = chunk.finish_reason, chunk.score
        if not return_scores:
            return hypotheses
        if not isinstance(self.model, Transformer) or self.ensemble:
            kind = "ensemble" if self.ensemble else "LSTM"
            raise InputError(f"an {kind} gives no token scores; leave out return_scores")
        rows = [(prompt, hypothesis) for prompt, row in zip(prompts, hypotheses, strict=True) for hypothesis in row]
        scores = score_texts(self.model, [prompt for prompt, _ in rows], [hypothesis.ids for _, hypothesis in rows])
        for (_, hypothesis), row_scores in zip(rows, scores, strict=True):
            hypothesis.token_scores = tuple(row_scores)
        return hypotheses

    def default_batch(self, prompt_length: int, settings: Settings) -> int:
        """Return how many prompts of this length to decode at once: 64, or as many as suit a GPU."""
        if self.model.device.type != "cuda":
            return DEFAULT_BATCH
        rows = self._default_rows(self._limit_length(prompt_length + settings.max_new_tokens))
        return max(1, rows // settings.rows_per_prompt)

    def _limit_length(self, length: int) -> int:
        """Return a number of tokens, or the model's context if that is less."""
        limit = self.model.config.context
        return length if limit is None else min(length, limit)

    def decode_chunks(
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
        new_text: decode the new tokens as a separate text, such as an answer in a chat. Otherwise they continue the
            text of the prompt, which can decide whether they begin with a space.
        """
        engine = self._make_engine(prompts, settings)
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


# -- generation_config.json -------------------------------------------------------------------------------------------


def read_generation_defaults(folder: ModelFolder, tokenizer: Tokenizer) -> GenerationDefaults:
    """Read the default decoding options of a model folder; ids of special tokens that it lacks are the tokenizer's."""
    values, path = folder.generation, folder.path

    def is_count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value > 1

    data = folder.read_json(GENERATION_CONFIG_FILE)
    options = {name: value for name, value in values.items() if name in SETTINGS_FIELDS}
    if values.get("do_sample", folder.is_run):
        options.setdefault("temperature", 1.0)
    elif "do_sample" in values:  # Hugging Face files give a temperature even without sampling
        options["temperature"] = 0.0
    if is_count(options.get("num_beams")):
        options["temperature"] = 0.0
    for name, token in (("eos_token_id", tokenizer.eos_id), ("pad_token_id", tokenizer.pad_id)):
        if token is not None:
            options.setdefault(name, token)
    is_encoder_decoder = folder.read_json(CONFIG_FILE).get("is_encoder_decoder")
    if is_encoder_decoder and is_count(values.get("max_length")) and "max_new_tokens" not in options:
        options["max_new_tokens"] = values["max_length"] - 1  # it counts the start token of the target
    known = SETTINGS_FIELDS | UNREPORTED_FIELDS | {DECODER_START_KEY}
    ignored = tuple(sorted(name for name, value in data.items() if name not in known and not is_neutral(name, value)))
    try:
        parse_settings({"temperature": 0.0, "num_beams": 1, **options})
    except (InputError, TypeError) as problem:
        raise FileError(f"{path / GENERATION_CONFIG_FILE}: {problem}") from None
    start = values.get(DECODER_START_KEY)
    if start is None:
        start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.pad_id
    elif isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise FileError(f"{path}: {DECODER_START_KEY}={short_repr(start)} is not a token id; write 0 or more")
    return GenerationDefaults(options, start, ignored, folder.is_run)


def stated_settings(folder: ModelFolder) -> dict[str, Any]:
    """Return the content of a generation_config.json that states how texts are generated; {} if it has only ids."""
    options = folder.generation
    stated = [name for name in options if name in SETTINGS_FIELDS | {"max_length"} and not name.endswith("_token_id")]
    return {name: value for name, value in options.items() if not name.startswith("_")} if stated else {}
