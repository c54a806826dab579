"""Write the reference of the Python API from the docstrings of the public names in src/monoblock/__init__.pyi.

The source is parsed and not imported, so that neither torch nor monoblock has to be installed.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = SOURCE / "monoblock"

# Page, title, and the modules whose public names it describes; the longest match counts.
PAGES = (
    (
        "models",
        "Models",
        ("config.families", "config.knobs", "config.presets", "model", "baselines.lstm", "nn.block"),
    ),
    ("configurations", "Configurations", ("config",)),
    ("parts", "Parts of a model", ("nn",)),
    (
        "adapters",
        "Adapters, files and quantization",
        ("nn.lora", "interop.adapters", "interop.huggingface", "quantization"),
    ),
    ("training", "Training and evaluation", ("runs", "training", "tasks", "tokenizers")),
    ("inference", "Decoding", ("inference", "parallel")),
    ("inspection", "Inspection, doctor and counting", ("inspection", "doctor", "runs.account", "plots")),
    ("errors", "Errors", ("errors",)),
)
SPECIAL = ("__call__", "__getitem__", "__len__", "__iter__")
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class PublicName:
    """A public name and where it is defined."""

    name: str
    module: str  # the module that __init__.pyi imports it from, without "monoblock."
    file: Path  # the file that defines it
    node: Definition


def list_public_names() -> list[PublicName]:
    """Return the public names in the order of __init__.pyi."""
    names = []
    for statement in ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            for alias in statement.names:
                file, node = _find_definition(statement.module, alias.name)
                names.append(PublicName(alias.name, statement.module.removeprefix("monoblock."), file, node))
    return names


def page_of(name: PublicName) -> str:
    """Return the page that describes a name."""
    matches = [
        (len(module), page)
        for page, _, modules in PAGES
        for module in modules
        if f"{name.module}.".startswith(f"{module}.")
    ]
    if matches:
        return max(matches)[1]
    raise ValueError(f"no page of the reference takes {name.module}; add it to PAGES in {Path(__file__).name}")


def build_reference() -> dict[str, str]:
    """Return the pages of the reference by file name."""
    names = list_public_names()
    pages = {"index.md": _build_index(names)}
    for page, title, _ in PAGES:
        sections = [_describe(name) for name in names if page_of(name) == page]
        pages[f"{page}.md"] = "\n\n".join([f"# {title}", *sections]) + "\n"
    return pages


def _build_index(names: list[PublicName]) -> str:
    parts = ["# Python reference", "Every public name is an attribute of `monoblock`: `import monoblock as mb`."]
    for page, title, _ in PAGES:
        rows = [
            f"| [`mb.{name.name}`]({page}.md#{name.name}) | {_table_cell(_summary(name))} |"
            for name in names
            if page_of(name) == page
        ]
        parts += [f"## [{title}]({page}.md)", "\n".join(["| name | |", "|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def _describe(name: PublicName) -> str:
    path = name.file.relative_to(PACKAGE).as_posix()
    parts = [f"## mb.{name.name} {{ #{name.name} }}", f"`{path}::{name.name}`"]
    if isinstance(name.node, ast.ClassDef):
        parts += _describe_class(name.node, _docstring(name), name.file.read_text(encoding="utf-8").splitlines())
    elif isinstance(name.node, ast.FunctionDef):
        parts += [_signature(name.node, f"mb.{name.name}"), render_docstring(ast.get_docstring(name.node) or "")]
    else:
        parts.append(render_docstring(_docstring(name)))
    return "\n\n".join(part for part in parts if part)


def _describe_class(node: ast.ClassDef, docstring: str, lines: list[str]) -> list[str]:
    body = node.body
    if "transformer.Transformer" in map(ast.unparse, node.bases):  # the core of mb.Transformer
        core = _find_definition("monoblock.nn.transformer", "Transformer")[1]
        assert isinstance(core, ast.ClassDef)
        body = core.body + body
    methods = [item for item in body if isinstance(item, ast.FunctionDef)]
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    parts = []
    constructor = next((method for method in methods if method.name == "__init__"), None)
    if constructor is not None:
        parts.append(_signature(constructor, f"mb.{node.name}"))
    parts.append(render_docstring(docstring))
    if constructor is not None:
        parts.append(render_docstring(ast.get_docstring(constructor) or ""))
    if is_dataclass and fields:
        rows = [f"| {_field_row(field, lines)} |" for field in fields]
        parts.append("\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows]))
    for method in methods:
        text = ast.get_docstring(method)
        decorators = [ast.unparse(decorator) for decorator in method.decorator_list]
        is_public = not method.name.startswith("_") or method.name in SPECIAL
        if text and is_public and "overload" not in decorators:
            title = f"### {node.name}.{method.name} {{ #{node.name}.{method.name} }}"
            if any(name.endswith("property") for name in decorators):
                parts += [title, render_docstring(text)]
            else:
                parts += [title, _signature(method, method.name), render_docstring(text)]
    return [part for part in parts if part]


def _field_row(field: ast.AnnAssign, lines: list[str]) -> str:
    """Return the row of a field; its meaning is the comment behind it or above it."""
    assert isinstance(field.target, ast.Name)
    behind = lines[(field.end_lineno or field.lineno) - 1].partition("  # ")[2]
    above = lines[field.lineno - 2].strip()
    meaning = behind or (above.removeprefix("# ") if above.startswith("# ") else "")
    default = "required" if field.value is None else f"`{_table_cell(ast.unparse(field.value))}`"
    kind = _table_cell(ast.unparse(field.annotation))
    return f"`{field.target.id}` | `{kind}` | {default} | {_table_cell(meaning)}"


def _signature(node: ast.FunctionDef, name: str) -> str:
    """Return the signature as a block of code, one argument per line if it is long."""
    arguments = list(_list_arguments(node.args))
    if arguments and arguments[0] in ("self", "cls"):
        arguments = arguments[1:]
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    line = f"{name}({', '.join(arguments)}){result}"
    if len(line) > 88:
        line = f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){result}"
    return f"```python\n{line}\n```"


def _list_arguments(arguments: ast.arguments) -> Iterator[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for number, (argument, default) in enumerate(zip(positional, defaults, strict=True), start=1):
        yield _write_argument(argument, default)
        if number == len(arguments.posonlyargs):
            yield "/"
    if arguments.vararg is not None:
        yield f"*{_write_argument(arguments.vararg, None)}"
    elif arguments.kwonlyargs:
        yield "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _write_argument(argument, default)
    if arguments.kwarg is not None:
        yield f"**{_write_argument(arguments.kwarg, None)}"


def _write_argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(argument.annotation)}" if argument.annotation is not None else ""
    if default is None:
        return argument.arg + kind
    return f"{argument.arg}{kind}{' = ' if kind else '='}{ast.unparse(default)}"


def render_docstring(text: str) -> str:
    """Return a docstring as Markdown: `name: meaning` lines become a list, aligned or indented lines code."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text))
    return "\n\n".join(_render_paragraph(paragraph) for paragraph in paragraphs if paragraph.strip())


