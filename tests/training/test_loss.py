"""The loss is a mean over targets: accumulation, padding, bucketing and order do not change it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import build_model

from monoblock.config.families import bert, gpt, vaswani
from monoblock.data.encode import IGNORE_INDEX
from monoblock.errors import InputError
from monoblock.nn.experts import load_balancing_loss
from monoblock.training import optimizer
from monoblock.training.collate import (
    SpecialTokenIds,
    TensorBatch,
    collate_causal_lm,
    collate_masked_lm,
    collate_seq2seq,
)
from monoblock.training.loss import CrossEntropyLoss, RouterTap
from monoblock.training.runtime import choose_runtime
from monoblock.training.trainer import Trainer, TrainingArguments

VOCAB = 29
SPECIAL = SpecialTokenIds(pad_id=0, bos_id=1, eos_id=2, mask_id=3, unmaskable_ids=frozenset(range(4)), vocab_size=VOCAB)


def random_ids(rng, shortest, longest):
    return rng.integers(4, VOCAB, rng.integers(shortest, longest + 1))


def random_pairs(count, seed=1):
    rng = np.random.default_rng(seed)
    return [{"source": random_ids(rng, 2, 11), "target": random_ids(rng, 1, 13)} for _ in range(count)]


def collate_pairs(samples):
    return TensorBatch(*collate_seq2seq(samples, SPECIAL, start=1), 0, list(range(len(samples))))


def random_blocks(count, seed=1):
    rng = np.random.default_rng(seed)
    return [{"ids": rng.integers(4, VOCAB, 8)} for _ in range(count)]


def collate_blocks(samples):
    return TensorBatch(*collate_causal_lm(samples, SPECIAL), 0, list(range(len(samples))))


def random_texts(count, seed=1):
    rng = np.random.default_rng(seed)
    return [{"ids": random_ids(rng, 5, 17), "sample": n} for n in range(count)]


def collate_texts(samples):
    inputs, labels = collate_masked_lm(samples, SPECIAL, seed=1, epoch=0)
    return TensorBatch(inputs, labels, 0, [sample["sample"] for sample in samples])


MODELS = {
    "pairs": lambda: vaswani(vocab=VOCAB, width=21, depth=2, heads=3, hidden=34, context=19),
    "causal": lambda: gpt(vocab=VOCAB, width=21, depth=2, heads=3, context=7),
    "masked": lambda: bert(vocab=VOCAB, width=21, depth=2, heads=3, context=19, head="masked_lm"),
}
BATCHES = {
    "pairs": (random_pairs, collate_pairs),
    "causal": (random_blocks, collate_blocks),
    "masked": (random_texts, collate_texts),
}


def build_kind(kind, dtype=torch.float32):
    return build_model(MODELS[kind](), dtype)


def build_trainer(model, tmp_path, *, accumulate=1, loss=None):
    return Trainer(
        model=model,
        optimizers=optimizer.build_optimizers(model),
        learning_rate=lambda step: 1e-3,
        loss=loss or CrossEntropyLoss(label_smoothing=0.1),
        batches=lambda step: iter(()),
        args=TrainingArguments(steps=1, accumulate=accumulate),
        runtime=choose_runtime("cpu", "fp32", "no"),
        folder=tmp_path,
    )


def compute_gradients(model, batch, tmp_path, *, accumulate=1, loss=None):
    """The flattened gradients and the loss of one update."""
    trainer = build_trainer(model, tmp_path, accumulate=accumulate, loss=loss)
    loss_value, _ = trainer._compute_gradients(batch, batch.target_count, batch.batch_size)
    flat = torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])
    trainer.optimizers.zero_grad()
    return flat, float(loss_value)


def relative_error(actual, expected):
    return float((actual - expected).norm() / expected.norm())


# -- accumulation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("kind", BATCHES)
def test_accumulation_over_micro_batches_keeps_the_gradient(kind, dtype, limit, tmp_path):
    model = build_kind(kind, dtype)
    random_samples, collate = BATCHES[kind]
    batch = collate(random_samples(8))
    expected, loss = compute_gradients(model, batch, tmp_path)
    for accumulate in (8, 3, 2, 11):
        actual, loss_value = compute_gradients(model, batch, tmp_path, accumulate=accumulate)
        assert relative_error(actual, expected) < limit
        assert float(loss_value) == pytest.approx(loss, rel=1e-6)


def test_the_loss_of_a_step_is_the_mean_over_targets_not_over_micro_batches(tmp_path):
    model = build_kind("pairs", torch.float64)
    batch = collate_pairs(random_pairs(4))
    _, loss_value = compute_gradients(model, batch, tmp_path, accumulate=4, loss=CrossEntropyLoss())
    logits = model(**batch.inputs)
    expected = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE_INDEX)
    assert loss_value == pytest.approx(expected.item(), rel=1e-6)
    means = [
        CrossEntropyLoss()(model, micro.inputs, micro.labels).item() / micro.target_count for micro in batch.split(4)
    ]
    assert sum(means) / 4 != pytest.approx(expected.item(), rel=1e-3), "micro-batches have different numbers of targets"


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 20])
def test_micro_batches_partition_a_batch(count):
    batch = collate_pairs(random_pairs(7))
    micro_batches = batch.split(count)
    assert len(micro_batches) == min(count, 7)
    sizes = [micro.batch_size for micro in micro_batches]
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([micro.labels for micro in micro_batches]), batch.labels)
    for name, tensor in batch.inputs.items():
        assert torch.equal(torch.cat([micro.inputs[name] for micro in micro_batches]), tensor)
    assert [sample for micro in micro_batches for sample in micro.samples] == batch.samples
    assert sum(micro.target_count for micro in micro_batches) == batch.target_count


# -- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pairs", "masked"])
def test_the_loss_of_a_sample_does_not_depend_on_its_batch(kind):
    model = build_kind(kind, torch.float64)
    random_samples, collate = BATCHES[kind]
    samples, loss = random_samples(12), CrossEntropyLoss(label_smoothing=0.1)

    def total(groups):
        return sum(loss(model, batch.inputs, batch.labels).item() for batch in map(collate, groups))

    alone = total([[sample] for sample in samples])
    assert total([samples]) == pytest.approx(alone, rel=1e-12)
    assert total([samples[::-1]]) == pytest.approx(alone, rel=1e-12)
    assert total([samples[0::5], samples[1::5], samples[2::5], samples[3::5], samples[4::5]]) == pytest.approx(
        alone, rel=1e-12
    )
    length = lambda sample: sum(len(row) for row in sample.values() if isinstance(row, np.ndarray))
    bucketed = sorted(samples, key=length)
    assert total([bucketed[:4], bucketed[4:8], bucketed[8:]]) == pytest.approx(alone, rel=1e-12)


def test_padding_to_a_fixed_length_does_not_change_the_loss():
    model, samples = build_kind("pairs", torch.float64), random_pairs(5)
    plain = collate_seq2seq(samples, SPECIAL, start=1)
    padded = collate_seq2seq(samples, SPECIAL, start=1, pad_to=17)
    assert all(tensor.shape[1] == 17 for tensor in padded[0].values())
    assert CrossEntropyLoss()(model, *padded).item() == pytest.approx(
        CrossEntropyLoss()(model, *plain).item(), rel=1e-12
    )


def test_packed_documents_have_the_loss_of_separate_documents():
    model = build_kind("causal", torch.float64)
    rng = np.random.default_rng(2)
    one, two = rng.integers(4, VOCAB, 5), rng.integers(4, VOCAB, 3)
    packed = {"ids": np.concatenate([one, two]), "documents": np.array([0] * 5 + [1] * 3)}
    together = CrossEntropyLoss()(model, *collate_causal_lm([packed], SPECIAL)).item()
    apart = [CrossEntropyLoss()(model, *collate_causal_lm([{"ids": row}], SPECIAL)).item() for row in (one, two)]
    assert together == pytest.approx(sum(apart), rel=1e-12)


# -- the loss --------------------------------------------------------------------------------------------------------


def test_label_smoothing_is_that_of_torch_and_of_the_paper():
    torch.manual_seed(1)
    logits, labels = torch.randn(3, 5, VOCAB, dtype=torch.float64), torch.randint(0, VOCAB, (3, 5))
    labels[0, 2:] = IGNORE_INDEX
    actual = CrossEntropyLoss(label_smoothing=0.1).from_logits(logits, labels)
    rows, targets = logits[labels != IGNORE_INDEX], labels[labels != IGNORE_INDEX]
    theirs = F.cross_entropy(rows, targets, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(actual, theirs)
    smoothed = 0.9 * F.one_hot(targets, VOCAB) + 0.1 / VOCAB
    torch.testing.assert_close(actual, -(smoothed * rows.log_softmax(-1)).sum())


def test_evaluation_reports_the_loss_without_smoothing_and_balancing():
    assert CrossEntropyLoss(label_smoothing=0.1, balance=0.5, top_k=2).evaluation_loss() == CrossEntropyLoss(top_k=2)


def test_the_loss_of_half_precision_logits_is_computed_in_fp32():
    logits, labels = torch.randn(2, 3, 7), torch.zeros(2, 3, dtype=torch.int64)
    assert CrossEntropyLoss().from_logits(logits.bfloat16(), labels).dtype == torch.float32


def test_a_batch_without_targets_has_loss_zero():
    logits = torch.randn(2, 3, 7)
    assert CrossEntropyLoss().from_logits(logits, torch.full((2, 3), IGNORE_INDEX)) == 0


def test_the_balancing_loss_counts_once_for_every_target():
    config = gpt(vocab=VOCAB, width=21, depth=3, heads=3, context=7, experts=4)
    model, batch = build_model(config, torch.float64), collate_blocks(random_blocks(5))
    routers = RouterTap()
    model(**batch.inputs, tap=routers)
    assert len(routers.router_logits) == 3
    balancing = torch.stack([load_balancing_loss(logits, 2) for logits in routers.router_logits]).mean()
    plain, full = (
        CrossEntropyLoss(balance=balance, top_k=2)(model, batch.inputs, batch.labels) for balance in (0.0, 0.01)
    )
    torch.testing.assert_close(full - plain, 0.01 * balancing.double() * batch.target_count)


def test_the_balancing_loss_trains_the_router_and_not_the_experts():
    config = gpt(vocab=VOCAB, width=21, depth=1, heads=3, context=7, experts=4)
    model, batch = build_model(config), collate_blocks(random_blocks(5))
    with_it, without = (
        CrossEntropyLoss(balance=balance, top_k=2)(model, batch.inputs, batch.labels) for balance in (1.0, 0.0)
    )
    (with_it - without).backward()
    trained = {name for name, weight in model.named_parameters() if weight.grad.abs().max() > 1e-4}
    assert "decoder.0.feedforward.router.weight" in trained
    assert not any(name.startswith(("decoder.0.feedforward.up", "decoder.0.feedforward.down")) for name in trained)


# -- memory ----------------------------------------------------------------------------------------------------------


class LimitedMemoryLoss:
    """A loss that runs out of memory with more than this many rows; counts how often."""

    def __init__(self, loss, rows):
        self.loss, self.rows, self.failures = loss, rows, 0

    def __call__(self, model, inputs, labels):
        if len(labels) > self.rows:
            self.failures += 1
            raise torch.OutOfMemoryError("out of memory")
        return self.loss(model, inputs, labels)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", BATCHES)
def test_running_out_of_memory_halves_the_micro_batch_and_keeps_the_gradient(kind, rows, tmp_path):
    model = build_kind(kind)
    random_samples, collate = BATCHES[kind]
    batch = collate(random_samples(11))
    expected, loss = compute_gradients(model, batch, tmp_path, loss=CrossEntropyLoss())
    trainer = build_trainer(model, tmp_path, loss=LimitedMemoryLoss(CrossEntropyLoss(), rows))
    loss_value, warnings = trainer._compute_gradients(batch, batch.target_count, batch.batch_size)
    flat = torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])
    assert relative_error(flat, expected) < 1e-6
    assert float(loss_value) == pytest.approx(loss, rel=1e-6)
    assert trainer.loss.failures == len(warnings)
    assert all("micro-batches" in warning.text for warning in warnings)
    trainer.optimizers.zero_grad()
    _, warnings = trainer._compute_gradients(batch, batch.target_count, batch.batch_size)
    assert warnings == [], "the smaller size is kept"


def test_running_out_of_memory_within_a_batch_discards_its_first_gradients(tmp_path):
    model, batch = build_kind("causal"), collate_blocks(random_blocks(8))
    expected, _ = compute_gradients(model, batch, tmp_path, accumulate=4, loss=CrossEntropyLoss())
    calls = iter(range(99))

    def third_fails(model, inputs, labels):
        if next(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return CrossEntropyLoss()(model, inputs, labels)

    trainer = build_trainer(model, tmp_path, accumulate=4, loss=third_fails)
    trainer._compute_gradients(batch, batch.target_count, batch.batch_size)
    flat = torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])
    assert relative_error(flat, expected) < 1e-6


def test_a_sequence_too_large_for_memory_is_a_one_line_error(tmp_path):
    trainer = build_trainer(build_kind("causal"), tmp_path, loss=LimitedMemoryLoss(CrossEntropyLoss(), 0))
    batch = collate_blocks(random_blocks(5))
    with pytest.raises(InputError, match="single sequence of 7 tokens") as caught:
        trainer._compute_gradients(batch, batch.target_count, batch.batch_size)
    assert "\n" not in str(caught.value)
