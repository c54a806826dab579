"""Updates that are decided on the device equal those that are decided on the host, bit for bit."""

import math
from types import SimpleNamespace

import pytest
import torch

from monoblock.training.optimizer import build_optimizers
from monoblock.training.trainer import Update, UpdateGuard, Updater
from monoblock.training.weight_averaging import ExponentialMovingAverage

STEPS = 24
SPIKES, NANS = {9, 15}, {4, 16}


def build(can_wait: bool, kind: str = "adamw", ema: float = 0.0) -> tuple[torch.nn.Module, Updater]:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5)
    guard = UpdateGuard(min_good_updates=5, patience=10)
    parts = (model, build_optimizers(model, kind), guard, torch.amp.GradScaler("cpu", enabled=False))
    return model, Updater(*parts, ExponentialMovingAverage(model, ema) if ema else None, can_wait=can_wait)


def run_steps(model: torch.nn.Module, updater: Updater) -> list[tuple[int, float, float, bool]]:
    """Train with a few bad steps; return step, loss, gradient norm and whether the update was rejected."""
    generator = torch.Generator().manual_seed(1)
    finished = []
    for step in range(1, STEPS + 1):
        loss = model(torch.randn(8, 6, generator=generator)).square().mean()
        loss = loss * (1000 if step in SPIKES else math.nan if step in NANS else 1)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update = Update(step, 8 * step, 1e-2, 0.0, SimpleNamespace(), True, loss.detach(), norm)
        updater.run(update)
        finished += updater.read(keep=updater.lag)
    finished += updater.read()
    return [(f.step, f.loss, f.grad_norm, f.reason is not None) for f in finished]


@pytest.mark.parametrize("ema", [0.0, 0.5])  # 0.5 is reached after eight good updates
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_deferred_updates_equal_immediate_ones(kind: str, ema: float) -> None:
    (model, updater), (expected_model, expected_updater) = build(True, kind, ema), build(False, kind, ema)
    assert updater.device_guard is not None
    assert expected_updater.device_guard is None
    steps, expected = run_steps(model, updater), run_steps(expected_model, expected_updater)
    assert [step for step, *_ in steps] == list(range(1, STEPS + 1))
    assert {step for step, *_, rejected in expected if rejected} == SPIKES | NANS
    torch.testing.assert_close(torch.tensor(steps), torch.tensor(expected), rtol=0, atol=0, equal_nan=True)
    for weight, expected_weight in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(weight, expected_weight)
    states = [updater.optimizers.optimizers[0].state, expected_updater.optimizers.optimizers[0].state]
    for state, expected_state in zip(*(s.values() for s in states), strict=True):
        assert state.keys() == expected_state.keys()
        assert all(torch.equal(state[name], expected_state[name]) for name in state if state[name] is not None)
    assert updater.guard.state_dict() == expected_updater.guard.state_dict()
    if updater.average is not None and expected_updater.average is not None:
        tensors, expected_tensors = updater.average.tensors, expected_updater.average.tensors
        assert int(tensors["updates"]) == STEPS - len(SPIKES | NANS)
        assert not torch.equal(tensors["weight"], model.weight)
        assert all(torch.equal(tensors[name], expected_tensors[name]) for name in expected_tensors)


def test_a_deferred_step_is_reported_with_the_next_one() -> None:
    model, updater = build(True)
    reported = []
    for step in (1, 2, 3):
        loss = model(torch.ones(2, 6)).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update = Update(step, step, 1e-2, 0.0, SimpleNamespace(), True, loss.detach(), norm)
        updater.run(update)
        reported.append([finished.step for finished in updater.read(keep=updater.lag)])
    assert reported == [[], [1], [2]]
    updater.discard()
    assert not list(updater.read()), "a discarded step is not reported"


def test_the_device_counts_from_the_guard_again_after_a_rollback() -> None:
    model, updater = build(True)
    run_steps(model, updater)
    updater.guard.load_state_dict({**updater.guard.state_dict(), "mean": 1e-9, "good": 100})
    updater.discard()
    before = model.weight.detach().clone()
    loss = model(torch.ones(2, 6)).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    updater.run(Update(1, 1, 1e-2, 0.0, SimpleNamespace(), True, loss.detach(), norm))
    assert torch.equal(model.weight, before), "far above the mean that was restored"
    assert next(iter(updater.read())).reason is not None


@pytest.mark.parametrize("kind", ["muon", "adamw", "sgd"])
def test_only_optimizers_that_can_leave_out_an_update_are_deferred(kind: str) -> None:
    model = torch.nn.Sequential()
    model.add_module("x", torch.nn.ModuleDict({"feedforward": torch.nn.Linear(4, 4)}))
    optimizers = build_optimizers(model, kind)
    updater = Updater(model, optimizers, UpdateGuard(), torch.amp.GradScaler("cpu", enabled=False), can_wait=True)
    assert (updater.device_guard is not None) == (kind != "muon")


def test_losses_of_several_processes_are_summed_once_for_all_steps_of_a_report() -> None:
    model, updater = build(False)
    sums: list[tuple[float, ...]] = []

    def sum_losses(*losses: float) -> list[float]:
        sums.append(losses)
        return [2 * loss for loss in losses]

    updater.sum_losses = sum_losses
    for step in (1, 2, 3):
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        updater.run(Update(step, step, 1e-2, 0.0, SimpleNamespace(), True, loss.detach(), norm))
        assert not sums, "no exchange in a step that reports nothing"
    reported = list(updater.read())
    assert [update.step for update in reported] == [1, 2, 3]
    assert len(sums) == 1
    assert [update.loss for update in reported] == [2 * loss for loss in sums[0]]
