"""The listings of tasks, keys and knobs, and the reference pages that are generated from them."""

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from generated_pages import CLASSES, PAGES, find_stale_pages, main

from monoblock.cli import output
from monoblock.cli.main import VERBS, run
from monoblock.config import model, parts
from monoblock.config.families import bart, llama, vit
from monoblock.config.field_description import REQUIRED, describe_fields, field_comments
from monoblock.config.knobs import KNOBS, list_knobs, read_knob
from monoblock.experiments.library import EXPERIMENTS
from monoblock.recipes.schema import list_sections
from monoblock.runs.recipe import SECTIONS, list_recipes
from monoblock.tasks.table import TASKS

DOCS = Path(__file__).parents[2] / "docs"


def listing(capsys, *arguments):
    assert run(["ls", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)[arguments[0]]


def test_the_experiments_are_listed_and_the_suggested_one_exists(capsys):
    assert [row["name"] for row in listing(capsys, "experiments")] == list(EXPERIMENTS)
    assert run(["ls", "experiments", "norm-placement"]) == 0
    out, err = capsys.readouterr()
    assert EXPERIMENTS["norm-placement"][1] in " ".join(out.split())
    assert err == "Try: monoblock compare norm-placement --smoke\n"


@pytest.fixture(autouse=True, scope="module")
def built_once():
    """Build each reference page once for all tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        for name, build in PAGES.items():
            patch.setitem(PAGES, name, functools.cache(build))
        yield


@pytest.mark.parametrize("page", PAGES)
def test_every_reference_page_is_what_the_code_generates(page):
    assert page not in find_stale_pages(DOCS), "run scripts/docs"


def test_a_stale_page_is_found_and_written(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    assert main(["--check", str(tmp_path)]) == 0
    (tmp_path / "cli.md").write_text("old")
    assert main(["--check", str(tmp_path)]) == 1
    assert "docs/cli.md is not what the code generates; run scripts/docs" in capsys.readouterr().err
    assert main(["--chekc", str(tmp_path)]) == 2


def test_the_pages_name_every_command_recipe_section_and_knob():
    cli, recipes, config = (PAGES[name]() for name in ("cli.md", "recipes.md", "config.md"))
    assert all(f"\n## monoblock {verb}\n" in cli for verb in VERBS)
    assert all(f"| `{name}` |" in recipes for name in [*list_recipes(), *(task.name for task in TASKS)])
    assert all(f"\n### `[{section}]`\n" in recipes for section in SECTIONS)
    assert all(f"| `{knob}` |" in config for knob in KNOBS)


def test_every_key_of_a_recipe_has_a_meaning():
    sections = list_sections(TASKS)
    assert {"data", "train", "classification.augment", "text_to_text.tasks"} < {section.name for section in sections}
    assert [f"{section.name}.{key.name}" for section in sections for key in section.keys if not key.meaning] == []
    assert [section.name for section in sections if section.name and not section.about] == []


def test_every_field_of_a_configuration_has_a_meaning():
    assert [
        f"{cls.__name__}.{field.name}" for cls in CLASSES for field in describe_fields(cls) if not field.meaning
    ] == []


def test_the_page_lists_every_configuration_class():
    defined = {
        cls
        for module in (model, parts)
        for cls in vars(module).values()
        if isinstance(cls, type) and dataclasses.is_dataclass(cls)
    }
    assert set(CLASSES) == defined


def test_every_knob_has_a_meaning_and_a_paper_or_a_dash():
    assert [knob.name for knob in list_knobs() if not knob.meaning or not knob.paper] == []


def test_the_default_of_a_knob_is_that_of_the_field_it_sets():
    defaults = {knob.name: knob.default for knob in list_knobs()}
    assert (defaults["norm"], defaults["positions"], defaults["bias"], defaults["qk_norm"]) == (
        "layer",
        "none",
        True,
        False,
    )
    assert (defaults["mask"], defaults["kv_heads"], defaults["top_k"]) == ("causal", None, 2)
    assert defaults["width"] is defaults["experts"] is defaults["classes"] is REQUIRED


def test_a_knob_is_read_from_a_configuration():
    config = bart(vocab=11, width=12, depth=2, heads=3, context=13)
    assert read_knob(config, "mask") == ["full", "causal"]
    assert read_knob(config, "positions") == ["learned"]
    assert read_knob(config, "embedding_norm") == [True]
    assert read_knob(llama(vocab=11, width=12, depth=1, heads=3, context=13), "norm") == ["rms"]
    assert read_knob(vit(image=6, patch=2, width=12, depth=1, heads=3, classes=5), "embedding_norm") == []


def test_comments_are_read_behind_and_above_a_field():
    source = (
        'class A:\n    a: int = 1  # one\n    # two\n    b: str = "# no"\n    c: int = (\n        3  # three\n    )\n'
    )
    assert field_comments(source) == {"a": "one", "b": "two", "c": "three"}


@pytest.mark.parametrize("what", ["recipes", "tasks", "keys", "knobs"])
def test_these_listings_do_not_import_torch(what):
    code = f"import sys\nfrom monoblock.cli.main import run\nassert run(['ls', '{what}']) == 0"
    code += "\nassert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr


def test_keys_have_type_default_and_meaning(capsys):
    rows = {row["name"]: row for row in listing(capsys, "keys")}
    assert rows["train.lr"]["type"] == "number"
    assert rows["train.lr"]["default"] == 0.001
    assert rows["train.schedule"]["choices"] == ["noam", "constant", "linear", "cosine", "wsd"]
    assert "default" not in rows["data.corpus"]
    assert rows["classification.augment.flip"]["meaning"].startswith("mirror")
    assert rows["model.kv_heads"]["paper"].endswith("Ainslie et al. 2023")


def test_a_word_selects_a_section_a_name_or_a_text(capsys):
    assert {row["section"] for row in listing(capsys, "keys", "train")} == {"train"}
    assert [row["name"] for row in listing(capsys, "keys", "freeze")] == ["train.freeze_layers"]
    assert [row["name"] for row in listing(capsys, "knobs", "Su et al.")] == ["positions", "rotary_base"]
    assert run(["ls", "keys", "trian"]) == 2
    assert "none of the keys matches 'trian'; did you mean 'train'?" in capsys.readouterr().err


def test_tasks_name_their_models_data_and_metrics(capsys):
    rows = {row["name"]: row for row in listing(capsys, "tasks")}
    assert list(rows) == [task.name for task in TASKS]
    assert rows["classification"]["models"] == "encoder-only, decoder-only, vision"
    assert rows["question_answering"]["keys"] == ["stride", "unanswerable"]


@pytest.mark.parametrize("what", ["tasks", "keys", "knobs"])
def test_on_a_terminal_of_80_columns_no_name_is_broken(what, capsys, monkeypatch):
    names = {row["name"] for row in listing(capsys, what)}
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert run(["ls", what]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert names <= {line.split()[0] for line in lines if line.split()}
    assert max(len(line.rstrip()) for line in lines if not line.startswith("\x1b")) <= 80


def test_narrow_columns_are_wrapped_before_others():
    columns = [["name", "norm"], ["type", "one two three"], ["meaning", "some words of it"]]
    assert output._fit_widths(columns, [False] * 3, [False, True, False], 30) == [4, 6, 16]
    assert output._fit_widths(columns, [False] * 3, [False, True, False], 100) == [4, 13, 16]
