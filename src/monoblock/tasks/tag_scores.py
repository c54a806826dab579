"""Evaluate token classification: the accuracy over words, and the F1 of entities, of punctuation or of labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from monoblock.data.corpora.load import Corpus
from monoblock.data.corpora.punctuation import MARK_TO_LABEL
from monoblock.data.readers.records import TaggedSentence
from monoblock.errors import FileError
from monoblock.metrics import classification
from monoblock.plots.confusion_matrix import Mistake, save_confusion_matrix
from monoblock.tasks.bio import (
    OUTSIDE,
    MatchCounts,
    count_entities,
    is_chunking_scheme,
    is_iob1,
    sum_counts,
    to_bio,
)
from monoblock.tasks.evaluation_report import MAX_MISTAKES, Evaluation, EvaluationRequest, Table, read_corpus
from monoblock.tasks.labels import check_labels, label_to_id
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.splits import holdout_of
from monoblock.tasks.tag_augmentation import TokenClassificationSection
from monoblock.tasks.tag_words import (
    decode_labels,
    has_punctuation_labels,
    predict_word_probabilities,
)

SENTENCES_PER_ROW = 20  # sentences scored for each row that `score_validation_tags` is asked for; they are short
CONTEXT_WORDS = 5  # words shown on either side of a mistake
# The possible values of the first and the second part of a label such as COMMA+CAP.
LABEL_PARTS = ([mark for mark in MARK_TO_LABEL.values() if mark != OUTSIDE], ["CAP", "UPPER"])


def evaluate_tagger(loaded: LoadedModel, request: EvaluationRequest) -> Evaluation:
    """Compute the accuracy, the loss, the calibration error and the F1 of a tagger.

    The labels of the model decide whether F1 is that of entities, of punctuation and capitals, or of single labels.
    """
    corpus = read_corpus(request, "tagged")
    notes = []
    if is_iob1(corpus.rows, {*loaded.labels, *corpus.labels()}):
        corpus = Corpus(corpus.name, corpus.kind, corpus.split, [to_bio(row) for row in corpus.rows])
        notes.append("the labels of the data were converted from IOB1 to BIO")
    check_labels(corpus, (row.labels for row in corpus.rows), loaded.labels)
    row_probabilities = _predict_probabilities(loaded, corpus.rows, request.batch_size)
    predictions = _decode_rows(loaded, row_probabilities)
    probabilities = np.concatenate([row.double().numpy() for row in row_probabilities])
    predicted, gold = (_label_ids(rows, loaded.labels) for rows in (predictions, [row.labels for row in corpus.rows]))
    counts = classification.confusion_matrix(predicted, gold, len(loaded.labels))
    metrics: dict[str, Any] = {
        "accuracy": classification.accuracy(counts),
        **_f1_metrics(loaded.labels, predictions, corpus.rows, _training_request(loaded, request), notes),
        "loss": float(classification.negative_log_likelihood(probabilities, gold).mean()),
        "ece": classification.calibration_error(probabilities, gold),
        "majority": classification.majority_accuracy(gold),
        "words": len(gold),
        "sources": len(corpus),
        "split": corpus.split,
    }
    rows = metrics.pop("rows")
    columns = list(next(iter(rows.values()), {}))
    max_count = max(MAX_MISTAKES, request.samples)
    mistakes = _worst_mistakes(corpus.rows, probabilities, predicted, gold, loaded.labels, max_count)
    samples = [mistake.to_sample() for mistake in mistakes]
    report = classification.classification_report(counts, loaded.labels)
    return Evaluation(
        metrics | report | {"kinds": rows, "worst": samples[:MAX_MISTAKES]},
        samples[: request.samples],
        notes,
        tables=[Table(["kind", *columns], [[kind, *row.values()] for kind, row in rows.items()])],
        save_plot=lambda path: save_confusion_matrix(counts, loaded.labels, mistakes[:MAX_MISTAKES], path),
    )


def score_validation_tags(loaded: LoadedModel, rows: Sequence[TaggedSentence], count: int) -> dict[str, float]:
    """Return the F1 on the first SENTENCES_PER_ROW * count validation sentences, for the model card."""
    rows = rows[: SENTENCES_PER_ROW * count]
    predictions = _decode_rows(loaded, _predict_probabilities(loaded, rows))
    return {"val_f1": _f1_metrics(loaded.labels, predictions, rows, None, [])["f1"]}


def _predict_probabilities(loaded: LoadedModel, rows: Sequence[TaggedSentence], batch: int = 64) -> list[Tensor]:
    """Return the class probabilities of each row, of shape (words, classes); rows are joined as in training."""
    join = loaded.section(TokenClassificationSection).join_rows
    return predict_word_probabilities(loaded, [row.words for row in rows], batch=batch, long="split", join=join)


def _decode_rows(loaded: LoadedModel, probabilities: Sequence[Tensor]) -> list[list[str]]:
    return [[loaded.labels[label] for label in decode_labels(loaded.labels, row)] for row in probabilities]


def _label_ids(rows: Sequence[Sequence[str]], labels: Sequence[str]) -> list[int]:
    """Return the class indices of all labels in all rows as one list."""
    ids = label_to_id(labels)
    return [ids[label] for row in rows for label in row]


def _f1_metrics(
    labels: Sequence[str],
    predictions: Sequence[Sequence[str]],
    rows: Sequence[TaggedSentence],
    request: EvaluationRequest | None,
    notes: list[str],
) -> dict[str, Any]:
    """Compute "f1" and related metrics, and append explanations to `notes`.

    The key "rows" has the scores of each entity type, punctuation mark or label.
    request: where the training split for the baseline of punctuation is read from; None means no training split.
    """
    references = [row.labels for row in rows]
    if is_chunking_scheme(labels):
        notes.append("f1 is the F1 of whole entities, micro-averaged over their types as in conlleval")
        entity_counts = count_entities(predictions, references)
        total = sum_counts(entity_counts)
        kinds = {kind: _format_counts(counts) for kind, counts in entity_counts.items()}
        return {"f1": total.f1, "precision": total.precision, "recall": total.recall, "rows": kinds}
    if has_punctuation_labels(labels):
        return _punctuation_metrics(predictions, rows, _most_frequent_labels(request, rows), notes)
    notes.append("f1 is the mean of the F1 of all labels")
    predicted, gold = (_label_ids(names, labels) for names in (predictions, references))
    counts = classification.confusion_matrix(predicted, gold, len(labels))
    scores = zip(labels, classification.class_scores(counts), strict=True)
    return {
        "f1": classification.macro_f1(counts),
        "rows": {label: score.to_dict() for label, score in scores if score.support},
    }


def _format_counts(counts: MatchCounts) -> dict[str, Any]:
    return {"precision": counts.precision, "recall": counts.recall, "f1": counts.f1, "there": counts.gold}


# -- punctuation and capitals -----------------------------------------------------------------------------------------


def _punctuation_metrics(
    predictions: Sequence[Sequence[str]],
    rows: Sequence[TaggedSentence],
    baseline: Sequence[Sequence[str]],
    notes: list[str],
) -> dict[str, Any]:
    """Compute the F1 of every punctuation mark and of capitals, their mean, and the same for the baseline.

    baseline: the labels that the baseline predicts for each row.
    """
    kinds: dict[str, Any] = {}
    for index, names in enumerate(LABEL_PARTS):
        predicted, guessed, gold = (
            np.array([_label_part(label, index) for row in label_rows for label in row])
            for label_rows in (predictions, baseline, [row.labels for row in rows])
        )
        for name in names:
            if not (gold == name).any():
                continue
            counts, baseline_counts = (_count_matches(parts == name, gold == name) for parts in (predicted, guessed))
            margin = counts.f1 - baseline_counts.f1
            kinds[name] = _format_counts(counts) | {"baseline": baseline_counts.f1, "margin": margin}
    mean, base = (float(np.mean([row[key] for row in kinds.values()] or [0.0])) for key in ("f1", "baseline"))
    notes.append(
        "f1 is the mean over marks and capitals; the baseline gives each word its most frequent label in training"
    )
    return {"f1": mean, "baseline": base, "margin": mean - base, "rows": kinds}


def _count_matches(predicted: Any, gold: Any) -> MatchCounts:
    return MatchCounts(int((predicted & gold).sum()), int(predicted.sum()), int(gold.sum()))


def _training_request(loaded: LoadedModel, request: EvaluationRequest) -> EvaluationRequest:
    """Return the request whose training split gives the baseline.

    If all rows of a file are evaluated (split "all"), the baseline comes from the corpus the model was trained on.
    """
    if request.split != "all" or loaded.data_section is None:
        return request
    return replace(request, data=loaded.data_section.corpus, holdout=holdout_of(loaded.data_section))


def _most_frequent_labels(request: EvaluationRequest | None, rows: Sequence[TaggedSentence]) -> list[list[str]]:
    """Label each word with its most frequent label in the training split, or O if it does not occur there."""
    frequencies: dict[str, Counter[str]] = {}
    try:
        for row in read_corpus(request, "tagged", "train").rows if request is not None else ():
            for word, label in zip(row.words, row.labels, strict=True):
                frequencies.setdefault(word, Counter())[label] += 1
    except FileError:  # there is no training split
        pass
    best = {word: counts.most_common(1)[0][0] for word, counts in frequencies.items()}
    return [[best.get(word, OUTSIDE) for word in row.words] for row in rows]


def _label_part(label: str, index: int) -> str:
    return label.partition("+")[2 * index]


# -- mistakes ---------------------------------------------------------------------------------------------------------


def _worst_mistakes(
    rows: Sequence[TaggedSentence],
    probabilities: Any,
    predictions: list[int],
    gold: list[int],
    labels: Sequence[str],
    max_count: int,
) -> list[Mistake]:
    """Return the wrongly labelled words whose true labels have the lowest probabilities, with the words around them."""
    words = [(row.words, index) for row in rows for index in range(len(row.words))]
    wrong = np.flatnonzero(np.array(predictions) != np.array(gold))
    loss = classification.negative_log_likelihood(probabilities, gold)
    mistakes = []
    for word in wrong[np.argsort(-loss[wrong], kind="stable")][:max_count].tolist():
        sentence, index = words[word]
        marked = [*sentence[:index], f"[{sentence[index]}]", *sentence[index + 1 :]]
        text = " ".join(marked[max(0, index - CONTEXT_WORDS) : index + CONTEXT_WORDS + 1])
        probability = float(probabilities[word, predictions[word]])
        mistakes.append(Mistake(text, labels[gold[word]], labels[predictions[word]], probability))
    return mistakes
