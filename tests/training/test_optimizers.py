"""Optimizers, Muon, weight averages, and states that are restored bit for bit."""

import random
from typing import get_args

import numpy as np
import pytest
import torch
from support import build_model, random_tokens
from torch import nn
from torch.testing import assert_close
from training_support import assert_same_weights, clone_weights

from monoblock.accounting.memory import Optimizer, optimizer_states
from monoblock.baselines.lstm import Recurrent
from monoblock.config.families import bert, gpt, t5
from monoblock.config.model import RecurrentConfig
from monoblock.errors import ConfigError, FileError
from monoblock.model import Transformer
from monoblock.training import checkpoint, optimizer
from monoblock.training.optimizer import Muon, orthogonalize
from monoblock.training.resume_state import (
    describe_differences,
    environment,
    optimizer_tensors,
    restore_optimizer,
    restore_rng,
    rng_tensors,
)
from monoblock.training.weight_averaging import ExponentialMovingAverage

VOCAB = 29


def small_model(**knobs):
    torch.manual_seed(2)
    return Transformer(gpt(vocab=VOCAB, width=21, depth=2, heads=3, context=13, **knobs))


def split_by_decay(model, kind="adamw"):
    """The names of the weights with and without weight decay."""
    names = {weight: name for name, weight in model.named_parameters()}
    by_decay = {True: set(), False: set()}
    for part in optimizer.build_optimizers(model, kind, weight_decay=0.1).optimizers:
        for group in part.param_groups:
            by_decay[group["weight_decay"] > 0] |= {names[weight] for weight in group["params"]}
    assert by_decay[True] | by_decay[False] == set(names.values())
    assert not by_decay[True] & by_decay[False]
    return by_decay[True], by_decay[False]


def muon_weights(model):
    names = {weight: name for name, weight in model.named_parameters()}
    parts = [part for part in optimizer.build_optimizers(model, "muon").optimizers if isinstance(part, Muon)]
    return {names[weight] for part in parts for group in part.param_groups for weight in group["params"]}


def train_steps(model, optimizers, count, seed=0, lr=1e-2):
    """Run `count` updates on random tokens that depend on the seed only."""
    for number in range(count):
        ids = random_tokens(3, 13, VOCAB, seed=seed + number)
        optimizers.set_lr(lr)
        optimizers.zero_grad()
        model(ids).logsumexp(-1).sum().backward()
        optimizers.step()


# -- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", optimizer.OPTIMIZERS)
def test_matrices_decay_and_tables_norms_and_biases_do_not(kind):
    decayed, kept = split_by_decay(small_model(), kind)
    assert {"decoder.0.attention.query.weight", "decoder.1.feedforward.down.weight"} <= decayed
    assert {"input.token.weight", "input.position.weight", "decoder.norm.weight"} <= kept
    assert not any(name.endswith("bias") or "norm" in name for name in decayed)


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_embedding_tables_have_their_own_weight_decay(kind):
    model = small_model()
    names = {weight: name for name, weight in model.named_parameters()}
    parts = optimizer.build_optimizers(model, kind, weight_decay=0.3, table_decay=0.07).optimizers
    rates = {names[w]: group["weight_decay"] for part in parts for group in part.param_groups for w in group["params"]}
    assert set(rates) == set(names.values())
    assert rates["input.token.weight"] == rates["input.position.weight"] == 0.07
    assert rates["decoder.0.attention.query.weight"] == 0.3
    assert rates["decoder.norm.weight"] == rates["decoder.0.feedforward.up.bias"] == 0.0


def test_two_dimensional_biases_of_experts_do_not_decay():
    model = small_model(experts=5)
    decayed, kept = split_by_decay(model)
    assert "decoder.0.feedforward.up" in decayed
    assert {"decoder.0.feedforward.up_bias", "decoder.0.feedforward.down_bias"} <= kept
    names = muon_weights(model)
    assert "decoder.0.feedforward.up" in names
    assert not any("bias" in name or "router" in name for name in names)


def test_tables_of_other_families_do_not_decay():
    for model in (
        Transformer(bert(vocab=VOCAB, width=21, depth=1, heads=3, context=13)),
        Transformer(t5(vocab=VOCAB, width=21, depth=1, heads=3, hidden=34)),
        Recurrent(RecurrentConfig(kind="language_model", vocab=VOCAB, width=21)),
    ):
        decayed, kept = split_by_decay(model)
        tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
        assert tables
        assert {f"{name}.weight" for name in tables} <= kept
        assert decayed


