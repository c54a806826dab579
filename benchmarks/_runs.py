"""What benchmarks that train share: figures of finished runs kept as lines of JSON, and tables of them.

A line says what was run, with which seed and changes, on which device, and what came out.  A run that has its line is
not repeated, so a table may be made of runs on several days, several at a time, and made again anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from monoblock.accounting.report import account
from monoblock.tasks.folder import RECIPE
from monoblock.tasks.pipeline import Pipeline, load
from monoblock.tasks.recipe import Recipe, read
from monoblock.tasks.run import prepare
from monoblock.training import metrics

Figures = dict[str, Any]
CARD = "README.md"  # the last file a run writes


def options(parser: argparse.ArgumentParser, runs: Sequence[str], default: Sequence[str] | None = None) -> None:
    """The arguments that all of them have."""
    parser.add_argument("--runs", nargs="*", default=list(default or runs), choices=list(runs))
    parser.add_argument("--seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--more", nargs="*", default=[], metavar="section.key=value", help="changes to the recipe")
    parser.add_argument("--data", type=Path, default=os.environ.get("MONOBLOCK_DATA"))
    parser.add_argument("--keep", type=Path, help="leave the run folders here")
    parser.add_argument("--rows", type=Path, help="figures of finished runs, a line each: read, and written")
    parser.add_argument("--table", action="store_true", help="train nothing: a table of what --rows has")
    parser.add_argument("--out", type=Path, help="the file of the table")
    parser.add_argument("--note", default="", help="what a reader of the table must know, such as a busy machine")
    parser.add_argument("--smoke", action="store_true", help="everything once, on a few made-up rows")


def trained(recipe: str | Recipe, words: Sequence[str], folder: Path, data: Path | None) -> tuple[Pipeline, Figures]:
    """The model a recipe ends with (taken as it lies there if that is finished), its size, the seconds of its steps."""
    if not (folder / CARD).is_file():
        begun = (folder / RECIPE).is_file()
        chosen = read(recipe, words) if isinstance(recipe, str) else recipe
        for _ in prepare(chosen, folder, data=data, resume=begun).events(resume=begun):
            pass
    pipe = load(folder)
    seconds = sum(line.get("seconds", 0.0) for line in metrics.read(folder))
    return pipe, {"parameters": account(pipe.model.config).parameters, "seconds": seconds}


def machine() -> str:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"


def found(name: str, given: argparse.Namespace, make: Callable[[int], Figures], *changes: str) -> list[Figures]:
    """The figures of a run, a seed each: those of --rows, and those that are made now and added there."""
    if given.table:
        return _tabled(name, given)
    out = []
    for seed in given.seeds:
        key = {"run": name, "seed": seed, "changes": " ".join([*given.more, *changes]), "measured": measured(given)}
        known = [row for row in _lines(given.rows) if all(row[word] == value for word, value in key.items())]
        if not known:
            known = [key | {"machine": machine(), "note": given.note} | make(seed)]
            _add(given.rows, known[0])
            print(json.dumps(known[0], ensure_ascii=False), flush=True)
        out.append(known[-1])
    return out


def measured(given: argparse.Namespace) -> str:
    """What figures are of: the test split, or something to choose by."""
    chosen = "rows held back" if getattr(given, "choose", False) else getattr(given, "split", None) or "test"
    return f"{chosen}, a smoke run" if given.smoke else chosen


def place(given: argparse.Namespace, otherwise: Path, name: str, seed: int, *changes: str) -> Path:
    """The folder of a run: other changes, other folder."""
    words = " ".join([*given.more, *changes, *(["smoke"] if given.smoke else [])])
    key = f"-{blake2b(words.encode(), digest_size=3).hexdigest()}" if words else ""
    return (given.keep or otherwise) / f"{name}-{seed}{key}"


def _tabled(name: str, given: argparse.Namespace) -> list[Figures]:
    if given.rows is None:
        raise SystemExit("--table needs --rows FILE: it trains nothing")
    rows = [row for row in _lines(given.rows) if row["run"] == name and row["measured"] == measured(given)]
    return list({(row["changes"], row["machine"], row["seed"]): row for row in rows}.values())


def _lines(path: Path | None) -> list[Figures]:
    if path is None or not path.is_file():
        return []
    return [{"measured": "test"} | json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _add(path: Path | None, row: Figures) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:  # one short write, so that several processes may add
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def mean(values: Iterable[float | None], digits: int = 2) -> str:
    """The mean, and the deviation where there are several."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "–"
    spread = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.{digits}f}{spread}"


def table(title: str, rows: Sequence[Figures], names: Sequence[str], *notes: str) -> list[str]:
    """A table for each way it was run (changes, machine): the means of the named figures, every seed, where and how."""
    ways: dict[tuple[str, str], list[Figures]] = {}
    for row in rows:
        ways.setdefault((row["changes"], row["machine"]), []).append(row)
    return [line for same in ways.values() for line in _table(title, same, names, *notes)]


def _table(title: str, rows: Sequence[Figures], names: Sequence[str], *notes: str) -> list[str]:
    lines = [f"### {title}", "", f"| {' | '.join(['seed', *names, 'parameters', 'training seconds'])} |"]
    lines.append("|---" * (len(names) + 3) + "|")
    cells = [mean(row[name] for row in rows) for name in names]
    if len(rows) > 1:
        took = mean((row["seconds"] for row in rows), 0)
        lines.append(f"| mean of {len(rows)} | {' | '.join(cells)} | {rows[0]['parameters']:,} | {took} |")
    for row in rows:
        own = [f"{row[name]:,}" if isinstance(row[name], int) else mean([row[name]]) for name in names]
        lines.append(f"| {row['seed']} | {' | '.join(own)} | {row['parameters']:,} | {row['seconds']:.0f} |")
    how = {
        f"{row['machine']}; changes to the recipe: {row['changes'] or 'none'}. {row['note']}".strip() for row in rows
    }
    return [*lines, "", *sorted(how), *(note for note in notes if note), ""]
