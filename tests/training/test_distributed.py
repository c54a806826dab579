"""Training in two processes equals training in one: the same losses, decisions and files."""

import copy
import json
import os
import signal
import time
from pathlib import Path

import parallel_worker
import pytest
import torch
from processes import run_ranks
from training_support import (
    SEQ2SEQ_RECIPE,
    last_logged_step,
    launch_training,
    list_files,
    read_log,
    read_metrics,
    run_command,
    train_to_end,
    write_recipe,
)

from monoblock.parallel.world import SINGLE_PROCESS, init_distributed
from monoblock.training import checkpoint
from monoblock.training.events import StepEvent

EXACT = {"model": {"dropout": 0.0}}
PACKED = {
    "data": {"corpus": "documents.jsonl", "packing": "documents"}
}  # the processes have different numbers of targets
SHORT = {"train": {"steps": 12, "batch": 7, "save_every": 5, "eval_every": 6, "max_skipped_updates": 2}}
BATCHES_OF_ONE = copy.deepcopy(SEQ2SEQ_RECIPE)
BATCHES_OF_ONE["model"]["dropout"] = 0.0
BATCHES_OF_ONE["train"] |= {"batch": 1, "steps": 6}
del BATCHES_OF_ONE["train"]["batch_tokens"]
RECIPES = {
    "plain": (EXACT, PACKED, SHORT, {"train": {"accumulate": 3}}),
    "alone": (SHORT, BATCHES_OF_ONE),  # the second process has empty batches
    "dropout": (SHORT, {"train": {"workers": 1}}),
    "bad losses": (EXACT, SHORT),
    "only bad losses": (EXACT, SHORT, {"train": {"steps": 60}}),
    "stopped": (EXACT, SHORT),
    "resized": (EXACT, PACKED, SHORT, {"train": {"steps": 14, "save_every": 4}}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder for each recipe, in which two processes have trained, and a file of observations for each process."""
    root = tmp_path_factory.mktemp("parallel")
    for name, changes in RECIPES.items():
        write_recipe(root / name, *changes)
    run_ranks(parallel_worker.main, root, 2)
    return root


@pytest.fixture(scope="module")
def observations(root):
    return [json.loads((root / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def train_alone(root, name, folder):
    """Train the same recipe in this process."""
    _, events = train_to_end(root / name / "recipe.toml", folder)
    return [event for event in events if isinstance(event, StepEvent)]


# -- collectives -----------------------------------------------------------------------------------------------------


def test_numbers_and_tensors_are_the_same_in_both(observations):
    for rank, process in enumerate(observations):
        assert process["collectives"] == {
            "rank": rank,
            "total": [3.0, 1.0],
            "broadcast": 7,
            "gathered": [[0, 4], [1, 4]],
            "parts": [rank, 2],
        }


def test_without_torchrun_there_is_a_single_process(monkeypatch):
    assert init_distributed({}) is init_distributed({"WORLD_SIZE": "4"}) is SINGLE_PROCESS, (
        "WORLD_SIZE alone is not torchrun"
    )
    assert (SINGLE_PROCESS.is_main, SINGLE_PROCESS.all_reduce_sum(3, 0.5), SINGLE_PROCESS.broadcast(4)) == (
        True,
        [3, 0.5],
        4,
    )


# -- the same run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "alone"])
def test_two_processes_have_the_losses_of_one(name, root, observations, tmp_path):
    steps = train_alone(root, name, tmp_path / "run")
    for process in observations:
        assert process[name]["losses"] == pytest.approx([event.loss for event in steps], rel=1e-6)
        assert process[name]["norms"] == pytest.approx([event.grad_norm for event in steps], rel=1e-4)
    assert [line["step"] for line in read_metrics(root / name / "run") if "loss" in line] == [
        event.step for event in steps
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_both_processes_end_with_the_same_weights(name, observations):
    first, second = (process[name] for process in observations)
    keys = ("weights", "losses", "step", "parts", "guard", "skipped", "error")
    assert [first[key] for key in keys] == [second[key] for key in keys]


def test_only_the_main_process_writes(root, observations):
    lines = read_metrics(root / "plain/run")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13)), "every step once"
    assert [line["step"] for line in lines if "val_loss" in line] == [6, 12, 12]
    for step in checkpoint.list_steps(root / "plain/run/checkpoints"):
        assert checkpoint.find_problem(root / f"plain/run/checkpoints/step-{step}") is None
    assert not list((root / "plain/run").rglob("*.tmp"))


# -- events in one of the processes ----------------------------------------------------------------------------------


def test_a_bad_loss_in_one_process_is_skipped_by_both(observations, root, tmp_path):
    run, _ = train_to_end(root / "bad losses/recipe.toml", tmp_path / "run")
    for process in observations:
        assert [line["step"] for line in process["bad losses"]["skipped"]] == [4, 6]
        for line in process["bad losses"]["skipped"]:
            assert line["samples"] == run.task_data.batch_plan.batch_at(line["step"] - 1).indices.tolist()


def test_an_exhausted_guard_ends_both_processes(observations):
    for process in observations:
        assert "no improvement after 3 rollbacks" in process["only bad losses"]["error"]


def test_stopping_one_process_stops_both_after_the_same_step(observations, root):
    assert [process["stopped"]["step"] for process in observations] == [4, 4]
    assert (root / "stopped/run/checkpoints/latest").read_text() == "step-4"


# -- resuming --------------------------------------------------------------------------------------------------------


def test_a_run_resumed_on_as_many_processes_equals_an_uninterrupted_one(observations):
    """With dropout: each process has its own random numbers, and they are restored."""
    for process in observations:
        assert process["resumed"]["weights"] == process["dropout"]["weights"]
        assert process["resumed"]["losses"] == process["dropout"]["losses"][5:]
        assert process["resumed"]["warnings"] == []
    assert observations[0]["random"] != observations[1]["random"]


def train_on_two(recipe, out, *words):
    process = launch_training(recipe, out, *words, "--nproc", "2")
    assert process.wait(600) == 0, read_log(out)


def test_a_run_resumed_on_other_numbers_of_processes_has_the_losses_of_one(root, observations, tmp_path):
    train_to_end(root / "resized/recipe.toml", tmp_path / "uninterrupted")
    folders = (root / "resized/run", tmp_path / "uninterrupted")
    lines, expected = ([line for line in read_metrics(folder) if "loss" in line] for folder in folders)
    for key in ("step", "tokens", "lr"):
        assert [line[key] for line in lines] == [line[key] for line in expected]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], rel=1e-5)
    for process in observations:
        assert process["resized"]["step"] == 14
        assert ["processes was 1 and is 2" in text for text in process["resized"]["warnings"]] == [True]


# -- the command line ------------------------------------------------------------------------------------------------


def one_error(out):
    lines = read_log(out).splitlines()
    assert "Traceback" not in read_log(out)
    assert [line.startswith("error: ") for line in lines].count(True) == 1, lines
    return next(line for line in lines if line.startswith("error: "))


def test_mistakes_are_reported_before_any_process_starts(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    for words, message in [
        (["--resume"], "nothing to resume"),
        (["train.lr=x"], "train.lr='x' is not a number"),
        (["train.device=cpu:0"], "leave out the index"),
    ]:
        assert run_command("train", recipe, *words, "--out", tmp_path / "run", "--nproc", "2") in (1, 2)
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_command_line_starts_the_processes_and_prints_one_result(root, tmp_path):
    out = tmp_path / "run"
    train_on_two(root / "plain/recipe.toml", out, "--json")
    start = read_log(out).index("{")
    result = json.loads(read_log(out)[start : read_log(out).rindex("}") + 1])
    assert (result["folder"], result["steps"]) == (str(out), 12)
    assert read_log(out).count("2 processes") == read_log(out).count("step 12/12") == 1
    assert read_metrics(out) == read_metrics(root / "plain/run"), "as with torchrun"
    logs = [(out / f"logs/rank-{rank}.log").read_text() for rank in (0, 1)]
    assert ["rank 0 of 2" in logs[0], "rank 1 of 2" in logs[1], "step 12/12" in logs[1]] == [True] * 3


@pytest.mark.slow
def test_an_error_of_all_processes_is_one_line(tmp_path):
    recipe = write_recipe(tmp_path)
    process = launch_training(recipe, tmp_path / "run", "data.corpus=nowhere", "--nproc", "2")
    assert process.wait(600) == 1
    assert "nowhere" in one_error(tmp_path / "run")


def start_and_wait(recipe, out, *words):
    process = launch_training(recipe, out, *words, "--nproc", "2")
    while last_logged_step(out) < 20:
        assert process.poll() is None, read_log(out)
        time.sleep(0.01)
    return process


LONG = {"train": {"steps": 400, "save_every": 15, "eval_every": 0}}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("kill", [os.killpg, os.kill], ids=["the terminal", "the parent alone"])
def test_a_signal_saves_in_the_main_process_and_exits_128_plus_its_number(kill, number, code, tmp_path, capsys):
    recipe, out = write_recipe(tmp_path, LONG, {"train": {"steps": 100_000}}), tmp_path / "run"
    process = start_and_wait(recipe, out)
    assert run_command("train", recipe, "--out", out, "--resume") == 1
    assert f"process {_pid(process.pid, 0)} is training in" in capsys.readouterr().err
    kill(process.pid, number)
    assert process.wait(600) == code, read_log(out)
    assert not (out / "run.lock").exists()
    step = last_logged_step(out)
    assert (out / "checkpoints/latest").read_text() == f"step-{step}"
    assert "--nproc 2" in read_log(out)
    assert "Traceback" not in read_log(out)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_run_which_resumes_bit_for_bit(rank, tmp_path):
    recipe, out = write_recipe(tmp_path, LONG, {"train": {"steps": 60}}), tmp_path / "run"
    train_on_two(recipe, tmp_path / "uninterrupted")
    process = start_and_wait(recipe, out)
    os.kill(_pid(process.pid, rank), signal.SIGKILL)
    assert process.wait(600) == 1, read_log(out)
    assert "ended by signal 9" in one_error(out)
    before = list_files(out / "checkpoints")
    time.sleep(1)
    assert list_files(out / "checkpoints") == before, "no process writes any more"
    train_on_two(recipe, out, "--resume")
    assert read_metrics(out) == read_metrics(tmp_path / "uninterrupted")
    ends = [checkpoint.load(folder / "checkpoints/step-60") for folder in (out, tmp_path / "uninterrupted")]
    assert all(
        torch.equal(ends[0].tensors["model"][name], ends[1].tensors["model"][name]) for name in ends[0].tensors["model"]
    )


def _pid(parent, rank):
    """Find the process of a rank by its environment variables."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in children:
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"no rank {rank} among {children}")
