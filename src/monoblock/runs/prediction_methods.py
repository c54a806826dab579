"""The methods of `Pipeline` that predict classes, labels of words, masked tokens, embeddings and answers."""

# mypy: disable-error-code="overload-overlap"
# A str is also an Iterable[str]; the overload for one text comes first.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Unpack, cast, overload

import torch
from torch import Tensor

from monoblock.tasks.classification import TextOrPair, predict_image_probabilities, predict_probabilities
from monoblock.tasks.embedding import embed_images, embed_texts
from monoblock.tasks.image_inputs import Image
from monoblock.tasks.labels import Prediction, top_predictions
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.masked_lm import FilledText, fill_masks
from monoblock.tasks.prediction_options import AnswerOptions, PredictionOptions, is_single, list_inputs
from monoblock.tasks.question_answering import AnswerSpan, answer_questions
from monoblock.tasks.token_classification import TaggedText, split_words, tag_words


@dataclass
class PredictionMethods:
    """The methods of `Pipeline` for models that do not generate text."""

    loaded: LoadedModel

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
        images = self.loaded.reads_images
        single = is_single(text, (str, tuple), images=images)
        rows = list_inputs(text, "classify", (str, tuple), images=images)
        predict: Callable[..., Tensor] = predict_image_probabilities if images else predict_probabilities
        probabilities = predict(self.loaded, rows, **options) if rows else ()
        predictions = [top_predictions(self.loaded.labels, row, top) for row in probabilities]
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
        rows = cast(list[str | list[str]], list_inputs(text, "tag", also=(list, tuple)))
        words = [split_words(self.loaded, row, split_punctuation) for row in rows]
        tagged = tag_words(self.loaded, words, **options)
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
        filled = fill_masks(self.loaded, cast(list[str], list_inputs(text, "fill")), top=top, **options)
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
        images = self.loaded.reads_images
        single = is_single(text, images=images)
        rows = list_inputs(text, "embed", images=images)
        if not rows:
            return torch.zeros(0, self.loaded.model.config.width)
        embed: Callable[..., Tensor] = embed_images if images else embed_texts
        vectors = embed(self.loaded, rows, pooling=pooling, normalize=normalize, **options)
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
        spans = answer_questions(self.loaded, pairs, n_best=1 if n_best is None else n_best, **options) if pairs else []
        if n_best is not None:
            return spans[0] if single else spans
        best = [row[0].text for row in spans]
        return best[0] if single else best
