"""fp16: the loss is scaled, an overflow skips the update and halves the scale, and checkpoints store the scaler."""

import json
import math

import pytest
import torch
from training_support import assert_same_run, clone_weights, start_run, train_to_end, train_until, write_recipe

from monoblock.training import checkpoint
from monoblock.training.events import SkippedUpdateEvent, StepEvent, WarningEvent

HALF = {"train": {"steps": 14, "save_every": 5, "eval_every": 0, "precision": "fp16", "max_skipped_updates": 2}}
SCALE = 2.0**16  # the initial scale of torch


def overflow_at(steps, interval=2000):
    """Make the gradient infinite at these steps; the scale doubles after `interval` good updates in a row."""

    def change(run):
        run.trainer.scaler.set_growth_interval(interval)
        scale = lambda grad: grad * (float("inf") if run.trainer.step in steps else 1.0)
        next(run.model.parameters()).register_hook(scale)

    return change


def expected_scales(bad, steps, interval):
    """The scale after each step: halved by an overflow, doubled after `interval` good updates in a row."""
    scale, good, states = SCALE, 0, []
    for step in range(steps):
        good = 0 if step in bad else good + 1
        scale *= 0.5 if step in bad else 2.0 if good == interval else 1.0
        good %= interval
        states.append((scale, good))
    return states


def test_gradients_are_computed_in_fp16_and_applied_unscaled(tmp_path):
    """Losses are close to fp32, which they would not be with scaled gradients."""
    half = write_recipe(tmp_path / "half", HALF, {"model": {"dropout": 0.0}})
    full = write_recipe(tmp_path / "full", HALF, {"model": {"dropout": 0.0}, "train": {"precision": "fp32"}})
    run, events = train_to_end(half, tmp_path / "half/run")
    _, expected = train_to_end(full, tmp_path / "full/run")
    assert run.trainer.scaler.is_enabled()
    losses, norms = ([getattr(e, key) for e in events if isinstance(e, StepEvent)] for key in ("loss", "grad_norm"))
    assert losses == pytest.approx([e.loss for e in expected if isinstance(e, StepEvent)], rel=5e-3)
    assert norms == pytest.approx([e.grad_norm for e in expected if isinstance(e, StepEvent)], rel=5e-2)
    assert all(tensor.dtype == torch.float32 for tensor in run.model.state_dict().values())


def test_an_overflow_skips_the_update_and_adjusts_the_scale(tmp_path):
    bad = {3, 4, 5, 6, 11}
    run = start_run(write_recipe(tmp_path, HALF), tmp_path / "run")
    overflow_at(bad, interval=4)(run)
    seen, before, skipped = [], clone_weights(run.model), []
    for event in run.events():
        if isinstance(event, StepEvent | SkippedUpdateEvent):
            state = run.trainer.scaler.state_dict()
            seen.append((state["scale"], state["_growth_tracker"]))
            same = all(torch.equal(before[name], tensor) for name, tensor in run.model.state_dict().items())
            assert same is isinstance(event, SkippedUpdateEvent), "an overflow changes no weight"
            before = clone_weights(run.model)
            skipped += [event.step - 1] * isinstance(event, SkippedUpdateEvent)
        assert not isinstance(event, WarningEvent), "overflows cause no rollback: the scale adapts"
    torch.use_deterministic_algorithms(False)
    assert skipped == sorted(bad)
    assert seen == expected_scales(bad, 14, 4)
    assert run.trainer.guard.good == 9


def test_an_overflow_at_a_scale_below_one_is_a_bad_update(tmp_path):
    run = start_run(write_recipe(tmp_path, HALF), tmp_path / "run")
    assert run.trainer.updater.is_fp16_overflow(1.0, math.inf)
    assert not run.trainer.updater.is_fp16_overflow(math.nan, math.nan), "the scale does not change the loss"
    assert not run.trainer.updater.is_fp16_overflow(1.0, 1.0)
    run.trainer.scaler.scale(torch.zeros(()))  # creates the state
    run.trainer.scaler.update(0.5)
    assert not run.trainer.updater.is_fp16_overflow(1.0, math.inf)


def test_a_rejected_update_is_no_overflow_and_keeps_the_scale(tmp_path):
    def change(run):
        run.trainer.guard.rejection_reason = lambda loss, norm: "rejected" if run.trainer.step == 5 else None

    run, _ = train_to_end(write_recipe(tmp_path, HALF), tmp_path / "run", change=change)
    assert run.trainer.scaler.get_scale() == SCALE


def test_a_checkpoint_stores_the_scaler_and_a_run_resumes_with_it(tmp_path):
    recipe, bad = write_recipe(tmp_path, HALF), {2, 3}
    train_to_end(recipe, tmp_path / "uninterrupted", change=overflow_at(bad))
    run = start_run(recipe, tmp_path / "run")
    overflow_at(bad)(run)
    events = run.events()
    for event in events:
        if isinstance(event, StepEvent) and event.step == 7:
            events.close()
            break
    metadata = checkpoint.load(tmp_path / "run/checkpoints/step-5").metadata
    assert (metadata["scaler"]["scale"], metadata["scaler"]["_growth_tracker"]) == (SCALE / 4, 1)
    assert json.loads(json.dumps(metadata["scaler"])) == metadata["scaler"]
    again, _ = train_to_end(recipe, tmp_path / "run", resume=True)
    assert again.trainer.scaler.get_scale() == SCALE / 4
    ends = [checkpoint.load(tmp_path / f"{name}/checkpoints/step-14") for name in ("run", "uninterrupted")]
    assert ends[0].metadata["scaler"] == ends[1].metadata["scaler"]


def test_an_interrupted_and_resumed_run_equals_an_uninterrupted_one(tmp_path):
    recipe = write_recipe(tmp_path, HALF, {"train": {"optimizer": "muon"}})
    train_to_end(recipe, tmp_path / "uninterrupted")
    train_until(recipe, tmp_path / "run", 8)
    train_to_end(recipe, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "uninterrupted", 14)


def test_in_fp32_there_is_no_scaler(tmp_path):
    run = start_run(write_recipe(tmp_path), tmp_path / "run")
    assert not run.trainer.scaler.is_enabled()
    assert run.trainer.checkpoint_state().metadata["scaler"] == {}
