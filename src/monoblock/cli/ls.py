"""`monoblock ls`: what there is to work with."""

import os
from typing import Any

import click

from monoblock.cli.common import as_json, next_verb, print_json, table
from monoblock.errors import did_you_mean

Row = dict[str, Any]


def _presets() -> list[Row]:
    from monoblock.presets import PRESETS

    return [
        {
            "name": name,
            "family": preset.config.family,
            "parameters": preset.parameters,
            "source": preset.source,
            "hub": preset.hub,
            "unverified": preset.unverified,
        }
        for name, preset in PRESETS.items()
    ]


def _corpora() -> list[Row]:
    from monoblock.data.corpora import CORPORA, how_to_get, place_of

    folder = os.environ.get("MONOBLOCK_DATA")
    rows = []
    for name, source in CORPORA.items():
        place = place_of(name, folder)
        rows.append(
            {
                "name": name,
                "kind": source.kind,
                "what": source.what,
                "licence": source.licence,
                "here": place is not None,
                "place": place,
                "origin": source.origin,
                "get": None if place else how_to_get(name),
            }
        )
    return rows


# What -> (how it is gathered, the columns shown, the verb to try next). --json gives every key.
SECTIONS = {
    "presets": (_presets, ("name", "family", "parameters", "source"), "account {name}"),
    "corpora": (_corpora, ("name", "kind", "what", "licence", "here"), "ls corpora --json"),
}


def _known(ctx: click.Context, argument: click.Parameter, what: str | None) -> str | None:
    if what is not None and what not in SECTIONS:
        raise click.UsageError(
            f"no list of {what!r}{did_you_mean(what, SECTIONS)}; there is {', '.join(SECTIONS)}", ctx
        )
    return what


@click.command(name="ls", help="List what there is to work with; without WHAT, all of it.")
@click.argument("what", required=False, callback=_known)
@as_json
def command(what: str | None, as_json: bool) -> None:
    found = {name: SECTIONS[name][0]() for name in ([what] if what else SECTIONS)}
    if as_json:
        print_json(found)
        return
    for name, rows in found.items():
        _, columns, _ = SECTIONS[name]
        if len(found) > 1:
            click.echo(f"\n{name}")
        table(columns, [[row[column] for column in columns] for row in rows])
    for name, rows in found.items():
        if rows:
            next_verb(SECTIONS[name][2].format(**rows[0]))
