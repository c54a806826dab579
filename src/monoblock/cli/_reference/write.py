"""Write the pages docs/cli.md, recipes.md, config.md and experiments.md; scripts/docs runs this module.

With --check nothing is written, and the exit code is 1 if a page is not what the code generates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from monoblock.cli._reference.cli_page import build_cli_page
from monoblock.cli._reference.config_page import build_config_page
from monoblock.cli._reference.experiments_page import build_experiments_page
from monoblock.cli._reference.recipes_page import build_recipes_page
from monoblock.cli._shared.output import echo

PAGES: dict[str, Callable[[], str]] = {
    "cli.md": build_cli_page,
    "recipes.md": build_recipes_page,
    "config.md": build_config_page,
}


RESULT_PAGES: dict[str, Callable[[Path], str]] = {"experiments.md": build_experiments_page}  # of benchmarks/results


def build_page(name: str, folder: Path) -> str:
    """Return a page of the folder docs/, beside which lies benchmarks/."""
    results = folder.resolve().parent / "benchmarks" / "results"
    return RESULT_PAGES[name](results) if name in RESULT_PAGES else PAGES[name]()


def find_stale_pages(folder: Path) -> list[str]:
    """Return the names of the pages in a folder that are not what the code generates."""
    return [
        name
        for name in (*PAGES, *RESULT_PAGES)
        if not (folder / name).is_file() or (folder / name).read_text(encoding="utf-8") != build_page(name, folder)
    ]


def main(arguments: Sequence[str]) -> int:
    """Write the pages into the folder named last in `arguments`, or with --check compare them; return the exit code."""
    *options, folder = arguments
    unknown = [option for option in options if option != "--check"]
    if unknown:
        echo(f"error: unknown option {unknown[0]!r}; scripts/docs takes --check", err=True)
        return 2
    stale = find_stale_pages(Path(folder))
    for name in stale:
        if "--check" in options:
            echo(f"error: docs/{name} is not what the code generates; run scripts/docs", err=True)
        else:
            (Path(folder) / name).write_text(build_page(name, Path(folder)), encoding="utf-8")
            echo(f"wrote docs/{name}", err=True)
    return int(bool(stale) and "--check" in options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
