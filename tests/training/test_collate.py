"""Collation: inputs and labels of every objective; masking is a pure function of (seed, epoch, sample)."""

import numpy as np
import pytest
import torch

from monoblock.data.encode import IGNORE_INDEX
from monoblock.training.collate import (
    SpecialTokenIds,
    collate_causal_lm,
    collate_classification,
    collate_masked_lm,
    collate_seq2seq,
    collate_span_corruption,
    collate_token_classification,
    corrupt_spans,
    mask_tokens,
    sample_generator,
    select_target_positions,
)

VOCAB, MASK = 997, 4
SPECIALS = frozenset(range(7))
SPECIAL = SpecialTokenIds(
    pad_id=0,
    bos_id=1,
    eos_id=2,
    mask_id=MASK,
    sentinel_ids=tuple(range(900, 997)),
    unmaskable_ids=SPECIALS,
    vocab_size=VOCAB,
)


def random_ids(rng, length, specials=True):
    ids = rng.integers(7, 900, length)
    if specials:
        ids[0], ids[-1] = 5, 6
    return ids


def mask(ids, seed=1, epoch=0, sample=0, **options):
    rng = sample_generator(seed, epoch, sample)
    return mask_tokens(ids, rng, mask_id=MASK, vocab=VOCAB, special=SPECIALS, **options)


def within(count, total, share, deviations=5):
    """Whether a binomial count is at most this many standard deviations from its mean."""
    return abs(count - share * total) <= deviations * (total * share * (1 - share)) ** 0.5


# -- masked tokens ---------------------------------------------------------------------------------------------------


def test_masking_selects_15_percent_and_splits_them_80_10_10():
    rng = np.random.default_rng(3)
    chosen = masked = kept = tokens = 0
    for sample in range(3000):
        ids = random_ids(rng, 103)
        hidden, labels = mask(ids, sample=sample)
        selected = labels != IGNORE_INDEX
        assert (labels[selected] == ids[selected]).all()
        assert (hidden[~selected] == ids[~selected]).all(), "other tokens are unchanged"
        assert not selected[[0, -1]].any(), "special tokens are never selected"
        chosen, tokens = chosen + selected.sum(), tokens + 101
        masked += (hidden[selected] == MASK).sum()
        kept += (hidden[selected] == ids[selected]).sum()
    assert chosen == 3000 * round(0.15 * 101)
    assert within(masked, chosen, 0.8 + 0.1 / VOCAB)
    assert within(kept, chosen, 0.1 + 0.1 / VOCAB)
    assert within(chosen - masked - kept, chosen, 0.1 * (1 - 2 / VOCAB))


def test_every_position_is_selected_equally_often():
    ids = random_ids(np.random.default_rng(3), 23, specials=False)
    counts = sum((mask(ids, sample=sample)[1] != IGNORE_INDEX).astype(int) for sample in range(4000))
    assert all(within(count, 4000, 3 / 23) for count in counts)


def test_random_tokens_come_from_the_whole_vocabulary():
    ids = random_ids(np.random.default_rng(3), 701, specials=False)
    tokens = [token for sample in range(300) for token in mask(ids, sample=sample, rate=0.9)[0]]
    swapped = set(tokens) - set(ids.tolist()) - {MASK}
    assert len(swapped) > 300
    assert all(0 <= token < VOCAB for token in swapped)


def test_masking_depends_on_seed_epoch_and_sample_only():
    ids = random_ids(np.random.default_rng(3), 103)
    first = mask(ids, 7, 2, 11)
    mask(ids, 1, 1, 1)
    again = mask(ids.copy(), 7, 2, 11)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    others = [mask(ids, 8, 2, 11), mask(ids, 7, 3, 11), mask(ids, 7, 2, 12)]
    assert all((other[1] != first[1]).any() for other in others)


def test_masks_differ_between_epochs():
    ids = random_ids(np.random.default_rng(3), 103)
    masks = {tuple(np.flatnonzero(mask(ids, epoch=epoch)[1] != IGNORE_INDEX)) for epoch in range(50)}
    assert len(masks) == 50


def test_large_seeds_give_different_numbers():
    draws = [sample_generator(seed, 0, 0).random() for seed in (0, 1, 2**63, 2**63 + 1, 2**64 - 1, 2**64 - 2)]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_at_least_one_token_of_a_short_text_is_selected(length):
    hidden, labels = mask(random_ids(np.random.default_rng(3), length, specials=False))
    assert (labels != IGNORE_INDEX).sum() == 1
    assert hidden.shape == labels.shape == (length,)


def test_special_tokens_are_never_selected():
    hidden, labels = mask(np.array([5, 6, 5]))
    assert hidden.tolist() == [5, 6, 5]
    assert (labels == IGNORE_INDEX).all()


