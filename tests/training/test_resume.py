"""A resumed run equals an uninterrupted one bit for bit; every obstacle is a one-line error, and nothing is lost."""

import functools
import json
import os
import resource
import shutil
import signal
import time

import pytest
import torch
from training_support import (
    RECIPE_VARIATIONS,
    assert_same_run,
    last_logged_step,
    launch_training,
    list_files,
    read_log,
    read_metrics,
    run_command,
    train_to_end,
    train_until,
    write_recipe,
)

from monoblock.errors import FileError
from monoblock.interop.model_folder import ModelFolder
from monoblock.model import Transformer
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training import checkpoint
from monoblock.training.events import WarningEvent

STEPS = 23


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A recipe and its uninterrupted run."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    recipe = write_recipe(folder)
    train_to_end(recipe, folder / "run")
    return recipe, folder / "run"


@pytest.fixture
def interrupted(uninterrupted, tmp_path):
    """The same run interrupted after step 17, with checkpoints of steps 5, 10 and 15."""
    recipe, _ = uninterrupted
    train_until(recipe, tmp_path / "run", 17)
    return recipe, tmp_path / "run"


def read_error(capsys):
    """The last line of stderr, which must be the only error and no traceback."""
    text = capsys.readouterr().err
    assert "Traceback" not in text
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert text.rstrip("\n").endswith(errors[0])
    return errors[0]


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variation", RECIPE_VARIATIONS.values(), ids=RECIPE_VARIATIONS)
def test_a_run_killed_or_stopped_and_resumed_equals_an_uninterrupted_one(variation, tmp_path):
    recipe = write_recipe(tmp_path, variation)
    train_to_end(recipe, tmp_path / "uninterrupted")
    for number, (step, saving) in enumerate([(7, False), (9, True), (14, False), (22, True)]):
        train_until(recipe, tmp_path / "broken", step, resume=bool(number), save=saving)
    train_to_end(recipe, tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "broken", tmp_path / "uninterrupted", STEPS)


def test_two_runs_of_one_recipe_have_the_same_losses_bit_for_bit(uninterrupted, tmp_path):
    recipe, first = uninterrupted
    train_to_end(recipe, tmp_path / "run")
    assert_same_run(tmp_path / "run", first, STEPS)


def test_another_seed_gives_other_losses(uninterrupted, tmp_path):
    _, first = uninterrupted
    recipe = write_recipe(tmp_path, {"train": {"seed": 2, "steps": 3}})
    train_to_end(recipe, tmp_path / "run")
    assert read_metrics(tmp_path / "run")[0]["loss"] != read_metrics(first)[0]["loss"]


