"""Every link between pages leads to a page and a heading, and every file and test that a page names exists."""

import re
from pathlib import Path

import pytest
from markdown_source import split_lines
from site_pages import DOCS, MARKDOWN_LINK, ROOT, find_file, find_line, find_linked_file

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "benchmarks/results").glob("*.md")])
MAP = DOCS / "paper-to-code.md"


def heading_anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    text = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def list_anchors(page: Path) -> set[str]:
    lines = [line for line, is_code in split_lines(page.read_text(encoding="utf-8")) if not is_code]
    return {heading_anchor(line.lstrip("#")) for line in lines if re.match(r"#+ ", line)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_internal_link_leads_to_a_file_and_a_heading(page):
    lines = [line for line, is_code in split_lines(page.read_text(encoding="utf-8")) if not is_code]
    for _, target in MARKDOWN_LINK.findall("\n".join(re.sub(r"`[^`]*`", "", line) for line in lines)):
        file = find_linked_file(target, page.parent)
        if file is not None:
            assert file.exists(), target
        anchor = target.partition("#")[2]
        if anchor and not re.match(r"[a-z]+:", target):
            assert anchor in list_anchors(file or page), target


def test_every_file_and_name_of_the_map_from_the_paper_exists():
    named = re.findall(r"`([\w./-]+\.(?:py|toml))(?:::(\w+))?`", MAP.read_text(encoding="utf-8"))
    assert len(named) > 150
    for name, definition in named:
        file = find_file(name, DOCS)
        assert file is not None, name
        assert not definition or find_line(file, definition), f"{name}::{definition}"


def test_every_heading_of_the_map_leads_to_code_or_a_page_and_to_a_notebook_or_a_test():
    rows = [line.split("|")[1:-1] for line in MAP.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0].strip() not in ("section", "heading", "7 Conclusion")]
    assert len(rows) > 100
    assert [row[0] for row in rows if not re.search(r"`|\]\(", row[1])] == []


def test_every_table_of_results_is_linked():
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("results.md", "experiments.md"))
    tables = [file.name for file in (ROOT / "benchmarks/results").glob("*.md")]
    assert [name for name in tables if f"(../benchmarks/results/{name})" not in text] == []
