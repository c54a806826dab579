"""Predict class probabilities of texts, pairs of texts and images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from monoblock.tasks.batching import ProgressCallback, no_progress, run_batches, run_image_batches
from monoblock.tasks.image_inputs import Image
from monoblock.tasks.input_template import EncodedInput
from monoblock.tasks.labels import Prediction, top_predictions
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.long_inputs import (
    LongTextMode,
    average_parts,
    check_long_mode,
    enumerate_lines,
    fit_to_context,
    too_long_error,
)

TextOrPair = str | tuple[str, str]


def predict_probabilities(
    loaded: LoadedModel,
    texts: Sequence[TextOrPair],
    *,
    batch: int = 64,
    long: LongTextMode = "refuse",
    lines: Sequence[int] | None = None,
    progress: ProgressCallback = no_progress,
) -> Tensor:
    """Return the class probabilities of each text or pair of texts, of shape (texts, classes).

    long: "refuse", "cut" or "split" a text that is longer than the context; a split text gets the mean over its parts,
        weighted by their numbers of tokens.
    lines: the line numbers of the texts for error messages, counted from 0.
    """
    loaded.check_head("classifier")
    check_long_mode(long)
    texts_in_parts = [_encode_parts(loaded, line, text, long) for line, text in enumerate_lines(texts, lines)]
    rows = [row for parts in texts_in_parts for row in parts]
    logits = iter(run_batches(loaded, rows, batch, loaded.model, progress=progress))
    probabilities = (class_probabilities(row, loaded.is_multi_label) for row in logits)
    return torch.stack([average_parts(parts, [next(probabilities) for _ in parts]) for parts in texts_in_parts])


def class_probabilities(logits: Tensor, multi_label: bool = False) -> Tensor:
    """Return the softmax of the logits, or their sigmoid for a single class and for classes that exclude none."""
    return logits.sigmoid() if multi_label or logits.shape[-1] == 1 else logits.softmax(-1)


def predict_numbers(loaded: LoadedModel, texts: Sequence[TextOrPair], *, batch: int = 64) -> list[list[float]]:
    """Return the numbers of a regression head for each text or pair of texts."""
    loaded.check_head("regression")
    rows = [_encode_parts(loaded, line, text, "refuse")[0] for line, text in enumerate(texts)]
    return [numbers.tolist() for numbers in run_batches(loaded, rows, batch, loaded.model)]


def _encode_parts(loaded: LoadedModel, line: int, text: TextOrPair, long: str) -> list[EncodedInput]:
    encode, context = loaded.tokenizer.encode, loaded.model.config.context
    if isinstance(text, str):
        return fit_to_context(loaded, line, text, encode, long)
    first, second = (encode(part) for part in text)
    encoded = loaded.input_template(context)(first, second)
    if encoded.num_truncated and long != "cut":
        raise too_long_error(line, len(loaded.input_template()(first, second).ids), context, ("cut",))
    return [encoded]


def predict_image_probabilities(
    loaded: LoadedModel, images: Sequence[Image], *, batch: int = 64, progress: ProgressCallback = no_progress
) -> Tensor:
    """Return the class probabilities of images with pixels from 0 to 1, of shape (images, classes)."""
    loaded.check_head("classifier")
    logits = run_image_batches(loaded, images, batch, loaded.model, progress)
    return torch.cat([class_probabilities(rows, loaded.is_multi_label) for rows in logits])


def predict_classes(loaded: LoadedModel, inputs: Sequence[Any]) -> list[Prediction]:
    """Return the most probable class of each text, pair of texts or image."""
    if not len(inputs):
        return []
    predict: Any = predict_image_probabilities if loaded.tokenizer is None else predict_probabilities
    return [top_predictions(loaded.labels, row, 1)[0] for row in predict(loaded, inputs)]
