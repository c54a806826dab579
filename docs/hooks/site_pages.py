"""Which file of the repository becomes which page of the site, and what each page contains.

Pages are written with paths of the repository (`../benchmarks/results/digits.md`, `nn/attention.py::attend`), so that
they can be read there too; here they become links between pages. Files that a page names are shown on pages of their
own.
"""

from __future__ import annotations

import ast
import posixpath
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from markdown_source import split_lines
from notebook_page import fence, read_notebook
from reference_pages import build_reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "monoblock"
LANGUAGES = {".py": "python", ".pyi": "python", ".toml": "toml", ".cpp": "cpp", ".h": "cpp", "": "bash"}
PROJECT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
}
NAMED_FILE = re.compile(
    r"`([\w./-]+\.(?:py|pyi|md|toml|cpp|h|ipynb)|(?:scripts|tests|src|docs)/[\w/.-]+)(?:::[\w.]+)?`"
)
MARKDOWN_LINK = re.compile(r"(!?\[(?:[^\]\[]|\[[^\]]*\])*\])\(([^)\s]+)\)")


@dataclass
class Pages:
    """The pages of the site that are not files of docs/: Markdown and pictures by path, and the file of each page."""

    texts: dict[str, str] = field(default_factory=dict)
    pictures: dict[str, bytes] = field(default_factory=dict)
    origins: dict[str, Path] = field(default_factory=dict)


def page_path(file: Path) -> str:
    """Return the path of the page that shows a file or folder of the repository."""
    path = file.relative_to(ROOT).as_posix()
    if path in PROJECT_PAGES:
        return PROJECT_PAGES[path]
    if file.is_dir():
        return f"source/{path}/index.md"
    if file.suffix == ".md" and path.startswith("docs/"):
        return path.removeprefix("docs/")
    if file.suffix == ".md" and path.startswith("benchmarks/results/"):
        return f"results/{file.name}"
    if file.suffix == ".ipynb":
        return f"notebooks/{file.stem}.md"
    return f"source/{path}.md"


def find_file(name: str, folder: Path) -> Path | None:
    """Return the file of the repository that a page in `folder` means by a name in code, such as nn/attention.py."""
    for base in (ROOT, PACKAGE, folder, ROOT / "tests", DOCS):
        file = base / name
        if "/" in name or base in (folder, ROOT / "tests", DOCS):
            resolved = file.resolve()
            if resolved.exists() and resolved.is_relative_to(ROOT):
                return resolved
    return None


def find_linked_file(target: str, folder: Path) -> Path | None:
    """Return the file that a Markdown link of a page in `folder` points to, or None for addresses and anchors."""
    path = target.partition("#")[0]
    if not path or re.match(r"[a-z]+:", path):
        return None
    return (folder / path).resolve()


@cache
def find_line(file: Path, name: str) -> int | None:
    """Return the line that defines or imports a function, a class or a method (Class.method) in a Python file."""
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    line = None
    for part in name.split("."):
        node = next((item for item in body if part in _defined_names(item)), None)
        if node is None:
            return None
        line, body = node.lineno, getattr(node, "body", [])
    return line


def _defined_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def link_pages(text: str, page: str, folder: Path) -> str:
    """Return Markdown in which links to files of the repository lead to their pages; `page` is the path of the page."""

    def replace(match: re.Match[str]) -> str:
        label, target = match.groups()
        file = find_linked_file(target, folder)
        if file is None or not file.exists() or file.suffix in (".png", ".svg", ".jpg"):
            return match[0]
        anchor = target.partition("#")[2]
        path = posixpath.relpath(page_path(file), posixpath.dirname(page) or ".")
        return f"{label}({path}{'#' + anchor if anchor else ''})"

    lines = [line if is_code else MARKDOWN_LINK.sub(replace, line) for line, is_code in split_lines(text)]
    return "\n".join(lines) + "\n"


def collect_pages() -> Pages:
    """Build every page that is not a file of docs/: notebooks, results, reference, and the files that pages name."""
    pages = Pages()
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, pictures = read_notebook(notebook)
        _add(pages, page_path(notebook), text, notebook)
        pages.pictures |= {f"notebooks/{name}": content for name, content in pictures.items()}
    for result in sorted((ROOT / "benchmarks/results").glob("*.md")):
        _add(pages, page_path(result), result.read_text(encoding="utf-8"), result)
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        _add(pages, page_path(ROOT / name), (ROOT / name).read_text(encoding="utf-8"), ROOT / name)
    for name, text in build_reference().items():
        _add(pages, f"reference/{name}", text, DOCS / "reference" / name)
    texts = [(origin, pages.texts[page]) for page, origin in pages.origins.items()]
    texts += [(file, file.read_text(encoding="utf-8")) for file in DOCS.rglob("*.md")]
    for origin, text in texts:
        for file in sorted(_find_files(text, origin.parent)):
            _add_source(pages, file)
    return pages


def _add(pages: Pages, page: str, text: str, origin: Path) -> None:
    pages.texts[page], pages.origins[page] = text, origin


def _find_files(text: str, folder: Path) -> set[Path]:
    named = {find_file(match[1], folder) for match in NAMED_FILE.finditer(text)}
    linked = {find_linked_file(match[2], folder) for match in MARKDOWN_LINK.finditer(text)}
    return {file for file in named | linked if file is not None and file.exists()}


def _add_source(pages: Pages, file: Path) -> None:
    page = page_path(file)
    if page in pages.texts or not page.startswith("source/"):
        return
    path = file.relative_to(ROOT).as_posix()
    header = "---\nsearch:\n  exclude: true\nhide:\n  - navigation\n  - toc\n---\n\n"
    if file.is_dir():
        children = sorted(child for child in file.iterdir() if child.is_file() and _is_text(child))
        links = [
            f"- [`{child.name}`]({posixpath.relpath(page_path(child), posixpath.dirname(page))})" for child in children
        ]
        _add(pages, page, f"{header}# {path}/\n\n" + "\n".join(links) + "\n", file / "index.md")
        for child in children:
            _add_source(pages, child)
    elif _is_text(file):
        language = f'{{ .{LANGUAGES.get(file.suffix, "text")} linenums="1" }}'
        code = fence(file.read_text(encoding="utf-8").rstrip(), language)
        _add(pages, page, f"{header}# {path}\n\n{code}\n", file)


def _is_text(file: Path) -> bool:
    return file.suffix in LANGUAGES or file.suffix == ".md"
