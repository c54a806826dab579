"""`monoblock compare EXPERIMENT [key=value …]`: run the arms of an experiment and tabulate the results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monoblock.cli.output import echo, print_json, print_table
from monoblock.cli.verb import argument, data_folder_option, json_option, option, resolve_data_folder
from monoblock.errors import ConfigError
from monoblock.experiments.library import EXPERIMENTS

if TYPE_CHECKING:
    from monoblock.experiments.experiment import Trial
    from monoblock.experiments.report import Report

EXPERIMENT_HELP = "\n".join(f"\b\n  {name}: {about}" for name, about in EXPERIMENTS.items())


@dataclass(frozen=True, kw_only=True)
class Compare:
    __doc__ = f"""Run the arms of EXPERIMENT, which are variants of a model, with the same budget, data and seeds;
    compare their results in a table and a plot; and state a conclusion only if the numbers carry it, by rules that
    were fixed before. The experiments are:

{EXPERIMENT_HELP}

    An argument whose key has a dot, such as train.steps=500, changes the recipe of all arms. Other arguments are
    options of the experiment; all have seeds=1,2,3 and arms=NAME,NAME, in which * stands for any text. The table has
    all stored seeds of these arms.

    Each finished arm and seed is a line of results.jsonl in the folder --out. What has a line is not repeated, so an
    interrupted call continues, and lines from another machine can be added to the folder or named by --results.
    """

    experiment: str | None = argument(None)
    words: tuple[str, ...] = argument((), metavar="[key=value …]")
    out: Path | None = option("Folder to write.  [default: runs/compare-<experiment>]")
    data: Path | None = data_folder_option()
    jobs: int = option("Arms that run at the same time.", 1, least=1)
    smoke: bool = option("Run everything for a few steps on a toy corpus, to see that it runs.", False)
    results: tuple[Path, ...] = option(
        "Also read results from this file; may be repeated.", (), path="file", exists=True
    )
    table: bool = option("Run nothing: only tabulate the stored results.", False)
    write: Path | None = option("Also write NAME.md, NAME.jsonl and NAME.png here.")
    note: str = option("A sentence for the page of results, such as what else used the machine.", "")
    keep: bool = option("Keep the run folders of the arms, which are deleted after their evaluation.", False)
    dry_run: bool = option("Run nothing: print the claim, the budget, the seeds, the arms and the rules.", False)
    as_json: bool = json_option()

    def run(self) -> None:
        from monoblock.experiments.library import load_experiment
        from monoblock.experiments.report import Report, write_page
        from monoblock.experiments.results import check_writable
        from monoblock.experiments.runner import plan_trials, run_trials, select_results

        if self.experiment is None:
            raise ConfigError("name an experiment, such as residuals; monoblock compare --help lists them")
        record = load_experiment(self.experiment)
        values, overrides = _split_overrides(self.words)
        default = Path("runs") / f"compare-{self.experiment}{'-smoke' if self.smoke else ''}"
        folder = self.out if self.out is not None else default
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--out {folder} is a file; name a folder")
        trials = plan_trials(
            record,
            values,
            folder=folder,
            overrides=overrides,
            data=resolve_data_folder(self.data),
            smoke=self.smoke,
            keep=self.keep,
            more_results=self.results,
        )
        if self.dry_run:
            _print_plan(trials, self.as_json)
            return
        if self.write is not None:
            check_writable(self.write)
        if not self.table:
            try:
                for message in run_trials(trials, self.jobs):
                    echo(message, err=True)
            except KeyboardInterrupt:
                echo("Finished trials are kept; the same command goes on with the others.", err=True)
                raise
        results, hidden = select_results(trials)
        report = Report(record, tuple(results), self.note)
        if not report.results:
            hint = "; leave out --table to run it" if self.table else ""
            places, verb = " and ".join(map(str, (folder, *self.results))), "have" if self.results else "has"
            raise ConfigError(f"{places} {verb} no results of {self.experiment} with these options{hint}")
        if hidden:
            echo(f"{hidden} results with the packaged corpus are left out beside those with the real one", err=True)
        if self.write is not None:
            for path in write_page(report, self.write):
                echo(f"Saved {path}", err=True)
        _save_and_print(report, folder, self.as_json)


def _split_overrides(words: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Split `key=value` arguments into options of the experiment, and overrides of the recipe (keys with a dot)."""
    from monoblock.runs.recipe import parse_value

    values: dict[str, Any] = {}
    overrides = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} is not an option; write key=value, as in seeds=1,2,3")
        if "." in key:
            overrides.append(word)
        else:
            values[key] = parse_value(text)
    return values, tuple(overrides)


