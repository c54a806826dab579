"""Turn a notebook into a page: its text, its code, and the outputs and pictures that are stored in it.

Nothing is executed.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def read_notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the page as Markdown, and its pictures by file name."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = _join(cell["source"]).rstrip()
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code" and source:
            code = [fence(source, "python")]
            for output in cell["outputs"]:
                code.extend(_write_output(output, path.stem, pictures))
            is_hidden = cell.get("metadata", {}).get("jupyter", {}).get("source_hidden", False)
            parts += (
                ['<details markdown="1"><summary>Show the code</summary>', *code, "</details>"] if is_hidden else code
            )
    opening = (
        f"Open it in Jupyter with `bash scripts/course`: `notebooks/{path.name}`. Below are the outputs stored in it."
    )
    title, _, rest = parts[0].partition("\n")
    return "\n\n".join([title, opening, rest.strip(), *parts[1:]]) + "\n", pictures


def fence(text: str, language: str) -> str:
    """Return text as a fenced block; the fence is longer than any in the text."""
    longest = max(map(len, re.findall(r"`{3,}", text)), default=2)
    marks = "`" * (longest + 1)
    return f"{marks} {language}\n{text}\n{marks}"


def _write_output(output: dict[str, Any], stem: str, pictures: dict[str, bytes]) -> list[str]:
    if output["output_type"] == "stream":
        return _write_text(_join(output["text"]))
    if output["output_type"] == "error":
        return _write_text(f"{output['ename']}: {output['evalue']}")
    data = output["data"]
    for kind, suffix in (("image/svg+xml", "svg"), ("image/png", "png"), ("image/jpeg", "jpg")):
        if kind in data:
            name = f"{stem}-{len(pictures) + 1}.{suffix}"
            content = _join(data[kind])
            pictures[name] = content.encode() if suffix == "svg" else base64.b64decode(content)
            return [f"![Output {len(pictures)} of notebook {stem[:2]}]({name})"]
    if "text/markdown" in data:
        return [_join(data["text/markdown"])]
    if "text/html" in data:
        return [f'<div class="output-html" markdown="0">\n{_join(data["text/html"])}\n</div>']
    return _write_text(_join(data.get("text/plain", "")))


def _write_text(text: str) -> list[str]:
    text = ANSI.sub("", text).rstrip()
    return [fence(text, "{ .text .output }")] if text else []


def _join(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)
