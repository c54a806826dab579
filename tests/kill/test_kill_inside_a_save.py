"""A process killed at any fault point inside a save leaves the previous state or the new one, never nothing."""

import itertools
import os
import shutil
import signal
import warnings

import pytest
from training_support import VARIATIONS, assert_same_run, train, train_until, write_recipe

from monoblock.training import checkpoint

STEPS = 12
SAVES = {"train": {"steps": STEPS, "save_every": 4, "eval_every": 0, "workers": 0}}


def dies_at(number, save):
    """Let a child do the work and kill it before the number-th write, sync or rename; True if it died of that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child of a process with threads: it takes no lock
        child = os.fork()
    if child == 0:
        calls = itertools.count()

        def reached(point):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        checkpoint.reached = reached
        try:
            save()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0, "the child failed of itself"
    return os.WIFSIGNALED(status)


def states_after_kills(folder, good, save):
    """Kill at the first point, at the second … until a save gets through; yields after each, and restores `good`."""
    for number in itertools.count():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        died = dies_at(number, save)
        yield number
        if not died:
            assert number > 15, "there are more fault points than that"
            return


@pytest.mark.parametrize("variation", ["a stream of text", pytest.param("a moving average", marks=pytest.mark.slow)])
def test_a_kill_at_any_point_of_the_next_save_leaves_a_good_state_and_the_same_end(variation, tmp_path):
    recipe = write_recipe(tmp_path, VARIATIONS[variation], SAVES)
    train(recipe, tmp_path / "whole")
    good, out = tmp_path / "good", tmp_path / "run"
    train_until(recipe, good, 5)
    found = []
    for _ in states_after_kills(out, good, lambda: train_until(recipe, out, 9, resume=True)):
        place, problems = checkpoint.newest(out / "checkpoints")
        assert problems == []
        found.append(place.name)
        train(recipe, out, resume=True)
        assert_same_run(out, tmp_path / "whole", STEPS)
    assert found == sorted(found), "once the new one is safe, it stays"
    assert set(found) == {"step-4", "step-8"}


def test_a_kill_at_any_point_of_a_second_save_of_the_only_step_never_leaves_nothing(tmp_path):
    recipe = write_recipe(tmp_path, SAVES)
    train(recipe, tmp_path / "whole")
    good, out = tmp_path / "good", tmp_path / "run"
    train_until(recipe, good, 2, saving=True)
    assert checkpoint.steps(good / "checkpoints") == [2]

    def stop_at_once(run):
        run.trainer.stop = lambda: True

    for number in states_after_kills(out, good, lambda: train(recipe, out, resume=True, change=stop_at_once)):
        place, problems = checkpoint.newest(out / "checkpoints")
        assert (place and place.name, problems) == ("step-2", []), number
    train(recipe, out, resume=True)
    assert_same_run(out, tmp_path / "whole", STEPS)


def test_a_kill_at_any_point_of_the_first_save_leaves_nothing_or_the_whole_of_it(tmp_path):
    recipe = write_recipe(tmp_path, SAVES)
    train_until(recipe, tmp_path / "empty", 3)
    found = []
    for _ in states_after_kills(
        tmp_path / "run", tmp_path / "empty", lambda: train_until_first_save(recipe, tmp_path / "run")
    ):
        place, problems = checkpoint.newest(tmp_path / "run/checkpoints")
        assert problems == []
        found.append(place is not None)
    assert found == sorted(found)
    assert found[0] is False
    assert found[-1] is True


def train_until_first_save(recipe, out):
    shutil.rmtree(out)
    train_until(recipe, out, 5)


@pytest.mark.slow
def test_kills_in_later_saves_that_prune_leave_a_good_state(tmp_path):
    recipe = write_recipe(tmp_path, SAVES, {"train": {"steps": 60, "save_every": 3, "keep": 1}})
    train(recipe, tmp_path / "whole")
    good, out = tmp_path / "good", tmp_path / "run"
    train_until(recipe, good, 41)
    for number in itertools.count():
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(good, out)
        if not dies_at(number, lambda: train_until(recipe, out, 58, resume=True)):
            break
        place, problems = checkpoint.newest(out / "checkpoints")
        assert problems == []
        assert int(place.name.removeprefix("step-")) >= 39
        train(recipe, out, resume=True)
        assert_same_run(out, tmp_path / "whole", 60)
    assert number > 100
