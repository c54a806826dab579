"""Evaluate a classifier of texts, pairs of texts or images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monoblock.data.corpora.load import Corpus
from monoblock.data.readers.records import LabelledImage, LabelledPicture, LabelledText
from monoblock.errors import InputError
from monoblock.metrics import classification
from monoblock.plots.confusion_matrix import Mistake, save_confusion_matrix
from monoblock.tasks.classification.images import label_ids
from monoblock.tasks.classification.predict import TextOrPair, predict_image_probabilities, predict_probabilities
from monoblock.tasks.evaluation_report import MAX_MISTAKES, Evaluation, EvaluationRequest, Table, read_corpus
from monoblock.tasks.image_inputs import Image, read_image
from monoblock.tasks.labels import check_labels, label_to_id
from monoblock.tasks.loaded_model import LoadedModel


def evaluate_classifier(loaded: LoadedModel, request: EvaluationRequest) -> Evaluation:
    """Compute accuracy, macro F1, loss and calibration error, the confusion matrix and the scores of each class."""
    corpus = read_corpus(request, "images" if loaded.tokenizer is None else "labelled")
    labels = label_indices(corpus, loaded.labels)
    probabilities = _predict_probabilities(loaded, corpus, request)
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
    return Evaluation(
        metrics | report | {"worst": samples[:MAX_MISTAKES]},
        samples[: request.samples],
        [
            f"f1 is the mean over classes; ece is the calibration error over {classification.CALIBRATION_BINS} bins, "
            "in percent",
            *_truncation_notes(loaded, corpus),
        ],
        tables=[Table(["class", "precision", "recall", "f1", "there"], rows)],
        save_plot=lambda path: save_confusion_matrix(counts, loaded.labels, mistakes[:MAX_MISTAKES], path),
    )


def label_indices(corpus: Corpus, labels: Sequence[str]) -> list[int]:
    """Return the class index of each row; raise InputError for a label that is not in `labels`."""
    if corpus.kind == "images":
        return [int(label) for label in label_ids(corpus, labels)]
    check_labels(corpus, ((row.label,) for row in corpus.rows), labels)
    ids = label_to_id(labels)
    return [ids[row.label] for row in corpus.rows]


def _predict_probabilities(loaded: LoadedModel, corpus: Corpus, request: EvaluationRequest) -> Any:
    if corpus.kind == "images":
        images = [_input_image(row) for row in corpus.rows]
        try:
            return predict_image_probabilities(loaded, images, batch=request.batch_size).double().numpy()
        except InputError as problem:
            raise InputError(str(problem).replace("the input holds an image", f"{corpus.name} holds images")) from None
    texts = [_input_text(row) for row in corpus.rows]
    return predict_probabilities(loaded, texts, batch=request.batch_size, long="cut").double().numpy()


def _truncation_notes(loaded: LoadedModel, corpus: Corpus) -> list[str]:
    """Return a note that says how many texts were truncated, as a list; the list is empty if none were."""
    limit = loaded.model.config.context
    if corpus.kind == "images" or limit is None:
        return []
    encode, template = loaded.tokenizer.encode, loaded.input_template(limit)
    inputs = (
        template(encode(row.text), None if row.text_pair is None else encode(row.text_pair)) for row in corpus.rows
    )
    count = sum(encoded.num_truncated > 0 for encoded in inputs)
    return [f"{count:,} of {len(corpus):,} texts were cut to {limit} tokens"] if count else []


def _input_image(row: LabelledImage | LabelledPicture) -> Image:
    return Path(row.path) if isinstance(row, LabelledPicture) else row.pixels


def _input_text(row: LabelledText) -> TextOrPair:
    return row.text if row.text_pair is None else (row.text, row.text_pair)


def _build_mistake(
    loaded: LoadedModel, corpus: Corpus, probabilities: Any, labels: Sequence[int], index: int
) -> Mistake:
    row, prediction = corpus.rows[index], int(probabilities[index].argmax())
    image = corpus.kind == "images"
    picture = Path(row.path) if isinstance(row, LabelledPicture) else None
    shown = f"image {index}" if picture is None else f"{picture.parent.name}/{picture.name}"
    text = shown if image else row.text if row.text_pair is None else f"{row.text} | {row.text_pair}"
    config: Any = loaded.model.config
    pixels = read_image(_input_image(row), config.input, loaded.image_preprocessing).numpy() if image else None
    names = loaded.labels[labels[index]], loaded.labels[prediction]
    return Mistake(text, *names, float(probabilities[index, prediction]), pixels)
