"""fp16: the loss is scaled, an overflow skips the update and halves the scale, and a checkpoint holds all of it."""

import json
import math

import pytest
import torch
from training_support import assert_same_run, start, train, train_until, weights, write_recipe

from monoblock.training import checkpoint
from monoblock.training.events import Skipped, Stepped, Warned

HALF = {"train": {"steps": 14, "save_every": 5, "eval_every": 0, "precision": "fp16", "patience": 2}}
SCALE = 2.0**16  # where torch's scaler begins


def overflowing(steps, interval=2000):
    """An infinite gradient at these steps; the scale doubles after `interval` good updates in a row."""

    def change(run):
        run.trainer.scaler.set_growth_interval(interval)
        spoil = lambda grad: grad * (float("inf") if run.trainer.step in steps else 1.0)
        next(run.model.parameters()).register_hook(spoil)

    return change


def scales(bad, steps, interval):
    """The scale after each step, by the rule: halved by an overflow, doubled after so many good updates in a row."""
    scale, good, out = SCALE, 0, []
    for step in range(steps):
        good = 0 if step in bad else good + 1
        scale *= 0.5 if step in bad else 2.0 if good == interval else 1.0
        good %= interval
        out.append((scale, good))
    return out


def test_gradients_are_computed_in_fp16_and_applied_unscaled(tmp_path):
    """Close to fp32 after a few updates, which 65,536-fold gradients would not be."""
    half = write_recipe(tmp_path / "half", HALF, {"model": {"dropout": 0.0}})
    full = write_recipe(tmp_path / "full", HALF, {"model": {"dropout": 0.0}, "train": {"precision": "fp32"}})
    ran, events = train(half, tmp_path / "half/run")
    _, wanted = train(full, tmp_path / "full/run")
    assert ran.trainer.scaler.is_enabled()
    losses, norms = ([getattr(e, key) for e in events if isinstance(e, Stepped)] for key in ("loss", "grad_norm"))
    assert losses == pytest.approx([e.loss for e in wanted if isinstance(e, Stepped)], rel=5e-3)
    assert norms == pytest.approx([e.grad_norm for e in wanted if isinstance(e, Stepped)], rel=5e-2)
    assert all(tensor.dtype == torch.float32 for tensor in ran.model.state_dict().values())


def test_an_overflow_is_skipped_told_and_counted_and_the_scale_follows_its_rule(tmp_path):
    bad = {3, 4, 5, 6, 11}
    run = start(write_recipe(tmp_path, HALF), tmp_path / "run")
    overflowing(bad, interval=4)(run)
    seen, before, skipped = [], weights(run.model), []
    for event in run.events():
        if isinstance(event, Stepped | Skipped):
            state = run.trainer.scaler.state_dict()
            seen.append((state["scale"], state["_growth_tracker"]))
            same = all(torch.equal(before[name], tensor) for name, tensor in run.model.state_dict().items())
            assert same is isinstance(event, Skipped), "an overflow changes no weight"
            before = weights(run.model)
            skipped += [event.step - 1] * isinstance(event, Skipped)
        assert not isinstance(event, Warned), "four in a row are no reason to go back: the scale finds its place"
    torch.use_deterministic_algorithms(False)
    assert skipped == sorted(bad)
    assert seen == scales(bad, 14, 4)
    assert run.trainer.guard.good == 9


def test_an_overflow_at_a_scale_that_cannot_be_too_large_is_a_bad_update(tmp_path):
    run = start(write_recipe(tmp_path, HALF), tmp_path / "run")
    assert run.trainer._overflowed(1.0, math.inf)
    assert not run.trainer._overflowed(math.nan, math.nan), "a loss that is none is no matter of scale"
    assert not run.trainer._overflowed(1.0, 1.0)
    run.trainer.scaler.scale(torch.zeros(()))  # it makes its state when first used
    run.trainer.scaler.update(0.5)
    assert not run.trainer._overflowed(1.0, math.inf)


def test_a_leap_is_no_overflow_and_leaves_the_scale(tmp_path):
    def change(run):
        run.trainer.guard.objection = lambda loss, norm: "because" if run.trainer.step == 4 else None

    run, _ = train(write_recipe(tmp_path, HALF), tmp_path / "run", change=change)
    assert run.trainer.scaler.get_scale() == SCALE


def test_a_checkpoint_holds_the_scaler_and_a_run_goes_on_with_it(tmp_path):
    recipe, bad = write_recipe(tmp_path, HALF), {2, 3}
    train(recipe, tmp_path / "whole", change=overflowing(bad))
    run = start(recipe, tmp_path / "run")
    overflowing(bad)(run)
    events = run.events()
    for event in events:
        if isinstance(event, Stepped) and event.step == 7:
            events.close()
            break
    facts = checkpoint.load(tmp_path / "run/checkpoints/step-5").facts
    assert (facts["scaler"]["scale"], facts["scaler"]["_growth_tracker"]) == (SCALE / 4, 1)
    assert json.loads(json.dumps(facts["scaler"])) == facts["scaler"]
    again, _ = train(recipe, tmp_path / "run", resume=True)
    assert again.trainer.scaler.get_scale() == SCALE / 4
    ends = [checkpoint.load(tmp_path / f"{name}/checkpoints/step-14") for name in ("run", "whole")]
    assert ends[0].facts["scaler"] == ends[1].facts["scaler"]


def test_dropped_and_resumed_it_ends_as_never_stopped(tmp_path):
    recipe = write_recipe(tmp_path, HALF, {"train": {"optimizer": "muon"}})
    train(recipe, tmp_path / "whole")
    train_until(recipe, tmp_path / "run", 8)
    train(recipe, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole", 14)


def test_in_fp32_there_is_none(tmp_path):
    run = start(write_recipe(tmp_path), tmp_path / "run")
    assert not run.trainer.scaler.is_enabled()
    assert run.trainer.state().facts["scaler"] == {}
