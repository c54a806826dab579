"""The mistakes of the classroom are named in each style of code, in words that a student understands."""

import functools

import pytest
from classroom import HANDED, MISTAKES, STYLES, build, options_of

import monoblock as mb

CELLS = [(mistake, style) for mistake in MISTAKES for style, cell in mistake.cells.items() if not isinstance(cell, str)]
NAME = {mistake.name: mistake for mistake in MISTAKES}


@functools.cache
def findings(name, style):
    mistake = NAME[name]
    student = build(style, mistake)
    return mb.diagnose(student.model, **options_of(student, mistake.hand_over)).findings


def is_named(name, style):
    mistake = NAME[name]
    return any(
        found.check == mistake.check and mistake.words in found.reason and mistake.line(style) in found.fix
        for found in findings(name, style)
    )


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("handed", [(), tuple(HANDED)], ids=["model", "everything"])
def test_a_healthy_script_has_no_findings(style, handed):
    student = build(style)
    assert mb.diagnose(student.model, **options_of(student, handed)).findings == []


@pytest.mark.parametrize(("name", "style"), [(mistake.name, style) for mistake, style in CELLS])
def test_a_mistake_of_the_classroom_is_named(name, style):
    assert is_named(name, style), [(f.check, f.reason, f.fix) for f in findings(name, style)]


def test_nearly_all_mistakes_are_named():
    """Print the table mistake x style, and count."""
    width = max(map(len, NAME))
    print(f"\n{'':{width}}  {'  '.join(STYLES)}")
    for name, mistake in NAME.items():
        row = ["-" if isinstance(mistake.cells[s], str) else "named" if is_named(name, s) else "no" for s in STYLES]
        print(f"{name:{width}}  {'  '.join(f'{word:{len(s)}}' for word, s in zip(row, STYLES, strict=True))}")
    named = sum(is_named(mistake.name, style) for mistake, style in CELLS)
    print(f"{named} of {len(CELLS)} cells named")
    assert named == len(CELLS)
