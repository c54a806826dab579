"""Objectives: what is hidden, what is asked, what is shifted; each a pure function of (seed, epoch, sample)."""

import numpy as np
import pytest
import torch

from monoblock.training import objectives
from monoblock.training.corruption import IGNORE, corrupt_spans, generator, mask_tokens
from monoblock.training.objectives import Special

VOCAB, MASK = 997, 4
SPECIALS = frozenset(range(7))
SPECIAL = Special(pad=0, bos=1, eos=2, mask=MASK, sentinels=tuple(range(900, 997)), never_masked=SPECIALS, vocab=VOCAB)


def text(draw, length, specials=True):
    ids = draw.integers(7, 900, length)
    if specials:
        ids[0], ids[-1] = 5, 6
    return ids


def hide(ids, seed=1, epoch=0, sample=0, **options):
    draw = generator(seed, epoch, sample)
    return mask_tokens(ids, draw, mask_id=MASK, vocab=VOCAB, special=SPECIALS, **options)


def within(count, total, share, deviations=5):
    """A count of independent events of this probability, so many standard deviations around its mean."""
    return abs(count - share * total) <= deviations * (total * share * (1 - share)) ** 0.5


# -- masked tokens ---------------------------------------------------------------------------------------------------


def test_masking_hides_fifteen_of_a_hundred_and_splits_them_eighty_ten_ten():
    draw = np.random.default_rng(3)
    chosen = masked = kept = tokens = 0
    for sample in range(3000):
        ids = text(draw, 103)
        hidden, labels = hide(ids, sample=sample)
        asked = labels != IGNORE
        assert (labels[asked] == ids[asked]).all()
        assert (hidden[~asked] == ids[~asked]).all(), "what is not asked is not touched"
        assert not asked[[0, -1]].any(), "specials are never hidden"
        chosen, tokens = chosen + asked.sum(), tokens + 101
        masked += (hidden[asked] == MASK).sum()
        kept += (hidden[asked] == ids[asked]).sum()
    assert chosen == 3000 * round(0.15 * 101)
    assert within(masked, chosen, 0.8 + 0.1 / VOCAB)
    assert within(kept, chosen, 0.1 + 0.1 / VOCAB)
    assert within(chosen - masked - kept, chosen, 0.1 * (1 - 2 / VOCAB))


def test_every_place_is_hidden_equally_often():
    ids = text(np.random.default_rng(3), 23, specials=False)
    counts = sum((hide(ids, sample=sample)[1] != IGNORE).astype(int) for sample in range(4000))
    assert all(within(count, 4000, 3 / 23) for count in counts)


def test_random_tokens_come_from_the_whole_vocabulary():
    ids = text(np.random.default_rng(3), 701, specials=False)
    found = [token for sample in range(300) for token in hide(ids, sample=sample, rate=0.9)[0]]
    swapped = set(found) - set(ids.tolist()) - {MASK}
    assert len(swapped) > 300
    assert all(0 <= token < VOCAB for token in swapped)


def test_a_mask_is_a_function_of_seed_epoch_and_sample_and_of_nothing_else():
    ids = text(np.random.default_rng(3), 103)
    first = hide(ids, 7, 2, 11)
    hide(ids, 1, 1, 1)
    again = hide(ids.copy(), 7, 2, 11)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    others = [hide(ids, 8, 2, 11), hide(ids, 7, 3, 11), hide(ids, 7, 2, 12)]
    assert all((other[1] != first[1]).any() for other in others)


def test_a_new_mask_every_epoch():
    ids = text(np.random.default_rng(3), 103)
    masks = {tuple(np.flatnonzero(hide(ids, epoch=epoch)[1] != IGNORE)) for epoch in range(50)}
    assert len(masks) == 50


def test_large_seeds_stay_apart():
    draws = [generator(seed, 0, 0).random() for seed in (0, 1, 2**63, 2**63 + 1, 2**64 - 1, 2**64 - 2)]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_even_a_short_text_hides_something(length):
    hidden, labels = hide(text(np.random.default_rng(3), length, specials=False))
    assert (labels != IGNORE).sum() == 1
    assert hidden.shape == labels.shape == (length,)


def test_a_text_of_specials_hides_nothing():
    hidden, labels = hide(np.array([5, 6, 5]))
    assert hidden.tolist() == [5, 6, 5]
    assert (labels == IGNORE).all()


def test_the_input_is_not_changed():
    ids = text(np.random.default_rng(3), 103)
    before = ids.copy()
    hide(ids, rate=0.9)
    assert (ids == before).all()


