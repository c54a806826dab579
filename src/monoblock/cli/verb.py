"""Declare the arguments and options of a verb once, as the fields of a dataclass, and build its click command.

    @dataclass(frozen=True, kw_only=True)
    class Prune:
        '''The help.'''

        model: str = argument()
        remove: int | None = option("Remove N heads.", least=1)
        as_json: bool = json_option()

        def run(self) -> int | None: ...  # the exit code; None: 0

A bool is a flag, a Literal a choice, a tuple an option that may be repeated or an argument of several words. A dict is
a group of options (`option_group`) and has the values of those that are given. The options that a verb inherits come
after its own.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from monoblock.cli.output import echo
from monoblock.config.schema import union_members
from monoblock.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Option:
    """What the type and the default of a field do not say about an option or, if `help` is None, an argument."""

    help: str | None = None
    flags: tuple[str, ...] = ()  # by default "--" and the name of the field
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    is_open: tuple[bool, bool] = (False, False)  # whether `least` and `most` are themselves not allowed
    choices: tuple[str, ...] = ()
    path: Literal["any", "file", "folder"] = "any"
    exists: bool = False  # the path must
    kind: click.ParamType | None = None  # by default that of the annotation
    needs: tuple[str, ...] = ()  # the options without any of which this one has no effect
    otherwise: Any = None  # the value with one of these options, if this one is not given


REQUIRED = MISSING  # the default of an argument or option that must be given


def argument(default: Any = REQUIRED, **details: Any) -> Any:
    """Declare an argument, which is required unless it has a default."""
    return field(default=default, metadata={"option": Option(**details)})


def option(help: str, default: Any = None, **details: Any) -> Any:
    """Declare an option; `details` are the fields of Option."""
    return field(default=default, metadata={"option": Option(help=help, **details)})


def option_group(options: Mapping[str, tuple[Any, Option]]) -> Any:
    """Declare options by name, each with its type."""
    return field(default_factory=dict, metadata={"group": options})


class NumberRange(click.FloatRange):
    """A number in a range, which `nan` and `inf` are not; click.FloatRange accepts nan in any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number; write one such as 0.5", param, ctx)
        return float(number)


class Count(click.ParamType):
    """A positive whole number, also written like 2e12."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value) if str(value).isdecimal() else float(value)
        except ValueError:
            number = 0
        if number < 1 or number != number or number == float("inf") or number != int(number):
            self.fail(f"{value!r} is not a whole number of 1 or more; write one, as in 2e12", param, ctx)
        return int(number)


def build_command(name: str, verb: type[Any]) -> click.Command:
    """Build the command that makes an object of the dataclass from the words of the command line, and runs it."""
    hints, fields = get_type_hints(verb), dataclasses.fields(verb)
    inherited = {
        item.name for base in verb.__bases__ if dataclasses.is_dataclass(base) for item in dataclasses.fields(base)
    }
    groups = {item.name: item.metadata["group"] for item in fields if "group" in item.metadata}
    single: dict[str, Option] = {item.name: item.metadata["option"] for item in fields if "option" in item.metadata}

    def is_shared(item: dataclasses.Field[Any]) -> bool:
        return item.name in inherited and single[item.name].help is not None

    parameters: list[click.Parameter] = []
    for item in sorted(fields, key=is_shared):  # the options that several verbs have come last
        if item.name in single:
            parameters.append(_build_parameter(item.name, hints[item.name], item.default, single[item.name]))
        else:
            options = groups[item.name].items()
            parameters += [_build_parameter(key, hint, None, about) for key, (hint, about) in options]

    def callback(**values: Any) -> int | None:
        for group, options in groups.items():
            given = {key: values.pop(key) for key in options}
            values[group] = {key: value for key, value in given.items() if value is not None}
        for key, about in single.items():
            if not _is_given(values[key]):
                values[key] = values[key] if about.otherwise is None else about.otherwise
            elif about.needs and not any(_is_given(values[other]) for other in about.needs):
                others = " or ".join(map(_flag, about.needs))
                value = "" if isinstance(values[key], bool | tuple) else f" {values[key]}"
                raise click.UsageError(f"{_flag(key)}{value} has no effect without {others}; give both or neither")
        return verb(**values).run()

    return click.Command(name, params=parameters, callback=callback, help=inspect.getdoc(verb))


def build_group(name: str, verbs: Mapping[str, type[Any]], about: str) -> click.Group:
    """Build a command with commands of its own."""

    @click.pass_context
    def callback(context: click.Context) -> None:
        if context.invoked_subcommand is None:
            echo(context.get_help())

    commands = {inner: build_command(inner, verb) for inner, verb in verbs.items()}
    return click.Group(
        name, commands, callback=callback, help=about, invoke_without_command=True, no_args_is_help=False
    )


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and value != ()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _build_parameter(name: str, hint: Any, default: Any, about: Option) -> click.Parameter:
    is_required, is_repeated = default is REQUIRED, get_origin(hint) is tuple
    details: dict[str, Any] = {"required": is_required, "metavar": about.metavar}
    if about.help is None:
        return click.Argument([name], nargs=-1 if is_repeated else 1, type=_build_type(hint, about), **details)
    words = [*(about.flags or (_flag(name),)), name]
    details["help"] = f"With {' or '.join(map(_flag, about.needs))}: {about.help}" if about.needs else about.help
    if about.otherwise is not None:
        details["help"] += f"  [default: {about.otherwise:g}]"
    if hint is bool:
        return click.Option(words, is_flag=True, **details)
    if not is_required and not is_repeated:
        details |= {"default": default, "show_default": default not in (None, "")}
    return click.Option(words, type=_build_type(hint, about), multiple=is_repeated, **details)


def _build_type(hint: Any, about: Option) -> click.ParamType | type:
    """Return the click type of an annotation."""
    (kind,) = (member for member in union_members(hint) if member is not NoneType)
    kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
    if about.kind is not None:
        return about.kind
    if about.choices or get_origin(kind) is Literal:
        return click.Choice(about.choices or get_args(kind))
    if kind is Path:
        is_file, is_folder = about.path != "folder", about.path != "file"
        return click.Path(path_type=Path, exists=about.exists, file_okay=is_file, dir_okay=is_folder)
    if about.least is None and about.most is None:
        return kind
    min_open, max_open = about.is_open
    limits: dict[str, Any] = {"min": about.least, "max": about.most, "min_open": min_open, "max_open": max_open}
    return click.IntRange(**limits) if kind is int else NumberRange(**limits)


# -- options of several verbs ------------------------------------------------------------------------------------------


def json_option(about: str = "Print one JSON object instead of text.") -> Any:
    return option(about, False, flags=("--json",))


def data_folder_option() -> Any:
    return option(
        "Folder that contains the corpora.  [default: $MONOBLOCK_DATA]", flags=("--data",), path="folder", exists=True
    )


def ray_option() -> Any:
    about = "Work on the Ray cluster at HOST:PORT, on that of this machine (auto), or on a new one here (local)."
    return option(about, metavar="ADDRESS")


def resolve_data_folder(folder: Path | None) -> Path | None:
    """Return the folder given by --data, or else the one in $MONOBLOCK_DATA."""
    default = os.environ.get("MONOBLOCK_DATA")
    return folder if folder is not None else Path(default) if default else None


def check_empty(folder: Path) -> None:
    """Raise ConfigError if the folder given by --out has files already."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"the folder {folder} is not empty; give another folder with --out")
