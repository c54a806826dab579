"""The pages that the site makes from notebooks and docstrings; mkdocs is not needed."""

import json
import re

from markdown_source import to_python_markdown
from notebook_page import read_notebook
from reference_pages import build_reference, list_public_names, render_docstring
from site_pages import ROOT, find_line, link_pages, page_path

import monoblock
from monoblock.interop.huggingface.load import FAMILIES

PIXEL = "iVBORw0KGgo="


def test_every_public_name_is_in_the_reference():
    pages = build_reference()
    text = "\n".join(pages.values())
    names = {name.name for name in list_public_names()}
    assert names == {name for name in monoblock.__all__ if not name.startswith("__")}
    assert all(f"{{ #{name} }}" in text and f"`mb.{name}`" in pages["index.md"] for name in names)


def test_arguments_of_a_docstring_become_a_list_and_examples_code():
    page = render_docstring(
        """Do it.

            run = mb.train("x")

        out: the folder,
            which is new.
        data: *args of it.
        """
    )
    assert page == (
        'Do it.\n\n```python\nrun = mb.train("x")\n```\n\n'
        "- `out`: the folder,\n    which is new.\n- `data`: \\*args of it."
    )


def test_a_notebook_is_shown_with_its_stored_outputs_and_pictures(tmp_path):
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["1\n", "```\n"]},
        {"output_type": "execute_result", "data": {"image/png": PIXEL, "text/plain": ["<Picture>"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text."]},
        {"cell_type": "code", "source": "print(1)", "outputs": outputs},
        {"cell_type": "code", "source": "2", "outputs": [], "metadata": {"jupyter": {"source_hidden": True}}},
    ]
    path = tmp_path / "01_title.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    page, pictures = read_notebook(path)
    assert page.startswith("# Title\n")
    assert "``` python\nprint(1)\n```\n" in page
    assert "```` { .text .output }\n1\n```\n````" in page  # longer than the fence in the output
    assert "<Picture>" not in page
    assert "</summary>\n\n``` python\n2\n```\n\n</details>" in page
    assert list(pictures) == ["01_title-1.png"]
    assert "](01_title-1.png)" in page


def test_lists_and_tables_after_a_paragraph_get_an_empty_line_and_code_is_unchanged():
    text = "Text:\n- one\n  - two\n\n```\na\n- b\n```\nText\n| a |\n|---|\n"
    assert to_python_markdown(text) == "Text:\n\n- one\n    - two\n\n```\na\n- b\n```\nText\n\n| a |\n|---|\n"


def test_links_to_files_of_the_repository_lead_to_their_pages():
    text = "[a](../benchmarks/results/digits.md) [b](adding.md#x) [c](https://x.org) [d](../scripts/docs)"
    linked = link_pages(text, "how-to/page.md", ROOT / "docs")
    assert linked == "[a](../results/digits.md) [b](../adding.md#x) [c](https://x.org) [d](../source/scripts/docs.md)\n"


def test_a_name_in_a_file_leads_to_its_line():
    file = ROOT / "src/monoblock/nn/attention.py"
    line = find_line(file, "attend")
    assert file.read_text(encoding="utf-8").splitlines()[line - 1].startswith("def attend(")
    assert find_line(file, "Attention.forward") > find_line(file, "Attention")
    assert find_line(file, "nothing") is None
    assert page_path(file) == "source/src/monoblock/nn/attention.py.md"


def test_the_number_of_published_families_is_said_once_and_by_the_code():
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    typed = re.compile(r"\d+ (?:\w+ ){0,3}famil")
    named = {page.name: typed.findall(page.read_text(encoding="utf-8")) for page in pages}
    assert {name: hits for name, hits in named.items() if hits} == {
        "config.md": [f"{len(FAMILIES)} Hugging Face famil"]
    }