def _render_paragraph(paragraph: str) -> str:
    lines = paragraph.splitlines()
    if all(line.startswith("    ") for line in lines) or any(re.search(r"\S {3,}\S", line) for line in lines):
        return f"```python\n{inspect.cleandoc(paragraph)}\n```"
    starts = [re.match(r"(\*{0,2}\w+(?:, \w+)*): (?=\S)", line) for line in lines]
    if starts[0] is None or not starts[0][1].islower():
        return "\n".join(_escape(line.strip()) for line in lines)
    rendered = []
    for line, start in zip(lines, starts, strict=True):
        if start and not line.startswith(" "):
            rendered.append(f"- `{start[1]}`: {_escape(line[start.end() :])}")
        else:
            rendered.append(f"    {_escape(line.strip())}")
    return "\n".join(rendered)


def _escape(line: str) -> str:
    """Return a line in which signs of Python outside code are not read as Markdown."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<\[\]$])", r"\\\1", part) for part in parts)


def _docstring(name: PublicName) -> str:
    """Return the docstring of a name, or that of its file if it has none."""
    is_documented = isinstance(name.node, ast.FunctionDef | ast.ClassDef)
    own = ast.get_docstring(name.node) if is_documented else _comment_above(name.file, name.node)
    return own or ast.get_docstring(ast.parse(name.file.read_text(encoding="utf-8"))) or ""


def _summary(name: PublicName) -> str:
    return _escape(re.split(r"\n\s*\n", _docstring(name))[0].replace("\n", " "))


def _comment_above(file: Path, node: Definition) -> str:
    lines = file.read_text(encoding="utf-8").splitlines()[: node.lineno - 1]
    comment: list[str] = []
    while lines and lines[-1].startswith("#"):
        comment.insert(0, lines.pop().lstrip("# "))
    return " ".join(comment)


def _table_cell(text: str) -> str:
    return text.replace("|", "\\|").strip()


def _find_definition(module: str, name: str) -> tuple[Path, Definition]:
    """Return the file and the statement that define a name; names that a module imports are followed."""
    base = SOURCE / module.replace(".", "/")
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            is_overload = any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)
            if not is_overload:
                return file, node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return file, node
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return file, node
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return _find_definition(node.module, name)
    raise ValueError(f"{module} does not define {name}, which __init__.pyi imports from it")
