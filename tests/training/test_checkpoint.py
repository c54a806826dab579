"""Checkpoints: files round-trip, a fault leaves the last good checkpoint, and pruning keeps the right ones."""

import errno
import json
import os
import shutil

import pytest
import torch
from training_support import assert_same_weights, train_to_end, write_recipe

from monoblock.errors import FileError
from monoblock.training import checkpoint
from monoblock.training.checkpoint import Checkpoint
from monoblock.training.events import EvaluationEvent
from monoblock.training.weight_averaging import average_checkpoints


def make_checkpoint(step, value=None):
    """A checkpoint whose tensors depend on the step or the given value."""
    value = step if value is None else value
    tensors = {
        "model": {"a": torch.full((3, 5), float(value)), "b": torch.arange(7) + value},
        "optimizer": {},
        "random": {"torch": torch.get_rng_state()},
    }
    return Checkpoint(step, tensors, {"step": step, "value": value, "third": 1 / 3})


def saved_value(folder):
    """The value of the newest checkpoint, which must be found without problems."""
    path, problems = checkpoint.find_newest(folder)
    assert problems == []
    read = checkpoint.load(path)
    assert read.metadata["value"] == read.tensors["model"]["a"][0, 0]
    return read.metadata["value"]


def file_names(folder):
    return sorted(path.name for path in folder.iterdir())


