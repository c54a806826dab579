"""An ensemble averages the log-probabilities of its models in each step."""

import pytest
import torch

import monoblock as mb
from monoblock.errors import InputError
from monoblock.inference.engine import Engine
from monoblock.inference.settings import Settings

VOCAB, START, END = 9, 1, 2
SOURCES = [(3, 5, 4), (6, 7), (8, 3, 3, 5, 7)]


def build(seed, vocab=VOCAB):
    torch.manual_seed(seed)
    model = mb.Transformer(mb.vaswani(vocab=vocab, width=16, depth=1, heads=2, context=24)).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight))
    return model


@pytest.fixture(scope="module")
def models():
    return [build(seed) for seed in range(3)]


def decode(models, settings, sources=SOURCES):
    """For each source the tokens and the score of the best sequence."""
    engine = Engine(models[0], ensemble=models[1:])
    ids = [engine.add((START,), settings, source) for source in sources]
    tokens, scores = {id: [] for id in ids}, {}
    while engine.busy:
        for output in engine.step():
            tokens[output.request_id] += output.tokens
            scores[output.request_id] = output.score
    return [(tuple(tokens[id]), scores[id]) for id in ids]


@torch.no_grad()
def mean_log_probs(models, source, ids):
    """The definition: the mean of the log-probabilities of whole passes, normalized."""
    rows = [model(torch.tensor([source]), torch.tensor([ids])).log_softmax(-1)[0] for model in models]
    return torch.stack(rows).mean(0).log_softmax(-1)


def test_greedy_tokens_have_the_highest_mean_log_probability(models):
    for source, (tokens, _) in zip(SOURCES, decode(models, Settings(max_new_tokens=6)), strict=True):
        log_probs = mean_log_probs(models, source, (START, *tokens[:-1]))
        assert tuple(log_probs.argmax(-1).tolist()) == tokens
    assert decode(models, Settings(max_new_tokens=6)) != decode(models[:1], Settings(max_new_tokens=6))


def test_beam_search_finds_the_best_of_all_sequences(models):
    settings = Settings(max_new_tokens=2, num_beams=VOCAB, eos_token_id=(END,), length_penalty=0.0)
    for source, (tokens, score) in zip(SOURCES, decode(models, settings), strict=True):
        totals = {}
        for first in range(VOCAB):
            log_probs = mean_log_probs(models, source, (START, first))
            if first == END:
                totals[first,] = log_probs[0, first]
            else:
                totals |= {(first, second): log_probs[0, first] + log_probs[1, second] for second in range(VOCAB)}
        best = max(totals, key=totals.get)
        assert tokens == best
        assert score == pytest.approx(totals[best].item(), abs=1e-5)


def test_an_ensemble_of_copies_decodes_as_its_model(models):
    settings = Settings(max_new_tokens=6, num_beams=3, eos_token_id=(END,))
    copies, single = decode([models[0]] * 3, settings), decode([models[0]], settings)
    assert [tokens for tokens, _ in copies] == [tokens for tokens, _ in single]
    assert [score for _, score in copies] == pytest.approx([score for _, score in single], abs=1e-5)


def test_models_of_other_vocabularies_and_drafts_are_refused(models):
    with pytest.raises(InputError, match="model 2 of the ensemble has a vocabulary of 11 tokens and the first 9"):
        Engine(models[0], ensemble=[build(1, vocab=11)])
    with pytest.raises(InputError, match="speculative decoding takes a single model"):
        Engine(models[0], ensemble=models[1:]).add((START,), Settings(draft="8-bit"), SOURCES[0])
