"""Turn formulas into MathML when the site is built, so that a page needs no script and no font to show them."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', flags=re.S)
DISPLAY = re.compile(r'<div class="arithmatex">\\\[(.*?)\\\]</div>', flags=re.S)


def write_mathml(page: str) -> str:
    """Return HTML in which the formulas that arithmatex has marked are MathML."""
    page = DISPLAY.sub(lambda match: f'<div class="formula">{_convert(match[1], "block")}</div>', page)
    return INLINE.sub(lambda match: _convert(match[1], "inline"), page)


def _convert(formula: str, display: str) -> str:
    return convert(html.unescape(formula).strip(), display=display)
