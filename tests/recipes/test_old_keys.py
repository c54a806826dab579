"""Keys and objectives of version 0.1: recipes mean the same, each old key says its new name, digests stay the same."""

import tomllib
import warnings
from pathlib import Path

import pytest

from monoblock.errors import ConfigError
from monoblock.recipes.old_keys import RENAMED_KEYS, to_old_tables
from monoblock.recipes.parse import list_recipes
from monoblock.runs.recipe import parse_recipe, read_recipe, task_of_recipe
from monoblock.tasks.table import TASKS

OLD_RECIPES = Path(__file__).parents[1] / "fixtures" / "version-0.1" / "recipes"
MODELS = {
    "decoder-only": {"family": "gpt", "width": 16, "depth": 1, "heads": 2, "context": 16},
    "encoder-only": {"family": "bert", "width": 16, "depth": 1, "heads": 2, "context": 16},
    "encoder-decoder": {"family": "t5", "width": 16, "depth": 1, "heads": 2, "context": 16},
}


RETUNED = {  # changed since
    "dakshina-hi": ["model.dropout=0.1", "model.word_dropout=0.1", "train.steps=7000"],
    "wikitext2-lstm": [
        *("model.dropout=0.3", "model.embedding_dropout=0.5", "model.head_dropout=0.6", "model.word_dropout=0.1"),
        *("model.variational_dropout=true", "model.recurrent_dropout=0.5"),
    ],
}


def tables(recipe):
    return recipe.to_tables() | {"about": ""}  # the descriptions name keys


@pytest.mark.parametrize("name", [path.stem for path in sorted(OLD_RECIPES.glob("*.toml"))])
def test_a_recipe_of_the_old_version_means_what_it_means_now(name):
    old = read_recipe(OLD_RECIPES / f"{name}.toml", RETUNED.get(name, []), warn=False)
    assert name in list_recipes()
    assert tables(old) == tables(read_recipe(name))


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_of_the_package_has_only_new_keys(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read_recipe(name)
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.parametrize("name", [path.stem for path in sorted(OLD_RECIPES.glob("*.toml"))])
def test_old_tables_are_those_the_old_version_resolved(name):
    """A checkpoint of the old version stores digests of these tables."""
    recipe = read_recipe(OLD_RECIPES / f"{name}.toml", warn=False)
    old = to_old_tables(recipe, task_of_recipe(recipe), TASKS)
    written = tomllib.loads((OLD_RECIPES / f"{name}.toml").read_text(encoding="utf-8"))
    for section in ("data", "train", "generate"):
        for key, value in written.get(section, {}).items():
            if isinstance(value, dict):
                assert old[section][key].items() >= value.items()
            elif key == "tasks":
                assert [{k: v for k, v in row.items() if v is not None} for row in old[section][key]] == value
            else:
                assert old[section][key] == value


def base(objective, **sections):
    task = next(task for task in TASKS if objective in (task.name, *task.old_names))
    return {"data": {"corpus": "x"}, "model": MODELS[task.families[0]], "train": {"objective": objective}, **sections}


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_a_renamed_key_is_read_with_a_warning_in_files_and_overrides(old, new):
    value = "true" if old.endswith(("best", "checkpointing")) else "2"
    with pytest.warns(FutureWarning, match=f"{old} is now called {new}"):
        by_old = parse_recipe(base("causal_lm"), ["train.keep_checkpoints=3", f"{old}={value}"])
    assert by_old == parse_recipe(base("causal_lm"), ["train.keep_checkpoints=3", f"{new}={value}"])


@pytest.mark.parametrize("task", [task for task in TASKS if task.old_names], ids=lambda task: task.name)
def test_an_old_objective_is_read_with_a_warning(task):
    extra = {"data": {"corpus": "x", "prefix": "a:"}} if task.name == "text_to_text" else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recipe = parse_recipe({**base(task.old_names[0]), **extra})
    assert any(f"is now called '{task.name}'" in str(warning.message) for warning in caught)
    assert recipe.train.objective == task.name


def test_the_keys_of_a_task_are_in_its_section():
    with pytest.warns(FutureWarning, match=r"data\.stride is now called question_answering\.stride"):
        recipe = parse_recipe(base("question_answering"), ["data.stride=7"])
    assert recipe.task.stride == 7
    with pytest.raises(ConfigError, match=r"data\.stride is now called question_answering\.stride, but .*'causal_lm'"):
        parse_recipe(base("causal_lm"), ["data.stride=7"])
    with pytest.raises(ConfigError, match=r"\[seq2seq\] is for train\.objective='seq2seq'"):
        parse_recipe(base("causal_lm", seq2seq={"direction": "both"}))
    with pytest.raises(ConfigError, match="did you mean 'stride'"):
        parse_recipe(base("question_answering"), ["question_answering.strid=7"])
