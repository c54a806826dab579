"""Beam search: greedy is not optimal, more beams are better, and enough beams are an exhaustive search."""

import itertools
import math

import pytest
import torch
from support import build_model

import monoblock as mb
from monoblock.inference.beam import BeamSearch, advance_from_log_probs, beam_scores
from monoblock.inference.engine import Engine
from monoblock.inference.settings import Settings

VOCAB, LENGTH, END = 5, 4, 3


# -- a table of probabilities instead of a model ----------------------------------------------------------------------


def search_table(next_probs, settings):
    """The best hypotheses of a beam search; next_probs(tokens) gives the probabilities of the next token."""
    search = BeamSearch(settings)
    rows = [()] * settings.num_beams
    while not search.is_done:
        log_probs = torch.tensor([next_probs(tokens) for tokens in rows], dtype=torch.double).log()
        origins = advance_from_log_probs([search], log_probs)
        rows = [(*rows[origin], token) for origin, token in zip(origins, search.last_tokens, strict=True)]
        assert rows == [search.running_tokens(row) for row in range(settings.num_beams)]
    return search.best_hypotheses()


# The two steps of the lecture's example; its third and fourth words have the same name.
FIRST = [0.5, 0.4, 0.0, 0.0, 0.0, 0.0]
SECOND = {0: [0.1, 0.2, 0.3, 0.1, 0.1, 0.2], 1: [0.1, 0.4, 0.2, 0.1, 0.0, 0.0]}


def lecture_probs(tokens):
    return FIRST if not tokens else SECOND.get(tokens[0], [1 / 6] * 6)


@pytest.mark.parametrize(("beams", "words", "probability"), [(1, (0, 2), 0.15), (2, (1, 1), 0.16), (3, (1, 1), 0.16)])
def test_greedy_misses_what_two_beams_find(beams, words, probability):
    """By the printed table greedy reaches 0.15, and the best is 0.16."""
    best, *_ = search_table(lecture_probs, Settings(max_new_tokens=2, num_beams=beams, length_penalty=0.0))
    assert best.tokens == words
    assert math.exp(best.score) == pytest.approx(probability)


def test_two_beams_find_the_best_of_all_two_word_sentences_of_the_lecture():
    probabilities = {(a, b): FIRST[a] * SECOND[a][b] for a in SECOND for b in range(6)}
    best, *_ = search_table(lecture_probs, Settings(max_new_tokens=2, num_beams=2, length_penalty=0.0))
    assert best.tokens == max(probabilities, key=probabilities.__getitem__)


# -- a model whose texts can all be enumerated ------------------------------------------------------------------------


def small_model(seed):
    return build_model(mb.gpt(vocab=VOCAB, width=12, depth=2, heads=3, context=13), seed=seed)


def all_texts(eos_tokens):
    """Every text of at most LENGTH tokens that stops at an end token or at the last position."""
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        stop = next((index for index, token in enumerate(text) if token in eos_tokens), LENGTH - 1)
        if set(text[stop + 1 :]) <= {0}:  # count texts that differ only after their end once
            yield text[: stop + 1]


@torch.no_grad()
def exhaustive_search(model, prompt, eos_tokens, penalty, form="length"):
    """The score of every text, best first, computed by full passes."""
    scores = {}
    for length, group in itertools.groupby(sorted(all_texts(eos_tokens), key=len), key=len):
        texts = list(group)
        ids = torch.tensor([[*prompt, *text] for text in texts])
        log_probs = model(ids).log_softmax(-1)[:, len(prompt) - 1 : -1]
        divisor = length**penalty if form == "length" else (5 + length) ** penalty / (5 + 1) ** penalty  # Wu et al., 7
        sums = log_probs.gather(-1, ids[:, len(prompt) :, None]).sum((1, 2)) / divisor
        scores |= dict(zip(texts, sums.tolist(), strict=True))
    return sorted(scores.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("eos_tokens", [(), (END,), (END, 1)], ids=["no end", "one end", "two ends"])
@pytest.mark.parametrize(
    ("penalty", "form"), [(0.0, "length"), (0.6, "length"), (1.0, "length"), (2.0, "length"), (0.6, "gnmt")]
)
@pytest.mark.parametrize("seed", range(3))
def test_as_many_beams_as_prefixes_find_the_three_best_texts(seed, penalty, form, eos_tokens):
    model, prompt = small_model(seed), [4, 2]
    num_beams = VOCAB ** (LENGTH - 1)
    engine = Engine(model, max_rows=num_beams)
    settings = Settings(
        max_new_tokens=LENGTH,
        num_beams=num_beams,
        num_return_sequences=3,
        length_penalty=penalty,
        length_penalty_form=form,
        early_stopping="never",
        eos_token_id=eos_tokens,
    )
    engine.add(prompt, settings)
    outputs = [output for _ in range(LENGTH) for output in engine.step()]
    expected = exhaustive_search(model, prompt, eos_tokens, penalty, form)[:3]
    assert [output.tokens for output in outputs] == [text for text, _ in expected]
    assert [output.score for output in outputs] == pytest.approx([score for _, score in expected], abs=1e-5)


def test_greedy_is_not_optimal_in_a_model_either():
    missed = 0
    for seed in range(9):
        model = small_model(seed)
        with torch.no_grad():
            model.input.token.weight.mul_(0.4)  # flatter distributions, in which greedy misses more
        scores = dict(exhaustive_search(model, [4, 2], (), 0.0))
        greedy = tuple(model.generate(torch.tensor([[4, 2]]), max_new_tokens=LENGTH)[0, 2:].tolist())
        beam = tuple(model.generate(torch.tensor([[4, 2]]), max_new_tokens=LENGTH, num_beams=9)[0, 2:].tolist())
        assert scores[greedy] <= scores[beam]
        missed += scores[greedy] < scores[beam]
    assert missed


# -- groups -----------------------------------------------------------------------------------------------------------


def test_groups_of_beams_are_penalized_for_tokens_of_earlier_groups():
    """Vijayakumar et al. 2018 by hand: one beam a group, one step."""
    log_probs = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.05]).log()
    chosen = {}
    for penalty in (0.0, 0.3, 9.0):
        settings = Settings(
            max_new_tokens=1, num_beams=3, num_beam_groups=3, diversity_penalty=penalty, num_return_sequences=3
        )
        search = BeamSearch(settings)
        advance_from_log_probs([search], log_probs.expand(3, -1))
        chosen[penalty] = [group.finished[0].tokens[0] for group in search.groups]
    # 0.4 · e⁻⁰·³ = 0.296 < 0.3, then 0.3 · e⁻⁰·³ = 0.222 and 0.296 again
    assert chosen == {0.0: [0, 0, 0], 0.3: [0, 1, 0], 9.0: [0, 1, 2]}


def test_a_diversity_penalty_makes_groups_differ():
    model, ids = small_model(1), torch.tensor([[4, 2]])
    options = {"max_new_tokens": 6, "num_beams": 4, "num_return_sequences": 4}
    plain = model.generate(ids, **options, num_beam_groups=4, diversity_penalty=0.0)
    diverse = model.generate(ids, **options, num_beam_groups=4, diversity_penalty=1e3)
    assert len({tuple(row) for row in plain.tolist()}) == 1, "without a penalty all groups find the same text"
    assert len({tuple(row) for row in diverse.tolist()}) == 4


def test_scores_are_float32_whatever_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        scores = beam_scores([BeamSearch(Settings(num_beams=3))], torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert scores.dtype == torch.float32  # the C++ kernel takes no other
    assert scores.shape == (3,)