def scattered(inputs, labels):
    """Labels (B, n) back at the places of the text that they ask for."""
    whole = torch.full_like(inputs["source"], IGNORE)
    return whole.scatter(1, inputs["logits_at"], labels)


def test_asked_places_come_first_and_none_is_lost():
    labels = torch.tensor([[IGNORE, 7, IGNORE, IGNORE, 5], [IGNORE] * 5, [1, 2, 3, IGNORE, IGNORE]]).repeat(1, 3)
    places, found = objectives.asked_first(labels)
    assert places.shape == found.shape == (3, 15), "nine in the fullest row: sixteen, but there are fifteen"
    assert found[0].tolist() == [7, 5] * 3 + [IGNORE] * 9
    assert torch.equal(torch.full_like(labels, IGNORE).scatter(1, places, found), labels)
    assert objectives.asked_first(labels[:2])[0].shape == (2, 8)


def test_a_batch_of_masked_texts_is_padded_and_padding_is_neither_seen_nor_asked():
    draw = np.random.default_rng(3)
    samples = [{"ids": text(draw, length), "sample": length} for length in (11, 17, 13)]
    inputs, labels = objectives.masked(samples, SPECIAL, seed=1, epoch=0)
    assert inputs["source"].shape == inputs["attention_mask"].shape == (3, 17)
    labels = scattered(inputs, labels)
    assert inputs["attention_mask"].sum(1).tolist() == [11, 17, 13]
    assert (inputs["source"][~inputs["attention_mask"]] == 0).all()
    assert (labels[~inputs["attention_mask"]] == IGNORE).all()
    alone, alone_labels = objectives.masked(samples[2:], SPECIAL, seed=1, epoch=0)
    assert torch.equal(alone["source"][0], inputs["source"][2, :13]), "company changes no mask"
    assert torch.equal(scattered(alone, alone_labels)[0], labels[2, :13])
    assert "attention_mask" not in alone


# -- spans -----------------------------------------------------------------------------------------------------------

SENTINELS = list(SPECIAL.sentinels)


def corrupt(ids, sample=0, **options):
    return corrupt_spans(ids, generator(1, 0, sample), sentinels=SENTINELS, **options)


def restored(source, target):
    """The text again, from the source and the spans that its sentinels stand for."""
    spans, current = {}, None
    for token in target.tolist():
        if token in SENTINELS:
            current = spans[token] = []
        else:
            current.append(token)
    out = []
    for token in source.tolist():
        out += spans[token] if token in SENTINELS else [token]
    return out, list(spans)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 20, 101, 512])
def test_source_and_target_together_hold_every_token_once(length):
    draw = np.random.default_rng(length)
    for sample in range(30):
        ids = text(draw, length, specials=False)
        source, target = corrupt(ids, sample)
        found, sentinels = restored(source, target)
        assert found == ids.tolist()
        assert sentinels == SENTINELS[: len(sentinels)], "in order, and a last one closes the target"
        assert target[-1] == sentinels[-1]
        assert [token for token in source.tolist() if token in SENTINELS] == sentinels[:-1]
        assert len(target) > len(sentinels), "something is asked"


def test_spans_hide_the_rate_in_spans_of_the_mean_length():
    draw = np.random.default_rng(3)
    hidden = spans = tokens = 0
    starts = set()
    for sample in range(300):
        source, target = corrupt(text(draw, 200, specials=False), sample)
        count = sum(token in SENTINELS for token in source.tolist())
        hidden, spans, tokens = hidden + len(target) - count - 1, spans + count, tokens + 200
        starts.add(source.tolist().index(SENTINELS[0]))
    assert hidden / tokens == pytest.approx(0.15, abs=0.005)
    assert hidden / spans == pytest.approx(3.0, abs=0.1)
    assert len(starts) > 20


def test_span_lengths_vary():
    draw = np.random.default_rng(3)
    lengths = set()
    for sample in range(200):
        _, target = corrupt(text(draw, 200, specials=False), sample)
        places = [place for place, token in enumerate(target.tolist()) if token in SENTINELS]
        lengths |= set(np.diff(places) - 1)
    assert {1, 2, 3, 4, 5, 6} <= lengths
    assert 0 not in lengths


def test_more_text_than_sentinels_makes_longer_spans():
    source, target = corrupt_spans(np.arange(7, 807), generator(1, 0, 0), sentinels=SENTINELS[:5])
    found, sentinels = restored(source, target)
    assert found == list(range(7, 807))
    assert sentinels == SENTINELS[:5]


