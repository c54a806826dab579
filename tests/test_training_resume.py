"""Resume = never stopped, bit for bit; whatever stands in the way is said in one line and nothing is lost."""

import json
import os
import resource
import shutil
import signal
import time

import pytest
import torch
from training_support import (
    VARIATIONS,
    assert_same_run,
    command,
    launch,
    listing,
    said,
    steps_told,
    told,
    train,
    train_until,
    write_recipe,
)

from monoblock.errors import FileError
from monoblock.model import Transformer
from monoblock.tasks.folder import tokenizer_in
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.training import checkpoint
from monoblock.training.events import Warned

STEPS = 23


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A recipe and its run, never stopped."""
    place = tmp_path_factory.mktemp("whole")
    recipe = write_recipe(place)
    train(recipe, place / "run")
    return recipe, place / "run"


@pytest.fixture
def halted(whole, tmp_path):
    """The same run dropped after step 17: checkpoints of steps 5, 10, 15."""
    recipe, _ = whole
    train_until(recipe, tmp_path / "run", 17)
    return recipe, tmp_path / "run"


def one_line(capsys):
    """What was said on stderr last; an error is one line and no traceback."""
    text = capsys.readouterr().err
    assert "Traceback" not in text
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert text.rstrip("\n").endswith(errors[0])
    return errors[0]


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variation", VARIATIONS.values(), ids=VARIATIONS)
def test_a_run_dropped_or_stopped_and_resumed_ends_as_one_never_stopped(variation, tmp_path):
    recipe = write_recipe(tmp_path, variation)
    train(recipe, tmp_path / "whole")
    for number, (step, saving) in enumerate([(7, False), (9, True), (14, False), (22, True)]):
        train_until(recipe, tmp_path / "broken", step, resume=bool(number), saving=saving)
    train(recipe, tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "broken", tmp_path / "whole", STEPS)


def test_two_runs_of_one_recipe_tell_the_same_losses_bit_for_bit(whole, tmp_path):
    recipe, first = whole
    train(recipe, tmp_path / "run")
    assert_same_run(tmp_path / "run", first, STEPS)


def test_another_seed_tells_other_losses(whole, tmp_path):
    _, first = whole
    recipe = write_recipe(tmp_path, {"train": {"seed": 2, "steps": 3}})
    train(recipe, tmp_path / "run")
    assert told(tmp_path / "run")[0]["loss"] != told(first)[0]["loss"]


def test_resuming_a_finished_run_changes_nothing(whole, tmp_path):
    recipe, first = whole
    shutil.copytree(first, tmp_path / "run")
    train(recipe, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", first, STEPS)


def test_a_run_killed_before_its_last_files_is_finished_by_resuming(whole, tmp_path):
    recipe, first = whole
    shutil.copytree(first, tmp_path / "run")
    for name in ("model.safetensors", "README.md"):
        (tmp_path / "run" / name).unlink()
    train(recipe, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", first, STEPS)
    assert (tmp_path / "run/README.md").read_text() == (first / "README.md").read_text()


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_control_c_saves_exits_130_and_can_be_resumed_bit_for_bit(workers, tmp_path):
    recipe = write_recipe(tmp_path, {"train": {"steps": 160, "save_every": 70, "workers": workers, "eval_every": 0}})
    out = tmp_path / "run"
    process = launch(recipe, out)
    while steps_told(out) < 20:
        assert process.poll() is None, said(out)
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to every process of the group
    assert process.wait(60) == 130, said(out)
    assert "Traceback" not in said(out)
    step = steps_told(out)
    assert step < 160
    assert (out / "checkpoints/latest").read_text() == f"step-{step}"
    assert checkpoint.problem_with(out / f"checkpoints/step-{step}") is None
    process = launch(recipe, out, "--resume")
    assert process.wait(120) == 0, said(out)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(recipe, tmp_path / "whole")
    finally:
        torch.set_num_threads(threads)
    assert_same_run(out, tmp_path / "whole", 160)


def test_control_c_before_the_first_step_saves_too(tmp_path):
    recipe = write_recipe(tmp_path)
    train(recipe, tmp_path / "whole")
    run = train_until(recipe, tmp_path / "run", 0, saving=True)  # the first step passes before anybody can ask
    assert run.trainer.step == 1
    place, problems = checkpoint.newest(tmp_path / "run/checkpoints")
    assert (place.name, problems) == ("step-1", [])
    train(recipe, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole", STEPS)


def test_a_run_stopped_at_step_zero_has_a_checkpoint_without_optimizer_states(tmp_path):
    recipe = write_recipe(tmp_path)
    train(recipe, tmp_path / "whole")

    def at_once(run):
        run.trainer.stop = lambda: True

    train(recipe, tmp_path / "run", change=at_once)
    assert checkpoint.load(tmp_path / "run/checkpoints/step-0").tensors["optimizer"] == {}
    train(recipe, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole", STEPS)


# -- folders ---------------------------------------------------------------------------------------------------------


def test_an_existing_run_folder_is_exit_2_and_nothing_is_touched(whole, capsys):
    recipe, folder = whole
    before = listing(folder)
    assert command("train", recipe, "--out", folder) == 2
    assert "--resume" in one_line(capsys)
    assert listing(folder) == before


def test_resuming_where_nothing_is_is_one_line(whole, tmp_path, capsys):
    recipe, _ = whole
    assert command("train", recipe, "--out", tmp_path / "nowhere", "--resume") == 1
    assert "nothing to resume" in one_line(capsys)
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_cannot_be_made_is_one_line(whole, tmp_path, capsys):
    recipe, _ = whole
    (tmp_path / "file").write_text("in the way")
    assert command("train", recipe, "--out", tmp_path / "file/run") == 1
    assert "cannot be made" in one_line(capsys)
    assert (tmp_path / "file").read_text() == "in the way"


# -- a disk that refuses ---------------------------------------------------------------------------------------------


def test_a_save_that_fails_is_one_line_and_the_old_checkpoint_stays(halted, whole, capsys):
    recipe, folder = halted
    (folder / "checkpoints/step-20.tmp").write_text("a file where a folder must go")
    before = listing(folder / "checkpoints")
    assert command("train", recipe, "--out", folder, "--resume") == 1
    assert "step 20 cannot be written" in one_line(capsys)
    assert listing(folder / "checkpoints") == before
    (folder / "checkpoints/step-20.tmp").unlink()
    assert command("train", recipe, "--out", folder, "--resume") == 0
    assert_same_run(folder, whole[1], STEPS)


def test_a_disk_that_takes_no_more_is_one_line_and_the_old_checkpoint_stays(halted, whole):
    recipe, folder = halted
    smallest = (folder / "checkpoints/step-15/optimizer.safetensors").stat().st_size // 2
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (smallest, smallest))
    process = launch(recipe, folder, "--resume", preexec_fn=limit)
    assert process.wait(60) == 1, said(folder)
    errors = [line for line in said(folder).splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "step 20 cannot be written" in errors[0]
    assert "Traceback" not in said(folder)
    place, problems = checkpoint.newest(folder / "checkpoints")
    assert (place.name, problems) == ("step-15", [])
    assert not list((folder / "checkpoints").glob("*.tmp")), "half a checkpoint would fill the disk for good"
    train(recipe, folder, resume=True)
    assert_same_run(folder, whole[1], STEPS)


def test_metrics_that_cannot_be_written_are_one_line(halted, capsys):
    recipe, folder = halted
    (folder / "metrics.tmp").mkdir()
    assert command("train", recipe, "--out", folder, "--resume") == 1
    assert "metrics.jsonl cannot be written" in one_line(capsys)


# -- what was damaged ------------------------------------------------------------------------------------------------


def truncate(place):
    path = place / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    return path


def flip(place):
    path = place / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-11] ^= 4
    path.write_bytes(bytes(data))
    return path


def lose_manifest(place):
    (place / "manifest.json").unlink()
    return place / "manifest.json"


def cut_manifest(place):
    path = place / "manifest.json"
    path.write_text(path.read_text()[:-9])
    return path


def point_outside(place):
    path = place / "manifest.json"
    manifest = json.loads(path.read_text())
    (place.parent / "x").write_text("outside")
    manifest["files"]["../x"] = checkpoint._described(place.parent / "x")
    path.write_text(json.dumps(manifest))
    return path


def name_nothing(place):
    path = place / "manifest.json"
    path.write_text(json.dumps({"step": 15, "files": {}}))
    return path


def take_another_steps(place):
    shutil.rmtree(place)
    shutil.copytree(place.parent / "step-10", place)
    return place / "manifest.json"


def lose_a_file(place):
    (place / "random.safetensors").unlink()
    return place / "random.safetensors"


def lose_everything(place):
    shutil.rmtree(place)
    return place.parent / "latest"


def scramble_latest(place):
    shutil.rmtree(place)
    (place.parent / "latest").write_bytes(b"\xff\xfe\x00")
    return place.parent / "latest"


DAMAGES = [
    truncate,
    flip,
    lose_manifest,
    cut_manifest,
    point_outside,
    name_nothing,
    take_another_steps,
    lose_a_file,
    lose_everything,
    scramble_latest,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_loudly_and_the_newest_good_one_taken(damage, halted, whole):
    recipe, folder = halted
    file = damage(folder / "checkpoints/step-15")
    _, events = train(recipe, folder, resume=True)
    warnings = [event.text for event in events if isinstance(event, Warned)]
    assert any(str(file) in warning for warning in warnings), warnings
    assert any("step-10" in warning for warning in warnings), warnings
    assert_same_run(folder, whole[1], STEPS)


def test_damage_is_told_on_stderr(halted, capsys):
    recipe, folder = halted
    file = flip(folder / "checkpoints/step-15")
    assert command("train", recipe, "--out", folder, "--resume") == 0
    assert f"warning: passed over a checkpoint: {file} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [flip, lose_manifest])
def test_where_no_checkpoint_is_good_one_line_says_so(damage, halted, capsys):
    recipe, folder = halted
    for step in (5, 10, 15):
        damage(folder / f"checkpoints/step-{step}")
    before = listing(folder)
    with pytest.raises(FileError, match="is whole"):
        train(recipe, folder, resume=True)
    assert command("train", recipe, "--out", folder, "--resume") == 1
    assert "is whole" in one_line(capsys)
    assert listing(folder) == before


def test_a_file_the_manifest_does_not_name_is_left_alone(halted, whole):
    recipe, folder = halted
    (folder / "checkpoints/step-15/extra.safetensors").write_bytes(b"no tensors")
    train(recipe, folder, resume=True)
    assert_same_run(folder, whole[1], STEPS)


HALF_LINES = [b'{"step": 18, "loss": 2.', b'{"step": 1', b"\xff\x00\xfe", b"1"]


@pytest.mark.parametrize("half", HALF_LINES, ids=["in a figure", "in the step", "no text", "a number"])
def test_a_half_written_line_of_metrics_is_repaired(half, halted, whole):
    recipe, folder = halted
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(half)
    train(recipe, folder, resume=True)
    assert_same_run(folder, whole[1], STEPS)


# -- what was changed ------------------------------------------------------------------------------------------------


def test_resuming_with_another_model_is_one_line(halted, capsys):
    recipe, folder = halted
    before = listing(folder)
    assert command("train", recipe, "model.width=24", "--out", folder, "--resume") == 1
    assert "another model" in one_line(capsys)
    assert listing(folder) == before, "a run that is refused loses nothing, of its metrics neither"


@pytest.mark.parametrize("word", ["train.lr=0.5", "train.seed=4", "train.batch=4", "train.optimizer=muon"])
def test_resuming_with_another_way_to_train_is_one_line(word, halted, capsys):
    recipe, folder = halted
    assert command("train", recipe, word, "--out", folder, "--resume") == 1
    assert "another training recipe" in one_line(capsys)


def test_resuming_with_another_corpus_is_one_line(halted, tmp_path, capsys):
    recipe, folder = halted
    other = tmp_path / "other.txt"
    text = (recipe.parent / "text.txt").read_text()
    other.write_text(text[500:] + text[:500])
    assert command("train", recipe, f"data.corpus={other}", "--out", folder, "--resume") == 1
    assert "another corpus" in one_line(capsys)


def test_resuming_with_another_tokenizer_is_one_line(halted, capsys):
    recipe, folder = halted
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    vocab = described["model"]["vocab"]
    (first, one), (second, two) = sorted(vocab.items())[-2:]
    vocab[first], vocab[second] = two, one
    path.write_text(json.dumps(described))
    assert command("train", recipe, "--out", folder, "--resume") == 1
    assert "tokenizer" in one_line(capsys)


def test_a_longer_run_may_be_asked_for_on_resume(halted, whole):
    recipe, folder = halted
    assert command("train", recipe, "train.steps=27", "train.save_every=9", "--out", folder, "--resume") == 0
    assert [line["step"] for line in told(folder) if "loss" in line] == list(range(1, 28))


def test_another_number_of_threads_is_said(halted):
    recipe, folder = halted
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        _, events = train(recipe, folder, resume=True)
    finally:
        torch.set_num_threads(threads)
    assert any("threads was" in event.text for event in events if isinstance(event, Warned))


# -- what changed under the same name --------------------------------------------------------------------------------


def exchange(text, place):
    """One letter of a text for another."""
    return text[:place] + ("a" if text[place] != "a" else "b") + text[place + 1 :]


@pytest.mark.parametrize(("where", "split"), [(0.3, "train"), (0.97, "valid")])
def test_resuming_with_another_text_under_the_same_path_is_one_line(where, split, tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    train_until(recipe, tmp_path / "run", 7)
    text = (tmp_path / "text.txt").read_text()
    (tmp_path / "text.txt").write_text(exchange(text, int(where * len(text))))
    before = listing(tmp_path / "run")
    assert command("train", recipe, "--out", tmp_path / "run", "--resume") == 1
    said = one_line(capsys)
    assert f"another content of data.corpus, split {split}; put it back as it was, or start a new run" in said
    assert listing(tmp_path / "run") == before
    (tmp_path / "text.txt").write_text(text)
    assert command("train", recipe, "--out", tmp_path / "run", "--resume") == 0


def test_a_tokenizer_that_is_not_the_models_is_refused_before_anything_is_read(halted, capsys):
    recipe, folder = halted
    stored = json.loads((folder / "config.json").read_text())
    assert stored["tokenizer"] == Tokenizer.from_pretrained(folder).fingerprint
    Tokenizer.train("char", ["abc" * 9], specials="none").save_pretrained(folder)
    assert command("train", recipe, "--out", folder, "--resume") == 1
    assert "is not the one the model was trained with" in one_line(capsys)
    with pytest.raises(FileError, match="give the tokenizer from the model's own folder"):
        tokenizer_in(folder)


def test_a_finished_run_still_says_whose_tokenizer_it_has(whole):
    _, folder = whole
    assert tokenizer_in(folder).fingerprint == json.loads((folder / "config.json").read_text())["tokenizer"]
    assert Transformer.from_pretrained(folder).config.input.vocab == tokenizer_in(folder).vocab_size
