"""`monoblock doctor [MODEL]`: examine a model, or plant a fault and see it found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from monoblock.cli._shared.output import echo, json_option, print_json, print_table, suggest_next
from monoblock.errors import ConfigError

if TYPE_CHECKING:
    from monoblock.doctor.report import Report

CHECK_FAILED = 3  # exit code


@click.command(
    name="doctor",
    help="Examine MODEL (the folder of a model or of a run): leaks of the future, padding, cache, positions, tying, "
    "tokenizer, training and more. Each finding has numbers, a reason and a fix; the exit code is 3 if one is a "
    "failure.\n\n"
    "--inject plants a classic fault into a copy of MODEL, or without MODEL into a small built-in one, to show that "
    "it is found.",
)
@click.argument("model", required=False)
@click.option("--inject", metavar="FAULT", help="Plant this fault first; `all` tries every fault on built-in models.")
@click.option("--list", "list_faults", is_flag=True, help="List the checks and the faults that can be planted.")
@click.option("--checks", metavar="NAMES", help="Run only these checks, separated by commas.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Also write the report to an HTML file.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    model: str | None,
    inject: str | None,
    list_faults: bool,
    checks: str | None,
    html: Path | None,
    as_json: bool,
) -> None:
    if list_faults:
        _print_list(as_json)
        return
    if inject == "all":
        ctx.exit(_inject_all(as_json))
    if inject is not None and checks is not None:
        raise ConfigError("--inject runs all checks; leave out --checks")
    if model is None and inject is None:
        raise ConfigError(
            "give the folder of a model, as in monoblock doctor runs/demo-1; or --inject FAULT, or --list"
        )
    if model is not None and not as_json and (lines := _lines_to_write(model)):
        echo("\n".join(lines))
        raise ConfigError(f"{model} holds code, which is not run here; write the three lines above in Python")
    report = _examine(model, inject, checks)
    if html is not None:
        report.html(html)
    if as_json:
        print_json(report.to_dict())
    else:
        echo(str(report))
        if html is not None:
            echo(f"Saved {html}")
    suggest_next("doctor --list" if model is None else f"doctor {model} --inject no_causal_mask")
    if not report.ok:
        ctx.exit(CHECK_FAILED)


def _lines_to_write(model: str) -> list[str]:
    from monoblock.runs.diagnose import lines_to_write

    return lines_to_write(Path(model))


def _examine(model: str | None, inject: str | None, checks: str | None) -> Report:
    from monoblock.runs.diagnose import diagnose, load_model_to_examine

    if inject is None:
        assert model is not None
        names = None if checks is None else [name.strip() for name in checks.split(",") if name.strip()]
        return diagnose(model, checks=names)
    from monoblock.doctor.faults import diagnose_with_fault, find_fault

    find_fault(inject)
    return diagnose_with_fault(inject, None if model is None else load_model_to_examine(model))


def _print_list(as_json: bool) -> None:
    from monoblock.doctor.checks import CHECKS
    from monoblock.doctor.faults import FAULTS

    checks = [(check.name, check.group, check.about) for check in CHECKS]
    faults = [(fault.name, fault.check, fault.about) for fault in FAULTS.values()]
    if as_json:
        rows = {"checks": [dict(zip(("name", "group", "about"), row, strict=True)) for row in checks]}
        rows["faults"] = [dict(zip(("name", "check", "about"), row, strict=True)) for row in faults]
        print_json(rows)
        return
    print_table(("check", "group", "what holds if it passes"), checks)
    echo()
    print_table(("fault", "found by", "what is planted"), faults)


def _inject_all(as_json: bool) -> int:
    """Plant every fault into a built-in model, and return the exit code: 0 if each is named by its check."""
    from monoblock.doctor.faults import FAULTS, diagnose_with_fault

    rows = []
    for fault in FAULTS.values():
        names = [finding.check for finding in diagnose_with_fault(fault.name).findings]
        rows.append({"fault": fault.name, "check": fault.check, "found": names, "named": fault.check in names})
    if as_json:
        print_json(rows)
    else:
        cells = [(r["fault"], r["check"], ", ".join(r["found"]), r["named"]) for r in rows]  # type: ignore[arg-type]
        print_table(("fault", "check", "found", "named"), cells)
    return 0 if all(row["named"] for row in rows) else CHECK_FAILED
