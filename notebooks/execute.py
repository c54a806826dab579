"""Execute the notebooks of this folder: check that no cell fails, or store the outputs.

python notebooks/execute.py [NAME …]            run the code cells, two notebooks at a time; print the seconds of each
python notebooks/execute.py --write [NAME …]    run them in Jupyter and store outputs and pictures in the files

A NAME is the start of a file name, such as 05. Checking needs no Jupyter: the code cells are executed one after the
other in one namespace. The exit code is 1 if a cell fails.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
PROCESSES = 2
TIMEOUT = 600  # seconds for one notebook


def find_notebooks(names: list[str]) -> list[Path]:
    """Return the notebooks whose file names start with one of the names, or all."""
    paths = sorted(FOLDER.glob("[0-9]*.ipynb"))
    unknown = [name for name in names if not any(path.name.startswith(name) for path in paths)]
    if unknown:
        sys.exit(f"error: no notebook starts with {unknown[0]!r}; there are {', '.join(path.stem for path in paths)}")
    return [path for path in paths if not names or path.name.startswith(tuple(names))]


def run_cells(path: Path) -> None:
    """Execute the code cells of a notebook in one namespace; draw the last value of a cell as Jupyter does."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]), f"{path.name}, cell {number}")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{path.name}, cell {number}", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"{path.name}, cell {number}", "eval"), namespace)
            getattr(value, "_repr_png_", lambda: None)()


def check_all(paths: list[Path]) -> bool:
    """Run each notebook in a process of its own, two at a time; print the seconds of each, and the errors."""
    environment = {"OMP_NUM_THREADS": "1"} | os.environ  # one process per core: more threads would only compete

    def check(path: Path) -> tuple[Path, float, str]:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--one", str(path)]
            options = {"cwd": folder, "env": environment, "capture_output": True, "text": True, "timeout": TIMEOUT}
            result = subprocess.run(command, **options)
        return path, time.perf_counter() - start, result.stderr if result.returncode else ""

    start, passed = time.perf_counter(), True
    with ThreadPoolExecutor(PROCESSES) as pool:
        for path, seconds, error in pool.map(check, paths):
            print(f"{path.stem:40} {seconds:6.1f} s  {'FAILED' if error else 'passed'}", flush=True)
            passed &= not error
            print(error, end="", file=sys.stderr)
    print(f"{len(paths)} notebooks in {time.perf_counter() - start:.1f} s")
    return passed


def write_outputs(path: Path) -> None:
    """Execute a notebook in Jupyter and store its outputs; what differs from run to run is left out."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        options = {"kernel_name": "python3", "timeout": TIMEOUT, "record_timing": False, "coalesce_streams": True}
        NotebookClient(notebook, resources={"metadata": {"path": folder}}, **options).execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.id = f"{path.stem[:2]}-{number:02}"
        cell.metadata.pop("execution", None)
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true", help="store the outputs in the files")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        try:
            run_cells(arguments.one)
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    paths = find_notebooks(arguments.names)
    if not arguments.write:
        return 0 if check_all(paths) else 1
    for path in paths:
        start = time.perf_counter()
        write_outputs(path)
        print(f"{path.stem:40} {time.perf_counter() - start:6.1f} s  {path.stat().st_size // 1000} kB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
