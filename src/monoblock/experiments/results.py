"""The results of an experiment: one line of JSON for every finished trial, in a file that other machines can add to.

A line has the arm, the seed, the settings, the machine and the metrics. A trial whose line is there is not repeated.
Lines of several files are merged: copy them from another machine into the folder of the experiment, or name them with
--results. Only lines with the same settings are compared: the options of the experiment and the changes to its recipe,
except for SPEED_KEYS.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from monoblock.errors import FileError
from monoblock.experiments.experiment import SPEED_KEYS, Metrics
from monoblock.untrusted_files import open_regular, open_to_write

RESULTS_FILE = "results.jsonl"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The metrics of one trial."""

    experiment: str
    arm: str
    seed: int
    settings: dict[str, Any]  # of the trial
    machine: str
    seconds: float  # of the call that finished the trial
    metrics: Metrics = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, str]:
        """The identity of the trial, whatever the machine and its speed."""
        return trial_key(self.arm, self.seed, self.settings)

    def to_line(self) -> str:
        return json.dumps(_finite(asdict(self)), ensure_ascii=False)


def trial_key(arm: str, seed: int, settings: dict[str, Any]) -> tuple[str, int, str]:
    changes = [change for change in settings.get("changes", ()) if change.partition("=")[0] not in SPEED_KEYS]
    return arm, seed, json.dumps({**settings, "changes": changes}, sort_keys=True)


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have, such as an infinite perplexity, by None."""
    if isinstance(value, dict):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_result(path: Path, result: Result) -> None:
    """Append a line in one write, so that several processes can append to the same file.

    If the last line has no end, because it was cut short or copied without it, the new line does not continue it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_to_write(path, "append") as file:
            size = os.fstat(file.fileno()).st_size
            is_complete = not size or os.pread(file.fileno(), 1, size - 1) == b"\n"
            os.write(file.fileno(), ("" if is_complete else "\n").encode() + (result.to_line() + "\n").encode())
    except OSError as problem:
        raise FileError(f"{path} cannot be written: {problem.strerror or problem}") from None


def check_writable(folder: Path) -> None:
    """Create a folder, and raise FileError if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise FileError(f"{folder} cannot be written: {problem.strerror or problem}") from None


def read_results(paths: Iterable[Path], experiment: str) -> list[Result]:
    """Read the results of an experiment from files of JSON lines; a line that a crash cut short is left out.

    Of several lines of the same trial on the same machine, the last one counts.
    """
    found: dict[tuple[Any, ...], Result] = {}
    for path in paths:
        with open_regular(path) as file:
            lines = file.read().decode("utf-8", errors="replace").splitlines()
        for result in filter(None, map(_parse, lines)):
            if result.experiment == experiment:
                found.pop((*result.key, result.machine), None)
                found[(*result.key, result.machine)] = result
    return list(found.values())


def _parse(line: str) -> Result | None:
    """Return the result in a line; None if it holds none."""
    try:
        result = Result(**json.loads(line))
    except (ValueError, TypeError):
        return None
    texts, kinds = (result.experiment, result.arm, result.machine), (result.metrics, result.settings)
    is_result = isinstance(result.seed, int) and all(isinstance(kind, dict) for kind in kinds)
    changes = result.settings.get("changes", []) if is_result else None
    is_result = isinstance(changes, list) and all(isinstance(text, str) for text in (*texts, *changes))
    return result if is_result else None
