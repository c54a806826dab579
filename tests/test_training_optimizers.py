"""Optimizers, Muon's orthogonal updates, averages of weights, and states that come back bit for bit."""

import random

import numpy as np
import pytest
import torch
from support import build, tokens
from torch import nn
from torch.testing import assert_close
from training_support import assert_same_weights, weights

from monoblock.config import RecurrentConfig
from monoblock.errors import ConfigError, FileError
from monoblock.families import bert, gpt, t5
from monoblock.model import Transformer
from monoblock.recurrent import Recurrent
from monoblock.training import checkpoint, optimizer
from monoblock.training.averaging import Average
from monoblock.training.muon import Muon, orthogonalize
from monoblock.training.state import (
    circumstances,
    differing,
    optimizer_tensors,
    random_tensors,
    restore_optimizer,
    restore_random,
)

VOCAB = 29


def small(**knobs):
    torch.manual_seed(2)
    return Transformer(gpt(vocab=VOCAB, width=21, depth=2, heads=3, context=13, **knobs))


def decaying(model, kind="adamw"):
    """The names of all weights that decay, and of those that do not."""
    names = {weight: name for name, weight in model.named_parameters()}
    sides = {True: set(), False: set()}
    for one in optimizer.build(model, kind, weight_decay=0.1).each:
        for group in one.param_groups:
            sides[group["weight_decay"] > 0] |= {names[weight] for weight in group["params"]}
    assert sides[True] | sides[False] == set(names.values())
    assert not sides[True] & sides[False]
    return sides[True], sides[False]


def taken_by_muon(model):
    names = {weight: name for name, weight in model.named_parameters()}
    each = optimizer.build(model, "muon").each
    return {names[w] for one in each if isinstance(one, Muon) for group in one.param_groups for w in group["params"]}


def steps(model, optimizers, count, seed=0, rate=1e-2):
    """So many updates on noise that depends on the seed alone."""
    for number in range(count):
        ids = tokens(3, 13, VOCAB, seed=seed + number)
        optimizers.set_rate(rate)
        optimizers.zero_grad()
        model(ids).logsumexp(-1).sum().backward()
        optimizers.step()


# -- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", optimizer.KINDS)
def test_matrices_decay_and_tables_norms_and_biases_do_not(kind):
    decayed, kept = decaying(small(), kind)
    assert {"decoder.0.attention.query.weight", "decoder.1.feedforward.down.weight"} <= decayed
    assert {"input.token.weight", "input.position.weight", "decoder.norm.weight"} <= kept
    assert not any(name.endswith("bias") or "norm" in name for name in decayed)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_tables_decay_by_a_rate_of_their_own_where_one_is_given(kind):
    model = small()
    names = {weight: name for name, weight in model.named_parameters()}
    each = optimizer.build(model, kind, weight_decay=0.3, table_decay=0.07).each
    rates = {names[w]: group["weight_decay"] for one in each for group in one.param_groups for w in group["params"]}
    assert set(rates) == set(names.values())
    assert rates["input.token.weight"] == rates["input.position.weight"] == 0.07
    assert rates["decoder.0.attention.query.weight"] == 0.3
    assert rates["decoder.norm.weight"] == rates["decoder.0.feedforward.up.bias"] == 0.0


def test_biases_of_experts_have_two_axes_and_are_biases_still():
    model = small(experts=5)
    decayed, kept = decaying(model)
    assert "decoder.0.feedforward.up" in decayed
    assert {"decoder.0.feedforward.up_bias", "decoder.0.feedforward.down_bias"} <= kept
    taken = taken_by_muon(model)
    assert "decoder.0.feedforward.up" in taken
    assert not any("bias" in name or "router" in name for name in taken)


def test_tables_of_other_families_do_not_decay():
    for model in (
        Transformer(bert(vocab=VOCAB, width=21, depth=1, heads=3, context=13)),
        Transformer(t5(vocab=VOCAB, width=21, depth=1, heads=3, hidden=34)),
        Recurrent(RecurrentConfig(kind="language_model", vocab=VOCAB, width=21)),
    ):
        decayed, kept = decaying(model)
        tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
        assert tables
        assert {f"{name}.weight" for name in tables} <= kept
        assert decayed


def test_muon_takes_the_matrices_of_blocks_and_nothing_else():
    names = taken_by_muon(Transformer(t5(vocab=VOCAB, width=21, depth=1, heads=3, hidden=34)))
    parts = {"query", "key", "value", "output", "up", "gate", "down"}
    assert all(name.split(".")[-2] in parts and name.endswith("weight") for name in names)
    assert {name.split(".")[2] for name in names} == {"attention", "cross", "feedforward"}


