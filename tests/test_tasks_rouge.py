"""ROUGE: the figures of the `rouge-score` package, on random texts and on what is odd about texts."""

import random

import pytest

from monoblock.errors import InputError
from monoblock.tasks.rouge import rouge

KINDS = ["rouge1", "rouge2", "rougeL"]
ODD = [
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


def reference(text, golds):
    """The package, without its stemmer: for each figure the F1 of the nearest reference."""
    rouge_score = pytest.importorskip("rouge_score.rouge_scorer")
    scorer = rouge_score.RougeScorer(KINDS, use_stemmer=False)
    found = [scorer.score(gold, text) for gold in golds]
    return {kind: 100 * max(one[kind].fmeasure for one in found) for kind in KINDS}


@pytest.mark.parametrize(("text", "gold"), ODD)
def test_odd_texts_score_as_the_package_says(text, gold):
    assert rouge([text], [[gold]]) == pytest.approx(reference(text, [gold]))


def test_random_summaries_score_as_the_package_says_and_the_mean_is_over_texts():
    draw = random.Random(3)
    vocabulary = ["the", "king", "of", "Moab,", "slew", "them", "and", "went", "up.", "Said:", "7", "thou'st"]
    texts = [" ".join(draw.choices(vocabulary, k=draw.randint(1, 31))) for _ in range(97)]
    golds = [[" ".join(draw.choices(vocabulary, k=draw.randint(1, 23))) for _ in range(1 + n % 3)] for n in range(97)]
    wanted = [reference(text, some) for text, some in zip(texts, golds, strict=True)]
    for kind, value in rouge(texts, golds).items():
        assert value == pytest.approx(sum(one[kind] for one in wanted) / 97)


def test_worked_by_hand():
    found = rouge(["police kill the gunman"], [["police killed the gunman"]])
    assert found["rouge1"] == pytest.approx(75)  # three of four words, both ways
    assert found["rouge2"] == pytest.approx(100 / 3)  # "the gunman" of three pairs
    assert found["rougeL"] == pytest.approx(75)  # police … the gunman


@pytest.mark.parametrize(("texts", "golds"), [([], []), (["a"], []), (["a"], [[]])])
def test_nothing_to_compare_with_is_refused(texts, golds):
    with pytest.raises(InputError, match="rows of references; give one or more a text"):
        rouge(texts, golds)