def _print_plan(trials: list[Trial], as_json: bool) -> None:
    from monoblock.experiments.runner import describe_stand_in

    record, plan = trials[0].experiment, _plan(trials)
    if as_json:
        print_json(plan)
        return
    echo(f"Claim ({record.source}): {record.claim}\nBudget: {plan['budget']}\nData: {plan['data']}")
    if notice := describe_stand_in(trials):
        echo(notice)
    if trials[0].smoke:
        echo("This is a smoke run: a few steps on toy data in place of the budget")
    if plan["overrides"]:
        echo(f"This call overrides the budget: {' '.join(plan['overrides'])}")
    if options := [f"{key}={value}" for key, value in plan["settings"]["options"].items() if value not in ("", None)]:
        echo(f"Options: {', '.join(options)}")
    echo(f"Seeds: {', '.join(map(str, plan['seeds']))}; trials: {len(trials)}\n")
    print_table(["arm", "what it is"], [[arm["arm"], arm["about"]] for arm in plan["arms"] if arm["chosen"]])
    if left_out := [arm["arm"] for arm in plan["arms"] if not arm["chosen"]]:
        echo(f"\nMore arms, for arms=: {', '.join(left_out)}")
    echo("\nRules:")
    for rule in record.rules:
        echo(f"- {rule.statement}: {rule.bound}")


def _plan(trials: list[Trial]) -> dict[str, Any]:
    """Return what a call would run, and by which rules it would be judged."""
    record = trials[0].experiment
    chosen = {trial.arm.name for trial in trials}
    first = next((trial for trial in trials if trial.arm.uses_recipe), trials[0])
    settings = first.settings
    budget, data = record.budget_and_data(settings["options"])
    return {
        "experiment": record.name,
        "claim": record.claim,
        "source": record.source,
        "budget": budget,
        "data": data,
        "stand_in": record.find_stand_in(settings["changes"]) if first.stands_in else None,
        "overrides": list(first.overrides),
        "arms": [
            {"arm": arm.name, "about": arm.about, "changes": list(arm.changes), "chosen": arm.name in chosen}
            for arm in record.arms
        ],
        "seeds": list(dict.fromkeys(trial.seed for trial in trials)),
        "settings": settings,
        "rules": [{"statement": rule.statement, "rule": rule.bound} for rule in record.rules],
    }


def _save_and_print(report: Report, folder: Path, as_json: bool) -> None:
    import json

    from monoblock.errors import FileError
    from monoblock.experiments.report import plot_report
    from monoblock.untrusted_files import write_atomically

    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "result.json", json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n")
    try:
        plot = f" and {plot_report(report, folder / 'result.png')}"
    except FileError as problem:  # keep the results without a plot
        plot = f" (no plot: {problem})"
    if as_json:
        print_json(report.to_json())
    else:
        if stand_in := report.about["stand_in"]:
            echo(f"The corpus of the recipe was not found; the packaged corpus {stand_in} was used instead.\n")
        for one in report.by_machine():
            if len(report.by_machine()) > 1:
                echo(f"\n{', '.join(one.machines)}")
            for title, columns, rows in one.tables():
                if title:
                    echo(f"\n{title}, by {report.experiment.curves[title]}")
                print_table(columns, rows)
            echo()
            _print_conclusions(one)
    echo(f"Saved {folder / 'result.json'}{plot}", err=True)


def _print_conclusions(report: Report) -> None:
    """Print what the rules say; those of arms without results are only counted."""
    conclusions = report.conclusions()
    for conclusion in conclusions:
        if conclusion.verdict != "not measured":
            echo(conclusion.sentence())
    if count := sum(conclusion.verdict == "not measured" for conclusion in conclusions):
        rules, need = ("rule", "needs") if count == 1 else ("rules", "need")
        echo(f"{count} more {rules} {need} other arms or seeds; --dry-run shows all rules.")