def test_the_papers_betas_reach_adam():
    (adam,) = optimizer.build(small(), "adam", betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0).each
    assert type(adam) is torch.optim.Adam
    assert all(group["betas"] == (0.9, 0.98) and group["eps"] == 1e-9 for group in adam.param_groups)


def test_one_rate_drives_all_and_a_factor_multiplies_it():
    optimizers = optimizer.build(small(), "muon", adam_factor=0.25)
    optimizers.set_rate(0.02)
    rates = {type(one).__name__: {group["lr"] for group in one.param_groups} for one in optimizers.each}
    assert rates == {"Muon": {0.02}, "AdamW": {0.005}}


def test_a_frozen_weight_is_left_out():
    model = small()
    model.decoder.norm.weight.requires_grad_(False)
    before = weights(model)
    optimizers = optimizer.build(model)
    steps(model, optimizers, 2)
    assert torch.equal(model.decoder.norm.weight, before["decoder.norm.weight"])
    assert not torch.equal(model.decoder.norm.bias, before["decoder.norm.bias"])


def test_an_unknown_optimizer_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'muon'"):
        optimizer.build(small(), "moun")


def test_adamw_updates_are_torchs():
    ours, theirs = small().double(), small().double()
    steps(ours, optimizer.build(ours, weight_decay=0.0), 3)
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for number in range(3):
        plain.zero_grad()
        theirs(tokens(3, 13, VOCAB, seed=number)).logsumexp(-1).sum().backward()
        plain.step()
    for name, weight in theirs.state_dict().items():
        assert_close(ours.state_dict()[name], weight, atol=1e-8, rtol=1e-6)


# -- Muon ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(37, 37), (53, 17), (17, 53), (3, 31, 19), (2, 3, 19, 31), (1, 23)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape):
    torch.manual_seed(4)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


def test_the_size_of_a_matrix_does_not_matter():
    torch.manual_seed(4)
    matrix = torch.randn(13, 29)
    for factor in (1e-4, 1e6):
        assert_close(orthogonalize(factor * matrix), orthogonalize(matrix), atol=2e-3, rtol=0)


def test_orthogonalizing_keeps_the_directions():
    torch.manual_seed(4)
    matrix = torch.randn(13, 29)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    along = torch.einsum("mi,mn,in->i", left, orthogonalize(matrix), right)
    assert float(along.min()) > 0.6


def test_a_zero_matrix_stays_zero():
    assert torch.equal(orthogonalize(torch.zeros(5, 7)), torch.zeros(5, 7))


def test_a_batch_of_matrices_is_each_by_itself():
    torch.manual_seed(4)
    matrices = torch.randn(6, 11, 17)
    assert_close(orthogonalize(matrices), torch.stack([orthogonalize(one) for one in matrices]), atol=1e-5, rtol=1e-5)


def test_a_zero_gradient_leaves_a_weight_alone_but_for_decay():
    weight = nn.Parameter(torch.randn(5, 7))
    before = weight.detach().clone()
    muon = Muon([weight], lr=0.1, weight_decay=0.5)
    weight.grad = torch.zeros_like(weight)
    muon.step()
    assert_close(weight.detach(), before * 0.95)


def test_a_weight_without_a_gradient_is_left_alone():
    used, unused = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(5, 7))
    before = unused.detach().clone()
    muon = Muon([used, unused], lr=0.1)
    used.grad = torch.randn_like(used)
    muon.step()
    assert torch.equal(unused, before)


def test_a_muon_update_is_nesterov_momentum_made_orthogonal():
    torch.manual_seed(4)
    weight = nn.Parameter(torch.randn(11, 17))
    expected, momentum = weight.detach().clone(), torch.zeros(11, 17)
    muon = Muon([weight], lr=0.05, momentum=0.9)
    for _ in range(3):
        gradient = torch.randn(11, 17)
        weight.grad = gradient.clone()
        muon.step()
        momentum = 0.9 * momentum + 0.1 * gradient
        expected -= 0.05 * 0.2 * 17**0.5 * orthogonalize(0.1 * gradient + 0.9 * momentum)
    assert_close(weight.detach(), expected, atol=1e-5, rtol=1e-5)


