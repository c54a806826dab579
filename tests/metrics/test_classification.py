"""Metrics of classifiers: as scikit-learn computes them, and by hand."""

import numpy as np
import pytest

from monoblock.metrics import classification

NUM_CLASSES = 5


@pytest.fixture
def random_predictions():
    rng = np.random.default_rng(7)
    labels = rng.integers(NUM_CLASSES - 1, size=211)  # the last class occurs only among the predictions
    probabilities = rng.dirichlet(np.ones(NUM_CLASSES), size=211)
    probabilities[np.arange(211), labels] += 0.4
    return probabilities / probabilities.sum(-1, keepdims=True), labels


def test_metrics_equal_those_of_scikit_learn(random_predictions):
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    probabilities, labels = random_predictions
    predictions = probabilities.argmax(-1)
    counts = classification.confusion_matrix(predictions.tolist(), labels.tolist(), NUM_CLASSES)
    assert (counts == sklearn_metrics.confusion_matrix(labels, predictions, labels=range(NUM_CLASSES))).all()
    assert classification.accuracy(counts) == pytest.approx(sklearn_metrics.accuracy_score(labels, predictions))
    assert classification.macro_f1(counts) == pytest.approx(
        100 * sklearn_metrics.f1_score(labels, predictions, average="macro", zero_division=0)
    )
    expected = sklearn_metrics.precision_recall_fscore_support(
        labels, predictions, labels=range(NUM_CLASSES), zero_division=0
    )
    for index, score in enumerate(classification.class_scores(counts)):
        assert score[:3] == pytest.approx([100 * expected[n][index] for n in range(3)])
        assert score.support == expected[3][index]
    assert classification.negative_log_likelihood(probabilities, labels).mean() == pytest.approx(
        sklearn_metrics.log_loss(labels, probabilities, labels=range(NUM_CLASSES))
    )


def test_the_calibration_error_by_hand():
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.4, 0.6]])
    # Two predictions at 0.9, one of them correct: |0.5 - 0.9|; two at 0.6, both correct: |1 - 0.6|.
    assert classification.calibration_error(probabilities, [0, 1, 0, 1], bins=10) == pytest.approx(
        100 * (2 * 0.4 + 2 * 0.4) / 4
    )
    certain = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert classification.calibration_error(certain, [0, 1]) == 0
    assert classification.calibration_error(certain, [1, 0]) == pytest.approx(100)


def test_a_calibrated_model_has_almost_no_calibration_error():
    rng = np.random.default_rng(2)
    probabilities = rng.dirichlet(np.ones(3), size=60_000)
    labels = (rng.random(60_000)[:, None] > probabilities.cumsum(-1)[:, :-1]).sum(-1)
    assert classification.calibration_error(probabilities, labels) < 1


def test_errors_are_listed_most_confident_first():
    probabilities = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.99, 0.01]])
    assert classification.most_confident_errors(probabilities, [1, 0, 0, 1], 5) == [3, 0, 1]
    assert classification.most_confident_errors(probabilities, [1, 0, 0, 1], 1) == [3]