def test_the_input_is_not_changed():
    ids = random_ids(np.random.default_rng(3), 103)
    before = ids.copy()
    mask(ids, rate=0.9)
    assert (ids == before).all()


def scatter_labels(inputs, labels):
    """Scatter labels (B, N) back to their positions (B, T)."""
    full = torch.full_like(inputs["source"], IGNORE_INDEX)
    return full.scatter(1, inputs["logits_at"], labels)


def test_target_positions_come_first_and_none_is_lost():
    labels = torch.tensor(
        [[IGNORE_INDEX, 7, IGNORE_INDEX, IGNORE_INDEX, 5], [IGNORE_INDEX] * 5, [1, 2, 3, IGNORE_INDEX, IGNORE_INDEX]]
    ).repeat(1, 3)
    positions, selected = select_target_positions(labels)
    assert positions.shape == selected.shape == (3, 15), "nine targets are rounded up to sixteen, but T is fifteen"
    assert selected[0].tolist() == [7, 5] * 3 + [IGNORE_INDEX] * 9
    assert torch.equal(torch.full_like(labels, IGNORE_INDEX).scatter(1, positions, selected), labels)
    assert select_target_positions(labels[:2])[0].shape == (2, 8)


def test_padding_of_masked_texts_is_neither_attended_nor_a_target():
    rng = np.random.default_rng(3)
    samples = [{"ids": random_ids(rng, length), "sample": length} for length in (11, 17, 13)]
    inputs, labels = collate_masked_lm(samples, SPECIAL, seed=1, epoch=0)
    assert inputs["source"].shape == inputs["attention_mask"].shape == (3, 17)
    labels = scatter_labels(inputs, labels)
    assert inputs["attention_mask"].sum(1).tolist() == [11, 17, 13]
    assert (inputs["source"][~inputs["attention_mask"]] == 0).all()
    assert (labels[~inputs["attention_mask"]] == IGNORE_INDEX).all()
    alone, alone_labels = collate_masked_lm(samples[2:], SPECIAL, seed=1, epoch=0)
    assert torch.equal(alone["source"][0], inputs["source"][2, :13]), "masks do not depend on the batch"
    assert torch.equal(scatter_labels(alone, alone_labels)[0], labels[2, :13])
    assert "attention_mask" not in alone


# -- spans -----------------------------------------------------------------------------------------------------------

SENTINELS = list(SPECIAL.sentinel_ids)


def corrupt(ids, sample=0, **options):
    return corrupt_spans(ids, sample_generator(1, 0, sample), sentinels=SENTINELS, **options)


def restore_spans(source, target):
    """Restore the text by replacing the sentinels of the source with their spans."""
    spans, current = {}, None
    for token in target.tolist():
        if token in SENTINELS:
            current = spans[token] = []
        else:
            current.append(token)
    tokens = []
    for token in source.tolist():
        tokens += spans[token] if token in SENTINELS else [token]
    return tokens, list(spans)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 20, 101, 512])
def test_source_and_target_together_contain_every_token_once(length):
    rng = np.random.default_rng(length)
    for sample in range(30):
        ids = random_ids(rng, length, specials=False)
        source, target = corrupt(ids, sample)
        tokens, sentinels = restore_spans(source, target)
        assert tokens == ids.tolist()
        assert sentinels == SENTINELS[: len(sentinels)], "in order, and a final one ends the target"
        assert target[-1] == sentinels[-1]
        assert [token for token in source.tolist() if token in SENTINELS] == sentinels[:-1]
        assert len(target) > len(sentinels), "at least one token is removed"


def test_spans_have_the_given_rate_and_mean_length():
    rng = np.random.default_rng(3)
    hidden = spans = tokens = 0
    starts = set()
    for sample in range(300):
        source, target = corrupt(random_ids(rng, 200, specials=False), sample)
        count = sum(token in SENTINELS for token in source.tolist())
        hidden, spans, tokens = hidden + len(target) - count - 1, spans + count, tokens + 200
        starts.add(source.tolist().index(SENTINELS[0]))
    assert hidden / tokens == pytest.approx(0.15, abs=0.005)
    assert hidden / spans == pytest.approx(3.0, abs=0.1)
    assert len(starts) > 20


def test_span_lengths_vary():
    rng = np.random.default_rng(3)
    lengths = set()
    for sample in range(200):
        _, target = corrupt(random_ids(rng, 200, specials=False), sample)
        positions = [index for index, token in enumerate(target.tolist()) if token in SENTINELS]
        lengths |= set(np.diff(positions) - 1)
    assert {1, 2, 3, 4, 5, 6} <= lengths
    assert 0 not in lengths


def test_few_sentinels_make_longer_spans():
    source, target = corrupt_spans(np.arange(7, 807), sample_generator(1, 0, 0), sentinels=SENTINELS[:5])
    tokens, sentinels = restore_spans(source, target)
    assert tokens == list(range(7, 807))
    assert sentinels == SENTINELS[:5]


