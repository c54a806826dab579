"""A process killed anywhere inside a save leaves the previous checkpoint or the new one, never none."""

import itertools
import os
import shutil
import signal
import warnings

import pytest
from training_support import RECIPE_VARIATIONS, assert_same_run, train_to_end, train_until, write_recipe

from monoblock.training import checkpoint

STEPS = 12
SAVES = {"train": {"steps": STEPS, "save_every": 4, "eval_every": 0, "workers": 0}}


def is_killed_at(number, save):
    """Save in a child process and kill it before the given write, sync or rename; return whether it was killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads: the child takes no lock
        child = os.fork()
    if child == 0:
        calls = itertools.count()

        def kill(point):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        checkpoint.fault_injection_point = kill
        try:
            save()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0, "the child failed on its own"
    return os.WIFSIGNALED(status)


def states_after_kills(folder, good, save):
    """Kill at the first point, the second … until a save completes; yield after each and restore `good`."""
    for number in itertools.count():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        was_killed = is_killed_at(number, save)
        yield number
        if not was_killed:
            assert number > 15, "a save has more fault injection points"
            return


@pytest.mark.parametrize("variation", ["a stream of text", pytest.param("a moving average", marks=pytest.mark.slow)])
def test_a_kill_inside_the_next_save_leaves_a_good_checkpoint_and_the_same_final_run(variation, tmp_path):
    recipe = write_recipe(tmp_path, RECIPE_VARIATIONS[variation], SAVES)
    train_to_end(recipe, tmp_path / "uninterrupted")
    good, out = tmp_path / "good", tmp_path / "run"
    train_until(recipe, good, 5)
    names = []
    for _ in states_after_kills(out, good, lambda: train_until(recipe, out, 9, resume=True)):
        path, problems = checkpoint.find_newest(out / "checkpoints")
        assert problems == []
        names.append(path.name)
        train_to_end(recipe, out, resume=True)
        assert_same_run(out, tmp_path / "uninterrupted", STEPS)
    assert names == sorted(names), "once the new checkpoint is found, it stays"
    assert set(names) == {"step-4", "step-8"}


def test_a_kill_inside_a_second_save_of_the_only_step_leaves_a_checkpoint(tmp_path):
    recipe = write_recipe(tmp_path, SAVES)
    train_to_end(recipe, tmp_path / "uninterrupted")
    good, out = tmp_path / "good", tmp_path / "run"
    train_until(recipe, good, 2, save=True)
    assert checkpoint.list_steps(good / "checkpoints") == [2]

    def stop_at_once(run):
        run.trainer.should_stop = lambda: True

    for number in states_after_kills(out, good, lambda: train_to_end(recipe, out, resume=True, change=stop_at_once)):
        path, problems = checkpoint.find_newest(out / "checkpoints")
        assert (path and path.name, problems) == ("step-2", []), number
    train_to_end(recipe, out, resume=True)
    assert_same_run(out, tmp_path / "uninterrupted", STEPS)


def test_a_kill_inside_the_first_save_leaves_no_checkpoint_or_a_complete_one(tmp_path):
    recipe = write_recipe(tmp_path, SAVES)
    train_until(recipe, tmp_path / "empty", 3)
    names = []
    for _ in states_after_kills(
        tmp_path / "run", tmp_path / "empty", lambda: train_until_first_save(recipe, tmp_path / "run")
    ):
        path, problems = checkpoint.find_newest(tmp_path / "run/checkpoints")
        assert problems == []
        names.append(path is not None)
    assert names == sorted(names)
    assert names[0] is False
    assert names[-1] is True


def train_until_first_save(recipe, out):
    shutil.rmtree(out)
    train_until(recipe, out, 5)


@pytest.mark.slow
def test_kills_inside_saves_that_prune_leave_a_good_checkpoint(tmp_path):
    recipe = write_recipe(tmp_path, SAVES, {"train": {"steps": 60, "save_every": 3, "keep_checkpoints": 1}})
    train_to_end(recipe, tmp_path / "uninterrupted")
    good, out = tmp_path / "good", tmp_path / "run"
    train_until(recipe, good, 41)
    for number in itertools.count():
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(good, out)
        if not is_killed_at(number, lambda: train_until(recipe, out, 58, resume=True)):
            break
        path, problems = checkpoint.find_newest(out / "checkpoints")
        assert problems == []
        assert int(path.name.removeprefix("step-")) >= 39
        train_to_end(recipe, out, resume=True)
        assert_same_run(out, tmp_path / "uninterrupted", 60)
    assert number > 100
