"""Checkpoints: what is written is what is read, faults leave the last good one, and only what may go is dropped."""

import errno
import json
import os
import shutil

import pytest
import torch
from training_support import assert_same_weights, train as trained, write_recipe

from monoblock.errors import FileError
from monoblock.training import averaging, checkpoint
from monoblock.training.checkpoint import State
from monoblock.training.events import Evaluated


def state(step, value=None):
    """Tensors of several kinds; every number depends on the step."""
    value = step if value is None else value
    tensors = {
        "model": {"a": torch.full((3, 5), float(value)), "b": torch.arange(7) + value},
        "optimizer": {},
        "random": {"torch": torch.get_rng_state()},
    }
    return State(step, tensors, {"step": step, "value": value, "third": 1 / 3})


def saved_value(folder):
    """The value of the newest checkpoint, found without a complaint."""
    place, problems = checkpoint.newest(folder)
    assert problems == []
    read = checkpoint.load(place)
    assert read.facts["value"] == read.tensors["model"]["a"][0, 0]
    return read.facts["value"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def points(folder, save):
    """The names of all fault points of a save, in order."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "reached", seen.append)
        save()
    return seen


def test_a_state_is_read_as_it_was_written(tmp_path):
    written = state(7)
    place = checkpoint.save(tmp_path, written)
    read = checkpoint.load(place)
    assert (read.step, read.facts) == (7, written.facts)
    assert read.tensors.keys() == written.tensors.keys()
    for group in written.tensors:
        assert_same_weights(read.tensors[group], written.tensors[group])
    assert (tmp_path / "latest").read_text() == "step-7"
    assert checkpoint.problem_with(place) is None


def test_the_manifest_holds_size_and_hash_of_every_other_file(tmp_path):
    place = checkpoint.save(tmp_path, state(7))
    files = json.loads((place / "manifest.json").read_text())["files"]
    assert sorted([*files, "manifest.json"]) == names(place)
    assert all(files[name]["bytes"] == (place / name).stat().st_size for name in files)
    assert all(len(files[name]["sha256"]) == 64 for name in files)


def test_every_write_sync_and_rename_has_a_fault_point(tmp_path):
    seen = points(tmp_path, lambda: checkpoint.save(tmp_path, state(3)))
    first = ["make", "tensors model", "sync model.safetensors", "tensors optimizer", "sync optimizer.safetensors"]
    assert seen[:5] == first
    assert seen[5:] == [
        "tensors random",
        "sync random.safetensors",
        "facts",
        "write state.json",
        "write manifest.json",
        "sync step-3.tmp",
        "rename",
        f"sync {tmp_path.name}",
        "latest",
        "write latest.tmp",
        "name",
        f"sync {tmp_path.name}",
        "prune",
    ]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the same step again"])
def test_a_fault_at_any_point_is_one_line_and_the_next_save_works(number, again, tmp_path):
    step = 2 if again else 5
    good, probe = tmp_path / "good", tmp_path / "probe"
    for one in (1, 2):
        checkpoint.save(good, state(one))
    shutil.copytree(good, probe)
    count = len(points(probe, lambda: checkpoint.save(probe, state(step, 9))))
    for fault in range(count):
        folder = tmp_path / f"fault-{fault}"
        shutil.copytree(good, folder)
        calls = iter(range(count))

        def reached(point, calls=calls, fault=fault):
            if next(calls) == fault:
                raise OSError(number, os.strerror(number))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "reached", reached)
            with pytest.raises(FileError, match=os.strerror(number)) as caught:
                checkpoint.save(folder, state(step, 9))
        assert "\n" not in str(caught.value)
        assert saved_value(folder) in (2, 9)
        assert not list(folder.glob("*.tmp")) or fault >= count - 3, "half a checkpoint would fill the disk for good"
        checkpoint.save(folder, state(8), keep=9)
        assert saved_value(folder) == 8
        assert [name for name in names(folder) if name != "step-5"] == ["latest", "step-1", "step-2", "step-8"]


def test_without_a_checkpoint_a_fault_leaves_none_or_the_new_one(tmp_path):
    count = len(points(tmp_path / "probe", lambda: checkpoint.save(tmp_path / "probe", state(4))))
    for fault in range(count):
        calls = iter(range(count))

        def reached(point, calls=calls, fault=fault):
            if next(calls) == fault:
                raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "reached", reached)
            with pytest.raises(FileError, match="No space left"):
                checkpoint.save(tmp_path / f"fault-{fault}", state(4))
        place, problems = checkpoint.newest(tmp_path / f"fault-{fault}")
        assert problems == []
        assert place is None or checkpoint.load(place).facts["value"] == 4


def test_a_library_that_cannot_write_tensors_is_one_line(tmp_path):
    checkpoint.save(tmp_path, state(1))
    (tmp_path / "step-2.tmp").write_text("in the way")
    with pytest.raises(FileError, match="step 2 cannot be written"):
        checkpoint.save(tmp_path, state(2))
    assert saved_value(tmp_path) == 1


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    checkpoint.save(tmp_path, state(4))
    checkpoint.save(tmp_path, state(4, 11))
    assert saved_value(tmp_path) == 11
    assert names(tmp_path) == ["latest", "step-4"]


def test_one_that_was_moved_aside_goes_back(tmp_path):
    place = checkpoint.save(tmp_path, state(4))
    place.rename(tmp_path / "step-4.stale")
    assert saved_value(tmp_path) == 4


def test_one_that_is_finished_but_not_yet_latest_is_found(tmp_path):
    checkpoint.save(tmp_path, state(1))
    checkpoint.save(tmp_path, state(2))
    (tmp_path / "latest").write_text("step-1")
    assert saved_value(tmp_path) == 2


def test_an_unfinished_one_never_wins(tmp_path):
    checkpoint.save(tmp_path, state(1))
    place = checkpoint.save(tmp_path, state(2))
    place.rename(tmp_path / "step-9.tmp")
    (tmp_path / "latest").write_text("step-1")
    (tmp_path / "step-x").mkdir()
    assert checkpoint.steps(tmp_path) == [1]
    assert saved_value(tmp_path) == 1


def test_where_nothing_is_nothing_is_found(tmp_path):
    assert checkpoint.newest(tmp_path) == (None, [])
    assert checkpoint.newest(tmp_path / "nowhere") == (None, [])


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_the_last_few_and_the_best_are_kept(tmp_path):
    for step in range(1, 8):
        checkpoint.save(tmp_path, state(step), keep=3, best=2)
    assert checkpoint.steps(tmp_path) == [2, 5, 6, 7]


def test_unfinished_ones_are_cleared_away(tmp_path):
    for name in ("step-2.tmp", "step-3.stale"):
        (tmp_path / name).mkdir()
    checkpoint.save(tmp_path, state(3))
    assert names(tmp_path) == ["latest", "step-3"]


def test_damaged_later_ones_do_not_push_out_good_ones(tmp_path):
    for step in (10, 11, 12):
        checkpoint.save(tmp_path, state(step))
        (tmp_path / f"step-{step}/state.json").unlink()
    for step in (3, 4, 5):
        checkpoint.save(tmp_path, state(step))
    assert [step for step in checkpoint.steps(tmp_path) if step < 10] == [3, 4, 5]


def test_one_left_by_an_interruption_goes_when_the_next_is_safe(tmp_path):
    for step in (5, 10, 12, 13, 15):
        checkpoint.save(tmp_path, state(step), keep=2, every=5)
        assert step in checkpoint.steps(tmp_path)
    assert checkpoint.steps(tmp_path) == [10, 15]


def test_the_best_step_survives_a_long_run(tmp_path):
    recipe = write_recipe(tmp_path, {"train": {"steps": 14, "save_every": 2, "eval_every": 2, "keep": 2}})

    def best_at_four(run):
        run.trainer.evaluate = lambda model: {"val_loss": abs(run.trainer.step - 4)}

    run, events = trained(recipe, tmp_path / "run", change=best_at_four)
    assert run.trainer.best == {"step": 4, "loss": 0}
    assert [event.step for event in events if isinstance(event, Evaluated) and event.best] == [2, 4]
    assert checkpoint.steps(tmp_path / "run/checkpoints") == [4, 12, 14]


# -- averages --------------------------------------------------------------------------------------------------------


def test_the_mean_of_checkpoints_is_taken_in_fp64(tmp_path):
    torch.manual_seed(1)
    made = [{"a": torch.randn(3, 5) * 10**n, "count": torch.tensor(n)} for n in range(5)]
    places = [checkpoint.save(tmp_path, State(n, {"model": one}, {}), keep=9) for n, one in enumerate(made)]
    mean = averaging.mean_of(places)
    assert torch.equal(mean["a"], torch.stack([one["a"] for one in made]).double().mean(0).float())
    assert mean["a"].dtype == torch.float32
    assert mean["count"] == 2


def test_a_damaged_checkpoint_is_never_averaged(tmp_path):
    places = [checkpoint.save(tmp_path, state(step)) for step in (1, 2)]
    data = bytearray((places[1] / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (places[1] / "model.safetensors").write_bytes(bytes(data))
    with pytest.raises(FileError, match=r"step-2.model\.safetensors is damaged"):
        averaging.mean_of(places)
