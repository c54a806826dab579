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

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack, cast, overload

import torch
from torch import Tensor

from monoblock.errors import InputError
from monoblock.inference.scheduler import Prompt
from monoblock.inference.settings import Settings, split_seeds
from monoblock.inference.streaming_text import TextChunk, chunk_texts
from monoblock.nn.generation_options import GenerationOptions, PipelineOptions
from monoblock.tasks.batching import LongTextMode, ProgressCallback
from monoblock.tasks.classification import (
    Prediction,
    TextOrPair,
    predict_image_probabilities,
    predict_numbers,
    predict_probabilities,
    top_predictions,
)
from monoblock.tasks.embedding import embed_images, embed_texts
from monoblock.tasks.images import Image
from monoblock.tasks.loaded_model import Hypothesis, LoadedModel
from monoblock.tasks.masked_lm import FilledText, fill_masks
from monoblock.tasks.question_answering import AnswerSpan, answer_questions
from monoblock.tasks.table import task_of_model
from monoblock.tasks.task import Task
from monoblock.tasks.token_classification import TaggedText, split_words, tag_words
from monoblock.tasks.translate import LongSourceMode, translate_texts

ChatMessages = Sequence[Mapping[str, object]]  # such as [{"role": "user", "content": "Hello"}]
Stop = str | Sequence[str]  # strings at which a text ends


class BatchOptions(TypedDict, total=False):
    batch: int  # the number of inputs processed at once
    lines: Sequence[int] | None  # line numbers for error messages, counted from 0
    progress: ProgressCallback | None


class PredictionOptions(BatchOptions, total=False):
    long: LongTextMode  # what to do with a text longer than the context: "refuse", "cut" or "split" it


class AnswerOptions(BatchOptions, total=False):
    longest: int  # the maximum number of tokens in an answer
    impossible: bool | None  # whether "" (no answer) is allowed; None means as in training


class TranslationOptions(PipelineOptions, total=False):
    batch: int | None  # the number of sources translated at once; None: 64, or as many as suit a GPU
    to: str | None  # the script of the target, for a model that writes several scripts
    long: LongSourceMode  # what to do with a source longer than the context: "refuse" or "split" it
    first_index: int  # the index of the first source; with a seed, source n is sampled with seed + first_index + n


