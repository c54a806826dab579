"""Text metrics against the libraries that define them, and computed by hand."""

import math

import pytest

from monoblock.errors import InputError
from monoblock.metrics import text as text_metrics

HYPOTHESES = ["The cat sat on the mat.", "A dog!", "it's a Test of two -- three"]
REFERENCES = [["The cat sat on a mat.", "the cat is on the mat."], ["A dog!"], ["It's a test of two or three"]]


def test_bleu_and_chrf_equal_sacrebleu_with_one_or_more_references():
    sacrebleu = pytest.importorskip("sacrebleu")
    first_references = [row[:1] for row in REFERENCES]
    for lowercase in (False, True):
        expected = sacrebleu.corpus_bleu(HYPOTHESES, [[row[0] for row in REFERENCES]], lowercase=lowercase).score
        assert text_metrics.bleu(HYPOTHESES, first_references, lowercase=lowercase).value == pytest.approx(
            expected, abs=1e-9
        )
    streams = [[row[0] for row in REFERENCES], [REFERENCES[0][1], None, None]]
    assert text_metrics.bleu(HYPOTHESES, REFERENCES).value == pytest.approx(
        sacrebleu.corpus_bleu(HYPOTHESES, streams).score, abs=1e-9
    )
    assert text_metrics.chrf(HYPOTHESES, first_references).value == pytest.approx(
        sacrebleu.corpus_chrf(HYPOTHESES, streams[:1]).score, abs=1e-9
    )


def test_bleu_by_hand():
    """5 words, one of them wrong at the end: precisions 4/5, 3/4, 2/3, 1/2, and no brevity penalty."""
    pytest.importorskip("sacrebleu")
    score = text_metrics.bleu(["a b c d e"], [["a b c d f"]])
    assert score.value == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    short = text_metrics.bleu(["a b c d"], [["a b c d e"]])
    assert short.value == pytest.approx(100 * math.exp(1 - 5 / 4))
    assert "tok:13a" in score.signature
    assert "case:mixed" in score.signature
    assert "case:lc" in text_metrics.bleu(["A"], [["a"]], lowercase=True).signature


def test_tokenized_bleu_uses_lowercased_moses_tokens():
    sacrebleu, sacremoses = pytest.importorskip("sacrebleu"), pytest.importorskip("sacremoses")
    moses = sacremoses.MosesTokenizer(lang="de")
    tokenize = lambda text: " ".join(moses.tokenize(text.lower(), escape=False))
    reference, hypothesis = ["Ein Hund, z.B. Rex, bellt!"], ["Ein Hund z.B. REX bellt!"]
    expected = sacrebleu.corpus_bleu(
        [tokenize(hypothesis[0])], [[tokenize(reference[0])]], tokenize="none", force=True
    ).score
    assert text_metrics.bleu_tokenized(hypothesis, [reference], "de").value == pytest.approx(expected, abs=1e-9)
    assert tokenize("bellt!") == "bellt !"


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("flaw", "lawn", 2), ("same", "same", 0)],
)
def test_edit_distances_by_hand(a, b, expected):
    assert text_metrics.edit_distance(a, b) == text_metrics.edit_distance(b, a) == expected


def test_the_character_error_rate_uses_the_nearest_reference():
    assert text_metrics.cer(["abcd", "xy"], [["abcf"], ["zzzz", "xyz"]]) == pytest.approx(100 * (1 + 1) / (4 + 3))
    assert text_metrics.cer(["abc"], [["abc", "abd"]]) == 0


def test_accuracy_counts_any_reference_among_the_first_k():
    hypotheses = [["a", "b", "c"], ["x", "y", "z"], ["q", "r", "s"]]
    references = [["a"], ["z", "y"], ["none"]]
    assert text_metrics.accuracy(hypotheses, references) == pytest.approx(1 / 3)
    assert text_metrics.accuracy(hypotheses, references, 2) == pytest.approx(2 / 3)
    assert text_metrics.accuracy(hypotheses, references, 3) == pytest.approx(2 / 3)


def test_perplexity_and_bits_per_byte_of_a_uniform_distribution():
    loss = math.log(50)
    assert text_metrics.perplexity(loss) == pytest.approx(50)
    assert text_metrics.perplexity(1e9) < math.inf
    assert text_metrics.bits_per_byte(math.log(256), 10, 10) == pytest.approx(8)
    assert text_metrics.bits_per_byte(math.log(2), 30, 10) == pytest.approx(3)


def test_empty_inputs_are_refused():
    for texts, references in (([], []), (["a"], []), (["a"], [[]])):
        with pytest.raises(InputError, match="give at least one text, and for each text a list"):
            text_metrics.cer(texts, references)
    with pytest.raises(InputError, match="an empty text has no bits per byte"):
        text_metrics.bits_per_byte(1.0, 1, 0)
