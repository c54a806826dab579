"""Search: greedy is not optimal, beams are better, and beams wide enough are exhaustive search."""

import itertools
import math

import pytest
import torch
from support import build

import monoblock as mb
from monoblock.decoding.beam import Beams, advance
from monoblock.decoding.engine import Engine
from monoblock.decoding.settings import Settings

VOCAB, LENGTH, END = 5, 4, 3


# -- a table of probabilities in the place of a model -----------------------------------------------------------------


def searched(table, settings):
    """The best texts by a beam search in which table(text) gives the probabilities of the next word."""
    beams = Beams(settings)
    text = [()] * settings.num_beams
    while not beams.done:
        shares = torch.tensor([table(said) for said in text], dtype=torch.double).log()
        origins = advance([beams], shares)
        text = [(*text[origin], token) for origin, token in zip(origins, beams.tokens, strict=True)]
        assert text == [beams.running_tokens(row) for row in range(settings.num_beams)]
    return beams.best()


# The lecture's two steps: its third and fourth words go by one name.
FIRST = [0.5, 0.4, 0.0, 0.0, 0.0, 0.0]
SECOND = {0: [0.1, 0.2, 0.3, 0.1, 0.1, 0.2], 1: [0.1, 0.4, 0.2, 0.1, 0.0, 0.0]}


def slides(said):
    return FIRST if not said else SECOND.get(said[0], [1 / 6] * 6)


@pytest.mark.parametrize(("beams", "words", "probability"), [(1, (0, 2), 0.15), (2, (1, 1), 0.16), (3, (1, 1), 0.16)])
def test_greedy_misses_what_two_beams_find(beams, words, probability):
    """Greedy reaches 0.15, the best is 0.16 by the printed table."""
    best, *_ = searched(slides, Settings(max_new_tokens=2, num_beams=beams, length_penalty=0.0))
    assert best.tokens == words
    assert math.exp(best.score) == pytest.approx(probability)


def test_the_beam_finds_the_best_of_all_two_word_sentences_of_the_slides():
    every = {(a, b): FIRST[a] * SECOND[a][b] for a in SECOND for b in range(6)}
    best, *_ = searched(slides, Settings(max_new_tokens=2, num_beams=2, length_penalty=0.0))
    assert best.tokens == max(every, key=every.__getitem__)


# -- a model whose texts can all be counted ---------------------------------------------------------------------------


def small(seed):
    return build(mb.gpt(vocab=VOCAB, width=12, depth=2, heads=3, context=13), seed=seed)


def texts(end):
    """Every text of at most LENGTH tokens that stops at an end token or at the last place."""
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        stop = next((place for place, token in enumerate(text) if token in end), LENGTH - 1)
        if set(text[stop + 1 :]) <= {0}:  # one spelling for what comes after the end
            yield text[: stop + 1]


@torch.no_grad()
def exhaustive(model, prompt, end, penalty):
    """Score of every text, best first, computed by whole passes."""
    found = {}
    for size, group in itertools.groupby(sorted(texts(end), key=len), key=len):
        rows = list(group)
        ids = torch.tensor([[*prompt, *row] for row in rows])
        shares = model(ids).log_softmax(-1)[:, len(prompt) - 1 : -1]
        said = shares.gather(-1, ids[:, len(prompt) :, None]).sum((1, 2)) / size**penalty
        found |= dict(zip(rows, said.tolist(), strict=True))
    return sorted(found.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("end", [(), (END,), (END, 1)], ids=["no end", "one end", "two ends"])
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_beams_as_many_as_there_are_beginnings_find_the_optimum_and_the_next_best(seed, penalty, end):
    model, prompt = small(seed), [4, 2]
    wide = VOCAB ** (LENGTH - 1)
    engine = Engine(model, rows=wide)
    asked = Settings(
        max_new_tokens=LENGTH,
        num_beams=wide,
        num_return_sequences=3,
        length_penalty=penalty,
        early_stopping="never",
        eos_token_id=end,
    )
    engine.add(prompt, asked)
    found = [event for _ in range(LENGTH) for event in engine.step()]
    wanted = exhaustive(model, prompt, end, penalty)[:3]
    assert [event.tokens for event in found] == [text for text, _ in wanted]
    assert [event.score for event in found] == pytest.approx([score for _, score in wanted], abs=1e-5)


def test_greedy_is_not_optimal_in_a_model_either():
    missed = 0
    for seed in range(9):
        model = small(seed)
        with torch.no_grad():
            model.input.token.weight.mul_(0.4)  # a model that is less sure has more to miss
        ranked = dict(exhaustive(model, [4, 2], (), 0.0))
        greedy = tuple(model.generate(torch.tensor([[4, 2]]), max_new_tokens=LENGTH)[0, 2:].tolist())
        beam = tuple(model.generate(torch.tensor([[4, 2]]), max_new_tokens=LENGTH, num_beams=9)[0, 2:].tolist())
        assert ranked[greedy] <= ranked[beam]
        missed += ranked[greedy] < ranked[beam]
    assert missed


# -- groups -----------------------------------------------------------------------------------------------------------


def test_groups_of_beams_pay_for_what_earlier_ones_chose():
    """Vijayakumar et al. 2018 by hand: one beam a group, one step."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.05]).log()
    table = {penalty: [] for penalty in (0.0, 0.3, 9.0)}
    for penalty, found in table.items():
        settings = Settings(
            max_new_tokens=1, num_beams=3, num_beam_groups=3, diversity_penalty=penalty, num_return_sequences=3
        )
        beams = Beams(settings)
        advance([beams], logits.expand(3, -1))
        found += [group.ended[0].tokens[0] for group in beams.groups]
    # 0.4 · e⁻⁰·³ = 0.296 < 0.3, then 0.3 · e⁻⁰·³ = 0.222 and 0.296 again
    assert table == {0.0: [0, 0, 0], 0.3: [0, 1, 0], 9.0: [0, 1, 2]}


def test_diverse_beams_differ_more():
    model, ids = small(1), torch.tensor([[4, 2]])
    asked = {"max_new_tokens": 6, "num_beams": 4, "num_return_sequences": 4}
    plain = model.generate(ids, **asked, num_beam_groups=4, diversity_penalty=0.0)
    diverse = model.generate(ids, **asked, num_beam_groups=4, diversity_penalty=1e3)
    assert len({tuple(row) for row in plain.tolist()}) == 1, "groups that pay nothing all say the same"
    assert len({tuple(row) for row in diverse.tolist()}) == 4
