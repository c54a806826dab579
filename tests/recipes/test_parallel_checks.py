"""Recipes that a strategy for several processes cannot train are refused before a process or a file is made."""

import pytest
from training_support import run_command

from monoblock.errors import ConfigError
from monoblock.runs.recipe import KEY_STRATEGIES, check_parallel, list_unused_keys, read_recipe


@pytest.mark.parametrize("strategy", ["fsdp", "tp", "fsdp+tp", "pp"])
@pytest.mark.parametrize(
    "choice",
    ["train.adversarial=0.1", "train.precision=fp16", "train.precision=fp8", "lora.rank=2", "model.norm=batch"],
)
def test_a_choice_that_needs_whole_weights_is_refused(strategy, choice):
    recipe = read_recipe("languages", [f"train.parallel={strategy}", choice])
    with pytest.raises(ConfigError, match=f"{choice.split('=')[0]}.*cannot be used with"):
        check_parallel(recipe, 2)
    check_parallel(recipe, 1)


def test_a_refused_recipe_leaves_no_folder(tmp_path, capsys):
    out = tmp_path / "run"
    assert run_command("train", "gpt-tiny", "train.parallel=tp", "lora.rank=2", "--nproc", "2", "--out", out) == 2
    assert capsys.readouterr().err.strip().splitlines() == [
        "error: lora.rank cannot be used with train.parallel=tp; write train.parallel=ddp"
    ]
    assert not out.exists()


def test_a_key_that_changes_nothing_is_noted():
    recipe = read_recipe("gpt-tiny", ["parallel.sequence=true", "parallel.pipeline=2"])
    assert list_unused_keys(recipe, 2) == [
        "parallel.sequence changes nothing with train.parallel=ddp",
        "parallel.pipeline changes nothing with train.parallel=ddp",
    ]
    recipe = read_recipe("gpt-tiny", ["parallel.sequence=true", "train.parallel=tp"])
    assert list_unused_keys(recipe, 2) == []
    assert list_unused_keys(recipe, 1) == ["parallel.sequence changes nothing in a single process"]


def test_every_key_of_the_section_is_in_the_table():
    section = read_recipe("gpt-tiny").parallel
    assert set(vars(section)) == {*KEY_STRATEGIES, "timeout"}


def test_processes_of_torchrun_start_no_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert run_command("train", "gpt-tiny", "--nproc", "2", "--out", tmp_path / "run") == 2
    assert "leave out --nproc" in capsys.readouterr().err
