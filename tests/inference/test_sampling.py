"""Sampling: the distribution of the model, with and without proposals; the same seed, the same text."""

import itertools

import pytest
import torch
from support import build_model

import monoblock as mb
from monoblock.errors import InputError
from monoblock.inference.engine import Engine
from monoblock.inference.sampler import sample_tokens, top_k
from monoblock.inference.scheduler import RandomStream
from monoblock.inference.settings import Settings
from monoblock.inference.speculative import DraftModel, PromptLookup

VOCAB, SEEDS, PROMPT = 5, 3000, [1, 2, 1]
TEMPERATURE, TOP_K = 1.7, 4


def small_model(seed=0):
    return build_model(mb.gpt(vocab=VOCAB, width=12, depth=1, heads=2, context=13), seed=seed)


def sample_texts(proposer=None):
    """Three tokens for each of many seeds."""
    engine = Engine(small_model(), max_rows=500, proposer=proposer)
    for seed in range(SEEDS):
        engine.add(PROMPT, Settings(max_new_tokens=3, seed=seed, temperature=TEMPERATURE, top_k=TOP_K))
    tokens = {}
    while engine.busy:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.tokens)
    return [tuple(tokens[request_id]) for request_id in sorted(tokens)]


@torch.no_grad()
def text_probabilities():
    """The probability of every text of three tokens, by full passes: temperature, then top-k."""
    texts = list(itertools.product(range(VOCAB), repeat=3))
    logits = small_model()(torch.tensor([PROMPT + list(text) for text in texts]))[:, len(PROMPT) - 1 : -1].double()
    probs = top_k((logits / TEMPERATURE).flatten(0, 1), TOP_K).view_as(logits).softmax(-1)
    products = probs.gather(-1, torch.tensor(texts)[..., None])[..., 0].prod(-1)
    return dict(zip(texts, products.tolist(), strict=True))


def chi_square(counts, probabilities):
    """Pearson's statistic, standardized by its mean and standard deviation; rare texts share one cell."""
    common = {text: p for text, p in probabilities.items() if p * SEEDS >= 5}
    observed = [counts.get(text, 0) for text in common] + [SEEDS - sum(counts.get(text, 0) for text in common)]
    expected = [p * SEEDS for p in common.values()] + [SEEDS * (1 - sum(common.values()))]
    cells = [(o, e) for o, e in zip(observed, expected, strict=True) if e > 1e-6]
    freedom = len(cells) - 1
    return (sum((o - e) ** 2 / e for o, e in cells) - freedom) / (2 * freedom) ** 0.5


PROPOSERS = {
    "none": lambda: None,
    "the model itself": lambda: DraftModel(small_model(0), 2),
    "another model": lambda: DraftModel(small_model(3), 2),
    "prompt lookup": lambda: PromptLookup(2),
}


@pytest.fixture(scope="module")
def samples():
    return sample_texts()


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_texts_follow_the_distribution_of_the_model(proposer, samples):
    texts = samples if proposer == "none" else sample_texts(PROPOSERS[proposer]())
    probabilities = text_probabilities()
    assert all(probabilities[text] > 0 for text in texts), "a token outside top-k was sampled"
    counts = {text: texts.count(text) for text in set(texts)}
    assert abs(chi_square(counts, probabilities)) < 4
    assert texts == samples, "the same seeds, the same texts"


def test_the_statistic_detects_another_distribution(samples):
    """Otherwise the test above would pass whatever is sampled."""
    probabilities = text_probabilities()
    texts = sorted(probabilities, key=probabilities.__getitem__)
    swapped = dict(zip(texts, [probabilities[text] for text in reversed(texts)], strict=True))
    counts = {text: samples.count(text) for text in set(samples)}
    assert chi_square(counts, swapped) > 40


def test_proposals_of_the_model_itself_are_all_accepted():
    """Sampled with the same uniform numbers: after the prompt a pass of five tokens and one of the last three."""
    engine = Engine(small_model(), proposer=DraftModel(small_model(), 4))
    engine.add(PROMPT, Settings(max_new_tokens=9, temperature=1.0, seed=5))
    gains = [sum(len(output.tokens) for output in engine.step()) for _ in range(3)]
    assert gains == [1, 5, 3]
    assert not engine.busy


def test_a_uniform_number_gives_the_token_at_which_the_cumulative_probability_exceeds_it():
    logits = torch.tensor([[0.1, 0.2, 0.0, 0.7]]).log()
    cases = {0.0: 0, 0.0999: 0, 0.1001: 1, 0.2999: 1, 0.3001: 3, 0.9999999: 3}
    for uniform, token in cases.items():
        assert sample_tokens(logits, torch.tensor([uniform], dtype=torch.double)).tolist() == [token]


def test_a_token_of_probability_0_is_never_sampled():
    logits = torch.tensor([[-torch.inf, -torch.inf, 0.3, -torch.inf, 0.7, -torch.inf]])
    uniforms = torch.tensor([0.0, 0.999999999999], dtype=torch.double)
    assert [sample_tokens(logits, uniform[None]).item() for uniform in uniforms] == [2, 4]


def test_uniform_numbers_depend_only_on_seed_stream_and_step():
    stream, same, other_seed, other_stream = (
        RandomStream(7),
        RandomStream(7),
        RandomStream(8),
        RandomStream(7, 1),
    )
    assert stream[100] == same[100]
    assert [stream[step] for step in range(100)] == [same[step] for step in range(100)]
    assert len({stream[3], other_seed[3], other_stream[3], stream[4]}) == 4


def test_the_samples_of_a_prompt_differ_and_do_not_depend_on_their_number():
    model, ids = small_model(), torch.tensor([PROMPT])
    options = {"max_new_tokens": 8, "temperature": 1.5, "seed": 11}
    five = model.generate(ids, num_return_sequences=5, **options)
    two = model.generate(ids, num_return_sequences=2, **options)
    assert five.shape == (5, len(PROMPT) + 8)
    assert torch.equal(five[:2], two)
    assert len({tuple(row) for row in five.tolist()}) > 1


def test_without_a_seed_the_torch_generator_determines_the_text():
    model, ids = small_model(), torch.tensor([PROMPT])
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(ids, max_new_tokens=10, temperature=2.0).tolist())
    assert texts[0] == texts[1] != texts[2]


def test_a_draft_keeps_its_training_mode_and_is_left_out_for_prompts_beyond_its_context():
    model = build_model(mb.gpt(vocab=31, width=12, depth=1, heads=3, context=41), seed=1)
    draft = build_model(mb.gpt(vocab=31, width=12, depth=1, heads=3, context=13), seed=2).train()
    for length in (5, 13, 29):
        ids = torch.arange(2 * length).view(2, length) % 31
        assert torch.equal(model.generate(ids, max_new_tokens=7, draft=draft), model.generate(ids, max_new_tokens=7))
        assert draft.training
    engine = Engine(model, proposer=DraftModel(draft.eval()))
    with pytest.raises(InputError, match="too long for the draft model's context of 13"):
        engine.add(list(range(13)))
    assert not engine.busy
