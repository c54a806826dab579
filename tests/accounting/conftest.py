"""The functions of benchmarks/_fake_group.py, which measure memory without a GPU."""

import importlib.util
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "_fake_group.py"


@pytest.fixture(scope="session")
def fake():
    spec = importlib.util.spec_from_file_location("fake_group", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
