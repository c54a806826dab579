"""The examples of the slides: byte-pair encoding step by step, and greedy decoding against beam search."""

import pytest
import torch

from monoblock.classic.translation import byte_pair_merges, next_token_model, pair_counts
from monoblock.errors import InputError

WORDS = ["BADD", "FAD", "FEEDE", "ADDEEF"]

# The tables of "Greedy Search is not optimal": of the first word, and of the second after word 1 and after word 2.
SLIDE = [
    [0.5, 0.4, 0.0, 0.0, 0.0, 0.0],
    [0.1, 0.2, 0.3, 0.1, 0.1, 0.2],
    [0.1, 0.4, 0.2, 0.1, 0.0, 0.0],
]
START, REST = 0, 7  # the words are 1 to 6


@pytest.fixture(scope="module")
def model():
    return next_token_model(SLIDE)


def test_the_three_merges_of_the_slides_and_the_words_after_each():
    steps = byte_pair_merges(WORDS, 3)
    assert ["".join(step.pair) for step in steps] == ["AD", "EE", "ADD"]
    assert [step.frequency for step in steps] == [3, 2, 2]
    assert [" ".join("·".join(word) for word in step.words) for step in steps] == [
        "B·AD·D F·AD F·E·E·D·E AD·D·E·E·F",
        "B·AD·D F·AD F·EE·D·E AD·D·EE·F",
        "B·ADD F·AD F·EE·D·E ADD·EE·F",
    ]


def test_the_second_merge_is_one_of_three_equally_frequent_pairs():
    counts = pair_counts(byte_pair_merges(WORDS, 1)[0].words)
    assert {pair for pair, count in counts.items() if count == max(counts.values())} == {
        ("AD", "D"),
        ("D", "E"),
        ("E", "E"),
    }


def test_merging_ends_when_every_word_is_one_symbol():
    assert byte_pair_merges(["AAB", "A"], 9)[-1].words == [("AAB",), ("A",)]
    assert byte_pair_merges(["AAAA"], 1)[0].words == [("AA", "AA")]
    assert byte_pair_merges(["A"], 5) == []


def test_without_ties_the_tokenizers_library_learns_the_same_merges():
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = ["ABX"] * 5 + ["ABY"] * 3 + ["XYX"] * 2
    steps = byte_pair_merges(words, 2)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    letters = len(set("".join(words)))
    trainer = trainers.BpeTrainer(vocab_size=letters + 2, show_progress=False)
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    merged = sorted(token for token in tokenizer.get_vocab() if len(token) > 1)
    assert merged == sorted("".join(step.pair) for step in steps)


def test_the_model_has_the_probabilities_of_the_slide_and_leaves_the_rest_to_another_word(model):
    probabilities = model(torch.tensor([[START, 1, 2, 3, REST]])).softmax(-1)[0]
    expected = torch.tensor([[0.0, *row, 1 - sum(row)] for row in SLIDE])
    torch.testing.assert_close(probabilities[:3], expected, atol=1e-5, rtol=0)
    only_others = torch.tensor([0.0] * REST + [1.0]).expand(2, -1)  # word 3 has no row, and the rest never has one
    torch.testing.assert_close(probabilities[3:], only_others, atol=1e-5, rtol=0)


def test_the_first_table_is_a_distribution_and_greedy_decoding_takes_its_second_word():
    table = [0.03, 0.7, 0.05, 0.1, 0.08, 0.04]
    assert sum(table) == pytest.approx(1)
    assert next_token_model([table]).generate(torch.tensor([[START]]), max_new_tokens=1).tolist() == [[START, 2]]


def test_greedy_decoding_finds_015_and_beam_search_016(model):
    """The slides say 0.18 for the best sequence; their table gives 0.4 · 0.4."""
    start = torch.tensor([[START]])
    greedy, greedy_scores = model.generate(start, max_new_tokens=2, return_scores=True)
    beam, beam_scores = model.generate(start, max_new_tokens=2, num_beams=2, return_scores=True)
    assert (greedy.tolist(), beam.tolist()) == ([[START, 1, 3]], [[START, 2, 2]])
    assert float(greedy_scores.sum().exp()) == pytest.approx(0.15, abs=1e-5)
    assert float(beam_scores.sum().exp()) == pytest.approx(0.16, abs=1e-5)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0.5, 0.6], [0.5, 0.5]], r"row 0 of the table, \[0.5, 0.6\], holds no probabilities"),
        ([[0.5, 0.5], [-0.1, 0.5]], r"row 1 of the table, \[-0.1, 0.5\]"),
        ([[0.5, float("nan")]], r"row 0 of the table, \[0.5, nan\]"),
        ([[0.5, 0.5], [0.5]], "2 rows of 1, 2 probabilities; write rows of one length"),
        ([[0.5, 0.5]] * 4, "4 rows of 2 probabilities"),
        ([], "0 rows of no probabilities"),
        ([[]], "1 rows of 0 probabilities"),
    ],
)
def test_a_table_that_holds_no_probabilities_is_refused(table, message):
    with pytest.raises(InputError, match=message):
        next_token_model(table)
