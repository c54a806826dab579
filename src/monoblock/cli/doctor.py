"""`monoblock doctor [MODEL]`: examine a model, or plant a fault and see it found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from monoblock.cli.output import echo, print_json, print_table, report
from monoblock.cli.verb import argument, json_option, option
from monoblock.errors import ConfigError

CHECK_FAILED = 3  # exit code


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Examine MODEL (the folder of a model or of a run): leaks of the future, padding, cache, positions, tying,
    tokenizer, training and more. Each finding has numbers, a reason and a fix; the exit code is 3 if one is a failure.

    --inject plants a classic fault into a copy of MODEL, or without MODEL into a small built-in one, to show that it is
    found.
    """

    model: str | None = argument(None)
    inject: str | None = option("Plant this fault first; `all` tries every fault on built-in models.", metavar="FAULT")
    list_faults: bool = option("List the checks and the faults that can be planted.", False, flags=("--list",))
    checks: str | None = option("Run only these checks, separated by commas.", metavar="NAMES")
    html: Path | None = option("Also write the report to an HTML file.", path="file")
    as_json: bool = json_option()

    def run(self) -> int | None:
        if self.list_faults:
            _print_list(self.as_json)
            return None
        if self.inject == "all":
            return _inject_all(self.as_json)
        if self.inject is not None and self.checks is not None:
            raise ConfigError("--inject runs all checks; leave out --checks")
        if self.model is None and self.inject is None:
            raise ConfigError(
                "give the folder of a model, as in monoblock doctor runs/demo-1; or --inject FAULT, or --list"
            )
        if self.model is not None and not self.as_json:
            from monoblock.runs.diagnose import lines_to_write

            if lines := lines_to_write(Path(self.model)):
                echo("\n".join(lines))
                raise ConfigError(
                    f"{self.model} holds code, which is not run here; write the three lines above in Python"
                )
        from monoblock.runs.diagnose import diagnose, load_model_to_examine

        if self.inject is not None:
            from monoblock.doctor.faults import diagnose_with_fault, find_fault

            find_fault(self.inject)
            model = None if self.model is None else load_model_to_examine(self.model)
            result = diagnose_with_fault(self.inject, model)
        else:
            assert self.model is not None
            names = None if self.checks is None else [name.strip() for name in self.checks.split(",") if name.strip()]
            result = diagnose(self.model, checks=names)
        if self.html is not None:
            result.html(self.html)
        text = str(result) if self.html is None else f"{result}\nSaved {self.html}"
        next_command = "doctor --list" if self.model is None else f"doctor {self.model} --inject no_causal_mask"
        report(self.as_json, result.to_dict(), lambda _: echo(text), next_command)
        return None if result.ok else CHECK_FAILED


def _print_list(as_json: bool) -> None:
    from monoblock.doctor.checks import CHECKS
    from monoblock.doctor.faults import FAULTS

    checks = [{"name": check.name, "group": check.group, "about": check.about} for check in CHECKS]
    faults = [{"name": fault.name, "check": fault.check, "about": fault.about} for fault in FAULTS.values()]
    if as_json:
        print_json({"checks": checks, "faults": faults})
        return
    print_table(("check", "group", "what holds if it passes"), [tuple(row.values()) for row in checks])
    echo()
    print_table(("fault", "found by", "what is planted"), [tuple(row.values()) for row in faults])


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
