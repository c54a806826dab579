"""ROUGE against the `rouge-score` package, on random and on unusual texts."""

import random

import pytest

from monoblock.errors import InputError
from monoblock.metrics.text import rouge

METRICS = ["rouge1", "rouge2", "rougeL"]
UNUSUAL_TEXTS = [
    ("The cat sat.", "the CAT, sat!"),
    ("don't stop", "do not stop"),
    ("", "a reference"),
    ("a text", "..."),
    ("one", "one"),
    ("naïve café 42", "naive cafe 42"),
    ("a a a a b", "a a b b"),
    ("x_y z-w", "x y z w"),
    ("and he said\nand he went", "and he went and he said"),
]


def reference_rouge(text, golds):
    """Score with the package, without stemming: for each metric the F1 of the best reference."""
    rouge_score = pytest.importorskip("rouge_score.rouge_scorer")
    scorer = rouge_score.RougeScorer(METRICS, use_stemmer=False)
    scores = [scorer.score(gold, text) for gold in golds]
    return {metric: 100 * max(score[metric].fmeasure for score in scores) for metric in METRICS}


@pytest.mark.parametrize(("text", "gold"), UNUSUAL_TEXTS)
def test_unusual_texts_score_as_in_the_package(text, gold):
    assert rouge([text], [[gold]]) == pytest.approx(reference_rouge(text, [gold]))


def test_random_texts_score_as_in_the_package_and_are_averaged():
    rng = random.Random(3)
    vocabulary = ["the", "king", "of", "Moab,", "slew", "them", "and", "went", "up.", "Said:", "7", "thou'st"]
    texts = [" ".join(rng.choices(vocabulary, k=rng.randint(1, 31))) for _ in range(97)]
    golds = [[" ".join(rng.choices(vocabulary, k=rng.randint(1, 23))) for _ in range(1 + n % 3)] for n in range(97)]
    expected = [reference_rouge(text, references) for text, references in zip(texts, golds, strict=True)]
    for metric, value in rouge(texts, golds).items():
        assert value == pytest.approx(sum(scores[metric] for scores in expected) / 97)


def test_scores_computed_by_hand():
    scores = rouge(["police kill the gunman"], [["police killed the gunman"]])
    assert scores["rouge1"] == pytest.approx(75)  # three of four words, both ways
    assert scores["rouge2"] == pytest.approx(100 / 3)  # "the gunman" of three pairs
    assert scores["rougeL"] == pytest.approx(75)  # police … the gunman


@pytest.mark.parametrize(("texts", "golds"), [([], []), (["a"], []), (["a"], [[]])])
def test_missing_references_are_refused(texts, golds):
    with pytest.raises(InputError, match="lists of references; give at least one text, and for each text a list"):
        rouge(texts, golds)
