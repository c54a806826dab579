"""Figures of classes: as scikit-learn has them, and by hand."""

import numpy as np
import pytest

from monoblock.tasks import classes

CLASSES = 5


@pytest.fixture
def drawn():
    draw = np.random.default_rng(7)
    there = draw.integers(CLASSES - 1, size=211)  # the last class occurs among the answers only
    shares = draw.dirichlet(np.ones(CLASSES), size=211)
    shares[np.arange(211), there] += 0.4
    return shares / shares.sum(-1, keepdims=True), there


def test_matrix_and_f1_are_those_of_scikit_learn(drawn):
    metrics = pytest.importorskip("sklearn.metrics")
    shares, there = drawn
    found = shares.argmax(-1)
    counts = classes.confusion(found.tolist(), there.tolist(), CLASSES)
    assert (counts == metrics.confusion_matrix(there, found, labels=range(CLASSES))).all()
    assert classes.accuracy(counts) == pytest.approx(100 * metrics.accuracy_score(there, found))
    assert classes.macro_f1(counts) == pytest.approx(
        100 * metrics.f1_score(there, found, average="macro", zero_division=0)
    )
    wanted = metrics.precision_recall_fscore_support(there, found, labels=range(CLASSES), zero_division=0)
    for place, row in enumerate(classes.scores(counts)):
        assert row[:3] == pytest.approx([100 * wanted[n][place] for n in range(3)])
        assert row.there == wanted[3][place]
    assert classes.surprise(shares, there).mean() == pytest.approx(
        metrics.log_loss(there, shares, labels=range(CLASSES))
    )


def test_the_calibration_error_by_hand():
    shares = np.array([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.4, 0.6]])
    # Two answers of 0.9, one of them right: |0.5 - 0.9|; two of 0.6, both right: |1 - 0.6|.
    assert classes.calibration_error(shares, [0, 1, 0, 1], bins=10) == pytest.approx(100 * (2 * 0.4 + 2 * 0.4) / 4)
    certain = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert classes.calibration_error(certain, [0, 1]) == 0
    assert classes.calibration_error(certain, [1, 0]) == pytest.approx(100)


def test_a_calibrated_model_has_almost_no_error():
    draw = np.random.default_rng(2)
    shares = draw.dirichlet(np.ones(3), size=60_000)
    there = (draw.random(60_000)[:, None] > shares.cumsum(-1)[:, :-1]).sum(-1)
    assert classes.calibration_error(shares, there) < 1


def test_the_worst_mistakes_are_the_surest_first():
    shares = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.99, 0.01]])
    assert classes.worst(shares, [1, 0, 0, 1], 5) == [3, 0, 1]
    assert classes.worst(shares, [1, 0, 0, 1], 1) == [3]
