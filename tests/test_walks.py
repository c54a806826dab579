"""How many files of the package a reader passes through from a call to its end: these figures may only fall."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "walks"
GOALS = {"forward": 15, "generate": 24, "from_pretrained": 22, "load": 28, "train": 60}


def test_each_walk_passes_through_few_files():
    process = subprocess.run([sys.executable, str(SCRIPT), "--json"], capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    figures = json.loads(process.stdout)
    assert list(figures) == list(GOALS)
    too_many = {name: row["files"] for name, row in figures.items() if row["files"] > GOALS[name]}
    assert not too_many, f"{too_many}: at most {GOALS}; `scripts/walks NAME --list` shows the files"
    assert all(row["functions"] >= row["files"] for row in figures.values())
