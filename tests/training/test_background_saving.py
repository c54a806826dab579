"""Checkpoints that a thread writes while training continues: the same files, faults and results as otherwise."""

import errno
import threading

import pytest
import torch
from training_support import assert_same_run, train_to_end, train_until, write_recipe

from monoblock.errors import FileError
from monoblock.parallel.strategy import Strategy
from monoblock.training import checkpoint
from monoblock.training.checkpoint import CheckpointSaver, HostCopies
from monoblock.training.events import CheckpointEvent, StepEvent

SAVES = {"train": {"steps": 12, "save_every": 4, "eval_every": 0, "save_async": True}}
SYNCHRONOUS = {"train": {"save_async": False}}


@pytest.fixture
def slow_disk(monkeypatch):
    """Make every write of a manifest wait until the event is set."""
    may_write = threading.Event()

    def wait(point):
        if point == f"write {checkpoint.MANIFEST_FILE}":
            assert may_write.wait(600)

    monkeypatch.setattr(checkpoint, "fault_injection_point", wait)
    return may_write


def make_state(step, value):
    return checkpoint.Checkpoint(step, {"model": {"weight": value}}, {"best": {}})


def test_the_run_and_its_checkpoints_are_those_of_a_synchronous_run(tmp_path):
    for name, changes in (("synchronous", SYNCHRONOUS), ("background", {})):
        recipe = write_recipe(tmp_path, SAVES, {"train": {"ema": 0.9}}, changes)
        _, events = train_to_end(recipe, tmp_path / name)
        assert [event.step for event in events if isinstance(event, CheckpointEvent)] == [4, 8, 12]
    assert_same_run(tmp_path / "background", tmp_path / "synchronous", 12)
    for step in (4, 8, 12):
        first, second = (
            checkpoint.load(tmp_path / name / f"checkpoints/step-{step}") for name in ("synchronous", "background")
        )
        for group in ("model", "optimizer", "average"):
            tensors = first.tensors[group]
            assert all(torch.equal(tensor, second.tensors[group][name]) for name, tensor in tensors.items()), group


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    recipe = write_recipe(tmp_path, SAVES)
    train_to_end(recipe, tmp_path / "uninterrupted")
    train_until(recipe, tmp_path / "run", 6)
    train_to_end(recipe, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "uninterrupted", 12)


def test_training_continues_while_a_checkpoint_is_written_and_the_next_save_waits(slow_disk, tmp_path):
    steps_before_the_save_ended = []

    def change(run):
        def write(event):
            if isinstance(event, StepEvent) and event.step == 7:
                steps_before_the_save_ended.extend(checkpoint.list_steps(tmp_path / "run/checkpoints"))
                slow_disk.set()

        run.metrics_writer.write = write

    _, events = train_to_end(write_recipe(tmp_path, SAVES), tmp_path / "run", change=change)
    assert steps_before_the_save_ended == [], "step 7 was done before the checkpoint of step 4"
    order = [event.step for event in events if isinstance(event, CheckpointEvent | StepEvent)]
    assert order.index(4) < order.index(7) < len(order)
    assert checkpoint.list_steps(tmp_path / "run/checkpoints") == [4, 8, 12]


def test_what_is_written_is_the_state_at_the_step_of_the_save(slow_disk, tmp_path):
    saver, weight = CheckpointSaver(tmp_path, Strategy(), in_background=True), torch.zeros(3)
    assert list(saver.save(make_state(1, weight))) == []
    weight += 1
    assert list(saver.poll()) == []
    slow_disk.set()
    assert [event.step for event in saver.wait()] == [1]
    assert list(saver.save(make_state(2, weight))) == []
    assert [event.step for event in saver.wait()] == [2]
    values = [checkpoint.load(tmp_path / f"step-{step}").tensors["model"]["weight"].tolist() for step in (1, 2)]
    assert values == [[0, 0, 0], [1, 1, 1]]


def test_a_full_disk_is_one_line_and_earlier_checkpoints_stay(monkeypatch, tmp_path):
    def fail(point):
        if point.startswith("tensors") and (tmp_path / "run/checkpoints/step-4").exists():
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "fault_injection_point", fail)
    recipe = write_recipe(tmp_path, SAVES)
    with pytest.raises(FileError, match=r"step 8 cannot be written .* No space left on device; earlier checkpoints"):
        train_to_end(recipe, tmp_path / "run")
    assert checkpoint.find_newest(tmp_path / "run/checkpoints")[0].name == "step-4"
    assert not list((tmp_path / "run/checkpoints").glob("*.tmp"))
    monkeypatch.undo()
    train_to_end(recipe, tmp_path / "run", resume=True)
    assert checkpoint.list_steps(tmp_path / "run/checkpoints") == [4, 8, 12]


def test_the_thread_completes_its_checkpoint_if_training_fails(slow_disk, tmp_path):
    saver = CheckpointSaver(tmp_path, Strategy(), in_background=True)
    list(saver.save(make_state(1, torch.zeros(3))))
    threading.Timer(0.2, slow_disk.set).start()
    with pytest.raises(KeyError), saver.finish_on_error():
        raise KeyError
    assert checkpoint.find_problem(tmp_path / "step-1") is None


def test_copies_reuse_their_memory():
    copies, weight = HostCopies(), torch.arange(6.0).reshape(2, 3)
    first = copies.copy("x", weight.t())
    assert torch.equal(first, weight.t())
    assert first.is_contiguous()
    assert copies.copy("x", weight.t() + 1).data_ptr() == first.data_ptr()
    assert copies.copy("x", weight).shape == (2, 3)