@dataclass(repr=False)
class Pipeline(LoadedModel):
    """A loaded model with methods that generate and predict; returned by `mb.load`."""

    task: Task | None = None  # a task that is not in the package

    def __repr__(self) -> str:
        weights = sum(weight.numel() for weight in self.model.parameters())
        task = self.task.name if self.task is not None else self.objective
        parts = [self.model.config.family, f"{weights:,} parameters", repr(self.tokenizer)]
        return f"Pipeline({', '.join(parts + ([f'objective={task!r}'] if task else []))})"

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
        prompts = cast(list[str], _list_inputs(prompt, "generate"))
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
        prompts, settings = self._prepare([self.encode_prompt(prompt)], options, streaming=True)
        return self.decode_chunks(prompts, [settings], stop)

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
        seeds = split_seeds(options.pop("seed", None), len(prompts))
        encoded, settings = self._prepare([self.encode_prompt(prompt) for prompt in prompts], options)
        own = [replace(settings, seed=seed) for seed in seeds]
        return self.decode(encoded, own, stop, return_scores=return_scores) if encoded else []

    def chat(self, messages: ChatMessages, *, stop: Stop = (), **options: Unpack[PipelineOptions]) -> str:
        """Return the next answer of the assistant to messages such as {"role": "user", "content": "Hello"}."""
        prompts, settings = self._prepare([self.encode_chat(messages)], options)
        return self.decode(prompts, settings, stop, new_text=True)[0][0].text

    def chat_stream(
        self, messages: ChatMessages, *, stop: Stop = (), **options: Unpack[PipelineOptions]
    ) -> Iterator[str]:
        """Yield the next answer of the assistant in pieces, as it is generated."""
        return chunk_texts(self.chat_chunks(messages, stop=stop, **options))

    def chat_chunks(
        self, messages: ChatMessages, *, stop: Stop = (), **options: Unpack[PipelineOptions]
    ) -> Iterator[TextChunk]:
        """Yield the pieces of `chat_stream` with their token ids; the last has the reason why the answer ends."""
        prompts, settings = self._prepare([self.encode_chat(messages)], options, streaming=True)
        return self.decode_chunks(prompts, [settings], stop, new_text=True)

    def _prepare(
        self, prompts: Sequence[Prompt], options: Mapping[str, object], *, streaming: bool = False
    ) -> tuple[list[Prompt], Settings]:
        """Return the prompts, truncated if the options of the call say so, and its decoding settings."""
        given: dict[str, Any] = dict(options)
        truncation = given.pop("truncation", None)
        settings = self.resolve_settings(given, streaming=streaming)
        return [self.truncate(prompt, truncation, settings.max_new_tokens) for prompt in prompts], settings

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
        texts = cast(list[str], _list_inputs(text, "translate"))
        hypotheses = translate_texts(self, texts, n_best=n_best, **options)
        if n_best is not None:
            return hypotheses[0] if isinstance(text, str) else hypotheses
        best = [row[0].text for row in hypotheses]
        return best[0] if isinstance(text, str) else best

    # -- prediction ----------------------------------------------------------------------------------------------------

    @overload
    def classify(
        self, text: TextOrPair | Image, *, top: int = 1, **options: Unpack[PredictionOptions]
    ) -> list[Prediction]: ...
    @overload
    def classify(
        self, text: Iterable[TextOrPair | Image], *, top: int = 1, **options: Unpack[PredictionOptions]
    ) -> list[list[Prediction]]: ...
    def classify(
        self,
        text: TextOrPair | Image | Iterable[TextOrPair | Image],
        *,
        top: int = 1,
        **options: Unpack[PredictionOptions],
    ) -> list[Prediction] | list[list[Prediction]]:
        """Return the `top` most probable classes of a text, a pair (text, text) or an image, most probable first.

        For a list of inputs, return a list of such results.

        An image is the path of a picture or of a .npz file, a picture of Pillow, or an array or tensor of shape
        (height, width, channels), (channels, height, width) or (height, width): uint8 from 0 to 255, or floats from 0
        to 1. It is resized if the model's preprocessor_config.json says so.

        options: `batch`, the number of inputs processed at once; `long`, what to do with a text that is longer than
            the context ("refuse", "cut" or "split" it).
        """
        images = self.reads_images
        single = _is_single(text, (str, tuple), images=images)
        rows = _list_inputs(text, "classify", (str, tuple), images=images)
        predict: Callable[..., Tensor] = predict_image_probabilities if images else predict_probabilities
        probabilities = predict(self, rows, **options) if rows else ()
        predictions = [top_predictions(self.labels, row, top) for row in probabilities]
        return predictions[0] if single else predictions

    @overload
    def tag(self, text: str, *, split_punctuation: bool = True, **options: Unpack[PredictionOptions]) -> TaggedText: ...
    @overload
    def tag(
        self,
        text: Iterable[str | Sequence[str]],
        *,
        split_punctuation: bool = True,
        **options: Unpack[PredictionOptions],
    ) -> list[TaggedText]: ...
    def tag(
        self,
        text: str | Iterable[str | Sequence[str]],
        *,
        split_punctuation: bool = True,
        **options: Unpack[PredictionOptions],
    ) -> TaggedText | list[TaggedText]:
        """Label every word of a text, and find its entities or restore its punctuation (see TaggedText).

        text: a text, or a list whose elements are texts or lists of words; for a list, return a list of results.
        split_punctuation: treat punctuation marks as separate words; if False, split texts at spaces only.
        """
        rows = cast(list[str | list[str]], _list_inputs(text, "tag", also=(list, tuple)))
        words = [split_words(self, row, split_punctuation) for row in rows]
        tagged = tag_words(self, words, **options)
        return tagged[0] if isinstance(text, str) else tagged

    @overload
    def fill(self, text: str, *, top: int = 5, **options: Unpack[PredictionOptions]) -> FilledText: ...
    @overload
    def fill(self, text: Iterable[str], *, top: int = 5, **options: Unpack[PredictionOptions]) -> list[FilledText]: ...
    def fill(
        self, text: str | Iterable[str], *, top: int = 5, **options: Unpack[PredictionOptions]
    ) -> FilledText | list[FilledText]:
        """Predict the `top` most probable tokens for each [MASK] of a text (see FilledText).

        For a list of texts, return a list of results.
        """
        filled = fill_masks(self, cast(list[str], _list_inputs(text, "fill")), top=top, **options)
        return filled[0] if isinstance(text, str) else filled

    def embed(
        self,
        text: str | Image | Iterable[str | Image],
        *,
        pooling: str | None = None,
        normalize: bool = True,
        **options: Unpack[PredictionOptions],
    ) -> Tensor:
        """Return the embedding of a text or image, of shape (D,), or of N of them in a list, of shape (N, D).

        pooling: "mean" of the token vectors, or "cls" or "last", the vector of the first or last token; None uses the
            pooling stored with the model, else "mean", or "last" for a decoder-only model.
        normalize: scale embeddings to length one.
        """
        images = self.reads_images
        single = _is_single(text, images=images)
        rows = _list_inputs(text, "embed", images=images)
        if not rows:
            return torch.zeros(0, self.model.config.width)
        embed: Callable[..., Tensor] = embed_images if images else embed_texts
        vectors = embed(self, rows, pooling=pooling, normalize=normalize, **options)
        return vectors[0] if single else vectors

    @overload
    def answer(self, question: str, context: str, *, n_best: None = None, **options: Unpack[AnswerOptions]) -> str: ...
    @overload
    def answer(
        self, question: str, context: str, *, n_best: int, **options: Unpack[AnswerOptions]
    ) -> list[AnswerSpan]: ...
    @overload
    def answer(
        self,
        question: Iterable[str] | Iterable[tuple[str, str]],
        context: Iterable[str] | None = None,
        *,
        n_best: None = None,
        **options: Unpack[AnswerOptions],
    ) -> list[str]: ...
    @overload
    def answer(
        self,
        question: Iterable[str] | Iterable[tuple[str, str]],
        context: Iterable[str] | None = None,
        *,
        n_best: int,
        **options: Unpack[AnswerOptions],
    ) -> list[list[AnswerSpan]]: ...
    def answer(
        self,
        question: str | Iterable[str] | Iterable[tuple[str, str]],
        context: str | Iterable[str] | None = None,
        *,
        n_best: int | None = None,
        **options: Unpack[AnswerOptions],
    ) -> str | list[str] | list[AnswerSpan] | list[list[AnswerSpan]]:
        """Return the part of the text `context` that answers a question; "" means no answer.

        question, context: two strings, or two lists of the same length, or a list of pairs (question, context) as
            `question`. For lists, return a list of answers.
        n_best: return this many spans with positions and probabilities, best first, instead of one text.
        options: `longest`, the maximum number of tokens in an answer; `impossible`, whether "" is allowed; `batch`.
        """
        single = isinstance(question, str)
        if single:
            rows: Iterable[object] = [(question, context)]
        else:
            rows = question if context is None else zip(question, context, strict=True)
        pairs = cast(list[tuple[str, str]], list(rows))
        spans = answer_questions(self, pairs, n_best=1 if n_best is None else n_best, **options) if pairs else []
        if n_best is not None:
            return spans[0] if single else spans
        best = [row[0].text for row in spans]
        return best[0] if single else best

    def predict(self, inputs: Sequence[object]) -> Sequence[object]:
        """Return the prediction of the model's task for each input: a class, a translation, an answer, numbers …

        With a task of your own (`mb.load(folder, task=…)`), this is its method `predict`.
        """
        if isinstance(inputs, str):
            raise InputError("predict takes a list of inputs; write predict([text])")
        task = task_of_model(self)
        if task is None and self.prediction_method == "predict":
            return predict_numbers(self, inputs)  # type: ignore[arg-type]
        if task is None:
            raise InputError("this model has no task that predicts; give mb.load the task, or call generate")
        return task.predict(self, inputs)


