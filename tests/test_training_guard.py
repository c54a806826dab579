"""The guard: nothing bad gets into the weights, every refusal is told, and a run that goes bad goes back."""

import json
import random

import pytest
import torch
from training_support import assert_same_weights, command, start, told, train, weights, write_recipe

from monoblock.errors import FileError, MonoblockError
from monoblock.training import checkpoint
from monoblock.training.events import Finished, Skipped, Stepped, Warned
from monoblock.training.guard import Guard


class Poisoned:
    """The loss of a run, spoilt at some steps."""

    def __init__(self, run, bad):
        self.run, self.loss, self.bad = run, run.trainer.loss, bad

    def __call__(self, model, inputs, labels):
        return self.loss(model, inputs, labels) * self.bad.get(self.run.trainer.step, 1.0)

    def plain(self):
        return self.loss.plain()


def poison(bad):
    def change(run):
        run.trainer.loss = Poisoned(run, bad)

    return change


def refuse(steps):
    """A guard that objects at these steps and at no others."""

    def change(run):
        run.trainer.guard.objection = lambda loss, norm: "because" if run.trainer.step in steps else None

    return change


def test_twenty_bad_losses_make_no_bad_update(tmp_path):
    recipe = write_recipe(tmp_path, {"train": {"steps": 80, "patience": 9, "save_every": 30, "eval_every": 0}})
    draw = random.Random(5)
    bad = {step: draw.choice([float("nan"), float("inf"), -float("inf")]) for step in draw.sample(range(80), 20)}
    run, events = train(recipe, tmp_path / "poisoned", change=poison(bad))
    skipped = [event for event in events if isinstance(event, Skipped)]
    assert [event.step for event in skipped] == [step + 1 for step in sorted(bad)]
    for event in skipped:
        batch = run.ground.plan.at(event.step - 1)
        assert (event.epoch, event.samples) == (batch.epoch, batch.samples.tolist())
        assert "loss is" in event.reason
    assert all(tensor.isfinite().all() for tensor in run.model.state_dict().values())
    same, _ = train(recipe, tmp_path / "skipping", change=refuse(bad))
    assert_same_weights(weights(run.model), weights(same.model))
    stepped = [event for event in events if isinstance(event, Stepped)]
    assert [event.step for event in stepped] == [step + 1 for step in range(80) if step not in bad]
    assert all(event.lr == run.trainer.rate(event.step - 1) for event in stepped), "the schedule counts skipped steps"


def test_a_skipped_update_is_a_line_of_the_metrics(tmp_path):
    recipe = write_recipe(tmp_path, {"train": {"steps": 4, "eval_every": 0}})
    run, _ = train(recipe, tmp_path / "run", change=poison({2: float("nan")}))
    lines = told(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    batch = run.ground.plan.at(2)
    assert lines[2] == {"step": 3, "skipped": "the loss is nan", "epoch": 0, "samples": batch.samples.tolist()}
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[2])


def test_a_finite_loss_with_a_gradient_that_is_not_is_refused(tmp_path):
    recipe = write_recipe(tmp_path, {"train": {"steps": 6, "eval_every": 0}})

    def change(run):
        def spoil(grad):
            return grad * (float("inf") if run.trainer.step == 3 else 1.0)

        next(run.model.parameters()).register_hook(spoil)

    run, events = train(recipe, tmp_path / "run", change=change)
    (skipped,) = [event for event in events if isinstance(event, Skipped)]
    assert skipped.step == 4
    assert "gradient" in skipped.reason
    assert all(tensor.isfinite().all() for tensor in run.model.state_dict().values())


def test_a_leap_is_skipped_once_the_run_has_settled(tmp_path):
    recipe = write_recipe(tmp_path, {"train": {"steps": 40, "eval_every": 0}})

    def change(run):
        run.trainer.guard.settled = 20
        poison({4: 50.0, 30: 50.0, 33: 5.0})(run)

    run, events = train(recipe, tmp_path / "run", change=change)
    (skipped,) = [event for event in events if isinstance(event, Skipped)]
    assert skipped.step == 31, "early ones are let through, small ones too"
    assert "leapt" in skipped.reason
    assert run.trainer.guard.good == 39


