"""Runs killed with SIGKILL at any moment and resumed equal uninterrupted ones: the same losses, the same weights."""

import random
import shutil
import signal
import time

import pytest
from training_support import (
    RECIPE_VARIATIONS,
    assert_same_run,
    last_logged_step,
    launch_training,
    read_log,
    write_recipe,
)

from monoblock.training import checkpoint

STEPS = 200
LONGER = {"train": {"steps": STEPS, "save_every": 7, "eval_every": 50}}


def kill_once(recipe, out, step, pause):
    """Start or resume a run and kill it soon after a step is logged; return False if it ended before."""
    resume = (out / "checkpoints/latest").exists()
    if not resume:
        shutil.rmtree(out, ignore_errors=True)
    process = launch_training(recipe, out, *["--resume"] * resume)
    while process.poll() is None and last_logged_step(out) < step:
        time.sleep(0.001)
    time.sleep(pause)
    process.send_signal(signal.SIGKILL)
    return process.wait(600) == -signal.SIGKILL


def kill_and_resume(recipe, out, kill_times):
    """Kill a run at each time, then resume it to the end; return how many kills met a running process."""
    kills = 0
    for step, pause in kill_times:
        kills += kill_once(recipe, out, step, pause)
        path, problems = checkpoint.find_newest(out / "checkpoints")
        assert problems == []
        assert path is not None
        assert last_logged_step(out) - checkpoint.load(path).step <= 7, "only steps after the last save are lost"
    process = launch_training(recipe, out, "--resume")
    assert process.wait(300) == 0, read_log(out)
    assert "warning" not in read_log(out)
    return kills


def random_moments(count, seed):
    """Steps to wait for and seconds to wait after them, to hit a step, a save or an evaluation."""
    rng = random.Random(seed)
    steps = sorted(rng.sample(range(9, STEPS - 20), count))
    return [(step, rng.random() * 0.03) for step in steps]


def train_uninterrupted(recipe, out):
    process = launch_training(recipe, out)
    assert process.wait(300) == 0, read_log(out)


def test_a_run_killed_twice_at_random_equals_an_uninterrupted_one(tmp_path):
    recipe = write_recipe(tmp_path, LONGER)
    train_uninterrupted(recipe, tmp_path / "uninterrupted")
    assert kill_and_resume(recipe, tmp_path / "killed", random_moments(2, seed=11)) == 2
    assert_same_run(tmp_path / "killed", tmp_path / "uninterrupted", STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("variation", RECIPE_VARIATIONS.values(), ids=RECIPE_VARIATIONS)
def test_a_run_killed_ten_times_at_random_equals_an_uninterrupted_one(variation, tmp_path):
    recipe = write_recipe(tmp_path, variation, LONGER)
    train_uninterrupted(recipe, tmp_path / "uninterrupted")
    assert kill_and_resume(recipe, tmp_path / "killed", random_moments(10, seed=13)) >= 8
    assert_same_run(tmp_path / "killed", tmp_path / "uninterrupted", STEPS)
