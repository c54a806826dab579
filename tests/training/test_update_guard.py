"""The update guard: bad updates are rejected and reported, and too many in a row roll the run back."""

import json
import random

import pytest
import torch
from training_support import (
    assert_same_weights,
    clone_weights,
    read_metrics,
    run_command,
    start_run,
    train_to_end,
    write_recipe,
)

from monoblock.errors import MonoblockError
from monoblock.training import checkpoint
from monoblock.training.events import FinishedEvent, SkippedUpdateEvent, StepEvent, WarningEvent
from monoblock.training.trainer import UpdateGuard


class ScaledLoss:
    """The loss of a run, multiplied by a factor at some steps."""

    def __init__(self, run, factors):
        self.run, self.loss, self.factors = run, run.trainer.loss, factors

    def __call__(self, model, inputs, labels):
        return self.loss(model, inputs, labels) * self.factors.get(self.run.trainer.step, 1.0)

    def evaluation_loss(self):
        return self.loss.evaluation_loss()


def scale_losses(factors):
    def change(run):
        run.trainer.loss = ScaledLoss(run, factors)

    return change


def reject_updates(steps):
    """Make the guard reject the updates of these steps only."""

    def change(run):
        run.trainer.guard.rejection_reason = lambda loss, norm: "rejected" if run.trainer.step - 1 in steps else None

    return change


def test_updates_with_bad_losses_are_never_applied(tmp_path):
    recipe = write_recipe(
        tmp_path, {"train": {"steps": 80, "max_skipped_updates": 9, "save_every": 30, "eval_every": 0}}
    )
    rng = random.Random(5)
    bad = {step: rng.choice([float("nan"), float("inf"), -float("inf")]) for step in rng.sample(range(80), 20)}
    run, events = train_to_end(recipe, tmp_path / "bad", change=scale_losses(bad))
    skipped = [event for event in events if isinstance(event, SkippedUpdateEvent)]
    assert [event.step for event in skipped] == [step + 1 for step in sorted(bad)]
    for event in skipped:
        batch = run.task_data.batch_plan.batch_at(event.step - 1)
        assert (event.epoch, event.samples) == (batch.epoch, batch.indices.tolist())
        assert "loss is" in event.reason
    assert all(tensor.isfinite().all() for tensor in run.model.state_dict().values())
    same, _ = train_to_end(recipe, tmp_path / "rejecting", change=reject_updates(bad))
    assert_same_weights(clone_weights(run.model), clone_weights(same.model))
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert [event.step for event in steps] == [step + 1 for step in range(80) if step not in bad]
    assert all(event.lr == run.trainer.learning_rate(event.step - 1) for event in steps), (
        "the schedule counts skipped steps"
    )


def test_a_skipped_update_is_written_to_the_metrics(tmp_path):
    recipe = write_recipe(tmp_path, {"train": {"steps": 4, "eval_every": 0}})
    run, _ = train_to_end(recipe, tmp_path / "run", change=scale_losses({2: float("nan")}))
    *lines, final = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert final["final"]
    batch = run.task_data.batch_plan.batch_at(2)
    assert lines[2] == {"step": 3, "skipped": "the loss is nan", "epoch": 0, "samples": batch.indices.tolist()}
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[2])


def test_a_gradient_that_is_not_finite_is_rejected_even_if_the_loss_is(tmp_path):
    recipe = write_recipe(tmp_path, {"train": {"steps": 6, "eval_every": 0}})

    def change(run):
        def scale(grad):
            return grad * (float("inf") if run.trainer.step == 3 else 1.0)

        next(run.model.parameters()).register_hook(scale)

    run, events = train_to_end(recipe, tmp_path / "run", change=change)
    (skipped,) = [event for event in events if isinstance(event, SkippedUpdateEvent)]
    assert skipped.step == 4
    assert "gradient" in skipped.reason
    assert all(tensor.isfinite().all() for tensor in run.model.state_dict().values())


def test_a_gradient_spike_is_rejected_after_enough_good_updates(tmp_path):
    recipe = write_recipe(tmp_path, {"train": {"steps": 40, "eval_every": 0}})

    def change(run):
        run.trainer.guard.min_good_updates = 20
        scale_losses({4: 50.0, 30: 50.0, 33: 5.0})(run)

    run, events = train_to_end(recipe, tmp_path / "run", change=change)
    (skipped,) = [event for event in events if isinstance(event, SkippedUpdateEvent)]
    assert skipped.step == 31, "early and small spikes are accepted"
    assert "jumped" in skipped.reason
    assert run.trainer.guard.good == 39


