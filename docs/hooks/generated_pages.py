"""Write docs/cli.md, recipes.md, config.md, experiments.md and a picture from the code; scripts/docs runs this file.

With --check nothing is written, and the exit code is 1 if a page is not what the code generates.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import click
from architecture_picture import build_architecture_picture

from monoblock.cli.ls import LISTINGS, NO_DEFAULT, format_toml
from monoblock.cli.main import VERBS, cli
from monoblock.config import model
from monoblock.config.field_description import (
    REQUIRED,
    FieldDescription,
    allows_none,
    describe_fields,
    list_choices,
    type_words,
)
from monoblock.config.knobs import StyleKnobs, list_knobs, read_knob
from monoblock.config.schema import union_members
from monoblock.experiments.claims import CLAIMS, Claim
from monoblock.experiments.library import EXPERIMENTS, load_experiment
from monoblock.experiments.report import Report
from monoblock.experiments.results import read_results
from monoblock.experiments.rules import Rule, Verdict
from monoblock.interop.huggingface.load import FAMILIES as PUBLISHED_FAMILIES
from monoblock.metrics.table import METRICS
from monoblock.recipes.schema import FAMILIES, SectionDescription, list_sections
from monoblock.tasks.table import TASKS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

WARNING = "<!-- Written by scripts/docs from the code; edit the code and run it again. -->"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; a column that is empty in every row is left out."""
    shown = [index for index, name in enumerate(columns) if not rows or any(row[index] for row in rows)]
    lines = [[columns[index] for index in shown], ["---"] * len(shown)]
    lines += [[_escape(row[index]) for index in shown] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;") if "`" not in cell else cell.replace("|", "\\|")


def code(text: str) -> str:
    return f"`{text}`" if text and text != "—" else text


def join_page(*parts: str) -> str:
    """Join the paragraphs of a page, which begins with the warning not to edit it."""
    return "\n\n".join([WARNING, *(part.strip("\n") for part in parts if part)]) + "\n"


# -- docs/cli.md -------------------------------------------------------------------------------------------------------

CLI_INTRODUCTION = """# The command line

`monoblock COMMAND --help` prints what this page lists. The exit code is 0 on success, 1 on failure, 2 if the
arguments or a recipe are wrong, 3 if a check failed (such as `evaluate --at-least`), 130 if the command was interrupted
by Ctrl-C, and 143 if it was ended by SIGTERM; training saves first in both cases. An error is one line on stderr;
`--debug` adds the traceback. `MODEL` is a run folder, a Hugging Face folder, a GGUF file, or the owner/name[@revision]
of a model on the Hugging Face Hub. The listings of `monoblock ls` are also on the pages [recipes.md](recipes.md) and
[config.md](config.md)."""


def build_cli_page() -> str:
    context = click.Context(cli, info_name="monoblock")
    overview = table(
        ("command", "what it does"), [(f"[`{name}`](#monoblock-{name})", about) for name, (_, about) in VERBS.items()]
    )
    parts = [CLI_INTRODUCTION, overview]
    for name in VERBS:
        command = cli.get_command(context, name)
        assert command is not None
        parts += _describe_command(command, name, context)
    return join_page(*parts)


def _describe_command(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    """Yield the paragraphs about a command and, if it is a group, about its commands."""
    context = click.Context(command, info_name=name, parent=parent)
    level = "#" * (1 + len(context.command_path.split()) - 1)
    yield f"{level} {context.command_path}"
    if not isinstance(command, click.Group):
        yield f"```\n{' '.join([context.command_path, *command.collect_usage_pieces(context)])}\n```"
    yield from _paragraphs(command.help or "")
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    if options:
        yield table(("option", "value", "default", "meaning"), [_option_row(option, context) for option in options])
    if isinstance(command, click.Group):
        for inner, subcommand in command.commands.items():
            yield from _describe_command(subcommand, inner, context)


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text; lines that click must not wrap become the items of a list."""
    items: list[str] = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\x08)", inspect.cleandoc(text)):
        if paragraph.startswith("\b"):
            items += [f"- {' '.join(line.split())}" for line in paragraph[1:].strip("\n").splitlines()]
            continue
        if items:
            yield "\n".join(items)
            items = []
        yield " ".join(paragraph.split()).replace("<", "&lt;")
    if items:
        yield "\n".join(items)


def _option_row(option: click.Option, context: click.Context) -> tuple[str, str, str, str]:
    text = " ".join((option.help or "").split())
    meaning, _, default = text.removesuffix("]").partition(" [default: ")
    if not default and not option.is_flag and isinstance(option.default, str | int | float | Path):
        default = str(option.default)
    names = ", ".join(code(name) for name in option.opts)
    return names, _option_values(option, context), "required" if option.required else default, meaning


def _option_values(option: click.Option, context: click.Context) -> str:
    if option.is_flag:
        return ""
    match option.type:
        case _ if option.metavar:
            return code(option.metavar)
        case click.Choice(choices=choices):
            return ", ".join(code(str(choice)) for choice in choices)
        case click.IntRange(min=int(least)):
            return f"integer ≥ {least}"
        case click.Path(file_okay=False):
            return "folder"
        case click.Path():
            return "path"
        case _:
            names = {"integer": "integer", "float": "number", "float range": "number", "number": "number"}
            return names.get(option.type.name, "text")


# -- docs/recipes.md ---------------------------------------------------------------------------------------------------

RECIPES_INTRODUCTION = """# Recipes

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
        RECIPES_INTRODUCTION,
        "## Recipes that come with the package",
        _recipe_table(),
        "## Tasks",
        "`train.objective` names the task. `monoblock ls tasks` prints this table.",
        _task_table(),
        "These are the metrics (`metrics/table.py`); a name may have a prefix, as in `val_accuracy`.",
        _metric_table(),
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


def _metric_table() -> str:
    rows = [(code(row.name), row.better or "—", row.about) for row in METRICS.values() if row.scale != "count"]
    return table(("metric", "better", "meaning"), rows)


def _list_text(names: Iterable[str]) -> str:
    return ", ".join(names)


# -- docs/config.md ----------------------------------------------------------------------------------------------------

CONFIG_INTRODUCTION = """# Configurations

A model is described by a `ModelConfig`: frozen data that says which parts a model has. There are four ways to get
one.

```python
import monoblock as mb

mb.preset("gpt2")                                                       # a published model
mb.gpt(vocab=4096, width=128, depth=4, heads=4, context=256)            # a family, by its sizes
mb.vary(mb.preset("gpt2"), norm="rms", positions="rotary", kv_heads=4)  # a change of some choices: knobs
mb.ModelConfig.from_json(open("config.json").read())                    # the file of a model folder
```

The families take every knob as a further argument, and a recipe has the same names in its section
[`[model]`](recipes.md). `monoblock ls presets` lists the published models, and `monoblock ls knobs` the knobs."""

# Sizes that differ from those of the other arguments; the values do not matter.
SIZES = {"vocab": 8, "width": 8, "depth": 1, "heads": 2, "context": 8, "image": 8, "patch": 4, "classes": 2}


def _classes_of_fields(cls: type) -> Iterator[type]:
    """Yield a configuration class and the classes of its fields, as a tree from the top."""
    yield cls
    for hint in get_type_hints(cls).values():
        for member in union_members(hint):
            inner = get_args(member)[0] if get_origin(member) is tuple else member
            yield from _classes_of_fields(inner) if dataclasses.is_dataclass(inner) else ()


CLASSES = tuple(dict.fromkeys((*_classes_of_fields(model.ModelConfig), model.RecurrentConfig)))
CLASS_NAMES = {cls.__name__ for cls in CLASSES}


def build_config_page() -> str:
    return join_page(
        CONFIG_INTRODUCTION,
        "## Families",
        _family_table(),
        "This is how the families differ. Where two values are given, the first is that of the encoder.",
        _family_knob_table(),
        "## Published families",
        f"Folders of {len(PUBLISHED_FAMILIES)} Hugging Face families (`model_type`) are read and written:",
        ", ".join(sorted(map(code, PUBLISHED_FAMILIES))) + ".",
        "## Knobs",
        "A knob changes one choice everywhere in a model and keeps the rest. The default is that of the configuration "
        "classes, which a family or preset may change (see above); — means that the family or preset always decides.",
        _knob_table(),
        "## Fields",
        "The classes that a `ModelConfig` is made of, with all their fields. A field without a default (—) must be "
        "given. Every value is checked when an object is built; a wrong one raises `ConfigError`, which says what to "
        "write instead.",
        *(part for cls in CLASSES for part in _describe_class(cls)),
    )


def _family_table() -> str:
    rows = []
    for name, build in FAMILIES.items():
        arguments = [item for item in inspect.signature(build).parameters.values() if item.kind is item.KEYWORD_ONLY]
        needed = ", ".join(code(item.name) for item in arguments if item.default is item.empty)
        optional = ", ".join(
            code(item.name if item.default is None else f"{item.name}={format_python(item.default)}")
            for item in arguments
            if item.default is not item.empty
        )
        about = (inspect.getdoc(build) or "").split("\n\n")[0]
        rows.append((code(name), " ".join(about.split()), needed, optional))
    return table(("family", "architecture", "required", "optional"), rows)


def _family_knob_table() -> str:
    """Return a table of the style knobs that are not the same in all families."""
    configs = [_build_family(name) for name in FAMILIES]
    rows = []
    for knob in get_type_hints(StyleKnobs):
        values = [", ".join(format_python(value) for value in read_knob(config, knob)) for config in configs]
        if len({value for value in values if value}) > 1:
            rows.append((code(knob), *(code(value) or "—" for value in values)))
    return table(("knob", *FAMILIES), rows)


def _build_family(name: str) -> model.ModelConfig:
    arguments = inspect.signature(FAMILIES[name]).parameters.values()
    needed = [item.name for item in arguments if item.kind is item.KEYWORD_ONLY and item.default is item.empty]
    return FAMILIES[name](**{argument: SIZES[argument] for argument in needed})


def _knob_table() -> str:
    rows = [
        (
            code(knob.name),
            _value_text(knob.hint),
            code(format_python(knob.default)),
            _link_values(knob.meaning),
            knob.paper,
        )
        for knob in list_knobs()
    ]
    return table(("knob", "values", "default", "meaning", "paper"), rows)


def _describe_class(cls: type) -> Iterator[str]:
    yield f"### {cls.__name__}"
    yield inspect.getdoc(cls) or ""
    rows = [
        (code(field.name), _value_text(field.hint), code(format_python(field.default)), _link_values(field.meaning))
        for field in describe_fields(cls)
    ]
    yield table(("field", "values", "default", "meaning"), rows)


def _value_text(hint: Any) -> str:
    """Describe a type, with links to the classes in it."""
    words = [re.sub(r"[A-Z]\w+", _link_class, word) for word in type_words(hint)]
    words += [code(format_python(choice)) for choice in list_choices(hint)]
    return ", ".join([*words, *([code("None")] if allows_none(hint) else [])])


def _link_class(match: re.Match[str]) -> str:
    name = match[0]
    return f"[{name}](#{name.lower()})" if name in CLASS_NAMES else name


def _link_values(meaning: str) -> str:
    """Write "None" in a meaning as code."""
    return re.sub(r"\bNone\b", "`None`", meaning)


def format_python(value: Any) -> str:
    """Write a default value as in Python, without the fields of a configuration that have their default."""
    if value is REQUIRED:
        return NO_DEFAULT
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = [field for field in dataclasses.fields(value) if getattr(value, field.name) != field.default]
        fields = (f"{field.name}={format_python(getattr(value, field.name))}" for field in changed)
        return f"{type(value).__name__}({', '.join(fields)})"
    return f'"{value}"' if isinstance(value, str) else repr(value)


# -- docs/experiments.md -----------------------------------------------------------------------------------------------

NOT_MEASURED = "not yet measured"
EXPERIMENTS_INTRODUCTION = """# Experiments

The source documents make claims; each is one command away:
```bash
monoblock compare residuals "arms=*-start"          # a table with deviations, a plot, a conclusion
monoblock compare residuals --dry-run               # the claim, the budget, the seeds, the arms and the rules
monoblock compare positions seeds=1,2,3 --jobs 7    # several arms at once, also on one GPU
monoblock compare positions --smoke                 # everything for a few steps, to see that it runs
```
An experiment trains or measures its *arms* with one budget, the same data in the same order and the same seeds.
`arms=NAME,NAME`, in which `*` stands for any text, and `seeds=1,2,3` choose what a call runs; the table has all stored
seeds of these arms. `section.key=value` changes the recipe of all arms. WikiText-2 and Multi30k are read from the
folder `--data` or `$MONOBLOCK_DATA`; where they are missing, a packaged corpus is used instead, and the call and the
page say so.

**Results are lines of JSON.** Each finished arm and seed is a line of `results.jsonl` in the folder `--out` (by default
`runs/compare-NAME`). A trial that has a line is not run again, so the same command continues an experiment that was
killed. Lines of another machine are merged by copying the file into the folder under any name that ends in `.jsonl`, or
with `--results FILE`. Only lines with the same options and changes are compared; compilation, workers and device may
differ. In translation, do not mix `train.compile=graphs` with other values: with it a batch has pairs of all lengths,
else of similar lengths. `benchmarks/experiments_gpu.sh` runs several experiments at the same time on one GPU. `--table`
runs nothing, and `--write benchmarks/results` writes the page, the lines and the plot.

**Rules are fixed beforehand.** The file of an experiment states, before any run, what has to hold for a claim: a metric
of an arm, or its difference or ratio to another arm with the same seed, and a bound. If the 95 % confidence interval of
the mean over the seeds lies on the right side of the bound, the rule is confirmed; if it lies on the other side, it is
contradicted; otherwise the result is inconclusive. Fewer than three seeds are always inconclusive, unless the quantity
does not vary with the seed; this minimum was set after most of the runs. The interval is that of Student's t and
symmetric, so for a ratio that varies much between few seeds it may begin below 0. A rule of which something was added
once there were results says what that was.

[adding.md](adding.md) shows how an experiment is written. This page is generated: what it says of a claim follows
from the lines in `benchmarks/results`.
"""


CLAIMS_INTRODUCTION = """## The claims

The verdict on a claim follows from the rules in the last column. A claim is confirmed if all its rules are,
contradicted if all are contradicted, and partly confirmed if some are confirmed and others contradicted; anything else
is inconclusive, and so is a claim that the experiment is too weak to contradict. Some rules say the opposite of a
claim: confirmed, they contradict it; contradicted, they say nothing.
Where a page has sections for several machines, the last one counts.
"""


def build_experiments_page() -> str:
    lines = [
        EXPERIMENTS_INTRODUCTION,
        "## The experiments",
        "",
        "| name | what is compared | claim | table |",
        "|---|---|---|---|",
    ]
    for name, about in EXPERIMENTS.items():
        experiment = load_experiment(name)
        lines.append(f"| `{name}` | {about} | {experiment.claim} ({experiment.source}) | {_link(name)} |")
    lines += ["", CLAIMS_INTRODUCTION]
    lines += ["| where | it says | verdict | experiment | what the numbers say |", "|---|---|---|---|---|"]
    verdicts = cache(_verdicts)
    for claim in CLAIMS:
        name = f"`{claim.experiment}`" if claim.experiment else "—"
        found = verdicts(claim.experiment) if claim.experiment else []
        verdict = f"**{claim.judge(found)}**" if found else "see the table"
        lines.append(f"| {claim.place} | {claim.text} | {verdict} | {name} | {_explain(claim, found)} |")
    return "\n".join(lines) + "\n"


def _link(name: str) -> str:
    return f"[table](../benchmarks/results/{name}.md)" if (RESULTS / f"{name}.md").is_file() else NOT_MEASURED


def _late(rule: Rule) -> str:
    return f" ({rule.added_later} was added after results)" if rule.added_later else ""


def _explain(claim: Claim, verdicts: Sequence[Verdict]) -> str:
    """Return what each rule of a claim says, and the other table that shows it."""
    rules = load_experiment(claim.experiment).rules if claim.experiment else ()
    said = [f"{rules[number].statement}: {verdicts[number]}{_late(rules[number])}" for number in claim.rules]
    if claim.table:
        said.append(f"[table](../benchmarks/results/{claim.table}.md)")
    return "; ".join([*said, claim.caveat] if claim.caveat else said)


def _verdicts(name: str) -> Sequence[Verdict]:
    """Return what each rule of an experiment says about the stored results; the last machine counts."""
    experiment, file = load_experiment(name), RESULTS / f"{name}.jsonl"
    stored = read_results([file], name) if file.is_file() else []
    report = Report(experiment, tuple(stored))
    return [conclusion.verdict for conclusion in report.by_machine()[-1].conclusions()]


# -- writing -----------------------------------------------------------------------------------------------------------

PAGES: dict[str, Callable[[], str]] = {
    "cli.md": build_cli_page,
    "recipes.md": build_recipes_page,
    "config.md": build_config_page,
    "experiments.md": build_experiments_page,
    "pictures/architecture.svg": build_architecture_picture,
}


def find_stale_pages(folder: Path) -> list[str]:
    """Return the names of the pages in a folder that are not what the code generates."""
    return [
        name
        for name, build in PAGES.items()
        if not (folder / name).is_file() or (folder / name).read_text(encoding="utf-8") != build()
    ]


def main(arguments: Sequence[str]) -> int:
    """Write the pages into the folder named last in `arguments`, or with --check compare them; return the exit code."""
    *options, folder = arguments
    unknown = [option for option in options if option != "--check"]
    if unknown:
        print(f"error: unknown option {unknown[0]!r}; scripts/docs takes --check", file=sys.stderr)
        return 2
    stale = find_stale_pages(Path(folder))
    for name in stale:
        if "--check" in options:
            print(f"error: docs/{name} is not what the code generates; run scripts/docs", file=sys.stderr)
        else:
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(PAGES[name](), encoding="utf-8")
            print(f"wrote docs/{name}", file=sys.stderr)
    return int(bool(stale) and "--check" in options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