def test_resuming_a_finished_run_changes_nothing(uninterrupted, tmp_path):
    recipe, first = uninterrupted
    shutil.copytree(first, tmp_path / "run")
    train_to_end(recipe, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", first, STEPS)


def test_a_run_killed_before_writing_its_last_files_is_completed_by_resuming(uninterrupted, tmp_path):
    recipe, first = uninterrupted
    shutil.copytree(first, tmp_path / "run")
    for name in ("model.safetensors", "README.md"):
        (tmp_path / "run" / name).unlink()
    train_to_end(recipe, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", first, STEPS)
    assert (tmp_path / "run/README.md").read_text() == (first / "README.md").read_text()


# -- Ctrl-C and SIGTERM ----------------------------------------------------------------------------------------------


def send_signal(recipe, out, number, code, *words):
    """Train, send a signal to all processes after twenty more steps, and check what is saved."""
    first, process = last_logged_step(out), launch_training(recipe, out, *words)
    while last_logged_step(out) < first + 20:
        assert process.poll() is None, read_log(out)
        time.sleep(0.002)
    os.killpg(process.pid, number)  # as a terminal does
    assert process.wait(600) == code, read_log(out)
    assert "Traceback" not in read_log(out)
    assert read_log(out).count("stopping after this step, then saving") == 1
    assert f"Saved {out} at step" in read_log(out)
    assert not (out / "run.lock").exists()
    step = last_logged_step(out)
    assert (out / "checkpoints/latest").read_text() == f"step-{step}"
    assert checkpoint.find_problem(out / f"checkpoints/step-{step}") is None
    return step


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_saves_exits_128_plus_its_number_and_the_run_can_be_resumed_bit_for_bit(workers, tmp_path):
    steps = 250
    train = {"steps": steps, "save_every": 70, "workers": workers, "eval_every": 0}
    recipe, out = write_recipe(tmp_path, {"train": train}), tmp_path / "run"
    first = send_signal(recipe, out, signal.SIGINT, 130)
    assert first < send_signal(recipe, out, signal.SIGTERM, 143, "--resume") < steps
    process = launch_training(recipe, out, "--resume")
    assert process.wait(600) == 0, read_log(out)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train_to_end(recipe, tmp_path / "uninterrupted")
    finally:
        torch.set_num_threads(threads)
    assert_same_run(out, tmp_path / "uninterrupted", steps)


def test_control_c_before_the_first_step_saves_too(tmp_path):
    recipe = write_recipe(tmp_path)
    train_to_end(recipe, tmp_path / "uninterrupted")
    run = train_until(recipe, tmp_path / "run", 0, save=True)  # the stop is requested after the first step
    assert run.trainer.step == 1
    path, problems = checkpoint.find_newest(tmp_path / "run/checkpoints")
    assert (path.name, problems) == ("step-1", [])
    train_to_end(recipe, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "uninterrupted", STEPS)


def test_a_run_stopped_at_step_zero_has_a_checkpoint_without_optimizer_states(tmp_path):
    recipe = write_recipe(tmp_path)
    train_to_end(recipe, tmp_path / "uninterrupted")

    def stop_at_once(run):
        run.trainer.should_stop = lambda: True

    train_to_end(recipe, tmp_path / "run", change=stop_at_once)
    assert checkpoint.load(tmp_path / "run/checkpoints/step-0").tensors["optimizer"] == {}
    train_to_end(recipe, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "uninterrupted", STEPS)


# -- folders ---------------------------------------------------------------------------------------------------------


def test_an_existing_run_folder_is_exit_code_2_and_is_not_changed(uninterrupted, capsys):
    recipe, folder = uninterrupted
    before = list_files(folder)
    assert run_command("train", recipe, "--out", folder) == 2
    assert "--resume" in read_error(capsys)
    assert list_files(folder) == before


def test_resuming_a_missing_run_is_a_one_line_error(uninterrupted, tmp_path, capsys):
    recipe, _ = uninterrupted
    assert run_command("train", recipe, "--out", tmp_path / "nowhere", "--resume") == 1
    assert "nothing to resume" in read_error(capsys)
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_cannot_be_created_is_a_one_line_error(uninterrupted, tmp_path, capsys):
    recipe, _ = uninterrupted
    (tmp_path / "file").write_text("in the way")
    assert run_command("train", recipe, "--out", tmp_path / "file/run") == 1
    assert "cannot be created" in read_error(capsys)
    assert (tmp_path / "file").read_text() == "in the way"


# -- write errors ----------------------------------------------------------------------------------------------------


def test_a_failed_save_is_a_one_line_error_and_the_old_checkpoint_stays(interrupted, uninterrupted, capsys):
    recipe, folder = interrupted
    (folder / "checkpoints/step-20.tmp").write_text("a file where a folder must go")
    before = list_files(folder / "checkpoints")
    assert run_command("train", recipe, "--out", folder, "--resume") == 1
    assert "step 20 cannot be written" in read_error(capsys)
    assert list_files(folder / "checkpoints") == before
    (folder / "checkpoints/step-20.tmp").unlink()
    assert run_command("train", recipe, "--out", folder, "--resume") == 0
    assert_same_run(folder, uninterrupted[1], STEPS)


def test_a_full_disk_is_a_one_line_error_and_the_old_checkpoint_stays(interrupted, uninterrupted):
    recipe, folder = interrupted
    max_bytes = (folder / "checkpoints/step-15/optimizer.safetensors").stat().st_size // 2
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    process = launch_training(recipe, folder, "--resume", prepare=limit)
    assert process.wait(600) == 1, read_log(folder)
    errors = [line for line in read_log(folder).splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "step 20 cannot be written" in errors[0]
    assert "Traceback" not in read_log(folder)
    path, problems = checkpoint.find_newest(folder / "checkpoints")
    assert (path.name, problems) == ("step-15", [])
    assert not list((folder / "checkpoints").glob("*.tmp")), "partial checkpoints must not fill the disk"
    train_to_end(recipe, folder, resume=True)
    assert_same_run(folder, uninterrupted[1], STEPS)


def test_metrics_that_cannot_be_written_are_a_one_line_error(interrupted, capsys):
    recipe, folder = interrupted
    (folder / "metrics.tmp").mkdir()
    assert run_command("train", recipe, "--out", folder, "--resume") == 1
    assert "metrics.jsonl cannot be written" in read_error(capsys)


# -- damaged files ---------------------------------------------------------------------------------------------------


def truncate_file(folder):
    path = folder / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    return path


def flip_bit(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-11] ^= 4
    path.write_bytes(bytes(data))
    return path


def delete_manifest(folder):
    (folder / "manifest.json").unlink()
    return folder / "manifest.json"


def truncate_manifest(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:-9])
    return path


def name_file_outside(folder):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    (folder.parent / "x").write_text("outside")
    manifest["files"]["../x"] = checkpoint.describe_file(folder.parent / "x")
    path.write_text(json.dumps(manifest))
    return path


def name_no_files(folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps({"step": 15, "files": {}}))
    return path


def copy_other_step(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "step-10", folder)
    return folder / "manifest.json"


def delete_file(folder):
    (folder / "random.safetensors").unlink()
    return folder / "random.safetensors"


def delete_checkpoint(folder):
    shutil.rmtree(folder)
    return folder.parent / "latest"


def corrupt_latest(folder):
    shutil.rmtree(folder)
    (folder.parent / "latest").write_bytes(b"\xff\xfe\x00")
    return folder.parent / "latest"


DAMAGES = [
    truncate_file,
    flip_bit,
    delete_manifest,
    truncate_manifest,
    name_file_outside,
    name_no_files,
    copy_other_step,
    delete_file,
    delete_checkpoint,
    corrupt_latest,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_newest_intact_one_is_used(damage, interrupted, uninterrupted):
    recipe, folder = interrupted
    file = damage(folder / "checkpoints/step-15")
    _, events = train_to_end(recipe, folder, resume=True)
    warnings = [event.text for event in events if isinstance(event, WarningEvent)]
    assert any(str(file) in warning for warning in warnings), warnings
    assert any("step-10" in warning for warning in warnings), warnings
    assert_same_run(folder, uninterrupted[1], STEPS)


def test_damage_is_reported_on_stderr(interrupted, capsys):
    recipe, folder = interrupted
    file = flip_bit(folder / "checkpoints/step-15")
    assert run_command("train", recipe, "--out", folder, "--resume") == 0
    assert f"warning: skipped a checkpoint: {file} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [flip_bit, delete_manifest])
def test_without_an_intact_checkpoint_resuming_is_a_one_line_error(damage, interrupted, capsys):
    recipe, folder = interrupted
    for step in (5, 10, 15):
        damage(folder / f"checkpoints/step-{step}")
    before = list_files(folder)
    with pytest.raises(FileError, match="is intact"):
        train_to_end(recipe, folder, resume=True)
    assert run_command("train", recipe, "--out", folder, "--resume") == 1
    assert "is intact" in read_error(capsys)
    assert list_files(folder) == before


def test_a_file_missing_in_the_manifest_is_ignored(interrupted, uninterrupted):
    recipe, folder = interrupted
    (folder / "checkpoints/step-15/extra.safetensors").write_bytes(b"no tensors")
    train_to_end(recipe, folder, resume=True)
    assert_same_run(folder, uninterrupted[1], STEPS)


PARTIAL_LINES = [b'{"step": 18, "loss": 2.', b'{"step": 1', b"\xff\x00\xfe", b"1"]


@pytest.mark.parametrize("partial_line", PARTIAL_LINES, ids=["in a number", "in the step", "no text", "a number"])
def test_a_partially_written_line_of_metrics_is_removed(partial_line, interrupted, uninterrupted):
    recipe, folder = interrupted
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(partial_line)
    train_to_end(recipe, folder, resume=True)
    assert_same_run(folder, uninterrupted[1], STEPS)


# -- changed runs ----------------------------------------------------------------------------------------------------


def test_resuming_with_another_model_is_a_one_line_error(interrupted, capsys):
    recipe, folder = interrupted
    before = list_files(folder)
    assert run_command("train", recipe, "model.width=24", "--out", folder, "--resume") == 1
    assert "another model" in read_error(capsys)
    assert list_files(folder) == before, "nothing is lost, not even metrics"


@pytest.mark.parametrize("word", ["train.lr=0.5", "train.seed=4", "train.batch=4", "train.optimizer=muon"])
def test_resuming_with_another_training_recipe_is_a_one_line_error(word, interrupted, capsys):
    recipe, folder = interrupted
    assert run_command("train", recipe, word, "--out", folder, "--resume") == 1
    assert f"another {word.partition('=')[0]} (" in read_error(capsys)


def test_resuming_with_another_corpus_is_a_one_line_error(interrupted, tmp_path, capsys):
    recipe, folder = interrupted
    other = tmp_path / "other.txt"
    text = (recipe.parent / "text.txt").read_text()
    other.write_text(text[500:] + text[:500])
    assert run_command("train", recipe, f"data.corpus={other}", "--out", folder, "--resume") == 1
    assert "another data.corpus (" in read_error(capsys)


def test_resuming_with_another_tokenizer_is_a_one_line_error(interrupted, capsys):
    recipe, folder = interrupted
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(tokenizer))
    assert run_command("train", recipe, "--out", folder, "--resume") == 1
    assert "tokenizer" in read_error(capsys)


def test_a_run_may_be_extended_on_resume(interrupted, uninterrupted):
    recipe, folder = interrupted
    assert run_command("train", recipe, "train.steps=27", "train.save_every=9", "--out", folder, "--resume") == 0
    assert [line["step"] for line in read_metrics(folder) if "loss" in line] == list(range(1, 28))


def test_another_number_of_threads_is_a_warning(interrupted):
    recipe, folder = interrupted
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        _, events = train_to_end(recipe, folder, resume=True)
    finally:
        torch.set_num_threads(threads)
    assert any("threads was" in event.text for event in events if isinstance(event, WarningEvent))


# -- changed files under the same name -------------------------------------------------------------------------------


def replace_letter(text, index):
    return text[:index] + ("a" if text[index] != "a" else "b") + text[index + 1 :]


@pytest.mark.parametrize(("fraction", "split"), [(0.3, "train"), (0.97, "valid")])
def test_resuming_with_another_text_under_the_same_path_is_a_one_line_error(fraction, split, tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    train_until(recipe, tmp_path / "run", 7)
    text = (tmp_path / "text.txt").read_text()
    (tmp_path / "text.txt").write_text(replace_letter(text, int(fraction * len(text))))
    before = list_files(tmp_path / "run")
    assert run_command("train", recipe, "--out", tmp_path / "run", "--resume") == 1
    error = read_error(capsys)
    assert f"another content of data.corpus, split {split}; restore the original, or start a new run" in error
    assert list_files(tmp_path / "run") == before
    (tmp_path / "text.txt").write_text(text)
    assert run_command("train", recipe, "--out", tmp_path / "run", "--resume") == 0


def test_a_tokenizer_of_another_model_is_an_error(interrupted, capsys):
    recipe, folder = interrupted
    stored = json.loads((folder / "config.json").read_text())
    assert stored["tokenizer"] == Tokenizer.from_pretrained(folder).fingerprint
    Tokenizer.train("char", ["abc" * 9], specials="none").save_pretrained(folder)
    assert run_command("train", recipe, "--out", folder, "--resume") == 1
    assert "is not the one the model was trained with" in read_error(capsys)
    with pytest.raises(FileError, match="give the tokenizer from the model's own folder"):
        ModelFolder(folder).load_tokenizer()


def test_a_finished_run_stores_the_fingerprint_of_its_tokenizer(uninterrupted):
    _, folder = uninterrupted
    assert (
        ModelFolder(folder).load_tokenizer().fingerprint
        == json.loads((folder / "config.json").read_text())["tokenizer"]
    )
    assert Transformer.from_pretrained(folder).config.input.vocab == ModelFolder(folder).load_tokenizer().vocab_size
