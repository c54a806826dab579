"""The site builds without a warning, its links resolve, and it loads nothing from elsewhere; needs the extra [docs]."""

import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from site_pages import ROOT

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """The links, the anchors and the loaded files of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") not in ("canonical", "prev", "next") and values.get("href"):
            self.loaded.append(values["href"])
        if values.get("src"):
            self.loaded.append(values["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="the site needs the extra [docs]; run scripts/docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-d", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {file: Page(file) for file in site.rglob("*.html") if file.name != "404.html"}


def is_outside(target: str) -> bool:
    return bool(re.match(r"(https?:)?//|mailto:", target))


def test_every_link_leads_to_a_page_and_an_anchor(pages):
    broken = []
    for file, page in pages.items():
        for link in page.links:
            path, _, anchor = link.partition("#")
            if not is_outside(link):
                target = (file.parent / unquote(path)).resolve() if path else file
                if not target.is_file() or (
                    anchor and target in pages and unquote(anchor) not in pages[target].anchors
                ):
                    broken.append((file.name, link))
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(site, pages):
    for file, page in pages.items():
        for target in page.loaded:
            assert not is_outside(target), (file.name, target)
            assert target.startswith("data:") or (file.parent / unquote(target.partition("?")[0])).is_file(), target
        assert 'class="mermaid"' not in file.read_text(encoding="utf-8")
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet.name


def test_the_map_from_the_paper_is_one_click_from_the_first_page_and_its_rows_one_from_the_code(site, pages):
    assert any(link.startswith("paper-to-code.html") for link in pages[site / "index.html"].links)
    rows = re.findall(r"<tr>\s*<td.*?</tr>", (site / "paper-to-code.html").read_text(encoding="utf-8"), flags=re.S)
    assert len(rows) > 100
    without = [row for row in rows if 'href="' not in row]
    assert [re.sub(r"<.*?>|\s+", " ", row).strip() for row in without] == ["7 Conclusion"]


def test_formulas_are_mathml(pages):
    assert not [file.name for file in pages if "arithmatex" in file.read_text(encoding="utf-8")]


MEASURE = """<!doctype html><meta charset="utf-8"><body><script>
async function measure(page, width) {
  const frame = document.createElement("iframe")
  frame.style.cssText = `width:${width}px;height:900px;border:0`
  frame.src = page
  await new Promise((done) => { frame.onload = done; document.body.append(frame) })
  const inside = frame.contentDocument, root = inside.documentElement, style = frame.contentWindow.getComputedStyle
  const boxes = [...inside.querySelectorAll(".md-content pre > code, .md-content .formula")]
  const wide = boxes.filter((box) => box.scrollWidth > box.clientWidth)
  const result = {
    page, width, beyond: root.scrollWidth - root.clientWidth, wide: wide.length,
    clipped: wide.filter((box) => style(box).overflowX !== "auto").length,
    unmarked: wide.filter((box) => !style(box).backgroundImage.includes("gradient")).length,
  }
  frame.remove()
  return result
}
async function all(pages) {
  const results = []
  for (const page of pages) for (const width of [360, 768]) results.push(await measure(page, width))
  document.body.textContent = "RESULT" + JSON.stringify(results) + "END"
}
all(PAGES)
</script>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_wide_code_and_formulas_scroll_in_their_box_with_a_shadow_and_the_page_does_not_scroll(site, tmp_path):
    pages = ["index.html", "exercises.html", "notebooks/02_positions.html", "cli.html", "data.html"]
    script = MEASURE.replace("PAGES", json.dumps(pages))
    (site / "measure.html").write_text(script, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--allow-file-access-from-files"]
    options += ["--virtual-time-budget=120000", f"--user-data-dir={tmp_path / 'profile'}"]
    command = ["chromium", *options, "--dump-dom", (site / "measure.html").as_uri()]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    finally:
        (site / "measure.html").unlink()
    found = re.search("RESULT(.*)END", shown)
    assert found is not None, shown[:500]
    results = json.loads(unescape(found[1]))
    assert len(results) == 2 * len(pages)
    assert [result for result in results if result["beyond"] or result["clipped"] or result["unmarked"]] == []
    assert sum(result["wide"] for result in results) > 10, "some are wider than the page, or nothing was measured"