def test_muon_updates_only_the_matrices_of_blocks():
    names = muon_weights(Transformer(t5(vocab=VOCAB, width=21, depth=1, heads=3, hidden=34)))
    parts = {"query", "key", "value", "output", "up", "gate", "down"}
    assert all(name.split(".")[-2] in parts and name.endswith("weight") for name in names)
    assert {name.split(".")[2] for name in names} == {"attention", "cross", "feedforward"}


def test_betas_and_eps_are_passed_to_adam():
    (adam,) = optimizer.build_optimizers(
        small_model(), "adam", betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0
    ).optimizers
    assert type(adam) is torch.optim.Adam
    assert all(group["betas"] == (0.9, 0.98) and group["eps"] == 1e-9 for group in adam.param_groups)


def test_one_learning_rate_sets_all_groups_times_their_factor():
    optimizers = optimizer.build_optimizers(small_model(), "muon", adam_factor=0.25)
    optimizers.set_lr(0.02)
    rates = {type(part).__name__: {group["lr"] for group in part.param_groups} for part in optimizers.optimizers}
    assert rates == {"Muon": {0.02}, "AdamW": {0.005}}


def test_a_frozen_weight_is_not_updated():
    model = small_model()
    model.decoder.norm.weight.requires_grad_(False)
    before = clone_weights(model)
    optimizers = optimizer.build_optimizers(model)
    train_steps(model, optimizers, 2)
    assert torch.equal(model.decoder.norm.weight, before["decoder.norm.weight"])
    assert not torch.equal(model.decoder.norm.bias, before["decoder.norm.bias"])


def test_an_unknown_optimizer_is_an_error_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'muon'"):
        optimizer.build_optimizers(small_model(), "moun")


def test_adamw_updates_are_those_of_torch():
    ours, theirs = small_model().double(), small_model().double()
    train_steps(ours, optimizer.build_optimizers(ours, weight_decay=0.0), 3)
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for number in range(3):
        plain.zero_grad()
        theirs(random_tokens(3, 13, VOCAB, seed=number)).logsumexp(-1).sum().backward()
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


def test_orthogonalizing_ignores_the_scale_of_a_matrix():
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


def test_matrices_of_a_batch_are_orthogonalized_independently():
    torch.manual_seed(4)
    matrices = torch.randn(6, 11, 17)
    assert_close(
        orthogonalize(matrices), torch.stack([orthogonalize(matrix) for matrix in matrices]), atol=1e-5, rtol=1e-5
    )


def test_a_zero_gradient_applies_weight_decay_only():
    weight = nn.Parameter(torch.randn(5, 7))
    before = weight.detach().clone()
    muon = Muon([weight], lr=0.1, weight_decay=0.5)
    weight.grad = torch.zeros_like(weight)
    muon.step()
    assert_close(weight.detach(), before * 0.95)


def test_a_weight_without_a_gradient_is_unchanged():
    used, unused = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(5, 7))
    before = unused.detach().clone()
    muon = Muon([used, unused], lr=0.1)
    used.grad = torch.randn_like(used)
    muon.step()
    assert torch.equal(unused, before)


def test_a_muon_update_is_orthogonalized_nesterov_momentum():
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


def test_weights_updated_as_a_batch_equal_weights_updated_alone():
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


def test_every_optimizer_of_recipes_has_a_builder_and_an_account_of_its_states():
    assert list(get_args(Optimizer)) == sorted(optimizer.OPTIMIZERS)
    for kind in optimizer.OPTIMIZERS:
        model = small_model()
        optimizers = optimizer.build_optimizers(model, kind)
        train_steps(model, optimizers, 1)
        states = sum(tensor.numel() for tensor in optimizer_tensors(model, optimizers).values() if tensor.dim())
        weights = dict(model.named_parameters())
        matrices = sum(weight.numel() for name, weight in weights.items() if optimizer.is_block_matrix(name, weight))
        expected = optimizer_states(kind, sum(weight.numel() for weight in weights.values()), matrices)
        assert states == expected, kind


@pytest.mark.parametrize("kind", optimizer.OPTIMIZERS)
def test_an_optimizer_restored_from_a_file_continues_bit_for_bit(kind, tmp_path):
    model = small_model()
    optimizers = optimizer.build_optimizers(model, kind)
    train_steps(model, optimizers, 3)
    state = checkpoint.Checkpoint(
        3, {"model": model.state_dict(), "optimizer": optimizer_tensors(model, optimizers)}, {}
    )
    read = checkpoint.load(checkpoint.save(tmp_path, state)).tensors
    train_steps(model, optimizers, 3, seed=50)
    other = small_model()
    fresh = optimizer.build_optimizers(other, kind)
    other.load_state_dict(read["model"])
    restore_optimizer(other, fresh, read["optimizer"])
    train_steps(other, fresh, 3, seed=50)
    assert_same_weights(clone_weights(other), clone_weights(model))
    assert_same_weights(optimizer_tensors(other, fresh), optimizer_tensors(model, optimizers))


