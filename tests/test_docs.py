"""The pages say what is so: the README's code runs, errata name tests that exist, names in shapes.md are real."""

import ast
import os
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

import monoblock as mb
from monoblock.presets import PRESETS

ROOT = Path(__file__).parent.parent
SOURCE = str(ROOT / "src")


def test_every_erratum_names_a_test_that_exists():
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs/errata.md").read_text(encoding="utf-8"))
    assert len(named) > 25
    for file, test in named:
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{test}"


def test_the_code_of_the_readme_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)
    assert blocks
    for block in blocks:
        subprocess.run(
            [sys.executable, "-c", block], check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": SOURCE}
        )


def documented():
    """The names of weights in docs/shapes.md, as patterns."""
    text = (ROOT / "docs/shapes.md").read_text(encoding="utf-8")
    rows = re.search(r"## Weights\n(.*?)## Activations", text, flags=re.S).group(1).splitlines()
    names = {name for row in rows if row.startswith("| `") for name in re.findall(r"`([\w.{},…]+)`", row.split("|")[1])}
    return {re.sub(r"\{[^}]*\}|…", "*", name).replace("stack.", "*.").replace(".N.", ".*.") for name in names}


@pytest.mark.parametrize("name", PRESETS)
def test_every_weight_is_listed_in_shapes(name):
    patterns = documented() | {"target.*", "*.feedforward.up", "*.feedforward.gate", "*.feedforward.down"}
    with torch.device("meta"):
        weights = mb.Transformer(mb.tiny(name)).state_dict()
    for weight in weights:
        assert any(fnmatchcase(weight, pattern) for pattern in patterns), weight
