"""A run folder that others have changed: nothing is written outside of it, and nothing crafted reaches the model."""

import hashlib
import itertools
import json
import os
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_support import (
    assert_same_weights,
    list_files,
    read_metrics,
    run_command,
    start_run,
    train_to_end,
    train_until,
    write_recipe,
)

import monoblock as mb
from monoblock.parallel import faults
from monoblock.training import checkpoint

SEED = 7
RECIPE = {"train": {"steps": 8, "save_every": 3, "eval_every": 4, "ema": 0.9, "keep_checkpoints": 1}}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A recipe, and its run that was killed after step 5, with a checkpoint of step 3."""
    folder = tmp_path_factory.mktemp("stopped")
    recipe = write_recipe(folder, RECIPE)
    train_until(recipe, folder / "run", 5)
    return recipe, folder / "run"


@pytest.fixture(scope="module")
def fresh(stopped):
    """A run that is not trained, to load checkpoints into."""
    recipe, _ = stopped
    run = start_run(recipe, recipe.parent / "fresh")
    yield run
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def folder(stopped, tmp_path):
    """A copy of the run."""
    shutil.copytree(stopped[1], tmp_path / "run")
    return tmp_path / "run"


def resume(recipe, folder, capsys):
    """Resume on the command line; return the exit code and the line of the error."""
    code = run_command("train", recipe, "--out", folder, "--resume")
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return code, next((line for line in text.splitlines() if line.startswith("error: ")), "")


# -- crafted checkpoints with a right manifest -------------------------------------------------------------------------


def correct_manifest(step):
    """Make the manifest list all files of a checkpoint with their true sizes and hashes, as an attacker would."""
    files = {}
    for path in sorted(step.iterdir()):
        if path.name != "manifest.json":
            raw = path.read_bytes()
            files[path.name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    number = int(step.name.removeprefix("step-"))
    (step / "manifest.json").write_text(json.dumps({"step": number, "files": files}))


def change_file(step, group, change):
    """Store other tensors in a file of a checkpoint, and correct the manifest."""
    tensors = dict(sorted(load_file(step / f"{group}.safetensors").items()))
    change(tensors)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, step / f"{group}.safetensors")
    correct_manifest(step)


def split_in_two(step):
    """Store model, optimizer and average as two processes would, each tensor in two parts if it has rows."""
    shards, index = ({}, {}), {}
    for group in ("model", "optimizer", "average"):
        for name, tensor in load_file(step / f"{group}.safetensors").items():
            rows = len(tensor) // 2 if tensor.dim() else 0
            cuts = [(0, rows), (rows, len(tensor) - rows)] if rows else [(0, tensor.shape[0] if tensor.dim() else 0)]
            parts = []
            for number, (start, count) in enumerate(cuts):
                key, part = f"{group}/{name}@{start}", tensor[start : start + count] if tensor.dim() else tensor
                shards[number][key] = part.clone()
                offsets = [start, *[0] * (tensor.dim() - 1)] if tensor.dim() else []
                parts.append([offsets, list(part.shape), f"shard-{number:05d}.safetensors", key])
            dtype = str(tensor.dtype).removeprefix("torch.")
            index[f"{group}/{name}"] = {"shape": list(tensor.shape), "dtype": dtype, "parts": parts}
        (step / f"{group}.safetensors").unlink()
    for number, tensors in enumerate(shards):
        save_file(tensors, step / f"shard-{number:05d}.safetensors")
    (step / "shards.json").write_text(json.dumps(index))
    correct_manifest(step)


def assert_refused(run, folder, match):
    """Load the newest checkpoint of a folder as resuming does: an error of one line, and the run is as before."""
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    average = {name: tensor.clone() for name, tensor in run.trainer.average.tensors.items()}
    run.trainer.folder = folder / "checkpoints"
    with pytest.raises(mb.FileError, match=match) as caught:
        list(itertools.islice(run.trainer.run(resume=True), 1))
    assert "\n" not in str(caught.value)
    assert_same_weights(run.model.state_dict(), before)
    assert_same_weights(run.trainer.average.tensors, average)
    assert not any(optimizer.state for optimizer in run.trainer.optimizers.optimizers)


SHAPES = [
    lambda t: t.flatten() if t.dim() > 1 else t[None],
    lambda t: t.mT if t.dim() > 1 and t.shape[-1] != t.shape[-2] else t[..., None],
    lambda t: t[:1] if t.dim() and len(t) > 1 else torch.stack([t, t]),
    lambda t: torch.cat([t, t]) if t.dim() else t.expand(1000),
    lambda t: t.new_zeros(()) if t.dim() else t.new_zeros(0),
    lambda t: t.to(torch.int32) if t.dtype != torch.int32 else t.to(torch.int64),
    lambda t: t.to(torch.float16),
    lambda t: t.double() if t.dtype != torch.float64 else t.float(),
    lambda t: t != 0,
]


def test_no_tensor_of_another_shape_dtype_or_name_is_loaded(stopped, fresh, tmp_path):
    rng, groups = random.Random(SEED), ("model", "optimizer", "average", "random")
    for number in range(80):
        folder = tmp_path / str(number)
        shutil.copytree(stopped[1], folder)

        def change(tensors, number=number):
            name = rng.choice(list(tensors))
            tensor = tensors.pop(name)
            if number % 4 == 0:
                tensors[rng.choice([f"{name}x", "x", "x/exp_avg", "", f"{name}/step"])] = tensor
            elif number % 4 == 1 and number % 8 > 4:
                tensors |= {name: tensor, "more": tensor}
            else:
                tensors[name] = rng.choice(SHAPES)(tensor)

        change_file(folder / "checkpoints/step-3", groups[number % 3 if number % 5 else 3], change)
        assert_refused(fresh, folder, r"step-3")
        shutil.rmtree(folder)


def test_an_unchanged_checkpoint_with_a_corrected_manifest_or_split_in_two_is_loaded(stopped, folder, tmp_path):
    recipe, _ = stopped
    shutil.copytree(folder, tmp_path / "split")
    change_file(folder / "checkpoints/step-3", "model", lambda tensors: None)
    split_in_two(tmp_path / "split/checkpoints/step-3")
    for copy in (folder, tmp_path / "split"):
        train_to_end(recipe, copy, resume=True)
    assert read_metrics(folder) == read_metrics(tmp_path / "split")
    assert load_file(folder / "model.safetensors").keys() == load_file(tmp_path / "split/model.safetensors").keys()


def test_momentum_of_another_shape_with_a_right_hash_is_one_line(stopped, folder, capsys):
    def cut_momenta(tensors):
        for name in [name for name in tensors if "exp_avg" in name]:
            tensors[name] = torch.ones(3)

    change_file(folder / "checkpoints/step-3", "optimizer", cut_momenta)
    before = list_files(folder)
    code, error = resume(stopped[0], folder, capsys)
    assert code == 1
    assert "shape (3,)" in error
    assert "exp_avg" in error
    assert list_files(folder) == before


@pytest.mark.parametrize("name", ["missing", "more"])
def test_each_optimizer_state_of_a_weight_is_there_and_no_other(name, stopped, fresh, folder):
    def change(tensors):
        weight = next(key for key in tensors if key.endswith("/exp_avg_sq"))
        tensor = tensors.pop(weight) if name == "missing" else tensors[weight]
        tensors |= {} if name == "missing" else {f"{weight}_max": tensor}

    change_file(folder / "checkpoints/step-3", "optimizer", change)
    assert_refused(fresh, folder, "exp_avg_sq")


RANDOM_CHANGES = {
    "a position of NumPy beyond its state": lambda t: t["numpy_rest"].__setitem__(0, 10**6),
    "a negative position of NumPy": lambda t: t["numpy_rest"].__setitem__(0, -3),
    "a position that is no number": lambda t: t["numpy_rest"].__setitem__(0, torch.nan),
    "a word of NumPy beyond 32 bits": lambda t: t["numpy"].__setitem__(5, 2**32),
    "a position of Python beyond its state": lambda t: t["python"].__setitem__(-1, 625),
    "a word of Python below zero": lambda t: t["python"].__setitem__(7, -1),
    "another version of Python's generator": lambda t: t["python"].__setitem__(0, 2),
    "a position of torch beyond its state": lambda t: t["torch"].__setitem__(slice(8, 24), 255),
}


@pytest.mark.parametrize("change", RANDOM_CHANGES.values(), ids=RANDOM_CHANGES)
def test_random_states_that_no_generator_has_are_refused(change, fresh, folder):
    change_file(folder / "checkpoints/step-3", "random", change)
    assert_refused(fresh, folder, "random")


INDEX_CHANGES = {
    "a part beyond the tensor": lambda entry: entry["parts"][1][0].__setitem__(0, 10**6),
    "a negative offset": lambda entry: entry["parts"][1][0].__setitem__(0, -1),
    "two parts in one place": lambda entry: entry["parts"][1].__setitem__(0, entry["parts"][0][0]),
    "a part that is missing": lambda entry: entry["parts"].pop(),
    "a part of another size than stored": lambda entry: entry["parts"][1][1].__setitem__(0, 1),
    "a larger tensor": lambda entry: entry["shape"].__setitem__(0, 10**12),
    "another dtype": lambda entry: entry.__setitem__("dtype", "int64"),
    "a dtype that there is not": lambda entry: entry.__setitem__("dtype", "quint4x2"),
    "a file outside": lambda entry: entry["parts"][1].__setitem__(2, "../../secret.safetensors"),
    "a file that the manifest does not list": lambda entry: entry["parts"][1].__setitem__(2, "x.safetensors"),
    "no list of parts": lambda entry: entry.__setitem__("parts", 3),
    "a text as offset": lambda entry: entry["parts"][1][0].__setitem__(0, "0"),
}


@pytest.mark.parametrize("change", INDEX_CHANGES.values(), ids=INDEX_CHANGES)
def test_parts_of_processes_that_do_not_make_up_a_tensor_are_refused(change, fresh, folder):
    step = folder / "checkpoints/step-3"
    split_in_two(step)
    index = json.loads((step / "shards.json").read_text())
    name = next(name for name in index if name.endswith("/exp_avg") and len(index[name]["parts"]) == 2)
    change(index[name])
    (step / "shards.json").write_text(json.dumps(index))
    correct_manifest(step)
    assert_refused(fresh, folder, "step-3")


def test_the_best_checkpoint_is_checked_as_well(tmp_path):
    recipe = write_recipe(tmp_path, RECIPE, {"train": {"load_best": True, "eval_every": 3, "ema": 0}})

    def best_at_three(run):
        run.trainer.evaluate = lambda model: {"val_loss": abs(run.trainer.step - 3)}

    def change(run):
        best_at_three(run)
        run.trainer.should_stop = lambda: run.trainer.step == 7 and bool(change_file(step, "model", to_integers))

    def to_integers(tensors):
        tensors |= {name: tensor.int() for name, tensor in tensors.items()}

    step = tmp_path / "run/checkpoints/step-3"
    with pytest.raises(mb.FileError, match="int32"):
        train_to_end(recipe, tmp_path / "run", change=change)


# -- planted links, pipes and folders ----------------------------------------------------------------------------------

PLANTED = ("metrics.tmp", "checkpoints/latest.tmp", "README.md.tmp", "model.safetensors.tmp", "config.json.tmp")


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_is_written_through_a_planted_link_and_no_pipe_is_waited_for(kind, stopped, folder, tmp_path, capsys):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in PLANTED:
        (folder / name).symlink_to(victim) if kind == "link" else os.mkfifo(folder / name)
    assert resume(stopped[0], folder, capsys)[0] == 0
    assert victim.read_text() == "mine"
    assert not any(os.path.lexists(folder / name) for name in PLANTED)


@pytest.mark.parametrize("kind", ["dangling link", "link", "pipe"])
def test_metrics_that_are_a_link_or_a_pipe_are_one_line(kind, stopped, folder, tmp_path, capsys):
    victim, path = tmp_path / "victim", folder / "metrics.jsonl"
    if kind == "link":
        shutil.copy(path, victim)
    before = victim.read_bytes() if victim.exists() else None
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(victim)
    code, error = resume(stopped[0], folder, capsys)
    assert code == 1
    assert "metrics.jsonl" in error
    assert (victim.read_bytes() if victim.exists() else None) == before


@pytest.mark.parametrize("name", ["checkpoints", "logs", "tensorboard", "adapter"])
def test_a_folder_of_the_run_that_is_a_link_is_refused_and_nothing_there_is_deleted(
    name, stopped, folder, tmp_path, capsys
):
    others = tmp_path / "others"
    shutil.copytree(folder / "checkpoints", others)
    for step in (1, 2):
        shutil.copytree(others / "step-3", others / f"step-{step}")
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / name).symlink_to(others)
    before = list_files(others)
    code, error = resume(stopped[0], folder, capsys)
    assert code == 1
    assert "link" in error
    assert list_files(others) == before


def test_only_what_a_manifest_lists_is_deleted(stopped, folder, capsys):
    checkpoints = folder / "checkpoints"
    (checkpoints / "step-1").mkdir()
    (checkpoints / "step-1/notes.txt").write_text("mine")
    shutil.copytree(checkpoints / "step-3", checkpoints / "step-2")
    correct_manifest(checkpoints / "step-2")
    (checkpoints / "step-2/notes.txt").write_text("mine")
    (checkpoints / "step-9.tmp").mkdir()
    (checkpoints / "step-9.tmp/notes.txt").write_text("mine")
    (checkpoints / "step-7.tmp").mkdir()
    (checkpoints / "step-7.tmp/model.safetensors").write_text("of a save that was killed")
    assert resume(stopped[0], folder, capsys)[0] == 0
    left = {str(path.relative_to(checkpoints)) for path in checkpoints.rglob("*") if path.is_file()}
    assert {"step-1/notes.txt", "step-2/notes.txt", "step-9.tmp/notes.txt"} <= left
    assert not (checkpoints / "step-7.tmp").exists()
    assert not (checkpoints / "step-2/model.safetensors").exists()
    assert not (checkpoints / "step-3").exists(), "old checkpoints of the run are deleted as before"
    assert checkpoint.find_newest(checkpoints)[0].name == "step-8"


def test_a_log_is_not_written_through_a_link_and_does_not_wait_for_a_pipe(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-0.log").symlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / "logs/rank-1.log")
    for rank in (0, 1):
        with faults._open_log(faults.log_path(tmp_path, rank)) as log:
            assert log.name == os.devnull
    assert not (tmp_path / "victim").exists()
    assert faults.has_ended(tmp_path, launcher=1, since=0) is None


# -- foreign names -----------------------------------------------------------------------------------------------------

FOREIGN = ["step-²", "step-0070", "step-", "step-１２", "step-70.old", "step--1", "step-1e3", f"step-{'9' * 40}"]


def test_folders_that_only_look_like_checkpoints_do_not_block_a_resume(stopped, folder, tmp_path, capsys):
    for name in FOREIGN:
        (folder / "checkpoints" / name).mkdir()
    (folder / "checkpoints/step-99").mkdir()  # a checkpoint of a later step, but damaged
    (folder / "checkpoints/step-98").symlink_to(folder / "checkpoints/step-3")
    assert checkpoint.list_steps(folder / "checkpoints") == [3, 99]
    assert resume(stopped[0], folder, capsys)[0] == 0
    assert all((folder / "checkpoints" / name).is_dir() for name in FOREIGN)


# -- lines of the metrics ----------------------------------------------------------------------------------------------

BAD_LINES = [
    '{"step": ' + "[" * 100_000 + "]" * 100_000 + "}",
    f'{{"step": 2, "loss": {"9" * 400}}}',
    f'{{"step": {"9" * 400}, "loss": 2.5}}',
    f'{{"step": {"9" * 5000}, "loss": 2.5}}',
    '{"step": 2, "loss": "low"}',
    '{"step": 2, "val_loss": "low"}',
    '{"step": 2, "val_loss": null}',
    '{"step": 2, "val_loss": [1]}',
    '{"step": "2", "loss": 2.5}',
    '{"step": true, "loss": 2.5}',
    '{"step": -1, "loss": 2.5}',
    '{"step": 2.5, "loss": 2.5}',
    '{"step": 2, "loss": 2.5, "samples": 3}',
    '{"step": 2, "skipped": 3}',
    "[" * 100_000,
    "[1]",
    "\x1b[31m",
    "",
]


def test_bad_lines_of_the_metrics_are_left_out_everywhere(stopped, folder, tmp_path, monkeypatch, capsys):
    good = read_metrics(folder)
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(f"{line}\n" for line in BAD_LINES)
    assert read_metrics(folder) == good
    runs = tmp_path / "runs"
    shutil.copytree(folder, runs / "one")
    monkeypatch.chdir(tmp_path)
    assert run_command("ls", "runs") == 0
    assert run_command("doctor", folder) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err
    assert resume(stopped[0], folder, capsys)[0] == 0
    assert [line["step"] for line in read_metrics(folder) if "loss" in line] == list(range(1, 9))


def test_a_bad_run_does_not_hide_the_others(stopped, folder, tmp_path, monkeypatch, capsys):
    runs = tmp_path / "runs"
    for name in "abcdef":
        shutil.copytree(folder, runs / name)
    (runs / "a/recipe.toml").write_bytes(b"\xff\xfe")
    (runs / "b/recipe.toml").write_text("a = " + "[" * 50_000)
    (runs / "c/metrics.jsonl").unlink()
    os.mkfifo(runs / "c/metrics.jsonl")
    (runs / "d/metrics.jsonl").write_text('{"step": 1, "val_loss": "x"}\n')
    (runs / "e/recipe.toml").write_text("[train]\nsteps = 'x'\n")
    monkeypatch.chdir(tmp_path)
    assert run_command("ls", "runs", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [row["name"] for row in rows] == list("abcdef")
    assert rows[-1]["steps"] == 5