# -- rollbacks -------------------------------------------------------------------------------------------------------

PATIENT = {"train": {"steps": 30, "max_skipped_updates": 3, "save_every": 5, "eval_every": 0}}


def observe(run, events):
    """Pair each event with the weights of the model at that time."""
    return [(event, clone_weights(run.model)) for event in events]


def run_with_rollback(tmp_path, changes, bad):
    recipe = write_recipe(tmp_path, PATIENT, changes)
    run = start_run(recipe, tmp_path / "run")
    scale_losses(bad)(run)
    seen = {}

    def record(event):
        if isinstance(event, WarningEvent):
            seen["weights"] = clone_weights(run.model)
            seen["optimizer"] = {
                name: tensor.clone() for name, tensor in run.trainer.checkpoint_state().tensors["optimizer"].items()
            }
            seen["text"] = event.text
            for step in checkpoint.list_steps(run.trainer.folder):
                seen[f"step-{step}"] = checkpoint.load(run.trainer.folder / f"step-{step}").tensors
        return event

    try:
        events = [record(event) for event in run.events()]
    finally:
        torch.use_deterministic_algorithms(False)
    return run, events, seen


def test_too_many_bad_updates_in_a_row_roll_back_to_the_last_checkpoint(tmp_path):
    run, events, seen = run_with_rollback(tmp_path, {}, dict.fromkeys((11, 12, 13), float("nan")))
    assert "rolled back to step-10" in seen["text"]
    assert_same_weights(seen["weights"], seen["step-10"]["model"])
    assert_same_weights(seen["optimizer"], seen["step-10"]["optimizer"])
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert [event.step for event in steps] == [*range(1, 12), *range(15, 31)], "continues with new data"
    assert all(event.lr == run.trainer.learning_rate(event.step - 1) for event in steps)
    assert run.trainer.step == 30


def test_a_checkpoint_saved_between_bad_updates_is_not_rolled_back_to(tmp_path):
    _, _, seen = run_with_rollback(tmp_path, {}, dict.fromkeys((8, 9, 10), float("nan")))
    assert "step-10" in seen
    assert "rolled back to step-5" in seen["text"]
    assert_same_weights(seen["weights"], seen["step-5"]["model"])


def test_a_run_resumed_after_a_rollback_equals_an_uninterrupted_one(tmp_path):
    recipe = write_recipe(tmp_path, PATIENT)
    bad = dict.fromkeys((11, 12, 13), float("nan"))
    train_to_end(recipe, tmp_path / "uninterrupted", change=scale_losses(bad))
    run = start_run(recipe, tmp_path / "broken")
    scale_losses(bad)(run)
    events = run.events()
    for event in events:
        if isinstance(event, StepEvent) and event.step == 17:
            events.close()
            break
    train_to_end(recipe, tmp_path / "broken", resume=True, change=scale_losses(bad))
    assert read_metrics(tmp_path / "broken") == read_metrics(tmp_path / "uninterrupted")
    ends = [checkpoint.load(tmp_path / f"{name}/checkpoints/step-30") for name in ("broken", "uninterrupted")]
    assert_same_weights(ends[0].tensors["model"], ends[1].tensors["model"])
    assert ends[0].metadata == ends[1].metadata


def test_without_a_checkpoint_to_roll_back_to_the_run_ends_with_a_one_line_error(tmp_path):
    with pytest.raises(
        MonoblockError, match=r"bad updates in a row \(the .*\), but no checkpoint to roll back to"
    ) as caught:
        run_with_rollback(tmp_path, {}, dict.fromkeys((0, 1, 2), float("nan")))
    assert "\n" not in str(caught.value)


# -- the guard itself ------------------------------------------------------------------------------------------------


def test_isolated_bad_updates_cause_no_rollback():
    guard = UpdateGuard(patience=3)
    for _ in range(50):
        assert guard.record_bad_update() is False
        assert guard.record_bad_update() is False
        guard.record_good_update(1.0)
    assert [guard.record_bad_update() for _ in range(3)] == [False, False, True]


def test_with_spike_zero_every_finite_gradient_is_accepted():
    guard = UpdateGuard(spike=0)
    for _ in range(200):
        guard.record_good_update(1.0)
    assert guard.rejection_reason(1.0, 1e9) is None
    assert guard.rejection_reason(float("nan"), 1.0) is not None


