"""Runs killed with SIGKILL at any moment and resumed end as runs never stopped: the same losses, the same weights."""

import random
import shutil
import signal
import time

import pytest
from training_support import VARIATIONS, assert_same_run, launch, said, steps_told, write_recipe

from monoblock.training import checkpoint

STEPS = 200
LONGER = {"train": {"steps": STEPS, "save_every": 7, "eval_every": 50}}


def kill_once(recipe, out, step, pause):
    """Start or go on, and kill soon after a step is told, wherever the process then is; False if it ended first."""
    resume = (out / "checkpoints/latest").exists()
    if not resume:
        shutil.rmtree(out, ignore_errors=True)
    process = launch(recipe, out, *["--resume"] * resume)
    while process.poll() is None and steps_told(out) < step:
        time.sleep(0.001)
    time.sleep(pause)
    process.send_signal(signal.SIGKILL)
    return process.wait(60) == -signal.SIGKILL


def killed_and_resumed(recipe, out, moments):
    """Kill at each of the moments, then go on to the end; how many kills met a living run."""
    kills = 0
    for step, pause in moments:
        kills += kill_once(recipe, out, step, pause)
        place, problems = checkpoint.newest(out / "checkpoints")
        assert problems == []
        assert place is not None
        assert steps_told(out) - checkpoint.load(place).step <= 7, "no more is lost than lies between two saves"
    process = launch(recipe, out, "--resume")
    assert process.wait(300) == 0, said(out)
    assert "warning" not in said(out)
    return kills


def moments(count, seed):
    """Steps to wait for, and fractions of a second to wait on: into a step, a save, an evaluation."""
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(9, STEPS - 20), count))
    return [(step, draw.random() * 0.03) for step in steps]


def never_stopped(recipe, out):
    process = launch(recipe, out)
    assert process.wait(300) == 0, said(out)


def test_a_run_killed_at_three_random_moments_ends_as_one_never_stopped(tmp_path):
    recipe = write_recipe(tmp_path, LONGER)
    never_stopped(recipe, tmp_path / "whole")
    assert killed_and_resumed(recipe, tmp_path / "killed", moments(3, seed=11)) == 3
    assert_same_run(tmp_path / "killed", tmp_path / "whole", STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("variation", VARIATIONS.values(), ids=VARIATIONS)
def test_a_run_killed_at_ten_random_moments_ends_as_one_never_stopped(variation, tmp_path):
    recipe = write_recipe(tmp_path, variation, LONGER)
    never_stopped(recipe, tmp_path / "whole")
    assert killed_and_resumed(recipe, tmp_path / "killed", moments(10, seed=13)) >= 8
    assert_same_run(tmp_path / "killed", tmp_path / "whole", STEPS)