def _list_inputs(
    inputs: object,
    method: str,
    kinds: tuple[type, ...] = (str,),
    also: tuple[type, ...] = (),
    *,
    images: bool = False,
) -> list[object]:
    """Return the inputs of a call as a list: a single input, or all elements of an iterable.

    method: the method of the pipeline, for the error text.
    kinds: the types of a single input.
    also: further types that elements may have.
    images: the model reads images: paths, pictures of Pillow, and arrays of two or three axes.
    """
    single = _is_single(inputs, kinds, images=images)
    if not single and (not isinstance(inputs, Iterable) or (hasattr(inputs, "ndim") and not images)):
        raise InputError(f"{method} takes one input or a list of inputs, but got {_type_name(inputs)}")
    rows = [inputs] if single else list(inputs)  # type: ignore[call-overload]
    for index, row in enumerate(rows):
        if not _is_single(row, kinds + also, images=images):
            what = "images" if images else "texts"
            raise InputError(f"{method} takes {what}, but element {index} of the list is {_type_name(row)}")
    return rows


def _is_single(value: object, kinds: tuple[type, ...] = (str,), *, images: bool = False) -> bool:
    """Return whether a value is one input, and not several."""
    if not images:
        return isinstance(value, kinds)
    return isinstance(value, str | os.PathLike) or getattr(value, "ndim", 0) in (2, 3) or hasattr(value, "getbands")


def _type_name(value: object) -> str:
    if value is None:
        return "None"
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return f"an object of type {type(value).__name__}{shape}"
