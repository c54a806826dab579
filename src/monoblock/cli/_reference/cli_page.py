"""The page docs/cli.md: every command with its arguments and options, from the click commands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from monoblock.cli._reference.markdown import code, join_page, table
from monoblock.cli.main import VERBS, cli

INTRODUCTION = """# The command line

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
    parts = [INTRODUCTION, overview]
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
    return names, _value_text(option, context), "required" if option.required else default, meaning


def _value_text(option: click.Option, context: click.Context) -> str:
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
            return {"integer": "integer", "float": "number"}.get(option.type.name, "text")
