"""The best continuations and one query a row, as kernels and as plain operations: the same as by formulas in fp64."""

import pytest
import torch
from support import build

import monoblock as mb
from monoblock.decoding import prepare
from monoblock.decoding.engine import Engine
from monoblock.decoding.ranking import best, ranked
from monoblock.decoding.settings import Settings
from monoblock.decoding.speculative import Draft
from monoblock.errors import InputError
from monoblock.native import library

MANY = 4 * 293 * 16  # a row that is looked at in pieces


@pytest.fixture
def compiled():
    if not library.load().ready:
        pytest.skip(library.load().reason)


@pytest.mark.parametrize("size", [11, 997, MANY])
def test_the_best_of_a_row_are_those_of_a_sorted_row(size):
    rows = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    values, places = ranked(rows, 7)
    assert torch.equal(values, rows.sort(descending=True).values[:, :7])
    assert torch.equal(rows.gather(1, places), values)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("vocabulary", [13, 211, 1201])
@pytest.mark.parametrize("without", [(), (5, 3)])
def test_scores_are_sums_of_log_probabilities(kernel, vocabulary, without, request, monkeypatch):
    if kernel:
        request.getfixturevalue("compiled")
    monkeypatch.setattr("monoblock.decoding.ranking._kernel", lambda logits: kernel)
    chance = torch.Generator().manual_seed(vocabulary)
    logits, scores = 4 * torch.randn(2 * 3, vocabulary, generator=chance), torch.randn(6, generator=chance)
    values, places = best(logits.clone(), scores, without, 3, 7)
    shares = logits.double().log_softmax(-1) + scores.double()[:, None]
    shares[:, list(without)] = -torch.inf  # ruled out after it had its share
    wanted = shares.view(2, -1).sort(descending=True)
    assert torch.equal(places, wanted.indices[:, :7])
    torch.testing.assert_close(values.double(), wanted.values[:, :7], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("heads", "groups", "size"), [(3, 3, 7), (4, 2, 19), (2, 1, 64)])
@pytest.mark.parametrize("padded", [False, True])
def test_one_query_a_row_looks_as_equation_1_says(heads, groups, size, padded, compiled):
    chance = torch.Generator().manual_seed(size)
    q = torch.randn(2 * 3, 1, heads, size, generator=chance).transpose(1, 2)  # three rows look at one source
    room = torch.randn(2, groups, 13, size, generator=chance)
    keys, values = room[:, :, :11], torch.randn(2, groups, 11, 5, generator=chance)
    seen = torch.rand(2, 1, 1, 11, generator=chance) < 0.6 if padded else None
    found = torch.ops.monoblock.attend(q, keys, values, seen, 0.3)
    k, v = (t.double().repeat_interleave(3, 0).repeat_interleave(heads // groups, 1) for t in (keys, values))
    scores = (q.double() @ k.mT) * 0.3
    if seen is not None:
        scores = scores.masked_fill(~seen.repeat_interleave(3, 0), -torch.inf)
    wanted = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", [(3, 1, 1, 11), (2, 2, 1, 11), (1, 1, 2, 11), (2, 1, 1, 10)])
def test_a_mask_of_another_shape_is_refused(shape, compiled):
    q, keys, values = torch.randn(6, 2, 1, 7), torch.randn(2, 2, 11, 7), torch.randn(2, 2, 11, 5)
    with pytest.raises(RuntimeError, match=r"a mask that does not fit|one row a text"):
        torch.ops.monoblock.attend(q, keys, values, torch.ones(shape, dtype=torch.bool), 0.3)


@pytest.mark.parametrize("beams", [3, 5])
def test_many_rows_by_kernels_find_the_texts_of_the_plain_model(beams, compiled, monkeypatch):
    """More rows than the operator for whole steps takes; sources and ends differ, so rows stop and go."""
    monkeypatch.setattr(prepare, "LARGE", 0)
    model = build(mb.vaswani(vocab=37, width=24, depth=2, heads=3, hidden=29, context=23), seed=5)
    chance = torch.Generator().manual_seed(2)
    sources = [torch.randint(3, 37, (2 + n % 7,), generator=chance).tolist() for n in range(11)]
    asked = Settings(max_new_tokens=17, num_beams=beams, eos_token_id=(2, 7), num_return_sequences=2)
    found = []
    for fast in (True, False):
        engine = Engine(model, rows=11 * beams, fast=fast)
        order = {engine.add((1,), asked, source): n for n, source in enumerate(sources)}
        texts = {}
        while engine.busy:
            texts |= {(order[event.id], event.number): event.tokens for event in engine.step()}
        found.append(texts)
    assert len(found[0]) == 22
    assert found[0] == found[1]


# -- drafts -----------------------------------------------------------------------------------------------------------


def test_a_draft_is_left_as_it_was_and_a_long_prompt_does_without_it():
    model = build(mb.gpt(vocab=31, width=12, depth=1, heads=3, context=41), seed=1)
    small = build(mb.gpt(vocab=31, width=12, depth=1, heads=3, context=13), seed=2).train()
    for length in (5, 13, 29):
        ids = torch.arange(2 * length).view(2, length) % 31
        assert torch.equal(model.generate(ids, max_new_tokens=7, draft=small), model.generate(ids, max_new_tokens=7))
        assert small.training
    engine = Engine(model, proposer=Draft(small.eval()))
    engine.add(list(range(13)))
    with pytest.raises(InputError, match="a draft of context 13; leave it out"):
        engine.step()
