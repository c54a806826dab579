"""Draw docs/pictures/architecture.svg from the imports of the package: which folder reads which."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import monoblock

PACKAGE = Path(monoblock.__file__).parent
CAPTIONS = {
    "accounting": "parameters, FLOPs, memory",
    "baselines": "LSTMs",
    "bench": "speed of this machine",
    "classic": "the source documents",
    "cli": "arguments, printing",
    "config": "configurations, presets",
    "data": "corpora to batches",
    "doctor": "checks and faults",
    "experiments": "arms, seeds, verdicts",
    "inference": "engine, sampling, beams",
    "inspection": "traces, edits, pruning",
    "interop": "Hugging Face, GGUF, folders",
    "kernels": "C++ and Triton",
    "metrics": "scores",
    "model": "mb.Transformer",
    "nn": "block, stack, Transformer",
    "parallel": "several processes",
    "plots": "figures",
    "quantization": "8 and 4 bits",
    "recipes": "TOML",
    "runs": "train, load, evaluate",
    "serving": "OpenAI's API over HTTP",
    "tasks": "data, loss, prediction",
    "tokenizers": "text to ids",
    "training": "trainer, optimizers",
}
WIDTH, HEIGHT, GAP, ROW = 178, 46, 18, 96  # of a box, between boxes, and from row to row
STYLE = """
    text { font-family: system-ui, sans-serif; text-anchor: middle; fill: #1d2433 }
    .name { font-size: 15px; font-weight: 600 } .caption { font-size: 11.5px; fill: #55607a }
    rect { fill: #f6f7fb; stroke: #aab3c8; rx: 7 } path { fill: none; stroke: #7c8db5; stroke-width: 1.3 }
    @media (prefers-color-scheme: dark) {
        text { fill: #e8ebf3 } .caption { fill: #a4aec4 }
        rect { fill: #232938; stroke: #566078 } path { stroke: #8a9ac0 }
    }"""


def build_architecture_picture() -> str:
    """Return the picture: a folder stands above all that it imports, and a line leads to each that no other implies."""
    reads = find_imports()
    ranks: dict[str, int] = {}
    while len(ranks) < len(reads):
        ready = {name for name in reads if name not in ranks and reads[name] <= ranks.keys()}
        assert ready, "the folders import each other in a circle"
        ranks |= {name: 1 + max((ranks[one] for one in reads[name]), default=-1) for name in sorted(ready)}
    rows = [sorted(name for name in ranks if ranks[name] == rank) for rank in range(max(ranks.values()) + 1)]
    lines = {name: reads[name] - {far for near in reads[name] for far in _reached(near, reads)} for name in reads}
    places = _place(rows, lines)
    width = max(len(row) for row in rows) * (WIDTH + GAP) + GAP
    height = len(rows) * ROW + GAP
    x = {name: width / 2 + places[name] for name in places}
    y = {name: height - (ranks[name] + 1) * ROW + GAP for name in places}
    parts = []
    for name, ends in sorted(lines.items()):
        for end in sorted(ends):
            top, bottom = y[name] + HEIGHT, y[end]
            bend = (bottom - top) / 2
            curve = f"C{x[name]:.0f} {top + bend:.0f} {x[end]:.0f} {bottom - bend:.0f} {x[end]:.0f} {bottom:.0f}"
            parts.append(f'<path d="M{x[name]:.0f} {top:.0f} {curve}"/>')
    for name in sorted(places):
        left, top = x[name] - WIDTH / 2, y[name]
        parts.append(f'<rect x="{left:.0f}" y="{top:.0f}" width="{WIDTH}" height="{HEIGHT}"/>')
        parts.append(f'<text class="name" x="{x[name]:.0f}" y="{top + 19:.0f}">{name}</text>')
        parts.append(f'<text class="caption" x="{x[name]:.0f}" y="{top + 36:.0f}">{CAPTIONS[name]}</text>')
    size = f'viewBox="0 0 {width} {height}" role="img" aria-label="Folders, each above what it imports"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}\n</style>\n'
    return head + "\n".join(parts) + "\n</svg>\n"


def find_imports() -> dict[str, set[str]]:
    """Return which folders and modules of CAPTIONS each of them imports; types that are only annotations count."""
    folders = {folder.parent.name for folder in PACKAGE.glob("*/__init__.py")}
    assert folders <= CAPTIONS.keys(), f"CAPTIONS has no row for {folders - CAPTIONS.keys()}"
    found: dict[str, set[str]] = {name: set() for name in CAPTIONS}
    for file in PACKAGE.rglob("*.py"):
        own = file.relative_to(PACKAGE).with_suffix("").parts[0]
        if own in found:
            found[own] |= set(_imported(file)) & found.keys() - {own}
    return found


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name.split(".")[1] for name in names if name.startswith("monoblock."))


def _reached(start: str, reads: Mapping[str, set[str]]) -> set[str]:
    """Return all that a folder imports, directly or through others."""
    return reads[start] | {far for near in reads[start] for far in _reached(near, reads)}


def _place(rows: list[list[str]], lines: Mapping[str, set[str]]) -> dict[str, float]:
    """Return the horizontal place of each box, from the middle: near those to which its lines lead."""
    neighbours = defaultdict[str, list[str]](list)
    for name, ends in lines.items():
        for end in ends:
            neighbours[name].append(end)
            neighbours[end].append(name)
    places: dict[str, float] = {}
    for _ in range(20):
        for row in rows:
            wish = {name: [places[one] for one in neighbours[name] if one in places] for name in row}
            row.sort(key=lambda name: (sum(wish[name]) / len(wish[name]) if wish[name] else 0, name))
            step = WIDTH + GAP
            places |= {name: (index - (len(row) - 1) / 2) * step for index, name in enumerate(row)}
    return places