def test_weights_of_one_shape_are_updated_as_each_would_be():
    torch.manual_seed(4)
    together, apart = ([nn.Parameter(torch.randn(5, 7, generator=seeded(n))) for n in range(3)] for _ in range(2))
    for pair in zip(together, apart, strict=True):
        gradient = torch.randn(5, 7)
        for weight in pair:
            weight.grad = gradient.clone()
    Muon(together, lr=0.1).step()
    for weight in apart:
        Muon([weight], lr=0.1).step()
    for one, other in zip(together, apart, strict=True):
        assert_close(one.detach(), other.detach(), atol=1e-6, rtol=1e-5)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# -- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", optimizer.KINDS)
def test_an_optimizer_restored_from_a_file_goes_on_bit_for_bit(kind, tmp_path):
    model = small()
    optimizers = optimizer.build(model, kind)
    steps(model, optimizers, 3)
    state = checkpoint.State(3, {"model": model.state_dict(), "optimizer": optimizer_tensors(model, optimizers)}, {})
    read = checkpoint.load(checkpoint.save(tmp_path, state)).tensors
    steps(model, optimizers, 3, seed=50)
    other = small()
    fresh = optimizer.build(other, kind)
    other.load_state_dict(read["model"])
    restore_optimizer(other, fresh, read["optimizer"])
    steps(other, fresh, 3, seed=50)
    assert_same_weights(weights(other), weights(model))
    assert_same_weights(optimizer_tensors(other, fresh), optimizer_tensors(model, optimizers))


def test_restoring_forgets_what_the_checkpoint_did_not_know():
    model = small()
    optimizers = optimizer.build(model)
    steps(model, optimizers, 2)
    restore_optimizer(model, optimizers, {})
    assert optimizer_tensors(model, optimizers) == {}


def test_a_state_of_a_weight_the_model_does_not_have_is_one_line():
    model = small()
    with pytest.raises(FileError, match=r"'decoder\.7\.up'"):
        restore_optimizer(model, optimizer.build(model), {"decoder.7.up/exp_avg": torch.zeros(3)})


def test_random_states_come_back_from_a_file(tmp_path):
    random.seed(1)
    random.gauss(0, 1)  # leaves a second number for the next call
    np.random.seed(1)
    np.random.standard_normal()
    torch.manual_seed(1)
    draw = lambda: [random.random(), random.gauss(0, 1), np.random.standard_normal(), np.random.rand(), *torch.rand(3)]
    place = checkpoint.save(tmp_path, checkpoint.State(0, {"random": random_tensors()}, {}))
    wanted = [draw() for _ in range(5)]
    random.seed(2)
    np.random.seed(2)
    torch.manual_seed(2)
    restore_random(checkpoint.load(place).tensors["random"])
    assert [draw() for _ in range(5)] == wanted


def test_other_circumstances_are_said_in_words():
    then = circumstances(torch.device("cpu"), False)
    assert differing(then, then) == []
    assert differing(then | {"torch": "1.0", "threads": 99}, then) == [
        f"torch was 1.0 and is {torch.__version__}",
        f"threads was 99 and is {torch.get_num_threads()}",
    ]


# -- moving averages -------------------------------------------------------------------------------------------------


def test_a_moving_average_has_its_closed_form():
    torch.manual_seed(4)
    model, decay = nn.Linear(3, 5).double(), 0.6
    average = Average(model, decay)
    expected = model.weight.detach().clone()
    for count in range(1, 13):
        with torch.no_grad():
            model.weight.normal_()
        average.update(model)
        trust = min(decay, (1 + count) / (10 + count))
        expected = trust * expected + (1 - trust) * model.weight.detach()
        assert_close(average.tensors["weight"], expected)
    constant = Average(model, decay)
    for _ in range(5):
        constant.update(model)
    assert_close(constant.tensors["weight"], model.weight.detach(), atol=0, rtol=0)


def test_a_moving_average_is_lent_to_the_model_and_given_back():
    model = small()
    average = Average(model, 0.9)
    start = weights(model)
    steps(model, optimizer.build(model), 2)
    own = weights(model)
    with average.in_place(model):
        assert_same_weights(weights(model), start)
    assert_same_weights(weights(model), own)


def test_a_restored_average_goes_on_bit_for_bit():
    model = build(gpt(vocab=VOCAB, width=21, depth=1, heads=3, context=13))
    first, second = Average(model, 0.9), Average(model, 0.9)
    optimizers = optimizer.build(model)
    for _ in range(3):
        steps(model, optimizers, 1)
        first.update(model)
    second.restore({name: tensor.clone() for name, tensor in first.tensors.items()})
    steps(model, optimizers, 1)
    first.update(model)
    second.update(model)
    assert_same_weights(first.tensors, second.tensors)
