"""One token-weighted loss: accumulation, padding, bucketing and order never change it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import build

from monoblock.errors import InputError
from monoblock.experts import load_balancing_loss
from monoblock.families import bert, gpt, vaswani
from monoblock.training import objectives, optimizer
from monoblock.training.corruption import IGNORE
from monoblock.training.loop import Plan, Trainer
from monoblock.training.objectives import Loss, Prepared, Routers, Special
from monoblock.training.precision import choose

VOCAB = 29
SPECIAL = Special(pad=0, bos=1, eos=2, mask=3, never_masked=frozenset(range(4)), vocab=VOCAB)


def ids(draw, least, most):
    return draw.integers(4, VOCAB, draw.integers(least, most + 1))


def some_pairs(count, seed=1):
    draw = np.random.default_rng(seed)
    return [{"source": ids(draw, 2, 11), "target": ids(draw, 1, 13)} for _ in range(count)]


def pairs(samples):
    return Prepared(*objectives.pairs(samples, SPECIAL, start=1), 0, list(range(len(samples))))


def some_blocks(count, seed=1):
    draw = np.random.default_rng(seed)
    return [{"ids": draw.integers(4, VOCAB, 8)} for _ in range(count)]


def blocks(samples):
    return Prepared(*objectives.causal(samples, SPECIAL), 0, list(range(len(samples))))


def some_texts(count, seed=1):
    draw = np.random.default_rng(seed)
    return [{"ids": ids(draw, 5, 17), "sample": n} for n in range(count)]


def masked(samples):
    made = objectives.masked(samples, SPECIAL, seed=1, epoch=0)
    return Prepared(*made, 0, [sample["sample"] for sample in samples])


MODELS = {
    "pairs": lambda: vaswani(vocab=VOCAB, width=21, depth=2, heads=3, hidden=34, context=19),
    "causal": lambda: gpt(vocab=VOCAB, width=21, depth=2, heads=3, context=7),
    "masked": lambda: bert(vocab=VOCAB, width=21, depth=2, heads=3, context=19, head="masked_lm"),
}
BATCHES = {"pairs": (some_pairs, pairs), "causal": (some_blocks, blocks), "masked": (some_texts, masked)}


def model_of(kind, dtype=torch.float32):
    return build(MODELS[kind](), dtype)


def trainer(model, tmp_path, *, accumulate=1, loss=None):
    return Trainer(
        model=model,
        optimizers=optimizer.build(model),
        rate=lambda step: 1e-3,
        loss=loss or Loss(label_smoothing=0.1),
        batches=lambda step: iter(()),
        plan=Plan(steps=1, accumulate=accumulate),
        choice=choose("cpu", "fp32", "no"),
        folder=tmp_path,
    )


def gradients(model, batch, tmp_path, *, accumulate=1, loss=None):
    """The gradients of one update, flat, and the loss it tells."""
    one = trainer(model, tmp_path, accumulate=accumulate, loss=loss)
    told, _ = one._gradients(batch, batch.asked, batch.rows)
    flat = torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])
    one.optimizers.zero_grad()
    return flat, told


def relative(actual, expected):
    return float((actual - expected).norm() / expected.norm())


# -- accumulation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("kind", BATCHES)
def test_eight_micro_batches_of_one_have_the_gradient_of_one_of_eight(kind, dtype, limit, tmp_path):
    model = model_of(kind, dtype)
    some, prepared = BATCHES[kind]
    batch = prepared(some(8))
    whole, loss = gradients(model, batch, tmp_path)
    for parts in (8, 3, 2, 11):
        split, told = gradients(model, batch, tmp_path, accumulate=parts)
        assert relative(split, whole) < limit
        assert told == pytest.approx(loss, rel=1e-6)


def test_the_loss_of_a_step_is_the_mean_over_asked_places_not_over_micro_batches(tmp_path):
    model = model_of("pairs", torch.float64)
    batch = pairs(some_pairs(4))
    _, told = gradients(model, batch, tmp_path, accumulate=4, loss=Loss())
    logits = model(**batch.inputs)
    wanted = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE)
    assert told == pytest.approx(wanted.item(), rel=1e-6)
    means = [Loss()(model, one.inputs, one.labels).item() / one.asked for one in batch.split(4)]
    assert sum(means) / 4 != pytest.approx(wanted.item(), rel=1e-3), "the sizes differ, so the two do"


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 8, 20])
def test_micro_batches_partition_a_batch(parts):
    batch = pairs(some_pairs(7))
    micro = batch.split(parts)
    assert len(micro) == min(parts, 7)
    assert max(one.rows for one in micro) - min(one.rows for one in micro) <= 1
    assert torch.equal(torch.cat([one.labels for one in micro]), batch.labels)
    for name, tensor in batch.inputs.items():
        assert torch.equal(torch.cat([one.inputs[name] for one in micro]), tensor)
    assert [sample for one in micro for sample in one.samples] == batch.samples
    assert sum(one.asked for one in micro) == batch.asked


# -- padding and company ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pairs", "masked"])
def test_a_sample_has_the_same_loss_in_any_company(kind):
    model = model_of(kind, torch.float64)
    some, prepared = BATCHES[kind]
    samples, loss = some(12), Loss(label_smoothing=0.1)

    def total(groups):
        return sum(loss(model, one.inputs, one.labels).item() for one in map(prepared, groups))

    alone = total([[sample] for sample in samples])
    assert total([samples]) == pytest.approx(alone, rel=1e-12)
    assert total([samples[::-1]]) == pytest.approx(alone, rel=1e-12)
    assert total([samples[0::5], samples[1::5], samples[2::5], samples[3::5], samples[4::5]]) == pytest.approx(
        alone, rel=1e-12
    )
    length = lambda sample: sum(len(row) for row in sample.values() if isinstance(row, np.ndarray))
    bucketed = sorted(samples, key=length)
    assert total([bucketed[:4], bucketed[4:8], bucketed[8:]]) == pytest.approx(alone, rel=1e-12)


def test_padding_to_a_width_changes_nothing():
    model, samples = model_of("pairs", torch.float64), some_pairs(5)
    plain = objectives.pairs(samples, SPECIAL, start=1)
    wide = objectives.pairs(samples, SPECIAL, start=1, width=17)
    assert all(tensor.shape[1] == 17 for tensor in wide[0].values())
    assert Loss()(model, *wide).item() == pytest.approx(Loss()(model, *plain).item(), rel=1e-12)


def test_packed_documents_have_the_loss_of_documents_apart():
    model = model_of("causal", torch.float64)
    draw = np.random.default_rng(2)
    one, two = draw.integers(4, VOCAB, 5), draw.integers(4, VOCAB, 3)
    packed = {"ids": np.concatenate([one, two]), "documents": np.array([0] * 5 + [1] * 3)}
    together = Loss()(model, *objectives.causal([packed], SPECIAL)).item()
    apart = [Loss()(model, *objectives.causal([{"ids": row}], SPECIAL)).item() for row in (one, two)]
    assert together == pytest.approx(sum(apart), rel=1e-12)


# -- what the loss is ------------------------------------------------------------------------------------------------


def test_label_smoothing_is_torchs_and_the_papers():
    torch.manual_seed(1)
    logits, labels = torch.randn(3, 5, VOCAB, dtype=torch.float64), torch.randint(0, VOCAB, (3, 5))
    labels[0, 2:] = IGNORE
    found = Loss(label_smoothing=0.1).of(logits, labels)
    rows, asked = logits[labels != IGNORE], labels[labels != IGNORE]
    theirs = F.cross_entropy(rows, asked, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(found, theirs)
    wanted = 0.9 * F.one_hot(asked, VOCAB) + 0.1 / VOCAB
    torch.testing.assert_close(found, -(wanted * rows.log_softmax(-1)).sum())


def test_evaluation_reports_the_plain_loss():
    assert Loss(label_smoothing=0.1, balance=0.5, top_k=2).plain() == Loss(top_k=2)


def test_half_precision_logits_are_compared_in_fp32():
    logits, labels = torch.randn(2, 3, 7), torch.zeros(2, 3, dtype=torch.int64)
    assert Loss().of(logits.bfloat16(), labels).dtype == torch.float32


def test_a_batch_that_asks_nothing_has_no_loss():
    logits = torch.randn(2, 3, 7)
    assert Loss().of(logits, torch.full((2, 3), IGNORE)) == 0


def test_the_balance_of_experts_is_counted_once_for_every_asked_place():
    config = gpt(vocab=VOCAB, width=21, depth=3, heads=3, context=7, experts=4)
    model, batch = build(config, torch.float64), blocks(some_blocks(5))
    routers = Routers()
    model(**batch.inputs, tap=routers)
    assert len(routers.logits) == 3
    even = torch.stack([load_balancing_loss(one, 2) for one in routers.logits]).mean()
    plain, full = (Loss(balance=balance, top_k=2)(model, batch.inputs, batch.labels) for balance in (0.0, 0.01))
    torch.testing.assert_close(full - plain, 0.01 * even.double() * batch.asked)


def test_the_balance_of_experts_moves_the_router_and_not_the_experts():
    config = gpt(vocab=VOCAB, width=21, depth=1, heads=3, context=7, experts=4)
    model, batch = build(config), blocks(some_blocks(5))
    with_it, without = (Loss(balance=balance, top_k=2)(model, batch.inputs, batch.labels) for balance in (1.0, 0.0))
    (with_it - without).backward()
    followed = {name for name, weight in model.named_parameters() if weight.grad.abs().max() > 1e-4}
    assert "decoder.0.feedforward.router.weight" in followed
    assert not any(name.startswith(("decoder.0.feedforward.up", "decoder.0.feedforward.down")) for name in followed)


# -- memory ----------------------------------------------------------------------------------------------------------


class Scarce:
    """A loss for which memory suffices for so many rows; counts how often it ran out."""

    def __init__(self, loss, rows):
        self.loss, self.rows, self.failures = loss, rows, 0

    def __call__(self, model, inputs, labels):
        if len(labels) > self.rows:
            self.failures += 1
            raise torch.OutOfMemoryError("out of memory")
        return self.loss(model, inputs, labels)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", BATCHES)
def test_memory_that_runs_out_halves_the_micro_batch_and_keeps_the_gradient(kind, rows, tmp_path):
    model = model_of(kind)
    some, prepared = BATCHES[kind]
    batch = prepared(some(11))
    whole, loss = gradients(model, batch, tmp_path, loss=Loss())
    one = trainer(model, tmp_path, loss=Scarce(Loss(), rows))
    told, warnings = one._gradients(batch, batch.asked, batch.rows)
    flat = torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])
    assert relative(flat, whole) < 1e-6
    assert told == pytest.approx(loss, rel=1e-6)
    assert one.loss.failures == len(warnings)
    assert all("micro-batches" in warning.text for warning in warnings)
    one.optimizers.zero_grad()
    _, warnings = one._gradients(batch, batch.asked, batch.rows)
    assert warnings == [], "it is remembered"


def test_memory_that_runs_out_amid_a_batch_leaves_no_gradient_twice(tmp_path):
    model, batch = model_of("causal"), blocks(some_blocks(8))
    whole, _ = gradients(model, batch, tmp_path, accumulate=4, loss=Loss())
    calls = iter(range(99))

    def third_fails(model, inputs, labels):
        if next(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return Loss()(model, inputs, labels)

    one = trainer(model, tmp_path, accumulate=4, loss=third_fails)
    one._gradients(batch, batch.asked, batch.rows)
    flat = torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])
    assert relative(flat, whole) < 1e-6


def test_a_single_sequence_that_is_too_large_is_one_line(tmp_path):
    one = trainer(model_of("causal"), tmp_path, loss=Scarce(Loss(), 0))
    batch = blocks(some_blocks(5))
    with pytest.raises(InputError, match="single sequence of 7 tokens") as caught:
        one._gradients(batch, batch.asked, batch.rows)
    assert "\n" not in str(caught.value)
