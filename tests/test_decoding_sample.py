"""Sampling: the model's own distribution, with and without proposals; the same seed, the same text."""

import itertools

import pytest
import torch
from support import build

import monoblock as mb
from monoblock.decoding.engine import Engine
from monoblock.decoding.logits import top_k
from monoblock.decoding.sample import Noise, choose
from monoblock.decoding.settings import Settings
from monoblock.decoding.speculative import Draft, LookUp

VOCAB, SEEDS, PROMPT = 5, 3000, [1, 2, 1]
DEGREE, BEST = 1.7, 4


def small(seed=0):
    return build(mb.gpt(vocab=VOCAB, width=12, depth=1, heads=2, context=13), seed=seed)


def drawn(proposer=None, **asked):
    """Three tokens for each of many seeds."""
    engine = Engine(small(), rows=500, proposer=proposer)
    for seed in range(SEEDS):
        engine.add(PROMPT, Settings(max_new_tokens=3, seed=seed, **asked))
    found = {}
    while engine.busy:
        for event in engine.step():
            found.setdefault(event.id, []).extend(event.tokens)
    return [tuple(found[number]) for number in sorted(found)]


@torch.no_grad()
def expected():
    """The probability of every text of three tokens, by whole passes: a temperature, then the best few."""
    texts = list(itertools.product(range(VOCAB), repeat=3))
    logits = small()(torch.tensor([PROMPT + list(text) for text in texts]))[:, len(PROMPT) - 1 : -1].double()
    shares = top_k((logits / DEGREE).flatten(0, 1), BEST).view_as(logits).softmax(-1)
    each = shares.gather(-1, torch.tensor(texts)[..., None])[..., 0].prod(-1)
    return dict(zip(texts, each.tolist(), strict=True))


def chi_square(counts, shares):
    """Pearson's statistic over its degrees of freedom's mean and spread; cells of few are taken together."""
    big = {text: p for text, p in shares.items() if p * SEEDS >= 5}
    seen = [counts.get(text, 0) for text in big] + [SEEDS - sum(counts.get(text, 0) for text in big)]
    meant = [p * SEEDS for p in big.values()] + [SEEDS * (1 - sum(big.values()))]
    cells = [(o, e) for o, e in zip(seen, meant, strict=True) if e > 1e-6]
    freedom = len(cells) - 1
    return (sum((o - e) ** 2 / e for o, e in cells) - freedom) / (2 * freedom) ** 0.5


PROPOSERS = {
    "alone": lambda: None,
    "a draft of its own": lambda: Draft(small(0), 2),
    "another draft": lambda: Draft(small(3), 2),
    "looking up": lambda: LookUp(2),
}


@pytest.fixture(scope="module")
def plain():
    return drawn(temperature=DEGREE, top_k=BEST)


@pytest.mark.parametrize("way", PROPOSERS)
def test_the_distribution_is_the_models(way, plain):
    texts = plain if way == "alone" else drawn(PROPOSERS[way](), temperature=DEGREE, top_k=BEST)
    shares = expected()
    assert all(shares[text] > 0 for text in texts), "a token was drawn that was ruled out"
    counts = {text: texts.count(text) for text in set(texts)}
    assert abs(chi_square(counts, shares)) < 4
    assert texts == plain, "the same seeds, the same texts"


def test_the_statistic_tells_another_distribution_apart(plain):
    """Else the test above would pass whatever is drawn."""
    shares = expected()
    texts = sorted(shares, key=shares.__getitem__)
    swapped = dict(zip(texts, [shares[text] for text in reversed(texts)], strict=True))
    counts = {text: plain.count(text) for text in set(plain)}
    assert chi_square(counts, swapped) > 40


def test_a_draft_agrees_as_often_as_its_distribution_does():
    """With the model itself as draft every proposal is kept: two and one tokens a pass, not one."""
    engine = Engine(small(), proposer=Draft(small(), 4))
    engine.add(PROMPT, Settings(max_new_tokens=9, temperature=1.0, seed=5))
    passes = [len(engine.step()) for _ in range(3)]
    assert passes == [1, 5, 3]
    assert not engine.busy


def test_a_uniform_number_becomes_the_token_where_the_sum_of_shares_passes_it():
    logits = torch.tensor([[0.1, 0.2, 0.0, 0.7]]).log()
    cases = {0.0: 0, 0.0999: 0, 0.1001: 1, 0.2999: 1, 0.3001: 3, 0.9999999: 3}
    for chance, token in cases.items():
        assert choose(logits, torch.tensor([chance], dtype=torch.double)).tolist() == [token]


def test_a_token_that_is_ruled_out_is_not_drawn_even_by_a_chance_of_nothing():
    logits = torch.tensor([[-torch.inf, -torch.inf, 0.3, -torch.inf, 0.7, -torch.inf]])
    drawn = [choose(logits, torch.tensor([chance], dtype=torch.double)).item() for chance in (0.0, 0.999999999999)]
    assert drawn == [2, 4]


def test_noise_depends_on_seed_number_and_step_alone():
    one, again, other, second = Noise(7), Noise(7), Noise(8), Noise(7, 1)
    assert one[100] == again[100]
    assert [one[step] for step in range(100)] == [again[step] for step in range(100)]
    assert len({one[3], other[3], second[3], one[4]}) == 4


def test_several_texts_of_one_prompt_differ_and_do_not_depend_on_how_many_there_are():
    model, ids = small(), torch.tensor([PROMPT])
    asked = {"max_new_tokens": 8, "temperature": 1.5, "seed": 11}
    five = model.generate(ids, num_return_sequences=5, **asked)
    two = model.generate(ids, num_return_sequences=2, **asked)
    assert five.shape == (5, len(PROMPT) + 8)
    assert torch.equal(five[:2], two)
    assert len({tuple(row) for row in five.tolist()}) > 1


def test_without_a_seed_torch_decides():
    model, ids = small(), torch.tensor([PROMPT])
    said = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        said.append(model.generate(ids, max_new_tokens=10, temperature=2.0).tolist())
    assert said[0] == said[1] != said[2]