def test_eos_ends_source_and_target():
    source, target = corrupt(np.arange(7, 60), eos=2)
    assert source[-1] == target[-1] == 2


def test_targets_of_spans_start_with_the_given_token():
    samples = [{"ids": np.arange(7, 7 + length), "sample": length} for length in (40, 61)]
    inputs, labels = collate_span_corruption(samples, SPECIAL, seed=1, epoch=0, start=0)
    assert (inputs["target"][:, 0] == 0).all()
    for row in range(2):
        targets = labels[row][labels[row] != IGNORE_INDEX]
        assert targets[-1] == 2
        assert torch.equal(inputs["target"][row, 1 : len(targets)], targets[:-1])
        source = inputs["source"][row][inputs["source_mask"][row]]
        tokens, _ = restore_spans(source[:-1].numpy(), targets[:-1].numpy())
        assert tokens == samples[row]["ids"].tolist()
    again = collate_span_corruption(samples, SPECIAL, seed=1, epoch=0, start=0)
    other = collate_span_corruption(samples, SPECIAL, seed=1, epoch=1, start=0)
    assert torch.equal(again[0]["source"], inputs["source"])
    assert not torch.equal(other[0]["source"], inputs["source"])


# -- pairs -----------------------------------------------------------------------------------------------------------


def test_the_decoder_reads_the_shifted_target_and_predicts_eos():
    samples = [
        {"source": np.array([11, 12, 13]), "target": np.array([21, 22])},
        {"source": np.array([14]), "target": np.array([23, 24, 25])},
    ]
    inputs, labels = collate_seq2seq(samples, SPECIAL, start=1)
    assert inputs["source"].tolist() == [[11, 12, 13, 2], [14, 2, 0, 0]]
    assert inputs["source_mask"].tolist() == [[True] * 4, [True, True, False, False]]
    assert inputs["target"].tolist() == [[1, 21, 22, 0], [1, 23, 24, 25]]
    assert labels.tolist() == [[21, 22, 2, IGNORE_INDEX], [23, 24, 25, 2]]


def test_pairs_of_one_length_need_no_mask():
    samples = [{"source": np.array([11, 12]), "target": np.array([21])}] * 3
    inputs, _ = collate_seq2seq(samples, SPECIAL, start=1)
    assert set(inputs) == {"source", "target"}


def test_without_an_eos_token_none_is_predicted():
    samples = [{"source": np.array([11, 12]), "target": np.array([21, 22])}]
    inputs, labels = collate_seq2seq(samples, SpecialTokenIds(pad_id=0, bos_id=1), start=1)
    assert inputs["source"].tolist() == [[11, 12]]
    assert inputs["target"].tolist() == [[1, 21, 22]]
    assert labels.tolist() == [[21, 22, IGNORE_INDEX]]


# -- causal language modeling ----------------------------------------------------------------------------------------


def test_every_next_token_of_a_block_is_a_label():
    inputs, labels = collate_causal_lm([{"ids": np.arange(10, 16)}, {"ids": np.arange(20, 26)}], SPECIAL)
    assert inputs["source"].tolist() == [list(range(10, 15)), list(range(20, 25))]
    assert labels.tolist() == [list(range(11, 16)), list(range(21, 26))]


def test_no_label_crosses_documents_or_is_padding():
    sample = {"ids": np.array([10, 11, 12, 20, 21, 30, 0, 0]), "documents": np.array([0, 0, 0, 1, 1, 2, -1, -1])}
    inputs, labels = collate_causal_lm([sample], SPECIAL)
    assert labels.tolist() == [[11, 12, IGNORE_INDEX, 21, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX]]
    assert inputs["documents"].tolist() == [[0, 0, 0, 1, 1, 2, -1]]


# -- labels ----------------------------------------------------------------------------------------------------------


def test_a_text_has_one_label():
    samples = [{"ids": np.array([5, 10, 11]), "label": 2}, {"ids": np.array([5, 12]), "label": 0}]
    inputs, labels = collate_classification(samples, SPECIAL)
    assert labels.tolist() == [2, 0]
    assert inputs["source"].tolist() == [[5, 10, 11], [5, 12, 0]]
    assert inputs["attention_mask"].tolist() == [[True] * 3, [True, True, False]]


def test_a_token_has_one_label_and_padding_none():
    samples = [
        {"ids": np.array([10, 11, 12]), "labels": np.array([1, IGNORE_INDEX, 0])},
        {"ids": np.array([13]), "labels": np.array([2])},
    ]
    _, labels = collate_token_classification(samples, SPECIAL)
    assert labels.tolist() == [[1, IGNORE_INDEX, 0], [2, IGNORE_INDEX, IGNORE_INDEX]]
