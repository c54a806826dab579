"""Which module may import which.  The table is the architecture; this file reads every import and compares."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import monoblock

# From bottom to top.  A module imports from the floors below it and, inside its floor, from the folders to its left.
FLOORS = [
    "errors untrusted_files",
    "config",
    "accounting",
    "kernels",
    "nn",
    "tokenizers data metrics plots",
    "quantization parallel",
    "training inference interop inspection",
    "model",
    "baselines",
    "recipes",
    "tasks",
    "doctor",
    "runs",
    "experiments classic bench serving",
    "cli",
    "__main__ __init__",
]
STANDARD_LIBRARY_ONLY = {"errors", "untrusted_files", "config"}
WITHOUT_TORCH = {"errors", "untrusted_files", "config", "accounting"}
TENSORS_ONLY = {"kernels"}  # they import nothing else of the package
STRANGERS = {"training", "inference", "interop", "inspection"}  # none of them imports another
PRINTS = {"cli", "__main__"}

PACKAGE = Path(monoblock.__file__).parent
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
FLOOR = {name: number for number, row in enumerate(FLOORS) for name in row.split()}
COLUMN = {name: column for row in FLOORS for column, name in enumerate(row.split())}


def module_name(file: Path) -> str:
    """`nn.block` for nn/block.py, `nn` for nn/__init__.py, "" for the package itself."""
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in FILES}


class Import(NamedTuple):
    function: str | None  # the innermost function around the statement
    target: str  # absolute, as `monoblock.nn.cache` or `torch.nn`
    line: int


def imports(source: str, package: str) -> list[Import]:
    """Every import in the source of a module of `package`, also inside functions and under TYPE_CHECKING."""
    return list(_imports(ast.parse(source), package, None))


def _imports(node: ast.AST, package: str, function: str | None) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import():
                yield from (Import(function, alias.name, child.lineno) for alias in child.names)
            case ast.ImportFrom():
                source = _absolute(child, package)
                for alias in child.names:  # `from monoblock.nn import cache` names a module
                    full = f"{source}.{alias.name}"
                    is_module = source == "monoblock" or full.removeprefix("monoblock.") in MODULES
                    yield Import(function, full if is_module else source, child.lineno)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _imports(child, package, child.name)
            case _:
                yield from _imports(child, package, function)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    return ".".join(parts[: len(parts) - node.level + 1] + ([node.module] if node.module else []))


def floor_name(module: str) -> str:
    return module.split(".")[0] or "__init__"


def objection(module: str, imported: Import) -> str | None:
    """Why a module may not have this import, None if it may."""
    name, (top, *rest) = floor_name(module), imported.target.split(".")
    if top != "monoblock":
        return _objection_to_package(name, top)
    target = rest[0] if rest else "__init__"
    if target == "__version__" or target == name:
        return None
    if target not in FLOOR:
        return f"{imported.target} is not in the table; import a name from the module that defines it"
    if name in TENSORS_ONLY:
        return f"{name} know tensors only, not {target}; pass what they need as an argument"
    if name in STRANGERS and target in STRANGERS:
        return f"{name} and {target} must not know each other"
    if (FLOOR[target], COLUMN[target]) > (FLOOR[name], COLUMN[name]):
        return f"{target} lies above {name}"
    return None


def _objection_to_package(name: str, top: str) -> str | None:
    if name in STANDARD_LIBRARY_ONLY and top not in sys.stdlib_module_names:
        return f"{name} may only use the standard library, not {top}"
    if name in WITHOUT_TORCH and top == "torch":
        return f"{name} must work without torch"
    return None


def package_of(file: Path) -> str:
    return ".".join(["monoblock", *file.parent.parts])


def import_graph() -> dict[str, set[str]]:
    """Module -> the modules of this package it imports."""
    graph: dict[str, set[str]] = {}
    for module, file in MODULES.items():
        found = imports((PACKAGE / file).read_text(), package_of(file))
        targets = {one.target.removeprefix("monoblock.") for one in found if one.target.startswith("monoblock.")}
        graph[module] = {t for t in targets if t in MODULES and t != module}
    return graph


def find_circle(graph: dict[str, set[str]]) -> list[str] | None:
    """Return the modules of a circle of imports in order, None if there is none."""
    state: dict[str, str] = {}

    def visit(module: str, path: list[str]) -> list[str] | None:
        state[module] = "open"
        for target in sorted(graph.get(module, ())):
            if state.get(target) == "open":
                return [*path[path.index(target) :], target]
            if target not in state and (circle := visit(target, [*path, target])):
                return circle
        state[module] = "done"
        return None

    circles = (visit(module, [module]) for module in sorted(graph) if module not in state)
    return next((circle for circle in circles if circle), None)


def test_every_file_is_on_a_floor():
    lost = [str(file) for file in FILES if floor_name(module_name(file)) not in FLOOR]
    assert not lost, f"add these to FLOORS: {lost}"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_module_imports_only_from_below(file):
    found = imports((PACKAGE / file).read_text(), package_of(file))
    wrong = [f"{file}:{one.line}: {why}" for one in found if (why := objection(module_name(file), one))]
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_imports_between_files():
    circle = find_circle(import_graph())
    assert circle is None, " -> ".join(circle)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_only_the_command_line_prints_and_reads_argv(file):
    if floor_name(module_name(file)) in PRINTS:
        return
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        prints = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        reads = isinstance(node, ast.Attribute) and node.attr == "argv"
        assert not prints, f"{file}:{node.lineno}: return or yield it; cli prints"
        assert not reads, f"{file}:{node.lineno}: take an argument; cli reads argv"


@pytest.mark.parametrize("folder", ["nn", "inference", "training", "interop", "inspection", "doctor"])
def test_nothing_but_their_own_folder_and_its_users_knows_the_baselines(folder):
    names = re.compile("lstm|recurrent", re.IGNORECASE)
    found = [str(file) for file in FILES if file.parts[0] == folder and names.search((PACKAGE / file).read_text())]
    assert not found, f"{found}: what a baseline needs belongs to baselines/"


HIDDEN_STATE = re.compile(r"threading\.local|Weak(Key|Value)Dictionary|__class__ = ")


@pytest.mark.parametrize("file", FILES, ids=str)
def test_no_state_is_hidden(file):
    """What a function depends on is an argument; a module is replaced by another, not turned into it."""
    hidden = HIDDEN_STATE.search((PACKAGE / file).read_text())
    assert hidden is None, f"{file}: {hidden[0]}"


# The reader of imports is code as well, and one that sees nothing would let everything pass.


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("config.model", "from monoblock.nn.block import Block"),
        ("config.model", "from monoblock.nn import block"),
        ("config.model", "from ..nn.block import Block"),
        ("config.model", "import monoblock.nn.block"),
        ("config.model", "import monoblock"),
        ("config.model", "from monoblock import Transformer"),
        ("tokenizers.train", "from monoblock.data.noise import drop"),
        ("nn.norm", "def late():\n    from monoblock.training.loss import Loss"),
        ("nn.norm", "if TYPE_CHECKING:\n    from monoblock.training.loss import Loss"),
        ("nn.transformer", "from monoblock.inference import engine"),
        ("nn.transformer", "def forward():\n    from monoblock.inference import engine"),
        ("nn.transformer", "def generate():\n    from monoblock.interop import folder"),
        ("inference.engine", "from monoblock.model import Transformer"),
        ("nn.block", "def generate():\n    from monoblock.inference import engine"),
        ("kernels.gpu", "from monoblock.config.model import AttentionConfig"),
        ("kernels.cpu.library", "from monoblock.errors import KernelError"),
        ("training.trainer", "from monoblock.inference import beam"),
        ("inspection.trace", "from monoblock.training import trainer"),
        ("recipes.schema", "from monoblock.tasks import table"),
        ("config.model", "import numpy"),
        ("accounting.flops", "import torch.nn"),
    ],
)
def test_a_wrong_import_is_seen(module, source):
    package = "monoblock." + module.rpartition(".")[0]
    assert any(objection(module, one) for one in imports(source, package))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("nn.norm", "import torch\nfrom torch import nn\nfrom monoblock.config.parts import NormConfig"),
        ("nn.norm", "from monoblock.nn.tap import Tap"),
        ("data.noise", "from monoblock.tokenizers.tokenizer import Tokenizer"),
        ("model", "from monoblock.inference import generate\nfrom monoblock.interop.model_folder import load_model"),
        ("cli.ls", "from monoblock import __version__\nfrom monoblock.cli.output import table"),
        ("config.presets", "from monoblock.config.families import gpt"),
        ("config.model", "import json"),
    ],
)
def test_a_right_import_passes(module, source):
    package = "monoblock." + module.rpartition(".")[0]
    assert not [why for one in imports(source, package) if (why := objection(module, one))]


def test_a_relative_import_is_resolved_from_its_folder():
    source = "from .flops import count\nfrom ..config.model import ModelConfig"
    assert [one.target for one in imports(source, "monoblock.accounting")] == [
        "monoblock.accounting.flops",
        "monoblock.config.model",
    ]


def test_a_circle_is_found():
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