def fault_points(folder, save):
    """The names of all fault injection points of a save, in order."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "fault_injection_point", seen.append)
        save()
    return seen


def test_a_checkpoint_round_trips(tmp_path):
    written = make_checkpoint(7)
    path = checkpoint.save(tmp_path, written)
    read = checkpoint.load(path)
    assert (read.step, read.metadata) == (7, written.metadata)
    assert read.tensors.keys() == written.tensors.keys()
    for group in written.tensors:
        assert_same_weights(read.tensors[group], written.tensors[group])
    assert (tmp_path / "latest").read_text() == "step-7"
    assert checkpoint.find_problem(path) is None


def test_the_manifest_lists_size_and_hash_of_every_other_file(tmp_path):
    path = checkpoint.save(tmp_path, make_checkpoint(7))
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert sorted([*files, "manifest.json"]) == file_names(path)
    assert all(files[name]["bytes"] == (path / name).stat().st_size for name in files)
    assert all(len(files[name]["sha256"]) == 64 for name in files)


def test_every_write_sync_and_rename_has_a_fault_point(tmp_path):
    seen = fault_points(tmp_path, lambda: checkpoint.save(tmp_path, make_checkpoint(3)))
    first = ["make", "tensors model", "sync model.safetensors", "tensors optimizer", "sync optimizer.safetensors"]
    assert seen[:5] == first
    assert seen[5:] == [
        "tensors random",
        "sync random.safetensors",
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
    for earlier in (1, 2):
        checkpoint.save(good, make_checkpoint(earlier))
    shutil.copytree(good, probe)
    count = len(fault_points(probe, lambda: checkpoint.save(probe, make_checkpoint(step, 9))))
    for fault in range(count):
        folder = tmp_path / f"fault-{fault}"
        shutil.copytree(good, folder)
        calls = iter(range(count))

        def fail(point, calls=calls, fault=fault):
            if next(calls) == fault:
                raise OSError(number, os.strerror(number))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "fault_injection_point", fail)
            with pytest.raises(FileError, match=os.strerror(number)) as caught:
                checkpoint.save(folder, make_checkpoint(step, 9))
        assert "\n" not in str(caught.value)
        assert saved_value(folder) in (2, 9)
        assert not list(folder.glob("*.tmp")) or fault >= count - 3, "partial checkpoints must not fill the disk"
        checkpoint.save(folder, make_checkpoint(8), keep=9)
        assert saved_value(folder) == 8
        assert [name for name in file_names(folder) if name != "step-5"] == ["latest", "step-1", "step-2", "step-8"]


def test_a_fault_in_the_first_save_leaves_no_checkpoint_or_the_new_one(tmp_path):
    count = len(fault_points(tmp_path / "probe", lambda: checkpoint.save(tmp_path / "probe", make_checkpoint(4))))
    for fault in range(count):
        calls = iter(range(count))

        def fail(point, calls=calls, fault=fault):
            if next(calls) == fault:
                raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "fault_injection_point", fail)
            with pytest.raises(FileError, match="No space left"):
                checkpoint.save(tmp_path / f"fault-{fault}", make_checkpoint(4))
        path, problems = checkpoint.find_newest(tmp_path / f"fault-{fault}")
        assert problems == []
        assert path is None or checkpoint.load(path).metadata["value"] == 4


def test_a_folder_that_cannot_be_written_is_a_one_line_error(tmp_path):
    checkpoint.save(tmp_path, make_checkpoint(1))
    (tmp_path / "step-2.tmp").write_text("in the way")
    with pytest.raises(FileError, match="step 2 cannot be written"):
        checkpoint.save(tmp_path, make_checkpoint(2))
    assert saved_value(tmp_path) == 1


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    checkpoint.save(tmp_path, make_checkpoint(4))
    checkpoint.save(tmp_path, make_checkpoint(4, 11))
    assert saved_value(tmp_path) == 11
    assert file_names(tmp_path) == ["latest", "step-4"]


def test_a_checkpoint_moved_aside_is_restored(tmp_path):
    path = checkpoint.save(tmp_path, make_checkpoint(4))
    path.rename(tmp_path / "step-4.stale")
    assert saved_value(tmp_path) == 4


def test_a_finished_checkpoint_is_found_before_it_is_latest(tmp_path):
    checkpoint.save(tmp_path, make_checkpoint(1))
    checkpoint.save(tmp_path, make_checkpoint(2))
    (tmp_path / "latest").write_text("step-1")
    assert saved_value(tmp_path) == 2


def test_an_unfinished_checkpoint_is_ignored(tmp_path):
    checkpoint.save(tmp_path, make_checkpoint(1))
    path = checkpoint.save(tmp_path, make_checkpoint(2))
    path.rename(tmp_path / "step-9.tmp")
    (tmp_path / "latest").write_text("step-1")
    (tmp_path / "step-x").mkdir()
    assert checkpoint.list_steps(tmp_path) == [1]
    assert saved_value(tmp_path) == 1


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path):
    assert checkpoint.find_newest(tmp_path) == (None, [])
    assert checkpoint.find_newest(tmp_path / "nowhere") == (None, [])


# -- pruning ---------------------------------------------------------------------------------------------------------


def test_the_last_checkpoints_and_the_best_are_kept(tmp_path):
    for step in range(1, 8):
        checkpoint.save(tmp_path, make_checkpoint(step), keep=3, best=2)
    assert checkpoint.list_steps(tmp_path) == [2, 5, 6, 7]


def test_unfinished_checkpoints_are_deleted(tmp_path):
    for name in ("step-2.tmp", "step-3.stale"):
        (tmp_path / name).mkdir()
    checkpoint.save(tmp_path, make_checkpoint(3))
    assert file_names(tmp_path) == ["latest", "step-3"]


def test_damaged_later_checkpoints_do_not_displace_good_ones(tmp_path):
    for step in (10, 11, 12):
        checkpoint.save(tmp_path, make_checkpoint(step))
        (tmp_path / f"step-{step}/state.json").unlink()
    for step in (3, 4, 5):
        checkpoint.save(tmp_path, make_checkpoint(step))
    assert [step for step in checkpoint.list_steps(tmp_path) if step < 10] == [3, 4, 5]


def test_a_checkpoint_left_by_an_interruption_is_deleted_after_the_next_save(tmp_path):
    for step in (5, 10, 12, 13, 15):
        checkpoint.save(tmp_path, make_checkpoint(step), keep=2, save_every=5)
        assert step in checkpoint.list_steps(tmp_path)
    assert checkpoint.list_steps(tmp_path) == [10, 15]


def test_the_best_step_survives_a_long_run(tmp_path):
    recipe = write_recipe(tmp_path, {"train": {"steps": 14, "save_every": 2, "eval_every": 2, "keep_checkpoints": 2}})

    def best_at_four(run):
        run.trainer.evaluate = lambda model: {"val_loss": abs(run.trainer.step - 4)}

    run, events = train_to_end(recipe, tmp_path / "run", change=best_at_four)
    assert run.trainer.best == {"step": 4, "loss": 0}
    assert [event.step for event in events if isinstance(event, EvaluationEvent) and event.is_best] == [2, 4]
    assert checkpoint.list_steps(tmp_path / "run/checkpoints") == [4, 12, 14]


# -- averages --------------------------------------------------------------------------------------------------------


def test_the_mean_of_checkpoints_is_taken_in_fp64(tmp_path):
    torch.manual_seed(1)
    models = [{"a": torch.randn(3, 5) * 10**n, "count": torch.tensor(n)} for n in range(5)]
    paths = [checkpoint.save(tmp_path, Checkpoint(n, {"model": model}, {}), keep=9) for n, model in enumerate(models)]
    mean = average_checkpoints(paths)
    assert torch.equal(mean["a"], torch.stack([model["a"] for model in models]).double().mean(0).float())
    assert mean["a"].dtype == torch.float32
    assert mean["count"] == 2


def test_a_damaged_checkpoint_is_never_averaged(tmp_path):
    paths = [checkpoint.save(tmp_path, make_checkpoint(step)) for step in (1, 2)]
    data = bytearray((paths[1] / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (paths[1] / "model.safetensors").write_bytes(bytes(data))
    with pytest.raises(FileError, match=r"step-2.model\.safetensors is damaged"):
        average_checkpoints(paths)