# -- going back ------------------------------------------------------------------------------------------------------

PATIENT = {"train": {"steps": 30, "patience": 3, "save_every": 5, "eval_every": 0}}


def observed(run, events):
    """Each event with the weights the model has when it is told."""
    return [(event, weights(run.model)) for event in events]


def rolled_back(tmp_path, changes, bad):
    recipe = write_recipe(tmp_path, PATIENT, changes)
    run = start(recipe, tmp_path / "run")
    poison(bad)(run)
    kept = {}

    def keep(event):
        if isinstance(event, Warned):
            kept["weights"] = weights(run.model)
            kept["optimizer"] = {
                name: tensor.clone() for name, tensor in run.trainer.state().tensors["optimizer"].items()
            }
            kept["text"] = event.text
            for step in checkpoint.steps(run.trainer.folder):
                kept[f"step-{step}"] = checkpoint.load(run.trainer.folder / f"step-{step}").tensors
        return event

    try:
        events = [keep(event) for event in run.events()]
    finally:
        torch.use_deterministic_algorithms(False)
    return run, events, kept


def test_too_many_bad_updates_in_a_row_go_back_to_the_last_checkpoint(tmp_path):
    run, events, kept = rolled_back(tmp_path, {}, dict.fromkeys((11, 12, 13), float("nan")))
    assert "back to the weights of step-10" in kept["text"]
    assert_same_weights(kept["weights"], kept["step-10"]["model"])
    assert_same_weights(kept["optimizer"], kept["step-10"]["optimizer"])
    stepped = [event for event in events if isinstance(event, Stepped)]
    assert [event.step for event in stepped] == [*range(1, 12), *range(15, 31)], "on with new data"
    assert all(event.lr == run.trainer.rate(event.step - 1) for event in stepped)
    assert run.trainer.step == 30


def test_a_checkpoint_saved_amid_bad_updates_is_not_what_it_goes_back_to(tmp_path):
    _, _, kept = rolled_back(tmp_path, {}, dict.fromkeys((8, 9, 10), float("nan")))
    assert "step-10" in kept
    assert "back to the weights of step-5" in kept["text"]
    assert_same_weights(kept["weights"], kept["step-5"]["model"])


def test_a_run_that_went_back_resumes_as_if_never_stopped(tmp_path):
    recipe = write_recipe(tmp_path, PATIENT)
    bad = dict.fromkeys((11, 12, 13), float("nan"))
    train(recipe, tmp_path / "whole", change=poison(bad))
    run = start(recipe, tmp_path / "broken")
    poison(bad)(run)
    events = run.events()
    for event in events:
        if isinstance(event, Stepped) and event.step == 17:
            events.close()
            break
    train(recipe, tmp_path / "broken", resume=True, change=poison(bad))
    assert told(tmp_path / "broken") == told(tmp_path / "whole")
    ends = [checkpoint.load(tmp_path / f"{name}/checkpoints/step-30") for name in ("broken", "whole")]
    assert_same_weights(ends[0].tensors["model"], ends[1].tensors["model"])
    assert ends[0].facts == ends[1].facts


def test_without_a_checkpoint_to_go_back_to_one_line_says_so(tmp_path):
    with pytest.raises(FileError, match="no checkpoint to go back to") as caught:
        rolled_back(tmp_path, {}, dict.fromkeys((0, 1, 2), float("nan")))
    assert "\n" not in str(caught.value)


# -- the guard itself ------------------------------------------------------------------------------------------------


def test_bad_updates_apart_from_each_other_never_go_back():
    guard = Guard(patience=3)
    for _ in range(50):
        assert guard.refused() is False
        assert guard.refused() is False
        guard.passed(1.0)
    assert [guard.refused() for _ in range(3)] == [False, False, True]


def test_a_spike_of_zero_lets_every_finite_gradient_through():
    guard = Guard(spike=0)
    for _ in range(200):
        guard.passed(1.0)
    assert guard.objection(1.0, 1e9) is None
    assert guard.objection(float("nan"), 1.0) is not None


