"""The pipeline that `mb.load` returns: a loaded model with one method for each task on text or images.

    pipe = mb.load("runs/demo")
    pipe.generate("In the beginning")
    for text in pipe.stream("In the beginning", temperature=0.8, stop="\\n"): ...
    pipe.chat([{"role": "user", "content": "Hello"}])
    pipe.translate(["Guten Tag"], n_best=3)
    pipe.classify / .tag / .fill / .embed / .answer          # depending on the head of the model

`generate`, `stream`, `chat` and `translate` take the options of `model.generate`. `stop` gives strings at which the
generated text ends; the text does not include them.
"""

# mypy: disable-error-code="overload-overlap"
# A str is also an Iterable[str]; the overload for one text comes first.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Unpack, cast, overload

from monoblock.baselines.lstm import Recurrent
from monoblock.errors import InputError
from monoblock.inference.scheduler import Prompt
from monoblock.inference.settings import Settings, split_seeds
from monoblock.inference.streaming_text import TextChunk, chunk_texts
from monoblock.model import Transformer
from monoblock.nn.generation_options import GenerationOptions, PipelineOptions
from monoblock.recipes.schema import DataSection
from monoblock.runs.prediction_methods import PredictionMethods
from monoblock.tasks.classification import predict_numbers
from monoblock.tasks.loaded_model import GenerationDefaults, Hypothesis
from monoblock.tasks.prediction_options import TranslationOptions, list_inputs
from monoblock.tasks.table import task_of_model
from monoblock.tasks.task import Task
from monoblock.tasks.translate import translate_texts
from monoblock.tokenizers.tokenizer import Tokenizer

ChatMessages = Sequence[Mapping[str, object]]  # such as [{"role": "user", "content": "Hello"}]
Stop = str | Sequence[str]  # strings at which a text ends


