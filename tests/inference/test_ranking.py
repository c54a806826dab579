"""The best continuations and attention of one query a row, by kernels and by torch: equal to formulas in fp64."""

import pytest
import torch
from operator_support import use_kernels_for_toys
from support import build_model

import monoblock as mb
from monoblock.errors import InputError
from monoblock.inference.draft_model import DraftModel
from monoblock.inference.engine import Engine
from monoblock.inference.ranking import segmented_topk, top_continuations
from monoblock.inference.settings import Settings
from monoblock.kernels.cpu import library

SEGMENTED = 4 * 293 * 16  # a length that is searched in segments


@pytest.fixture
def compiled():
    if not library.load_kernels().is_ready:
        pytest.skip(library.load_kernels().reason)


@pytest.mark.parametrize("size", [11, 997, SEGMENTED])
def test_segmented_topk_equals_sorting(size):
    rows = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    values, indices = segmented_topk(rows, 7)
    assert torch.equal(values, rows.sort(descending=True).values[:, :7])
    assert torch.equal(rows.gather(1, indices), values)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("vocabulary", [13, 211, 1201])
@pytest.mark.parametrize("suppressed", [(), (5, 3)])
def test_scores_are_sums_of_log_probabilities(kernel, vocabulary, suppressed, request, monkeypatch):
    if kernel:
        request.getfixturevalue("compiled")
    monkeypatch.setattr("monoblock.inference.ranking._has_kernel", lambda logits: kernel)
    generator = torch.Generator().manual_seed(vocabulary)
    logits, scores = 4 * torch.randn(2 * 3, vocabulary, generator=generator), torch.randn(6, generator=generator)
    values, indices = top_continuations(logits.clone(), scores, suppressed, 3, 7)
    totals = logits.double().log_softmax(-1) + scores.double()[:, None]
    totals[:, list(suppressed)] = -torch.inf  # after the softmax: suppressed tokens keep their probability
    expected = totals.view(2, -1).sort(descending=True)
    assert torch.equal(indices, expected.indices[:, :7])
    torch.testing.assert_close(values.double(), expected.values[:, :7], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("heads", "groups", "size"), [(3, 3, 7), (4, 2, 19), (2, 1, 64)])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_of_one_query_a_row_is_equation_1(heads, groups, size, padded, compiled):
    generator = torch.Generator().manual_seed(size)
    q = torch.randn(2 * 3, 1, heads, size, generator=generator).transpose(1, 2)  # three rows attend to one source
    room = torch.randn(2, groups, 13, size, generator=generator)
    keys, values = room[:, :, :11], torch.randn(2, groups, 11, 5, generator=generator)
    mask = torch.rand(2, 1, 1, 11, generator=generator) < 0.6 if padded else None
    out = torch.ops.monoblock.attend_one_query(q, keys, values, mask, 0.3)
    k, v = (t.double().repeat_interleave(3, 0).repeat_interleave(heads // groups, 1) for t in (keys, values))
    scores = (q.double() @ k.mT) * 0.3
    if mask is not None:
        scores = scores.masked_fill(~mask.repeat_interleave(3, 0), -torch.inf)
    expected = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", [(3, 1, 1, 11), (2, 2, 1, 11), (1, 1, 2, 11), (2, 1, 1, 10)])
def test_a_mask_of_another_shape_is_an_error(shape, compiled):
    q, keys, values = torch.randn(6, 2, 1, 7), torch.randn(2, 2, 11, 7), torch.randn(2, 2, 11, 5)
    with pytest.raises(RuntimeError, match="mask has shape"):
        torch.ops.monoblock.attend_one_query(q, keys, values, torch.ones(shape, dtype=torch.bool), 0.3)


@pytest.mark.parametrize("beams", [3, 5])
def test_kernels_find_the_texts_of_the_plain_model(beams, compiled, monkeypatch):
    """With more rows than the operator of a step takes; sources differ, and rows end at different steps."""
    use_kernels_for_toys(monkeypatch)
    model = build_model(mb.vaswani(vocab=37, width=24, depth=2, heads=3, hidden=29, context=23), seed=5)
    generator = torch.Generator().manual_seed(2)
    sources = [torch.randint(3, 37, (2 + n % 7,), generator=generator).tolist() for n in range(11)]
    settings = Settings(max_new_tokens=17, num_beams=beams, eos_token_id=(2, 7), num_return_sequences=2)
    results = []
    for decoder in (mb.optimize(model), model):
        engine = Engine(decoder, max_rows=11 * beams)
        for source in sources:
            engine.add((1,), settings, source)
        texts = {}
        while engine.busy:
            texts |= {(output.request_id, output.sequence_index): output.tokens for output in engine.step()}
        results.append(texts)
    assert len(results[0]) == 22
    assert results[0] == results[1]


# -- drafts -----------------------------------------------------------------------------------------------------------


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