@pytest.mark.parametrize(("good", "objects"), [(99, False), (100, True)])
def test_the_guard_settles_after_a_hundred_good_updates(good, objects):
    guard = Guard()
    for _ in range(good):
        guard.passed(2.0)
    assert (guard.objection(1.0, 100.0) is not None) is objects
    assert guard.objection(1.0, 19.0) is None


def test_the_usual_gradient_is_a_plain_mean_at_first_and_a_running_one_later():
    guard = Guard()
    for norm in (1.0, 2.0, 6.0):
        guard.passed(norm)
    assert guard.mean == pytest.approx(3.0)
    for _ in range(500):
        guard.passed(5.0)
    assert guard.mean == pytest.approx(5.0, rel=1e-3)


def test_a_guard_remembers_through_its_facts():
    guard, other = Guard(), Guard()
    guard.passed(1 / 3)
    guard.refused()
    other.restore(json.loads(json.dumps(guard.facts())))
    assert other == guard


# -- a run that cannot be helped -------------------------------------------------------------------------------------


def forever(first):
    return dict.fromkeys(range(first, 10**4), float("nan"))


@pytest.mark.parametrize("changes", [{}, {"train": {"save_every": 1, "keep": 1, "patience": 4}}])
def test_bad_losses_for_ever_end_the_run_and_the_last_good_checkpoint_stays(changes, tmp_path):
    recipe = write_recipe(tmp_path, PATIENT, {"train": {"steps": 500}}, changes)
    run = start(recipe, tmp_path / "run")
    poison(forever(11))(run)
    events = []
    with pytest.raises(MonoblockError) as caught:
        events.extend(run.events())
    torch.use_deterministic_algorithms(False)
    patience = run.trainer.guard.patience
    last = 11 + 4 * patience
    said = str(caught.value)
    assert run.trainer.step == last, "gone back three times, and not a fourth"
    batch = run.ground.plan.at(last - 1)
    assert f"at step {last} the loss is nan (epoch {batch.epoch}, samples {batch.samples[0]}, " in said
    assert "gone back 3 times" in said
    assert "\n" not in said
    assert checkpoint.newest(tmp_path / "run/checkpoints")[1] == []
    good = int(said.split("checkpoint is step-")[1].split(":")[0])
    assert checkpoint.problem_with(tmp_path / f"run/checkpoints/step-{good}") is None
    kept = checkpoint.load(tmp_path / f"run/checkpoints/step-{good}").tensors["model"]
    clean = start(recipe, tmp_path / "clean")
    told_of = {event.step: weights(clean.model) for event in until(clean.events(), 11) if isinstance(event, Stepped)}
    assert_same_weights(kept, told_of[11 if "keep" in changes.get("train", {}) else 10])


def test_good_updates_between_are_progress(tmp_path):
    bad = {step: float("nan") for step in range(8, 60) if (step - 8) % 6 < 3}  # three bad, three good, and so on
    recipe = write_recipe(tmp_path, PATIENT, {"train": {"steps": 60}})
    _, events = train(recipe, tmp_path / "run", change=poison(bad))
    assert sum(isinstance(event, Warned) for event in events) == 9
    assert run_ended(events)


def test_a_good_update_now_and_then_is_none(tmp_path):
    bad = {step: float("nan") for step in range(8, 60) if (step - 8) % 4 < 3}  # three bad, one good
    recipe = write_recipe(tmp_path, PATIENT, {"train": {"steps": 60}})
    with pytest.raises(MonoblockError, match="gone back 3 times and no better"):
        train(recipe, tmp_path / "run", change=poison(bad))


def test_a_rate_that_breaks_every_update_is_one_line_and_exit_1(tmp_path, capsys):
    recipe = write_recipe(tmp_path, PATIENT, {"train": {"lr": 1e30, "warmup": 0, "save_every": 1, "spike": 0.0}})
    assert command("train", recipe, "train.steps=500", "--out", tmp_path / "run") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: gone back 3 times")
    assert "lower train.lr" in error


def until(events, step):
    for event in events:
        yield event
        if isinstance(event, Stepped) and event.step == step:
            events.close()
            torch.use_deterministic_algorithms(False)
            return


def run_ended(events):
    return isinstance(events[-1], Finished) and not events[-1].interrupted
