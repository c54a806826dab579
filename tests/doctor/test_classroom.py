"""The mistakes of the classroom are named in each style of code, in words that a student understands."""

import functools
from pathlib import Path

import pytest
from classroom import HANDED, LAYERS, MISTAKES, STYLES, VARIANTS, build, options_of

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


def cells():
    """Yield each cell; of every second row one style is quick, another from row to row, and the others are slow."""
    for number, (name, styles) in enumerate((m.name, [s for x, s in CELLS if x is m]) for m in MISTAKES):
        for style in styles:
            is_quick = number % 2 == 0 and style == styles[number // 2 % len(styles)]
            yield pytest.param(name, style, marks=[] if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "style"), list(cells()))
def test_a_mistake_of_the_classroom_is_named(name, style):
    assert is_named(name, style), [(f.check, f.reason, f.fix) for f in findings(name, style)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_healthy_script_written_in_another_way_has_no_findings(variant):
    style, changes = VARIANTS[variant]
    assert mb.diagnose(build(style, changes=changes).model).findings == []


@pytest.mark.parametrize(
    ("variant", "changes"),
    [(name, tuple((old, new.replace("x + ", "")) for old, new in changes)) for name, (_, changes) in VARIANTS.items()][
        :2
    ],
)
def test_a_missing_residual_connection_is_found_in_another_order_of_norms(variant, changes):
    (found,) = mb.diagnose(build(VARIANTS[variant][0], changes=changes).model).findings
    assert (found.check, found.evidence["layers_without"]) == ("gradient_flow", 3)
    assert "residual connection" in found.reason


@pytest.mark.parametrize(
    ("style", "layers"),
    [
        (s, n) if (s, n) == ("nanogpt", 6) else pytest.param(s, n, marks=pytest.mark.slow)
        for s in LAYERS
        for n in (6, 12)
    ],
)
@pytest.mark.parametrize("name", [name for name in NAME if name.startswith("no residual")])
def test_missing_residual_connections_are_found_at_any_depth(style, layers, name):
    old, new = LAYERS[style]
    student = build(style, NAME[name], changes=((old, new.format(layers)),))
    (found,) = mb.diagnose(student.model).findings
    assert found.check == "gradient_flow"
    assert found.evidence["layers_without"] == found.evidence["layers"] == layers


@pytest.mark.parametrize(
    ("line", "use"),
    [
        ("self.pos = torch.randn(block_size, n_embd, requires_grad=True)", "pos_emb = self.pos[:T]"),
        ("self.pos = [nn.Parameter(torch.randn(block_size, n_embd))]", "pos_emb = self.pos[0][:T]"),
    ],
)
def test_a_weight_that_is_no_parameter_of_the_model_is_named(line, use):
    changes = {
        "self.position_embedding_table = nn.Embedding(block_size, n_embd)": line,
        "pos_emb = self.position_embedding_table(torch.arange(T))": use,
    }
    (found,) = mb.diagnose(build("lecture", changes=tuple(changes.items())).model).findings
    assert "self.pos" in found.reason
    assert "self.pos = nn.Parameter(" in found.fix


def test_the_page_lists_the_mistakes():
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text("utf-8")
    rows = [f"| {m.name} | {m.check} | {', '.join(f'`{n}=`' for n in m.hand_over)} |" for m in MISTAKES]
    assert "\n".join(rows) in page


@pytest.mark.slow
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
