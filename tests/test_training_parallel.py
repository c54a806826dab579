"""Two processes train as one: the same losses, one writer, one decision, whatever happens to one of them."""

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from training_support import PAIRS, command, launch, listing, said, steps_told, told, train, write_recipe

import monoblock
from monoblock.training import checkpoint
from monoblock.training.events import Stepped
from monoblock.training.parallel import ALONE, join

EXACT = {"model": {"dropout": 0.0}}
PACKED = {"data": {"corpus": "documents.jsonl", "packing": "documents"}}  # the parts ask for unequally many tokens
SHORT = {"train": {"steps": 12, "batch": 7, "save_every": 5, "eval_every": 6, "patience": 2}}
ONE_BY_ONE = copy.deepcopy(PAIRS)
ONE_BY_ONE["model"]["dropout"] = 0.0
ONE_BY_ONE["train"] |= {"batch": 1, "steps": 6}
del ONE_BY_ONE["train"]["tokens"]
RECIPES = {
    "plain": (EXACT, PACKED, SHORT, {"train": {"accumulate": 3}}),
    "alone": (SHORT, ONE_BY_ONE),  # the second process has nothing to read
    "dropout": (SHORT, {"train": {"workers": 1}}),
    "poisoned": (EXACT, SHORT),
    "lost": (EXACT, SHORT, {"train": {"steps": 60}}),
    "full": (EXACT, SHORT),
    "stopped": (EXACT, SHORT),
    "moved": (EXACT, PACKED, SHORT, {"train": {"steps": 14, "save_every": 4}}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder a recipe, where two processes have trained; each left a file that says what it saw."""
    place = tmp_path_factory.mktemp("parallel")
    for name, changes in RECIPES.items():
        write_recipe(place / name, *changes)
    source, here = str(Path(monoblock.__file__).parent.parent), Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    script = ["--nproc-per-node=2", str(here / "parallel_worker.py"), str(place)]
    done = subprocess.run([*torchrun, *script], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture(scope="module")
def seen(place):
    return [json.loads((place / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def alone(place, name, folder):
    """The same recipe in this process alone."""
    _, events = train(place / name / "recipe.toml", folder)
    return [event for event in events if isinstance(event, Stepped)]


# -- what they say to one another ------------------------------------------------------------------------------------


def test_numbers_tensors_and_gradients_are_the_same_in_both(seen):
    for rank, one in enumerate(seen):
        assert one["words"] == {
            "rank": rank,
            "total": [3.0, 1.0],
            "told": 7,
            "gathered": [[0, 4], [1, 4]],
            "gradients": [[5.0] * 3, [5.0] * 3, None],
        }


def test_without_torchrun_a_process_is_alone(monkeypatch):
    assert join({}) is join({"WORLD_SIZE": "4"}) is ALONE, "a number of nodes is no torchrun"
    assert (ALONE.leads, ALONE.total(3, 0.5), ALONE.told(4)) == (True, [3, 0.5], 4)


# -- the same run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "alone", "full"])
def test_two_processes_tell_the_losses_of_one(name, place, seen, tmp_path):
    steps = alone(place, name, tmp_path / "run")
    for one in seen:
        assert one[name]["losses"] == pytest.approx([event.loss for event in steps], rel=1e-6)
        assert one[name]["norms"] == pytest.approx([event.grad_norm for event in steps], rel=1e-4)
    assert [line["step"] for line in told(place / name / "run") if "loss" in line] == [event.step for event in steps]


@pytest.mark.parametrize("name", RECIPES)
def test_both_hold_the_same_weights_in_the_end(name, seen):
    first, second = (one[name] for one in seen)
    keys = ("weights", "losses", "step", "parts", "guard", "skipped", "error")
    assert [first[key] for key in keys] == [second[key] for key in keys]


def test_only_the_leader_writes(place, seen):
    lines = told(place / "plain/run")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13)), "every step once"
    assert [line["step"] for line in lines if "val_loss" in line] == [6, 12]
    for step in checkpoint.steps(place / "plain/run/checkpoints"):
        assert checkpoint.problem_with(place / f"plain/run/checkpoints/step-{step}") is None
    assert not list((place / "plain/run").rglob("*.tmp"))


# -- one of the two --------------------------------------------------------------------------------------------------


def test_a_bad_loss_in_one_is_skipped_by_both_and_names_the_whole_batch(seen, place, tmp_path):
    run, _ = train(place / "poisoned/recipe.toml", tmp_path / "run")
    for one in seen:
        assert [line["step"] for line in one["poisoned"]["skipped"]] == [4, 6]
        for line in one["poisoned"]["skipped"]:
            assert line["samples"] == run.ground.plan.at(line["step"] - 1).samples.tolist()


def test_a_run_that_cannot_go_on_ends_in_both(seen):
    for one in seen:
        assert "gone back 3 times and no better" in one["lost"]["error"]


def test_memory_that_runs_out_in_one_halves_the_parts_of_both(seen):
    for one in seen:
        assert one["full"]["parts"] == 2
        assert ["memory ran out" in text for text in one["full"]["warned"]] == [True]


def test_one_that_is_asked_to_stop_stops_both_after_the_same_step(seen, place):
    assert [one["stopped"]["step"] for one in seen] == [4, 4]
    assert (place / "stopped/run/checkpoints/latest").read_text() == "step-4"


# -- going on --------------------------------------------------------------------------------------------------------


def test_resumed_on_as_many_processes_it_ends_bit_for_bit_as_never_stopped(seen):
    """With dropout: each process has random numbers of its own, and gets them back."""
    for one in seen:
        assert one["resumed"]["weights"] == one["dropout"]["weights"]
        assert one["resumed"]["losses"] == one["dropout"]["losses"][5:]
        assert one["resumed"]["warned"] == []
    assert seen[0]["drawn"] != seen[1]["drawn"]


def on_two(recipe, out, *words):
    process = launch(recipe, out, *words, "--nproc", "2")
    assert process.wait(120) == 0, said(out)


def test_from_two_to_one_to_two_processes_it_stays_the_run_of_one(place, seen, tmp_path):
    train(place / "moved/recipe.toml", tmp_path / "whole")
    lines, whole = ([line for line in told(f) if "loss" in line] for f in (place / "moved/run", tmp_path / "whole"))
    for key in ("step", "tokens", "lr"):
        assert [line[key] for line in lines] == [line[key] for line in whole]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in whole], rel=1e-5)
    for one in seen:
        assert one["moved"]["step"] == 14
        assert ["processes was 1 and is 2" in text for text in one["moved"]["warned"]] == [True]


# -- the command line ------------------------------------------------------------------------------------------------


def one_error(out):
    lines = said(out).splitlines()
    assert "Traceback" not in said(out)
    assert [line.startswith("error: ") for line in lines].count(True) == 1, lines
    return next(line for line in lines if line.startswith("error: "))


def test_what_cannot_be_is_said_before_any_process_starts(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    for words, why in [
        (["--resume"], "nothing to resume"),
        (["train.lr=x"], "train.lr='x' cannot be"),
        (["train.device=cpu:0"], "leave the number out"),
    ]:
        assert command("train", recipe, *words, "--out", tmp_path / "run", "--nproc", "2") in (1, 2)
        error = capsys.readouterr().err
        assert why in error
        assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_command_line_starts_them_and_tells_one_result(place, tmp_path):
    out = tmp_path / "run"
    on_two(place / "plain/recipe.toml", out, "--json")
    start = said(out).index("{")
    told_ = json.loads(said(out)[start : said(out).rindex("}") + 1])
    assert (told_["folder"], told_["steps"]) == (str(out), 12)
    assert said(out).count("2 processes") == said(out).count("step 12/12") == 1
    assert told(out) == told(place / "plain/run"), "as under torchrun by hand"


@pytest.mark.slow
def test_an_error_of_all_is_one_line(tmp_path):
    recipe = write_recipe(tmp_path)
    process = launch(recipe, tmp_path / "run", "data.corpus=nowhere", "--nproc", "2")
    assert process.wait(60) == 1
    assert "nowhere" in one_error(tmp_path / "run")


def going(recipe, out, *words):
    process = launch(recipe, out, *words, "--nproc", "2")
    while steps_told(out) < 20:
        assert process.poll() is None, said(out)
        time.sleep(0.01)
    return process


LONG = {"train": {"steps": 400, "save_every": 15, "eval_every": 0}}


@pytest.mark.slow
@pytest.mark.parametrize("whom", [os.killpg, os.kill], ids=["the terminal", "the parent alone"])
def test_control_c_saves_in_the_leader_and_exits_130(whom, tmp_path):
    recipe, out = write_recipe(tmp_path, LONG), tmp_path / "run"
    process = going(recipe, out)
    whom(process.pid, signal.SIGINT)
    assert process.wait(60) == 130, said(out)
    step = steps_told(out)
    assert (out / "checkpoints/latest").read_text() == f"step-{step}"
    assert "--nproc 2" in said(out)
    assert "Traceback" not in said(out)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_takes_the_other_with_it_and_the_run_goes_on_bit_for_bit(rank, tmp_path):
    recipe, out = write_recipe(tmp_path, LONG, {"train": {"steps": 60}}), tmp_path / "run"
    on_two(recipe, tmp_path / "whole")
    process = going(recipe, out)
    os.kill(_pid(process.pid, rank), signal.SIGKILL)
    assert process.wait(60) == 1, said(out)
    assert "ended by signal 9" in one_error(out)
    before = listing(out / "checkpoints")
    time.sleep(1)
    assert listing(out / "checkpoints") == before, "nobody writes any more"
    on_two(recipe, out, "--resume")
    assert told(out) == told(tmp_path / "whole")
    ends = [checkpoint.load(folder / "checkpoints/step-60") for folder in (out, tmp_path / "whole")]
    assert all(
        torch.equal(ends[0].tensors["model"][name], ends[1].tensors["model"][name]) for name in ends[0].tensors["model"]
    )


def _pid(parent, rank):
    """The process of a rank, by what torchrun told it."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in children:
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"no rank {rank} among {children}")
