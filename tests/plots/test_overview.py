"""The picture of the README and of the start page: its masks, and the stored files."""

from pathlib import Path

import pytest

from monoblock.plots import masks as overview

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


def visible(panel):
    """A line for each row of a panel, with # for a coloured cell."""
    return ["".join(" " if color == overview.EMPTY else "#" for color in row).rstrip() for row in panel.colors]


def test_the_panels_show_the_masks_of_the_models():
    decoder, encoder, both, window, prefix, vision = overview._panels()
    assert visible(decoder) == ["#", "##", "###", "####", "#####", "######"]
    assert visible(encoder) == visible(vision) == ["######"] * 6
    assert visible(both) == ["###", "###", "###", "####", "#####", "######"]
    assert visible(window) == ["#", "##", "###", " ###", "  ###", "   ###"]
    assert visible(prefix) == ["###", "###", "###", "####", "#####", "######"]
    assert both.colors[3][:4] == [overview.CROSS] * 3 + [overview.SELF]


@pytest.mark.parametrize(("name", "narrow"), [("overview.png", False), ("overview-narrow.png", True)])
def test_the_stored_picture_is_small_and_drawn_by_the_function(tmp_path, name, narrow):
    pytest.importorskip("matplotlib")
    from PIL import Image

    drawn = overview.save_overview(tmp_path / name, narrow=narrow)
    assert (PICTURES / name).stat().st_size < 80_000
    with Image.open(PICTURES / name) as stored, Image.open(drawn) as new:
        assert stored.size == new.size
