"""Scores against the libraries that define them, and against figures worked out by hand."""

import math

import pytest

from monoblock.errors import InputError
from monoblock.tasks import scores
from monoblock.tasks.evaluation import whole
from monoblock.tasks.measured import Asked
from monoblock.tasks.sections import DataPart, TaskPart

TEXTS = ["The cat sat on the mat.", "A dog!", "it's a Test of two -- three"]
ACCEPTED = [["The cat sat on a mat.", "the cat is on the mat."], ["A dog!"], ["It's a test of two or three"]]


def test_bleu_is_sacrebleus_with_one_or_several_references():
    sacrebleu = pytest.importorskip("sacrebleu")
    once = [row[:1] for row in ACCEPTED]
    for lowercase in (False, True):
        wanted = sacrebleu.corpus_bleu(TEXTS, [[row[0] for row in ACCEPTED]], lowercase=lowercase).score
        assert scores.bleu(TEXTS, once, lowercase=lowercase).value == pytest.approx(wanted, abs=1e-9)
    several = [[row[0] for row in ACCEPTED], [ACCEPTED[0][1], None, None]]
    assert scores.bleu(TEXTS, ACCEPTED).value == pytest.approx(sacrebleu.corpus_bleu(TEXTS, several).score, abs=1e-9)
    assert scores.chrf(TEXTS, once).value == pytest.approx(sacrebleu.corpus_chrf(TEXTS, several[:1]).score, abs=1e-9)


def test_bleu_by_hand():
    """5 words, one of them wrong at the end: precisions 4/5, 3/4, 2/3, 1/2, and no brevity penalty."""
    pytest.importorskip("sacrebleu")
    score = scores.bleu(["a b c d e"], [["a b c d f"]])
    assert score.value == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    short = scores.bleu(["a b c d"], [["a b c d e"]])
    assert short.value == pytest.approx(100 * math.exp(1 - 5 / 4))
    assert "tok:13a" in score.signature
    assert "case:mixed" in score.signature
    assert "case:lc" in scores.bleu(["A"], [["a"]], lowercase=True).signature


def test_tokenized_bleu_is_of_lower_case_moses_tokens():
    sacrebleu, sacremoses = pytest.importorskip("sacrebleu"), pytest.importorskip("sacremoses")
    moses = sacremoses.MosesTokenizer(lang="de")
    cut = lambda text: " ".join(moses.tokenize(text.lower(), escape=False))
    theirs, ours = ["Ein Hund, z.B. Rex, bellt!"], ["Ein Hund z.B. REX bellt!"]
    wanted = sacrebleu.corpus_bleu([cut(ours[0])], [[cut(theirs[0])]], tokenize="none", force=True).score
    assert scores.bleu_tokenized(ours, [theirs], "de").value == pytest.approx(wanted, abs=1e-9)
    assert cut("bellt!") == "bellt !"


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("flaw", "lawn", 2), ("same", "same", 0)],
)
def test_edits_by_hand(one, other, wanted):
    assert scores.edits(one, other) == scores.edits(other, one) == wanted


def test_character_errors_are_counted_against_the_nearest_reference():
    assert scores.cer(["abcd", "xy"], [["abcf"], ["zzzz", "xyz"]]) == pytest.approx(100 * (1 + 1) / (4 + 3))
    assert scores.cer(["abc"], [["abc", "abd"]]) == 0


def test_accuracy_counts_any_reference_among_the_first_k():
    found = [["a", "b", "c"], ["x", "y", "z"], ["q", "r", "s"]]
    accepted = [["a"], ["z", "y"], ["none"]]
    assert scores.accuracy(found, accepted) == pytest.approx(100 / 3)
    assert scores.accuracy(found, accepted, 2) == pytest.approx(200 / 3)
    assert scores.accuracy(found, accepted, 3) == pytest.approx(200 / 3)


def test_perplexity_and_bits_per_byte_of_an_even_guess():
    loss = math.log(50)
    assert scores.perplexity(loss) == pytest.approx(50)
    assert scores.perplexity(1e9) < math.inf
    assert scores.bits_per_byte(math.log(256), 10, 10) == pytest.approx(8)
    assert scores.bits_per_byte(math.log(2), 30, 10) == pytest.approx(3)


def test_what_cannot_be_scored_is_said():
    for texts, accepted in (([], []), (["a"], []), (["a"], [[]])):
        with pytest.raises(InputError, match="one or more"):
            scores.cer(texts, accepted)
    with pytest.raises(InputError, match="no bytes"):
        scores.bits_per_byte(1.0, 1, 0)


def test_all_of_a_file_is_measured_unless_the_model_was_trained_on_it(tmp_path, monkeypatch):
    for name in ("mine.tsv", "other.tsv", "task.tsv"):
        (tmp_path / name).write_text("a\tb\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.tsv").write_text("a\tb\n")
    monkeypatch.chdir(tmp_path)
    part = DataPart(corpus="mine.tsv", prefix="x:", tasks=(TaskPart(corpus="task.tsv", prefix="y:"),))
    splits = {
        "other.tsv": "all",
        "mine.tsv": None,
        "./folder/../mine.tsv": None,
        str(tmp_path / "mine.tsv"): None,
        "task.tsv": None,
        "folder": None,
        "reverse": None,
    }
    assert {data: whole(Asked(data=data), part).split for data in splits} == splits
    assert whole(Asked(data="other.tsv", split="valid"), part).split == "valid"
    assert whole(Asked(data="other.tsv", rescore=True), part).split is None
    assert whole(Asked(data="mine.tsv"), None).split == "all"