@pytest.mark.parametrize(("good", "rejects"), [(99, False), (100, True)])
def test_spikes_are_rejected_after_a_hundred_good_updates(good, rejects):
    guard = UpdateGuard()
    for _ in range(good):
        guard.record_good_update(2.0)
    assert (guard.rejection_reason(1.0, 100.0) is not None) is rejects
    assert guard.rejection_reason(1.0, 19.0) is None


def test_the_mean_gradient_norm_is_plain_at_first_and_exponential_later():
    guard = UpdateGuard()
    for norm in (1.0, 2.0, 6.0):
        guard.record_good_update(norm)
    assert guard.mean == pytest.approx(3.0)
    for _ in range(500):
        guard.record_good_update(5.0)
    assert guard.mean == pytest.approx(5.0, rel=1e-3)


def test_a_guard_is_restored_from_its_state_dict():
    guard, other = UpdateGuard(), UpdateGuard()
    guard.record_good_update(1 / 3)
    guard.record_bad_update()
    other.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert other == guard


# -- exhausted guards ------------------------------------------------------------------------------------------------


def nan_from(first):
    return dict.fromkeys(range(first, 10**4), float("nan"))


@pytest.mark.parametrize("changes", [{}, {"train": {"save_every": 1, "keep_checkpoints": 1, "max_skipped_updates": 4}}])
def test_permanently_bad_losses_end_the_run_and_keep_the_last_good_checkpoint(changes, tmp_path):
    recipe = write_recipe(tmp_path, PATIENT, {"train": {"steps": 500}}, changes)
    run = start_run(recipe, tmp_path / "run")
    scale_losses(nan_from(11))(run)
    events = []
    with pytest.raises(MonoblockError) as caught:
        events.extend(run.events())
    torch.use_deterministic_algorithms(False)
    patience = run.trainer.guard.patience
    last = 11 + 4 * patience
    message = str(caught.value)
    assert run.trainer.step == last, "rolled back three times, and not a fourth"
    batch = run.task_data.batch_plan.batch_at(last - 1)
    assert f"at step {last} the loss is nan (epoch {batch.epoch}, samples {batch.indices[0]}, " in message
    assert "no improvement after 3 rollbacks" in message
    assert "\n" not in message
    assert checkpoint.find_newest(tmp_path / "run/checkpoints")[1] == []
    good = int(message.split("checkpoint is step-")[1].split(";")[0])
    assert checkpoint.find_problem(tmp_path / f"run/checkpoints/step-{good}") is None
    weights = checkpoint.load(tmp_path / f"run/checkpoints/step-{good}").tensors["model"]
    clean = start_run(recipe, tmp_path / "clean")
    weights_at = {
        event.step: clone_weights(clean.model)
        for event in events_until(clean.events(), 11)
        if isinstance(event, StepEvent)
    }
    assert_same_weights(weights, weights_at[11 if "keep_checkpoints" in changes.get("train", {}) else 10])


def test_enough_good_updates_between_rollbacks_are_progress(tmp_path):
    bad = {step: float("nan") for step in range(8, 60) if (step - 8) % 6 < 3}  # three bad, three good, and so on
    recipe = write_recipe(tmp_path, PATIENT, {"train": {"steps": 60}})
    _, events = train_to_end(recipe, tmp_path / "run", change=scale_losses(bad))
    assert sum(isinstance(event, WarningEvent) for event in events) == 9
    assert run_ended(events)


def test_single_good_updates_between_rollbacks_are_no_progress(tmp_path):
    bad = {step: float("nan") for step in range(8, 60) if (step - 8) % 4 < 3}  # three bad, one good
    recipe = write_recipe(tmp_path, PATIENT, {"train": {"steps": 60}})
    with pytest.raises(MonoblockError, match="no improvement after 3 rollbacks"):
        train_to_end(recipe, tmp_path / "run", change=scale_losses(bad))


def test_a_learning_rate_that_breaks_every_update_is_a_one_line_error_and_exit_code_1(tmp_path, capsys):
    recipe = write_recipe(
        tmp_path, PATIENT, {"train": {"lr": 1e30, "warmup": 0, "save_every": 1, "spike_threshold": 0.0}}
    )
    assert run_command("train", recipe, "train.steps=500", "--out", tmp_path / "run") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: no improvement after 3 rollbacks")
    assert "lower train.lr" in error


def events_until(events, step):
    for event in events:
        yield event
        if isinstance(event, StepEvent) and event.step == step:
            events.close()
            torch.use_deterministic_algorithms(False)
            return


def run_ended(events):
    return isinstance(events[-1], FinishedEvent) and not events[-1].interrupted