@dataclass(repr=False)
class Pipeline(PredictionMethods):
    """A loaded model with methods that generate and predict; returned by `mb.load`."""

    task: Task | None = None  # a task that is not in the package

    def __repr__(self) -> str:
        weights = sum(weight.numel() for weight in self.model.parameters())
        task = self.task.name if self.task is not None else self.objective
        parts = [self.model.config.family, f"{weights:,} parameters", repr(self.tokenizer)]
        return f"Pipeline({', '.join(parts + ([f'objective={task!r}'] if task else []))})"

    @property
    def model(self) -> Transformer | Recurrent:
        return self.loaded.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    @property
    def defaults(self) -> GenerationDefaults:
        return self.loaded.defaults

    @property
    def data_section(self) -> DataSection | None:
        """The [data] section of the recipe that trained the model; None for a model without a recipe."""
        return self.loaded.data_section

    @property
    def objective(self) -> str | None:
        return self.loaded.objective

    @property
    def labels(self) -> list[str]:
        """The class names of a classifier or tagger."""
        return self.loaded.labels

    @property
    def pooling(self) -> str | None:
        """The pooling of embeddings that is stored with the model; None if there is none."""
        return self.loaded.pooling

    # -- generation ---------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self, prompt: str, *, stop: Stop = (), num_return_sequences: None = None, **options: Unpack[PipelineOptions]
    ) -> str: ...
    @overload
    def generate(
        self, prompt: str, *, stop: Stop = (), num_return_sequences: int, **options: Unpack[PipelineOptions]
    ) -> list[str]: ...
    @overload
    def generate(
        self,
        prompt: Sequence[str],
        *,
        stop: Stop = (),
        num_return_sequences: None = None,
        **options: Unpack[PipelineOptions],
    ) -> list[str]: ...
    @overload
    def generate(
        self, prompt: Sequence[str], *, stop: Stop = (), num_return_sequences: int, **options: Unpack[PipelineOptions]
    ) -> list[list[str]]: ...
    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        stop: Stop = (),
        num_return_sequences: int | None = None,
        **options: Unpack[PipelineOptions],
    ) -> str | list[str] | list[list[str]]:
        """Return the text that continues a prompt; for a list of prompts, return a list.

        With num_return_sequences, each prompt gives a list of this many texts.
        """
        prompts = cast(list[str], list_inputs(prompt, "generate"))
        count = 1 if num_return_sequences is None else num_return_sequences
        hypotheses = self.generate_hypotheses(prompts, stop=stop, num_return_sequences=count, **options)
        texts = [[hypothesis.text for hypothesis in row] for row in hypotheses]
        if num_return_sequences is not None:
            return texts[0] if isinstance(prompt, str) else texts
        return texts[0][0] if isinstance(prompt, str) else [row[0] for row in texts]

    def stream(self, prompt: str, *, stop: Stop = (), **options: Unpack[PipelineOptions]) -> Iterator[str]:
        """Yield the continuation of a prompt in pieces as it is generated; joined, they are the text of `generate`."""
        return chunk_texts(self.stream_chunks(prompt, stop=stop, **options))

    def stream_chunks(self, prompt: str, *, stop: Stop = (), **options: Unpack[PipelineOptions]) -> Iterator[TextChunk]:
        """Yield the pieces of `stream` with their token ids; the last has the reason why the text ends."""
        truncation = options.pop("truncation", None)
        settings = self.resolve_settings(options, streaming=True)
        encoded = self.loaded.truncate(self.encode_prompt(prompt), truncation, settings.max_new_tokens)
        return self.loaded.stream_chunks([encoded], [settings], stop)

    def generate_hypotheses(
        self,
        prompts: Sequence[str],
        *,
        stop: Stop = (),
        return_scores: bool = False,
        **options: Unpack[GenerationOptions],
    ) -> list[list[Hypothesis]]:
        """Return num_return_sequences texts for each prompt, with token counts, finish reasons and scores.

        return_scores: also compute the log-probability of each token (`Hypothesis.token_scores`).
        """
        truncation, seeds = options.pop("truncation", None), split_seeds(options.pop("seed", None), len(prompts))
        settings = self.resolve_settings(options)
        encoded = [
            self.loaded.truncate(self.encode_prompt(prompt), truncation, settings.max_new_tokens) for prompt in prompts
        ]
        own = [replace(settings, seed=seed) for seed in seeds]
        return self.loaded.generate(encoded, own, stop, return_scores=return_scores) if encoded else []

    def chat(self, messages: ChatMessages, *, stop: Stop = (), **options: Unpack[PipelineOptions]) -> str:
        """Return the next answer of the assistant to messages such as {"role": "user", "content": "Hello"}."""
        truncation = options.pop("truncation", None)
        settings = self.resolve_settings(options)
        prompt = self.loaded.truncate(self.encode_chat(messages), truncation, settings.max_new_tokens)
        return self.loaded.generate([prompt], settings, stop, new_text=True)[0][0].text

    def chat_stream(
        self, messages: ChatMessages, *, stop: Stop = (), **options: Unpack[PipelineOptions]
    ) -> Iterator[str]:
        """Yield the next answer of the assistant in pieces, as it is generated."""
        return chunk_texts(self.chat_chunks(messages, stop=stop, **options))

    def chat_chunks(
        self, messages: ChatMessages, *, stop: Stop = (), **options: Unpack[PipelineOptions]
    ) -> Iterator[TextChunk]:
        """Yield the pieces of `chat_stream` with their token ids; the last has the reason why the answer ends."""
        truncation = options.pop("truncation", None)
        settings = self.resolve_settings(options, streaming=True)
        prompt = self.loaded.truncate(self.encode_chat(messages), truncation, settings.max_new_tokens)
        return self.loaded.stream_chunks([prompt], [settings], stop, new_text=True)

    def resolve_settings(self, options: Mapping[str, object], *, streaming: bool = False) -> Settings:
        """Return the decoding settings: the defaults of the model folder, overridden by options."""
        return self.loaded.resolve_settings(options, streaming=streaming)

    def encode_prompt(self, text: str) -> Prompt:
        """Encode a prompt or, for a model with an encoder, a source."""
        return self.loaded.encode_prompt(text)

    def encode_chat(self, messages: ChatMessages) -> Prompt:
        """Encode a conversation with the chat template of the tokenizer."""
        return self.loaded.encode_chat(messages)

    # -- translation --------------------------------------------------------------------------------------------------

    @overload
    def translate(self, text: str, *, n_best: None = None, **options: Unpack[TranslationOptions]) -> str: ...
    @overload
    def translate(self, text: str, *, n_best: int, **options: Unpack[TranslationOptions]) -> list[Hypothesis]: ...
    @overload
    def translate(
        self, text: Iterable[str], *, n_best: None = None, **options: Unpack[TranslationOptions]
    ) -> list[str]: ...
    @overload
    def translate(
        self, text: Iterable[str], *, n_best: int, **options: Unpack[TranslationOptions]
    ) -> list[list[Hypothesis]]: ...
    def translate(
        self, text: str | Iterable[str], *, n_best: int | None = None, **options: Unpack[TranslationOptions]
    ) -> str | list[str] | list[Hypothesis] | list[list[Hypothesis]]:
        """Translate a source, or a list of sources in their order; an empty source gives an empty target.

        n_best: return this many hypotheses with scores for each source, best first, instead of one text.
        options: batch, the number of sources translated at once; to, the script of the target, for a model that writes
        several; long="refuse" or "split" into sentences, for a source beyond the context; first_index: with a seed,
        source n is sampled with seed + first_index + n; and those of `generate`.
        """
        texts = cast(list[str], list_inputs(text, "translate"))
        hypotheses = translate_texts(self.loaded, texts, n_best=n_best, **options)
        if n_best is not None:
            return hypotheses[0] if isinstance(text, str) else hypotheses
        best = [row[0].text for row in hypotheses]
        return best[0] if isinstance(text, str) else best

    # -- any task -----------------------------------------------------------------------------------------------------

    def predict(self, inputs: Sequence[object]) -> Sequence[object]:
        """Return the prediction of the model's task for each input: a class, a translation, an answer, numbers …

        With a task of your own (`mb.load(folder, task=…)`), this is its method `predict`.
        """
        if isinstance(inputs, str):
            raise InputError("predict takes a list of inputs; write predict([text])")
        task = self.task or task_of_model(self.loaded)
        if task is None and self.loaded.prediction_method == "predict":
            return predict_numbers(self.loaded, inputs)  # type: ignore[arg-type]
        if task is None:
            raise InputError("this model has no task that predicts; give mb.load the task, or call generate")
        return task.predict(self.loaded, inputs)
