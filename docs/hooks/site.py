"""The steps that mkdocs runs to build the site (mkdocs.yml names this file)."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from formulas import write_mathml
from markdown_source import to_python_markdown
from mkdocs.structure.files import File, Files
from navigation import build_navigation
from reference_pages import list_public_names, page_of
from site_pages import DOCS, ROOT, Pages, collect_pages, find_file, find_line, link_pages, page_path

NAMED_FILE = re.compile(r"<code>([\w./-]+?)(?:::([\w.]+))?</code>")
PUBLIC_NAME = re.compile(r"<code>mb\.(\w+)(\.\w+)?(\(.*?\))?</code>")
LINKS_AND_CODE = re.compile(r"(<a\b.*?</a>|<pre\b.*?</pre>|<h[1-6]\b.*?</h[1-6]>)", flags=re.S)

COMMENT = re.compile(r"\A<!--.*?-->\s*", flags=re.S)  # before the title, which is to be the first line

FONT = "STIXTwoMath-Regular.ttf"  # for formulas; distributed with ziamath

PAGES = Pages()  # built anew for each build
REFERENCE = {name.name: f"reference/{page_of(name)}.md" for name in list_public_names()}


def on_config(config: Any) -> Any:
    global PAGES
    PAGES = collect_pages()
    config.nav = build_navigation(PAGES)
    return config


def on_serve(server: Any, **_: Any) -> Any:
    for folder in ("notebooks", "benchmarks/results", "src/monoblock"):
        if (ROOT / folder).is_dir():
            server.watch(str(ROOT / folder))
    return server


def on_files(files: Files, config: Any) -> Files:
    for page, text in PAGES.texts.items():
        files.append(File.generated(config, page, content=text))
    for name, content in PAGES.pictures.items():
        files.append(File.generated(config, name, content=content))
    ziamath = find_spec("ziamath")  # not imported: only its font is used
    assert ziamath is not None
    assert ziamath.origin is not None
    font = Path(ziamath.origin).parent / "fonts" / FONT
    files.append(File.generated(config, f"fonts/{FONT}", content=font.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    path = page.file.src_uri
    markdown = COMMENT.sub("", markdown)
    return to_python_markdown(link_pages(markdown, path, _folder(path)))


def on_page_content(html: str, page: Any, files: Files, **_: Any) -> str:
    """Write formulas as MathML, and turn names of files and of public functions into links."""
    if page.file.src_uri.startswith("source/"):
        return html
    folder = _folder(page.file.src_uri)

    def link_file(match: re.Match[str]) -> str:
        name, definition = match.groups()
        file = find_file(name, folder)
        target = None if file is None else files.get_file_from_path(page_path(file))
        if file is None or target is None or target is page.file:
            return match[0]
        line = find_line(file, definition) if definition and file.suffix == ".py" else None
        anchor = f"#__codelineno-0-{line}" if line else ""
        return f'<a href="{target.url_relative_to(page.file)}{anchor}">{_breakable(match[0])}</a>'

    def link_name(match: re.Match[str]) -> str:
        if match[1] not in REFERENCE:
            return match[0]
        target = files.get_file_from_path(REFERENCE[match[1]])
        assert target is not None
        url = "" if target is page.file else target.url_relative_to(page.file)
        return f'<a href="{url}#{match[1]}">{match[0]}</a>'

    for item in page.toc:
        _write_toc_formulas(item)
    parts = LINKS_AND_CODE.split(write_mathml(html))
    for index in range(0, len(parts), 2):
        parts[index] = PUBLIC_NAME.sub(link_name, NAMED_FILE.sub(link_file, parts[index]))
    return "".join(parts)


def _write_toc_formulas(item: Any) -> None:
    item.title = write_mathml(re.sub(r"(\\\(.*?\\\))", r'<span class="arithmatex">\1</span>', item.title))
    for child in item.children:
        _write_toc_formulas(child)


def _breakable(code: str) -> str:
    """Return the name of a file or of a definition in it, which breaks after `::` first, and else between words."""
    name = code.removeprefix("<code>").removesuffix("</code>")
    parts = [re.sub("([/_])", r"\1<wbr>", part) for part in re.split("(?<=::)", name)]
    return f"<code>{'<wbr>'.join(f'<span>{part}</span>' for part in parts)}</code>"


def _folder(page: str) -> Path:
    """Return the folder of the repository that the links of a page are relative to."""
    return PAGES.origins.get(page, DOCS / page).parent