def test_restoring_clears_states_missing_in_the_checkpoint():
    model = small_model()
    optimizers = optimizer.build_optimizers(model)
    train_steps(model, optimizers, 2)
    restore_optimizer(model, optimizers, {})
    assert optimizer_tensors(model, optimizers) == {}


def test_a_state_of_an_unknown_weight_is_a_one_line_error():
    model = small_model()
    with pytest.raises(FileError, match=r"'decoder\.7\.up'"):
        restore_optimizer(model, optimizer.build_optimizers(model), {"decoder.7.up/exp_avg": torch.zeros(3)})


def test_random_states_are_restored_from_a_file(tmp_path):
    random.seed(1)
    random.gauss(0, 1)  # leaves a second number for the next call
    np.random.seed(1)
    np.random.standard_normal()
    torch.manual_seed(1)
    draw = lambda: [random.random(), random.gauss(0, 1), np.random.standard_normal(), np.random.rand(), *torch.rand(3)]
    path = checkpoint.save(tmp_path, checkpoint.Checkpoint(0, {"random": rng_tensors()}, {}))
    expected = [draw() for _ in range(5)]
    random.seed(2)
    np.random.seed(2)
    torch.manual_seed(2)
    restore_rng(checkpoint.load(path).tensors["random"])
    assert [draw() for _ in range(5)] == expected


def test_differences_of_the_environment_are_described():
    saved = environment(torch.device("cpu"), False)
    assert describe_differences(saved, saved) == []
    assert describe_differences(saved | {"torch": "1.0", "threads": 99}, saved) == [
        f"torch was 1.0 and is {torch.__version__}",
        f"threads was 99 and is {torch.get_num_threads()}",
    ]


# -- moving averages -------------------------------------------------------------------------------------------------


def test_a_moving_average_follows_its_formula():
    torch.manual_seed(4)
    model, decay = nn.Linear(3, 5).double(), 0.6
    average = ExponentialMovingAverage(model, decay)
    expected = model.weight.detach().clone()
    for count in range(1, 13):
        with torch.no_grad():
            model.weight.normal_()
        average.update(model)
        current = min(decay, (1 + count) / (10 + count))
        expected = current * expected + (1 - current) * model.weight.detach()
        assert_close(average.tensors["weight"], expected)
    constant = ExponentialMovingAverage(model, decay)
    for _ in range(5):
        constant.update(model)
    assert_close(constant.tensors["weight"], model.weight.detach(), atol=0, rtol=0)


def test_averaged_weights_are_swapped_into_the_model_and_out_again():
    model = small_model()
    average = ExponentialMovingAverage(model, 0.9)
    start = clone_weights(model)
    train_steps(model, optimizer.build_optimizers(model), 2)
    trained = clone_weights(model)
    with average.average_parameters(model):
        assert_same_weights(clone_weights(model), start)
    assert_same_weights(clone_weights(model), trained)


def test_a_restored_average_continues_bit_for_bit():
    model = build_model(gpt(vocab=VOCAB, width=21, depth=1, heads=3, context=13))
    first, second = ExponentialMovingAverage(model, 0.9), ExponentialMovingAverage(model, 0.9)
    optimizers = optimizer.build_optimizers(model)
    for _ in range(3):
        train_steps(model, optimizers, 1)
        first.update(model)
    for name, tensor in ({name: tensor.clone() for name, tensor in first.tensors.items()}).items():
        second.tensors[name].copy_(tensor)
    train_steps(model, optimizers, 1)
    first.update(model)
    second.update(model)
    assert_same_weights(first.tensors, second.tensors)


def test_sgd_follows_the_gradient_and_decays_matrices():
    model = nn.Linear(3, 2)
    model.weight.grad, model.bias.grad = torch.randn(2, 3), torch.randn(2)
    expected = model.weight - 0.5 * (model.weight.grad + 0.1 * model.weight), model.bias - 0.5 * model.bias.grad
    optimizers = optimizer.build_optimizers(model, "sgd", weight_decay=0.1)
    optimizers.set_lr(0.5)
    optimizers.step()
    assert_close((model.weight, model.bias), expected)
