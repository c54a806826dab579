"""Beam search as tensor operations: the hypotheses of `BeamSearch`, one by one, with the same scores."""

import itertools
from dataclasses import replace

import pytest
import torch

from monoblock.inference import beam
from monoblock.inference.backends.search.device_search import DeviceSearch, SearchShape, best_continuations
from monoblock.inference.beam import BeamSearch
from monoblock.inference.settings import Settings

CPU = torch.device("cpu")


def random_logits(searches, beams, vocab, generator, sharpness=2.0):
    return sharpness * torch.randn(searches, beams, vocab, generator=generator)


def run_both(settings, vocab, seed, idle=2, **sizes):
    """Run searches with these settings on random logits in Python and on a device, and compare each step."""
    generator = torch.Generator().manual_seed(seed)
    beams, count = settings[0].num_beams, len(settings)
    expected, actual = ([BeamSearch(own) for own in settings] for _ in range(2))
    longest = max(own.max_new_tokens for own in settings)
    shape = SearchShape(count + idle, beams, longest + 3, vocab, beam.num_candidates(expected), True)
    search = DeviceSearch(shape, CPU)
    search.begin(actual)
    rows = list(range(count))
    while not all(one.is_done for one in expected):
        logits = random_logits(count + idle, beams, vocab, generator, **sizes)
        ruled_out = logits.log_softmax(-1)
        for row, one in enumerate(expected):
            own, early = one.settings, one.length < one.settings.min_new_tokens
            tokens = [*own.suppress_tokens, *(own.begin_suppress_tokens if one.length == 0 else ())]
            ruled_out[row, :, [*tokens, *(own.eos_token_id if early else ())]] = -torch.inf
        was_done = [one.is_done for one in expected]
        before = [one.groups[0].running for one in expected]
        origins = beam.advance_from_log_probs(expected, ruled_out[:count].flatten(0, 1))
        search.advance(logits)
        search.copy_finished(rows, actual)
        search.copy_running(rows, actual)
        assert search.origins[:count].flatten().tolist() == [row % beams for row in origins]
        for ours, theirs, ended, old in zip(actual, expected, was_done, before, strict=True):
            assert ours.groups[0].running == (old if ended else theirs.groups[0].running)
            assert ours.groups[0].finished == theirs.groups[0].finished
            assert ours.is_done == theirs.is_done
            assert ended or ours.length == theirs.length
        assert search.done[count:].all()
    return expected


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize(
    ("penalty", "form"), [(-0.7, "length"), (0.0, "length"), (1.0, "length"), (1.3, "length"), (0.6, "gnmt")]
)
def test_every_step_gives_the_hypotheses_of_beam_search(early_stopping, penalty, form):
    lengths = set()
    for seed, (beams, eos) in enumerate(itertools.product((2, 3, 5), ((), (2,), (1, 4, 6, 9)))):
        own = Settings(
            max_new_tokens=12, num_beams=beams, eos_token_id=eos, early_stopping=early_stopping,
            length_penalty=penalty, length_penalty_form=form,
        )  # fmt: skip
        for search in run_both([own] * 3, 37, seed):
            lengths |= {len(hypothesis.tokens) for hypothesis in search.groups[0].finished}
    assert len(lengths) > 1


@pytest.mark.parametrize("vocab", [11, 64, 600, 1013])
def test_vocabularies_with_and_without_segments(vocab):
    run_both([Settings(max_new_tokens=9, num_beams=4, eos_token_id=(3,))] * 5, vocab, seed=vocab, sharpness=3.0)


def test_searches_may_differ_in_length_and_penalty():
    own = Settings(max_new_tokens=12, num_beams=3, eos_token_id=(3, 8))
    changes = (
        {},
        {"max_new_tokens": 4},
        {"length_penalty": 2.0},
        {"length_penalty": 2.0, "length_penalty_form": "gnmt"},
        {"early_stopping": True},
        {"early_stopping": "never"},
    )
    for seed in range(10):
        run_both([replace(own, **change) for change in changes], 41, seed)


def test_tokens_are_ruled_out_in_all_steps_in_the_first_and_before_the_minimum_length():
    own = Settings(
        max_new_tokens=10, num_beams=3, eos_token_id=(3,), min_new_tokens=4, suppress_tokens=(1, 2),
        begin_suppress_tokens=(5, 6, 7),
    )  # fmt: skip
    for seed in range(10):
        for search in run_both([own] * 3, 23, seed):
            for hypothesis in search.best_hypotheses():
                assert not {1, 2} & set(hypothesis.tokens)
                assert hypothesis.tokens[0] not in (5, 6, 7)
                assert 3 not in hypothesis.tokens[:4]


def test_fewer_hypotheses_than_beams_and_a_single_new_token():
    run_both([Settings(max_new_tokens=1, num_beams=5, eos_token_id=(1,))] * 2, 17, seed=0)
    run_both([Settings(max_new_tokens=5, num_beams=5, eos_token_id=(1,))] * 2, 17, seed=1)


@pytest.mark.parametrize("vocab", [5, 40, 128, 640, 1013, 5000])
def test_continuations_are_those_of_a_plain_topk(vocab):
    generator = torch.Generator().manual_seed(vocab)
    log_probs = random_logits(7, 4, vocab, generator).log_softmax(-1)
    scores = -torch.rand(7, 4, generator=generator)
    best = best_continuations(log_probs, scores, 12)
    top = (log_probs + scores[..., None]).flatten(1).topk(12)
    assert torch.equal(best.scores, top.values.double())
    assert torch.equal(best.beams * vocab + best.tokens, top.indices)
