"""Classification: predict one label for a text, a pair of texts or an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from monoblock.config.schema import check_at_least, check_fraction, check_types, to_dict
from monoblock.data.corpora.load import Corpus
from monoblock.data.readers.records import LabelledPicture
from monoblock.errors import ConfigError, InputError
from monoblock.tasks.evaluation_report import MAX_MISTAKES, Evaluation, EvaluationRequest, Table, read_corpus
from monoblock.tasks.input_template import EncodedInput, InputTemplate
from monoblock.tasks.task import Task, TrainingDefaults

if TYPE_CHECKING:
    from torch import Tensor

    from monoblock.plots.confusion_matrix import Mistake
    from monoblock.tasks.batching import LongTextMode, ProgressCallback
    from monoblock.tasks.images import Image
    from monoblock.tasks.loaded_model import LoadedModel
    from monoblock.tasks.task_data import TaskData, TaskInputs

TextOrPair = str | tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class AugmentSection:
    """How training images are augmented, differently in every epoch; with 0, an augmentation is not applied."""

    shift: int = 0  # shift each image by up to this many pixels in both directions, and fill the gap with zeros
    rotate: float = 0.0  # rotate each image by up to this many degrees
    zoom: float = 0.0  # enlarge or shrink each image by up to this fraction of its size
    flip: float = 0.0  # mirror each image horizontally with this probability
    cutout: int = 0  # set a random square of this many pixels on each side to zero

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, 0, "shift", "rotate", "cutout")
        check_fraction(self, "zoom", "flip")


@dataclass(frozen=True, kw_only=True)
class ClassificationSection:
    """A table of its own says how training images are augmented; for texts there is nothing to set."""

    augment: AugmentSection = AugmentSection()  # how training images are augmented

    def __post_init__(self) -> None:
        check_types(self)


class Classification(Task):
    name = "classification"
    about = "predict one label for a text, a pair of texts or an image"
    head = "classifier"
    families = ("encoder-only", "decoder-only", "vision")
    corpus_kinds = ("labelled", "images")
    section = ClassificationSection
    required_tokens = ("cls",)
    metrics = ("accuracy", "f1", "ece")
    supports_adversarial = True
    supports_unpadded = True
    supports_subword_sampling = True
    defaults = TrainingDefaults(3, 32, 512)

    def data(self, inputs: TaskInputs, /) -> TaskData:
        """Build batches with one label for each image, text or pair of texts; texts are truncated to the context."""
        import numpy as np

        from monoblock.data.encode import encode_labelled
        from monoblock.tasks.images import build_image_data
        from monoblock.tasks.task_data import class_indices
        from monoblock.training.collate import collate_classification

        train, valid, labels, section = inputs.train, inputs.valid, inputs.labels, inputs.section(ClassificationSection)
        if train.kind == "images":
            augmentations = {name: value for name, value in to_dict(section.augment).items() if value}
            return build_image_data(inputs, augmentations)
        if section != ClassificationSection():
            raise ConfigError(
                f"classification.augment is for images, but the corpus {train.name} is text; leave it out"
            )
        tokenizer, sampler, num_truncated = inputs.text_tokenizer, inputs.sampler, 0
        template = InputTemplate(tokenizer, inputs.max_length)

        def encode(text: str, pair: str | None) -> tuple[list[int], list[int]]:
            nonlocal num_truncated
            encoded = template(tokenizer.encode(text), None if pair is None else tokenizer.encode(pair))
            num_truncated += encoded.num_truncated > 0
            return encoded.ids, encoded.segments if inputs.has_segments else [0] * len(encoded.ids)

        if valid is not None:
            class_indices(valid, labels)
        validation = None if valid is None else encode_labelled(valid.rows, encode, labels)
        num_truncated = 0
        samples = encode_labelled(train.rows, encode, labels)

        def resample(index: int, epoch: int) -> dict[str, Any]:
            """Return a sample whose texts are segmented differently in every epoch."""
            assert sampler is not None
            encoded, number = samples[index], int(samples.row_numbers[index])
            texts = [text for text in (train.rows[number].text, train.rows[number].text_pair) if text is not None]
            row = template(*(sampler(text, epoch=epoch, index=number) for text in texts))
            fields = {"ids": row.ids, "segments": row.segments}
            return {**encoded, **{name: np.array(fields[name], np.int64) for name in fields if name in encoded}}

        return inputs.encoded_data(
            samples,
            partial(collate_classification, special=inputs.special_tokens),
            validation,
            resample=None if sampler is None else resample,
            model_sizes={"classes": len(labels)},
            labels=labels,
            summary=f"{len(samples):,} samples of {len(labels)} classes to train on"
            f"{inputs.truncation_note(num_truncated)}",
            unit="texts",
        )

    def predict(self, loaded: LoadedModel, inputs: Sequence[Any], /) -> list[Prediction]:
        """Return the most probable class of each text, pair of texts or image."""
        if not len(inputs):
            return []
        predict: Any = predict_image_probabilities if loaded.tokenizer is None else predict_probabilities
        return [top_predictions(loaded.labels, row, 1)[0] for row in predict(loaded, inputs)]

    def evaluate(self, loaded: LoadedModel, request: EvaluationRequest, /) -> Evaluation:
        """Compute accuracy, macro F1, loss and calibration error, the confusion matrix and the scores of each class."""
        from monoblock.metrics import classification
        from monoblock.plots.confusion_matrix import save_confusion_matrix
        from monoblock.tasks.task_data import class_indices

        corpus = read_corpus(request, "images" if loaded.tokenizer is None else "labelled")
        labels = class_indices(corpus, loaded.labels)
        probabilities = _predict_corpus(loaded, corpus, request)
        counts = classification.confusion_matrix(probabilities.argmax(-1).tolist(), labels, len(loaded.labels))
        metrics: dict[str, Any] = {
            "accuracy": classification.accuracy(counts),
            "f1": classification.macro_f1(counts),
            "loss": float(classification.negative_log_likelihood(probabilities, labels).mean()),
            "ece": classification.calibration_error(probabilities, labels),
            "majority": classification.majority_accuracy(labels),
            "sources": len(corpus),
            "split": corpus.split,
        }
        worst = classification.most_confident_errors(probabilities, labels, max(MAX_MISTAKES, request.samples))
        mistakes = [_build_mistake(loaded, corpus, probabilities, labels, index) for index in worst]
        samples = [mistake.to_sample() for mistake in mistakes]
        report = classification.classification_report(counts, loaded.labels)
        scores = zip(loaded.labels, classification.class_scores(counts), strict=True)
        rows = [[label, *score] for label, score in scores if score.support]
        notes = [
            "f1 is the mean over classes; ece is the calibration error over "
            f"{classification.CALIBRATION_BINS} bins, in percent"
        ]
        limit = loaded.model.config.context
        if corpus.kind != "images" and limit is not None:
            encode, template = loaded.tokenizer.encode, loaded.input_template(limit)
            pairs = (
                (encode(row.text), None if row.text_pair is None else encode(row.text_pair)) for row in corpus.rows
            )
            count = sum(template(*pair).num_truncated > 0 for pair in pairs)
            notes += [f"{count:,} of {len(corpus):,} texts were cut to {limit} tokens"] if count else []
        return Evaluation(
            metrics | report | {"worst": samples[:MAX_MISTAKES]},
            samples[: request.samples],
            notes,
            tables=[Table(["class", "precision", "recall", "f1", "there"], rows)],
            save_plot=lambda path: save_confusion_matrix(counts, loaded.labels, mistakes[:MAX_MISTAKES], path),
        )


# -- labels -----------------------------------------------------------------------------------------------------------


class Prediction(NamedTuple):
    label: str
    probability: float


def top_predictions(labels: Sequence[str], probabilities: Tensor, top: int) -> list[Prediction]:
    """Return the `top` most probable labels, best first; `probabilities` has the shape (classes,)."""
    values, indices = probabilities.topk(min(top, len(probabilities)))
    return [Prediction(labels[index], value) for index, value in zip(indices.tolist(), values.tolist(), strict=True)]


# -- prediction -------------------------------------------------------------------------------------------------------


def predict_probabilities(
    loaded: LoadedModel,
    texts: Sequence[TextOrPair],
    *,
    batch: int = 64,
    long: LongTextMode = "refuse",
    lines: Sequence[int] | None = None,
    progress: ProgressCallback | None = None,
) -> Tensor:
    """Return the class probabilities of each text or pair of texts, of shape (texts, classes).

    long: "refuse", "cut" or "split" a text that is longer than the context; a split text gets the mean over its parts,
        weighted by their numbers of tokens.
    lines: the line numbers of the texts for error messages, counted from 0.
    """
    import torch

    from monoblock.tasks.batching import average_parts, check_long_mode, enumerate_lines, run_batches

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
    from monoblock.tasks.batching import run_batches

    loaded.check_head("regression")
    rows = [_encode_parts(loaded, line, text, "refuse")[0] for line, text in enumerate(texts)]
    return [numbers.tolist() for numbers in run_batches(loaded, rows, batch, loaded.model)]


def _encode_parts(loaded: LoadedModel, line: int, text: TextOrPair, long: str) -> list[EncodedInput]:
    from monoblock.tasks.batching import fit_to_context, too_long_error

    encode, context = loaded.tokenizer.encode, loaded.model.config.context
    if isinstance(text, str):
        return fit_to_context(loaded, line, text, encode, long)
    first, second = (encode(part) for part in text)
    encoded = loaded.input_template(context)(first, second)
    if encoded.num_truncated and long != "cut":
        raise too_long_error(line, len(loaded.input_template()(first, second).ids), context, ("cut",))
    return [encoded]


def predict_image_probabilities(
    loaded: LoadedModel, images: Sequence[Image], *, batch: int = 64, progress: ProgressCallback | None = None
) -> Tensor:
    """Return the class probabilities of images with pixels from 0 to 1, of shape (images, classes)."""
    import torch

    from monoblock.tasks.batching import run_image_batches

    loaded.check_head("classifier")
    logits = run_image_batches(loaded, images, batch, loaded.model, progress)
    return torch.cat([class_probabilities(rows, loaded.is_multi_label) for rows in logits])


# -- evaluation -------------------------------------------------------------------------------------------------------


def _predict_corpus(loaded: LoadedModel, corpus: Corpus, request: EvaluationRequest) -> Any:
    if corpus.kind == "images":
        images = [Path(row.path) if isinstance(row, LabelledPicture) else row.pixels for row in corpus.rows]
        try:
            return predict_image_probabilities(loaded, images, batch=request.batch_size).double().numpy()
        except InputError as problem:
            raise InputError(str(problem).replace("the input holds an image", f"{corpus.name} holds images")) from None
    texts = [row.text if row.text_pair is None else (row.text, row.text_pair) for row in corpus.rows]
    return predict_probabilities(loaded, texts, batch=request.batch_size, long="cut").double().numpy()


def _build_mistake(
    loaded: LoadedModel, corpus: Corpus, probabilities: Any, labels: Sequence[int], index: int
) -> Mistake:
    from monoblock.plots.confusion_matrix import Mistake
    from monoblock.tasks.images import read_image

    row, prediction = corpus.rows[index], int(probabilities[index].argmax())
    names = loaded.labels[labels[index]], loaded.labels[prediction]
    probability = float(probabilities[index, prediction])
    if corpus.kind != "images":
        text = row.text if row.text_pair is None else f"{row.text} | {row.text_pair}"
        return Mistake(text, *names, probability, None)
    picture = Path(row.path) if isinstance(row, LabelledPicture) else None
    shown = f"image {index}" if picture is None else f"{picture.parent.name}/{picture.name}"
    config: Any = loaded.model.config
    pixels = read_image(picture or row.pixels, config.input, loaded.image_preprocessing).numpy()
    return Mistake(shown, *names, probability, pixels)
