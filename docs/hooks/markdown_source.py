"""Adapt Markdown written for GitHub to Python-Markdown, in which an empty line precedes lists and tables."""

from __future__ import annotations

import re
from collections.abc import Iterator

ITEM = re.compile(r"^( *)([-*+]|\d+\.) +\S")
FENCE = re.compile(r"^ *(```+|~~~+)")


def split_lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether it belongs to a fenced block."""
    fence = ""
    for line in text.splitlines():
        match = FENCE.match(line)
        if fence:
            yield line, True
            if match and match[1].startswith(fence) and line.strip() == match[1]:
                fence = ""
        else:
            fence = match[1] if match else ""
            yield line, bool(match)


def to_python_markdown(text: str) -> str:
    """Return the text with the empty lines and the indents that Python-Markdown requires around lists and tables."""
    lines: list[str] = []
    in_list = False
    previous = ""
    for line, is_code in split_lines(text):
        item = None if is_code else ITEM.match(line)
        if is_code:
            # A block at the margin ends a list.
            in_list = in_list and line.startswith(" ")
        elif item:
            if not in_list and previous.strip():
                lines.append("")
            in_list = True
            line = " " * len(item[1]) + line  # Python-Markdown nests by four spaces, GitHub by two
        elif not line.strip():
            pass
        elif in_list and not line.startswith(" ") and not previous.strip():
            in_list = False
        elif line.startswith("|") and previous.strip() and not previous.startswith("|"):
            lines.append("")
        lines.append(line)
        previous = line
    return "\n".join(lines) + "\n"
