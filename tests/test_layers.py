"""Which module may import which. The table is the architecture; this file reads every import and holds it to that."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import monoblock

# A module imports from rows above its own, and within its row from modules to its left.
LAYERS = [
    "errors untrusted schema schemes parts config",
    "knobs families presets accounting",
    "native tap norm positions masks places cache kernels_triton kernels",
    "linear lora feedforward experts attention embedding heads",
    "block stack initialize reading model recurrent resizing",
    "recipes tokenizers data quantize interop",
    "training decoding inspection",
    "tasks doctor classic experiments",
    "cli",
    "__main__ __init__",
]
STANDARD_LIBRARY_ONLY = 1  # so many rows from the top
WITHOUT_TORCH = 2
STRANGERS = 6  # nobody in this row imports another of it
PRINTS = {"cli", "__main__"}

# The only arrows that point down: each one import inside the function of model.py named here.
DOWNWARD = {
    ("model", "generate", "decoding"),
    ("model", "stream", "decoding"),
    ("model", "from_pretrained", "interop"),
    ("model", "save_pretrained", "interop"),
}

MOST_LINES = 320  # about 300: a file is not split for its last few lines
TABLES_OF_DATA = {"presets.py", "interop/hf_decoders.py", "interop/hf_weights.py"}

PACKAGE = Path(monoblock.__file__).parent
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
ROW = {name: number for number, row in enumerate(LAYERS) for name in row.split()}
PLACE = {name: place for row in LAYERS for place, name in enumerate(row.split())}


class Arrow(NamedTuple):
    function: str | None  # the innermost function the import stands in
    target: str  # dotted, as in `monoblock.cache` or `torch.nn`
    line: int


def place_of(file: Path) -> str:
    """The name by which the table knows a file: its folder's, or its own."""
    return file.parts[0].removesuffix(".py")


def arrows(source: str, package: str) -> list[Arrow]:
    """Every import of a module that lies in `package`, wherever in it the statement stands."""
    return list(_arrows(ast.parse(source), package, None))


def _arrows(node: ast.AST, package: str, function: str | None) -> Iterator[Arrow]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import():
                yield from (Arrow(function, alias.name, child.lineno) for alias in child.names)
            case ast.ImportFrom():
                source = _absolute(child, package)
                # `from monoblock import cache` names a module, `from monoblock.cache import Cache` does not.
                whole = source == "monoblock"
                for target in [f"{source}.{alias.name}" for alias in child.names] if whole else [source]:
                    yield Arrow(function, target, child.lineno)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _arrows(child, package, child.name)
            case _:
                yield from _arrows(child, package, function)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    return ".".join(parts[: len(parts) - node.level + 1] + ([node.module] if node.module else []))


def complaint(name: str, arrow: Arrow) -> str | None:
    """Why the module the table calls `name` may not have this import, or None."""
    top, *rest = arrow.target.split(".")
    if top != "monoblock":
        return _complaint_about_others(name, top)
    target = rest[0] if rest else "__init__"
    if target == "__version__" or target == name or (name, arrow.function, target) in DOWNWARD:
        return None
    if target not in ROW:
        return f"{arrow.target} is not in the table; import a name from the module it lives in"
    if ROW[name] == ROW[target] == STRANGERS:
        return f"{name} and {target} may not know each other"
    if (ROW[target], PLACE[target]) > (ROW[name], PLACE[name]):
        return f"{target} stands below {name}"
    return None


def _complaint_about_others(name: str, top: str) -> str | None:
    if ROW[name] < STANDARD_LIBRARY_ONLY and top not in sys.stdlib_module_names:
        return f"{name} may only use the standard library, not {top}"
    if ROW[name] < WITHOUT_TORCH and top == "torch":
        return f"{name} must answer without torch"
    return None


def test_every_file_stands_in_the_table_and_no_folder_in_a_folder():
    lost = [str(file) for file in FILES if place_of(file) not in ROW]
    assert not lost, f"place these in LAYERS: {lost}"
    deep = [str(file) for file in FILES if len(file.parts) > 2]
    assert not deep, f"a folder holds files only: {deep}"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_module_imports_only_from_above_it(file):
    package = ".".join(["monoblock", *file.parent.parts])
    found = arrows((PACKAGE / file).read_text(), package)
    wrong = [f"{file}:{arrow.line}: {why}" for arrow in found if (why := complaint(place_of(file), arrow))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_only_the_command_line_prints_and_reads_argv(file):
    if place_of(file) in PRINTS:
        return
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        prints = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        reads = isinstance(node, ast.Attribute) and node.attr == "argv"
        assert not prints, f"{file}:{node.lineno}: return or yield what there is to say; cli prints it"
        assert not reads, f"{file}:{node.lineno}: take an argument; cli reads argv"


def test_a_file_holds_one_idea():
    lengths = {str(file): len((PACKAGE / file).read_text().splitlines()) for file in FILES}
    long = {file: lines for file, lines in lengths.items() if lines > MOST_LINES and file not in TABLES_OF_DATA}
    assert not long, f"split these along an idea, to at most {MOST_LINES} lines: {long}"


# The reader of imports is code as well, and one that sees nothing would let everything pass.


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("norm", "from monoblock.block import Block"),
        ("norm", "from monoblock import block"),
        ("norm", "from .block import Block"),
        ("norm", "import monoblock.block"),
        ("norm", "import monoblock"),
        ("norm", "from monoblock import Transformer"),
        ("norm", "from monoblock.positions import rotate"),
        ("norm", "def late():\n    from monoblock.block import Block"),
        ("norm", "if TYPE_CHECKING:\n    from monoblock.block import Block"),
        ("model", "from monoblock.decoding import engine"),
        ("model", "def forward():\n    from monoblock.decoding import engine"),
        ("model", "def generate():\n    from monoblock.interop import folder"),
        ("training", "from monoblock.decoding import beam"),
        ("inspection", "from monoblock.training import loop"),
        ("config", "import numpy"),
        ("presets", "import torch.nn"),
    ],
)
def test_a_wrong_arrow_is_seen(name, source):
    assert any(complaint(name, arrow) for arrow in arrows(source, "monoblock"))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("norm", "import torch\nfrom torch import nn\nfrom monoblock.config import NormConfig"),
        ("positions", "from monoblock.norm import Norm"),
        ("model", "class Transformer:\n    def generate(self):\n        from monoblock.decoding import engine"),
        (
            "model",
            "class Transformer:\n    def from_pretrained(self):\n        from monoblock.interop.folder import load",
        ),
        ("cli", "from monoblock import __version__\nfrom monoblock.cli.common import table"),
        ("presets", "from monoblock.families import gpt"),
        ("config", "import json"),
    ],
)
def test_a_right_arrow_passes(name, source):
    assert not [why for arrow in arrows(source, "monoblock") if (why := complaint(name, arrow))]


def test_a_relative_import_is_resolved_from_its_folder():
    targets = [
        arrow.target
        for arrow in arrows("from .flops import count\nfrom ..config import ModelConfig", "monoblock.accounting")
    ]
    assert targets == ["monoblock.accounting.flops", "monoblock.config"]
