"""Load documentation of Python functions and classes as pairs for summarization: the text, and its first line.

A docstring begins with a summary in one paragraph (PEP 257). The target is this summary; the source is the name of the
function or class and the paragraphs after the summary, without lists of parameters, examples and markup:

    edge_disjoint_paths: Edge disjoint paths are paths that do not share any edge. The number of …
    ->  Returns the edges disjoint paths between source and target.

The docstrings are read from the source files of installed packages, which are not imported, so the rows depend on the
versions of the packages. All modules in one folder of a package are in the same split. A row of the validation or test
split is dropped if its source or its summary also occurs in an earlier split.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from zlib import crc32

from monoblock.data.readers.records import Pair

PACKAGES = ("networkx", "numpy", "scipy", "sklearn", "sympy", "torch")
SPLITS = ("train", "valid", "test")
SUMMARY_WORDS = range(3, 26)
MIN_BODY_WORDS = 10
MAX_BODY_CHARACTERS = 500  # the rest of a body is cut off, at a space

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
PARAGRAPH_END = re.compile(r"\n[ \t]*\n")
# A section in the style of numpy ("Notes" over a line of dashes) or of Google ("Args:").
SECTION = re.compile(r"\s*([A-Z][A-Za-z ]+?)\s*(?:\n\s*[-=~]{3,}\s*(?:\n|$)|:\s*\n)")
PROSE_SECTIONS = {"notes", "explanation"}
NOT_PROSE = re.compile(
    r"\s*(?:>>>|\.\.|::|:\w|[-*+|] |\d+[.)] |\[\d)"
)  # examples, directives, fields, lists, references
MARKUP = re.compile(r"(?::[\w:+-]+:)?`+~?([^`]*)`+_*|\*\*?(?=\w)|(?<=\w)\*\*?|\s*\[\w+\]_")


def load_docstrings(split: str) -> Iterator[Pair]:
    """Yield the pairs of a split, in the order of packages, files and lines."""
    earlier: set[str] = set()
    for other in SPLITS[: SPLITS.index(split)]:
        earlier.update(text for pair in _read_split(other) for text in pair[:2])
    own: set[str] = set()
    for pair in _read_split(split):
        if pair.source not in own and earlier.isdisjoint((pair.source, pair.target)):
            own.add(pair.source)
            yield pair


@cache
def _read_split(split: str) -> tuple[Pair, ...]:
    return tuple(
        pair for package in PACKAGES for path in _find_modules(package, split) for pair in read_module(path.read_text())
    )


def _find_modules(package: str, split: str) -> list[Path]:
    """Return the source files of a package that are in a split, without its tests."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    names = sorted(path.relative_to(root.parent).as_posix() for path in root.rglob("*.py"))
    return [root.parent / name for name in names if "tests" not in name.split("/") and split_of_module(name) == split]


def split_of_module(name: str) -> str:
    """Return the split of a module from the folder it is in: of 16 folders, one is for validation and one for tests."""
    remainder = crc32(str(PurePosixPath(name).parent).encode()) % 16
    return {0: "test", 1: "valid"}.get(remainder, "train")


def read_module(code: str) -> Iterator[Pair]:
    """Yield a pair for each documented function and class of a module, in the order of its lines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes in strings
        try:
            tree = ast.parse(code)
        except SyntaxError:  # of a later version of Python
            return
    for node in _walk_definitions(tree):
        pair = make_pair(node.name, ast.get_docstring(node) or "")
        if pair is not None:
            yield pair


def _walk_definitions(parent: ast.AST) -> Iterator[Definition]:
    """Yield the functions and classes below a node, also nested ones; expressions are not visited."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, Definition):
            yield node
        if isinstance(node, ast.stmt | ast.excepthandler):
            yield from _walk_definitions(node)


def make_pair(name: str, docstring: str) -> Pair | None:
    """Return the pair of a docstring; None if it is not ASCII, or if its summary or its text has an unusual length."""
    summary, *paragraphs = PARAGRAPH_END.split(docstring.strip())
    target, body = clean(summary), " ".join(_select_prose(paragraphs))
    if len(body) > MAX_BODY_CHARACTERS:
        body = body[:MAX_BODY_CHARACTERS].rsplit(" ", 1)[0]
    is_usual = len(target.split()) in SUMMARY_WORDS and len(body.split()) >= MIN_BODY_WORDS
    if not is_usual or not (target + body).isascii() or SECTION.match(summary) or NOT_PROSE.match(summary):
        return None
    return Pair(f"{name}: {body}", target)


def _select_prose(paragraphs: list[str]) -> Iterator[str]:
    """Yield the paragraphs of prose before the first section that is not prose, such as a list of parameters."""
    for paragraph in paragraphs:
        section = SECTION.match(paragraph)
        if section is not None:
            if section[1].lower() not in PROSE_SECTIONS:
                return
            paragraph = paragraph[section.end() :]
        if paragraph.strip() and not NOT_PROSE.match(paragraph):
            yield clean(paragraph)


def clean(text: str) -> str:
    """Return a text on one line, without the markup of reStructuredText."""
    return " ".join(MARKUP.sub(lambda match: match[1] or "", text).split())
