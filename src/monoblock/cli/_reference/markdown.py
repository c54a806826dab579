"""Tables, code and headings in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

WARNING = "<!-- Written by scripts/docs from the code; edit the code and run it again. -->"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; a column that is empty in every row is left out."""
    shown = [index for index, name in enumerate(columns) if not rows or any(row[index] for row in rows)]
    lines = [[columns[index] for index in shown], ["---"] * len(shown)]
    lines += [[_escape(row[index]) for index in shown] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;") if "`" not in cell else cell.replace("|", "\\|")


def code(text: str) -> str:
    return f"`{text}`" if text and text != "—" else text


def join_page(*parts: str) -> str:
    """Join the paragraphs of a page, which begins with the warning not to edit it."""
    return "\n\n".join([WARNING, *(part.strip("\n") for part in parts if part)]) + "\n"