def test_an_end_is_put_after_both_sides():
    source, target = corrupt(np.arange(7, 60), eos=2)
    assert source[-1] == target[-1] == 2


def test_spans_are_pairs_that_start_from_the_given_token():
    samples = [{"ids": np.arange(7, 7 + length), "sample": length} for length in (40, 61)]
    inputs, labels = objectives.spans(samples, SPECIAL, seed=1, epoch=0, start=0)
    assert (inputs["target"][:, 0] == 0).all()
    for row in range(2):
        asked = labels[row][labels[row] != IGNORE]
        assert asked[-1] == 2
        assert torch.equal(inputs["target"][row, 1 : len(asked)], asked[:-1])
        source = inputs["source"][row][inputs["source_mask"][row]]
        found, _ = restored(source[:-1].numpy(), asked[:-1].numpy())
        assert found == samples[row]["ids"].tolist()
    again = objectives.spans(samples, SPECIAL, seed=1, epoch=0, start=0)
    other = objectives.spans(samples, SPECIAL, seed=1, epoch=1, start=0)
    assert torch.equal(again[0]["source"], inputs["source"])
    assert not torch.equal(other[0]["source"], inputs["source"])


# -- pairs -----------------------------------------------------------------------------------------------------------


def test_the_decoder_reads_the_target_one_place_late_and_is_asked_for_its_end():
    samples = [
        {"source": np.array([11, 12, 13]), "target": np.array([21, 22])},
        {"source": np.array([14]), "target": np.array([23, 24, 25])},
    ]
    inputs, labels = objectives.pairs(samples, SPECIAL, start=1)
    assert inputs["source"].tolist() == [[11, 12, 13, 2], [14, 2, 0, 0]]
    assert inputs["source_mask"].tolist() == [[True] * 4, [True, True, False, False]]
    assert inputs["target"].tolist() == [[1, 21, 22, 0], [1, 23, 24, 25]]
    assert labels.tolist() == [[21, 22, 2, IGNORE], [23, 24, 25, 2]]


def test_pairs_of_one_length_need_no_mask():
    samples = [{"source": np.array([11, 12]), "target": np.array([21])}] * 3
    inputs, _ = objectives.pairs(samples, SPECIAL, start=1)
    assert set(inputs) == {"source", "target"}


def test_without_an_end_token_none_is_asked():
    samples = [{"source": np.array([11, 12]), "target": np.array([21, 22])}]
    inputs, labels = objectives.pairs(samples, Special(pad=0, bos=1), start=1)
    assert inputs["source"].tolist() == [[11, 12]]
    assert inputs["target"].tolist() == [[1, 21, 22]]
    assert labels.tolist() == [[21, 22, IGNORE]]


# -- running text ----------------------------------------------------------------------------------------------------


def test_every_next_token_of_a_block_is_asked():
    inputs, labels = objectives.causal([{"ids": np.arange(10, 16)}, {"ids": np.arange(20, 26)}], SPECIAL)
    assert inputs["source"].tolist() == [list(range(10, 15)), list(range(20, 25))]
    assert labels.tolist() == [list(range(11, 16)), list(range(21, 26))]


def test_no_label_reaches_across_documents_or_into_filling():
    sample = {"ids": np.array([10, 11, 12, 20, 21, 30, 0, 0]), "documents": np.array([0, 0, 0, 1, 1, 2, -1, -1])}
    inputs, labels = objectives.causal([sample], SPECIAL)
    assert labels.tolist() == [[11, 12, IGNORE, 21, IGNORE, IGNORE, IGNORE]]
    assert inputs["documents"].tolist() == [[0, 0, 0, 1, 1, 2, -1]]


# -- labels ----------------------------------------------------------------------------------------------------------


def test_one_label_a_text():
    samples = [{"ids": np.array([5, 10, 11]), "label": 2}, {"ids": np.array([5, 12]), "label": 0}]
    inputs, labels = objectives.classified(samples, SPECIAL)
    assert labels.tolist() == [2, 0]
    assert inputs["source"].tolist() == [[5, 10, 11], [5, 12, 0]]
    assert inputs["attention_mask"].tolist() == [[True] * 3, [True, True, False]]


def test_one_label_a_token_and_none_for_padding():
    samples = [
        {"ids": np.array([10, 11, 12]), "labels": np.array([1, IGNORE, 0])},
        {"ids": np.array([13]), "labels": np.array([2])},
    ]
    _, labels = objectives.labelled(samples, SPECIAL)
    assert labels.tolist() == [[1, IGNORE, 0], [2, IGNORE, IGNORE]]
