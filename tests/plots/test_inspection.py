"""The pictures of an inspection: labels that fit, sizes, a limit, and pages that load nothing from elsewhere."""

import itertools
import json
import re

import numpy as np
import pytest
import torch

import monoblock as mb
from monoblock.plots.figure import MISSING_GLYPH, check_length, choose_labels, drawable, readable_tokens

pytest.importorskip("matplotlib")

from monoblock.plots.attention import draw_attention, draw_head_grid, draw_layer, draw_patch_attention
from monoblock.plots.curves import draw_bars, draw_curves, draw_head_statistics, draw_lens
from monoblock.plots.figure import save_figure
from monoblock.plots.page import AttentionMap, Section, save_page
from monoblock.plots.positions import draw_bias, draw_hands, draw_vectors, mean_by_offset

WORDS = ["the", "cat", "unbelievably-long-word", "$x_1$", "é", "."]


def tokens(count):
    return [WORDS[number % len(WORDS)] for number in range(count)]


def label_boxes(figure, side):
    """Return the labels of an axis as boxes in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).draw()
    axis = getattr(figure.axes[0], f"{side}axis")
    return [label.get_window_extent() for label in axis.get_ticklabels() if label.get_text()]


@pytest.mark.parametrize("count", [8, 40, 400])
def test_labels_do_not_overlap_and_are_inside_the_picture(count):
    figure = draw_attention(np.eye(count), tokens(count), tokens(count), "decoder.0.attention, head 0")
    for side in ("x", "y"):
        boxes = label_boxes(figure, side)
        assert len(boxes) == (count if count <= 40 else 80)
        edges = sorted((box.x0, box.x1) if side == "x" else (box.y0, box.y1) for box in boxes)
        assert all(first[1] <= second[0] + 1 for first, second in itertools.pairwise(edges))
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)
    assert figure.axes[0].get_xlabel()
    assert figure.axes[0].get_ylabel()


def test_a_text_of_more_than_2000_tokens_is_refused():
    check_length(2000)
    with pytest.raises(mb.InputError, match="a picture of 2,001 tokens cannot be read; give a text of at most 2,000"):
        draw_attention(np.zeros((1, 2001)), tokens(1), tokens(2001), "too long")


def test_a_grid_has_a_map_for_every_head_and_long_texts_are_reduced():
    weights = np.full((3, 400, 400), 1 / 400)  # uniform attention
    weights[1, 399, 0] = 0.5
    figure = draw_head_grid({"layer 0": weights, "layer 1": weights[:2]}, "all heads")
    (image,) = figure.axes[0].images
    canvas = np.asarray(image.get_array().filled(np.nan))
    assert canvas.shape == (2 * 220 + 7, 3 * 220 + 2 * 7)  # tiles of 2.2 inches
    assert canvas[219, 220 + 7] == 1  # more than 100 times uniform attention, at the left below in head 1
    assert canvas[0, 0] == pytest.approx(1 / 3)  # uniform attention, on a scale from 1/10 to 100
    assert np.isnan(canvas[227:, 454:]).all()  # layer 1 has no third head
    assert "uniform attention" in figure.axes[1].get_xlabel()


def test_long_causal_heads_of_three_kinds_differ_and_a_uniform_one_has_one_colour():
    size = 400
    mask = np.tril(np.ones((size, size), bool))
    uniform = mask / mask.sum(-1, keepdims=True)
    first, previous = np.zeros((size, size)), np.eye(size, k=-1)
    first[:, 0], previous[0, 0] = 1, 1
    weights = np.stack([0.5 * uniform + 0.5 * head for head in (uniform, first, previous)])
    figure = draw_head_grid({"layer 0": weights}, "all heads", mask={"layer 0": mask})
    canvas = np.asarray(figure.axes[0].images[0].get_array().filled(np.nan))
    side = canvas.shape[0]
    tiles = [canvas[:, start : start + side] for start in (0, side + 7, 2 * (side + 7))]
    places = [(side - 1, 0), (side - 1, side - 1), (side - 1, side // 2)]  # of the last query: first, previous, far
    bright = [[round(float(tile[place]), 2) for place in places] for tile in tiles]
    assert bright[0] == pytest.approx([1 / 3] * 3, abs=0.01)
    assert bright[1][0] == 1
    assert bright[1][1] == bright[1][2] < 1 / 3
    assert bright[2][1] == 1
    assert bright[2][0] == bright[2][2] < 1 / 3
    assert all(tile[0, side - 1] == -1 for tile in tiles)  # masked: grey


@pytest.mark.parametrize("count", [8, 406])
def test_the_labels_of_a_grid_do_not_overlap(count):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    weights = {"layer 0": np.stack([np.eye(count)] * 12)}
    notes = {name: ["previous 100 %"] * 12 for name in weights}
    figure = draw_head_grid(weights, "all heads", queries=tokens(count), keys=tokens(count), notes=notes)
    FigureCanvasAgg(figure).draw()
    axis = figure.axes[0]
    above, beside = axis.child_axes[1], axis.child_axes[0]
    boxes = [label.get_window_extent() for label in above.get_xticklabels() if label.get_text()]
    edges = [(box.x0, box.x1) for box in boxes]
    assert len(edges) >= 12 * 5
    assert all(first[1] <= second[0] + 1 for first, second in itertools.pairwise(edges))
    heights = sorted((box.y0, box.y1) for box in (label.get_window_extent() for label in beside.get_yticklabels()))
    assert all(first[1] <= second[0] + 1 for first, second in itertools.pairwise(heights))
    written = [text.get_window_extent() for text in axis.texts]
    assert max(box.y1 for box in written) <= min(box.y0 for box in boxes) + 1
    assert all(first.x1 <= second.x0 for first, second in itertools.pairwise(written[:12]))
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes + written)


def test_logarithmic_axes_have_plain_numbers():
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = draw_curves("time", "length", "ms", [8, 16], {"a": [2.5, 6.0]}, logarithmic=True)
    FigureCanvasAgg(figure).draw()
    axis = figure.axes[0].yaxis
    shown = [label.get_text() for label in axis.get_majorticklabels() + axis.get_minorticklabels()]
    assert [text for text in shown if "10^" in text] == []
    assert "5" in shown


@pytest.mark.parametrize("count", [8, 40])
def test_the_heads_of_a_layer_have_their_tokens_and_own_scales(count):
    weights = np.stack([np.eye(count) * scale for scale in (1.0, 0.5, 0.1, 0.0, 1.0)])
    figure = draw_layer(weights, tokens(count), tokens(count), "encoder.0.attention")
    maps = figure.axes[:5]
    assert [axis.get_title() for axis in maps] == [f"head {number}" for number in range(5)]
    assert [float(axis.images[0].get_array().max()) for axis in maps] == [1, 1, 1, 0, 1]
    edges = sorted((box.y0, box.y1) for box in label_boxes(figure, "y"))
    assert len(edges) == count
    assert all(first[1] <= second[0] + 1 for first, second in itertools.pairwise(edges))


def test_long_texts_have_a_square_root_scale_that_says_so():
    label = {count: draw_attention(np.eye(count), tokens(count), tokens(count), "").axes[1] for count in (40, 400)}
    assert [label[count].get_ylabel() for count in (40, 400)] == [
        "attention weight",
        "attention weight (square-root scale)",
    ]


def test_masked_cells_are_grey():
    weights = np.tril(np.ones((3, 3))) / 3
    figure = draw_attention(weights, tokens(3), tokens(3), "causal", mask=np.tril(np.ones((3, 3), bool)))
    (image,) = figure.axes[0].images
    rgba = image.to_rgba(image.get_array())
    assert rgba[0, 2, :3] == pytest.approx([0xD8 / 255] * 3, abs=0.01)
    assert rgba[2, 0, :3] != pytest.approx([0xD8 / 255] * 3, abs=0.01)


def test_every_other_picture_is_drawn(tmp_path):
    row = {"layer": "decoder.0.attention", "head": 0, "entropy": 1.0, "max_entropy": 2.0, "distance": 1.0}
    row |= {"uniform_distance": 2.0, "previous": 0.5, "next": 0.0, "first": 0.1, "own": 0.2}
    figures = [
        draw_curves("title", "layer", "norm", ["input", 0], {"a": [1, 2], "b": [3]}, starts={"b": 1}, level=("c", 1)),
        draw_lens(["input", "layer 0"], tokens(40), [tokens(40)] * 2, np.full((2, 40), 0.3)),
        draw_head_statistics([row]),
        draw_bars("parameters", "count", {"a": 10, "b": 0.5}),
        draw_patch_attention(np.zeros((1, 8, 8)), np.full((3, 17), 1 / 17), "class token", first=1),
        draw_vectors(torch.randn(9, 200), "positions"),
        draw_hands(torch.linspace(1, 0.01, 9), "hands", length=64),
        draw_bias(torch.randn(12, 9), list(range(-8, 1)), "bias"),
    ]
    for number, figure in enumerate(figures):
        assert save_figure(figure, tmp_path / f"{number}.png").stat().st_size > 1000


def test_bars_show_shares_only_of_the_parts_of_a_whole():
    texts = [
        [text.get_text().strip() for text in draw_bars("bars", "count", {"a": 1, "b": 3}, **options).axes[0].texts]
        for options in ({}, {"shares": False})
    ]
    assert texts == [["1  (25.0%)", "3  (75.0%)"], ["1", "3"]]


def test_an_svg_file_names_no_address_but_its_namespaces(tmp_path):
    text = save_figure(draw_bars("bars", "count", {"a": 1}), tmp_path / "a.svg").read_text()
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "DOCTYPE" not in text


def test_a_page_loads_nothing_from_elsewhere_and_holds_the_weights(tmp_path):
    weights = np.tril(np.ones((2, 3, 3))) / 3
    maps = [AttentionMap("decoder.0.attention", weights, ["</script>", "b", "c"], ["</script>", "b", "c"])]
    section = Section(
        "Heads & <more>", "a < b", [(draw_bars("bars", "count", {"a": 1}), 'a "bar"')], [(("x",), [(1.5,)])]
    )
    text = save_page(tmp_path / "page.html", "title <b>", "subtitle", [section], maps).read_text(encoding="utf-8")
    assert "http" not in text.replace("http-equiv", "")
    assert re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', text) == []
    assert "{{" not in text
    assert "<b>" not in text
    assert text.count("</script>") == 2
    (data,) = json.loads(re.search(r'type="application/json">(.*?)</script>', text, re.S)[1])
    assert (data["heads"], data["queries"][0]) == (2, "</script>")


def test_tokens_are_readable():
    tokenizer = mb.Tokenizer.train("bpe", ["the cat sat on the mat\n" * 9], 280)
    ids = tokenizer.encode("the cat\n")
    assert "".join(readable_tokens(tokenizer, ids)).replace("␣", " ").strip() == "the cat⏎"
    assert readable_tokens(tokenizer, tokenizer.encode("€"))[0].startswith("<E2")
    assert readable_tokens(tokenizer, [tokenizer.vocab_size]) == [f"id {tokenizer.vocab_size}"]
    assert drawable("aé中") == f"aé{MISSING_GLYPH}"


@pytest.mark.parametrize("options", [{"kind": "bpe"}, {"kind": "bpe", "marker": "▁"}, {"kind": "unigram"}])
def test_an_emoji_is_shown_after_the_mark_of_its_space(options):
    family, new = "\N{WOMAN}\u200d\N{GIRL}", "\U0001fae8"  # joined; and newer than the tables of Python 3.11
    texts = [f"I am {family} and {new} or a\u2028b\n"] * 50
    tokenizer = mb.Tokenizer.train(options.pop("kind"), texts, 400, **options)
    tokens = readable_tokens(tokenizer, tokenizer.encode(f"I {family} {new}"))
    assert tokens[1:] == [f"␣{family}", f"␣{new}"]
    for token in readable_tokens(tokenizer, range(tokenizer.vocab_size)):
        assert "E2 90 A3" not in token
        assert "\u2028" not in token


def test_bytes_that_are_no_character_are_shown_after_the_mark_of_their_space():
    faces = [chr(ord("\N{CAT FACE}") + number) for number in range(5)]  # whose first three bytes are the same
    tokenizer = mb.Tokenizer.train("bpe", [f" {face}\n" * 50 for face in faces], 262)
    assert "␣<F0 9F 90>" in readable_tokens(tokenizer, range(tokenizer.vocab_size))


def test_a_place_holder_in_a_token_stays_a_token(tmp_path):
    marks = ["{{DATA}}", "{{SECTIONS}}", "{{OTHER}}"]
    maps = [AttentionMap("decoder.0.attention", np.ones((2, 3, 3)) / 3, marks, marks)]
    section = Section("Tokens {{DATA}}", "{{TITLE}}", [], [(("x",), [("{{DATA}}",)])])
    text = save_page(tmp_path / "page.html", "{{DATA}}", "{{NAVIGATION}}", [section], maps).read_text(encoding="utf-8")
    (data,) = json.loads(re.search(r'type="application/json">(.*?)</script>', text, re.S)[1])
    assert data["queries"] == marks
    assert "<td>{{DATA}}</td>" in text
    assert text.count("decoder.0.attention") == 1


def test_the_mean_by_offset_is_that_of_the_diagonals():
    matrix = torch.arange(9.0).view(3, 3)
    offsets, means, deviations = mean_by_offset(matrix)
    assert offsets.tolist() == [-2, -1, 0, 1, 2]
    assert means.tolist() == [6, 5, 4, 3, 2]
    assert deviations.tolist() == [0, 2, pytest.approx(np.std([0, 4, 8])), 2, 0]


def test_positions_without_tokens_are_not_numbered_twice():
    places, labels, _ = choose_labels([str(n) for n in range(50)], inches=1.0)
    assert labels == [str(place) for place in places]
    places, labels, _ = choose_labels(["cat"] * 50, inches=1.0)
    assert labels == [f"{place} cat" for place in places]
