"""Build docs/experiments.md: how experiments work, and every claim with what its table in benchmarks/results says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from monoblock.experiments.claims import CLAIMS, Claim
from monoblock.experiments.frame.report import Report
from monoblock.experiments.frame.results import read_results
from monoblock.experiments.frame.rules import Rule, Verdict
from monoblock.experiments.names import EXPERIMENTS
from monoblock.experiments.table import load_experiment

NOT_MEASURED = "not yet measured"
INTRODUCTION = """# Experiments

The source documents make claims; each is one command away:
```bash
monoblock compare residuals "arms=*-start"          # a table with deviations, a plot, a conclusion
monoblock compare residuals --dry-run               # the claim, the budget, the seeds, the arms and the rules
monoblock compare positions seeds=1,2,3 --jobs 7    # several arms at once, also on one GPU
monoblock compare positions --smoke                 # everything for a few steps, to see that it runs
```
An experiment trains or measures its *arms* with one budget, the same data in the same order and the same seeds. Which
arms and seeds a call runs is said by `arms=NAME,NAME`, in which `*` stands for any text, and `seeds=1,2,3`; the table
has all stored seeds of these arms. `section.key=value` changes the recipe of all arms. WikiText-2 and Multi30k are read
from the folder `--data` or `$MONOBLOCK_DATA`; where they are absent, a packaged corpus stands in, as the call and the
page say.

**Results are lines of JSON.** Each finished arm and seed is a line of `results.jsonl` in the folder `--out` (by
default `runs/compare-NAME`). What has a line is not run again, so a killed experiment continues. Lines of another
machine are merged by copying the file into the folder under any name that ends in `.jsonl`, or with `--results FILE`.
Only lines with the same options and changes are compared; compilation, workers and device may differ. In translation,
do not mix `train.compile=graphs` with other values: with it a batch has pairs of all lengths, else of similar lengths.
`benchmarks/experiments_gpu.sh` runs several experiments at the same time on one GPU. `--table` runs nothing, and
`--write benchmarks/results` writes the page, the lines and the plot.

**Rules are fixed beforehand.** The file of an experiment states, before any run, what has to hold for a claim: a
metric of an arm, or its difference or ratio to another arm with the same seed, and a bound. If the 95 % confidence
interval of the mean over the seeds lies on the right side of the bound, the rule is confirmed; if it lies on the
other side, it is contradicted; otherwise the result is inconclusive. Fewer than three seeds are always inconclusive,
unless the quantity does not vary with the seed; this minimum was set after most of the runs. The interval is that of
Student's t and symmetric, so for a ratio that varies much between few seeds it may begin below 0. A rule says what of
it was added when there were results already.

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


def build_experiments_page(results: Path) -> str:
    """Return the page; `results` is the folder benchmarks/results."""
    lines = [INTRODUCTION, "## The experiments", "", "| name | what is compared | claim | table |", "|---|---|---|---|"]
    for name, (_, about) in EXPERIMENTS.items():
        experiment = load_experiment(name)
        lines.append(f"| `{name}` | {about} | {experiment.claim} ({experiment.source}) | {_link(results, name)} |")
    lines += ["", CLAIMS_INTRODUCTION]
    lines += ["| where | it says | verdict | experiment | what the numbers say |", "|---|---|---|---|---|"]
    verdicts = cache(lambda name: _verdicts(results, name))
    for claim in CLAIMS:
        name = f"`{claim.experiment}`" if claim.experiment else "—"
        found = verdicts(claim.experiment) if claim.experiment else []
        verdict = f"**{claim.judge(found)}**" if found else "see the table"
        lines.append(f"| {claim.place} | {claim.text} | {verdict} | {name} | {_explain(claim, found)} |")
    return "\n".join(lines) + "\n"


def _link(results: Path, name: str) -> str:
    return f"[table](../benchmarks/results/{name}.md)" if (results / f"{name}.md").is_file() else NOT_MEASURED


def _late(rule: Rule) -> str:
    return f" ({rule.late} was added after results)" if rule.late else ""


def _explain(claim: Claim, verdicts: Sequence[Verdict]) -> str:
    """Return what each rule of a claim says, and the other table that shows it."""
    rules = load_experiment(claim.experiment).rules if claim.experiment else ()
    said = [f"{rules[number].statement}: {verdicts[number]}{_late(rules[number])}" for number in claim.rules]
    if claim.table:
        said.append(f"[table](../benchmarks/results/{claim.table}.md)")
    return "; ".join([*said, claim.caveat] if claim.caveat else said)


def _verdicts(results: Path, name: str) -> Sequence[Verdict]:
    """Return what each rule of an experiment says about the stored results; the last machine counts."""
    experiment, file = load_experiment(name), results / f"{name}.jsonl"
    stored = read_results([file], name) if file.is_file() else []
    report = Report(experiment, tuple(stored))
    return [conclusion.verdict for conclusion in (report.by_machine() or [report])[-1].conclusions()]
