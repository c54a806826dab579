"""The page docs/recipes.md: the sections of a recipe with their keys, the tasks, and the recipes of the package."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from monoblock.cli._reference.markdown import code, join_page, table
from monoblock.cli._shared.value_text import format_toml
from monoblock.cli.ls import LISTINGS
from monoblock.config.field_description import FieldDescription, list_choices, type_words
from monoblock.recipes.key_table import SectionDescription, list_sections
from monoblock.tasks.table import TASKS

INTRODUCTION = """# Recipes

A recipe is a TOML file that says which model is trained, on which data and how. `monoblock train RECIPE` takes the
name of a recipe below or the path of a file of your own; arguments such as `train.steps=500` change keys for one run,
and `--dry-run` prints the whole recipe. From Python: `mb.train("demo", {"train.steps": 500})`. The shortest recipe is

```toml
[data]
corpus = "my-text.txt"

[model]
family = "gpt"
width = 128
depth = 4
heads = 4
context = 256
```

Every other key has a default. A key whose default is none is not set unless the recipe sets it; — means that there is
no default. `monoblock ls keys` prints the tables of this page, and `monoblock ls keys train` those of one section."""

MODEL_NOTE = """All other keys of this section are knobs, such as `width`, `depth`, `heads`, `norm` or `dropout`:
[config.md](config.md) lists them, and the sizes that each family needs. With `family = "lstm"` the keys are those of
[RecurrentConfig](config.md#recurrentconfig). With `folder`, the sizes are those of the stored model, and only
`context`, the dropout probabilities and the head can be changed."""


def build_recipes_page() -> str:
    sections = list_sections(TASKS)
    shared = [part for section in sections if not section.task for part in _describe_section(section)]
    own = [part for section in sections if section.task for part in _describe_section(section)]
    without = ", ".join(code(task.name) for task in TASKS if task.section is None)
    return join_page(
        INTRODUCTION,
        "## Recipes that come with the package",
        _recipe_table(),
        "## Tasks",
        "`train.objective` names the task. `monoblock ls tasks` prints this table.",
        _task_table(),
        "## Keys of every recipe",
        *shared,
        "## Keys of one task",
        "A section with the name of the task holds the keys that only this task has; a recipe may have it only with "
        f"this `train.objective`. These tasks have no keys of their own: {without}.",
        *own,
    )


def _describe_section(section: SectionDescription) -> Iterator[str]:
    heading = f"[[{section.name}]]" if section.is_list else f"[{section.name}]"
    yield f"### {code(heading)}" if section.name else "### Before the first section"
    yield section.about.replace("[seq2seq]", "`[seq2seq]`")
    if section.keys:
        yield table(("key", "type", "default", "meaning"), [_key_row(key) for key in section.keys])
    if section.name == "model":
        yield MODEL_NOTE


def _key_row(key: FieldDescription) -> tuple[str, str, str, str]:
    values = [*type_words(key.hint), *(code(format_toml(choice)) for choice in list_choices(key.hint))]
    default = "none" if key.default is None else code(format_toml(key.default))
    return code(key.name), ", ".join(values), default, key.meaning


def _recipe_table() -> str:
    rows = LISTINGS["recipes"][0]()
    return (
        table(
            ("recipe", "task", "corpus", "parameters", "steps", "about"),
            [
                (
                    code(row["name"]),
                    code(row["objective"]),
                    code(row["corpus"]),
                    "" if row["parameters"] is None else f"{row['parameters']:,}",
                    f"{row['epochs']:g} epochs" if row["epochs"] is not None else f"{row['steps']:,}",
                    row["about"],
                )
                for row in rows
            ],
        )
        + "\n\nThe number of parameters is left out where it depends on the vocabulary or the labels of the data."
    )


def _task_table() -> str:
    return table(
        ("task", "what the model learns", "models", "head", "data", "metrics"),
        [
            (
                code(task.name),
                task.about,
                *map(_list_text, (task.families, [task.head], task.corpus_kinds, task.metrics)),
            )
            for task in TASKS
        ],
    )


def _list_text(names: Iterable[str]) -> str:
    return ", ".join(names)
