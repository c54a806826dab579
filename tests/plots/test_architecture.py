"""Pictures of architectures: what is drawn follows from the configuration, and its parameters add up."""

import cProfile
import os
import pstats
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import monoblock as mb
from monoblock.classic import lecture
from monoblock.cli.main import run
from monoblock.plots.figure import create_figure, save_figure

PICTURES = Path(__file__).parents[2] / "docs/pictures"


def texts(picture):
    """Return the texts of a picture with their heights, from the bottom of the picture to its top."""
    found = [
        (float(element.get("y")), element.text)
        for element in ElementTree.fromstring(picture.svg).iter()
        if element.tag.endswith("text")
    ]
    return [text for _, text in sorted(found, key=lambda item: -item[0])]


def column(picture, *words):
    """Return those of the words that the picture has, from its bottom to its top, as often as they stand there."""
    return [text for text in texts(picture) if text in words]


def without_final_norm(**knobs):
    config = mb.vary(mb.gpt(vocab=61, width=24, depth=5, heads=3, context=17), **knobs)
    return replace(config, decoder=replace(config.decoder, norm=None))


@pytest.mark.parametrize("name", mb.PRESETS)
def test_the_parameters_in_the_boxes_add_up_to_those_of_the_model(name):
    assert mb.draw(name).parameters == mb.account(name).parameters


@pytest.mark.parametrize("name", mb.PRESETS)
def test_a_picture_is_one_svg_whose_texts_and_boxes_lie_inside(name):
    root = ElementTree.fromstring(mb.draw(name).svg)
    left, top, width, height = map(float, root.get("viewBox").split())
    for element in root.iter():
        kind = element.tag.rpartition("}")[2]
        if kind == "rect":
            x, y, w, h = (float(element.get(key)) for key in ("x", "y", "width", "height"))
            assert left <= x
            assert x + w <= left + width
            assert top <= y
            assert y + h <= top + height
        if kind == "text":
            assert left < float(element.get("x")) < left + width
            assert top < float(element.get("y")) < top + height


@pytest.mark.parametrize("name", mb.PRESETS)
def test_no_text_of_a_box_is_wider_than_it(name):
    root = ElementTree.fromstring(mb.draw(name).svg)
    boxes = []
    for element in root.iter():
        kind = element.tag.rpartition("}")[2]
        if kind == "rect" and element.get("rx") == "6":
            x, y, w, h = (float(element.get(key)) for key in ("x", "y", "width", "height"))
            boxes.append((x, y, x + w, y + h))
        if kind == "text" and element.get("text-anchor") == "middle":
            x, y = float(element.get("x")), float(element.get("y"))
            half = len(element.text) * (7.0 if element.get("class") == "title" else 5.4) / 2
            for x0, y0, x1, y1 in boxes:
                if x0 < x < x1 and y0 < y < y1:
                    assert min(x - half - x0, x1 - x - half) >= 0, element.text


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("pre", ["LayerNorm", "masked self-attention", "LayerNorm", "feed-forward"]),
        ("post", ["masked self-attention", "LayerNorm", "feed-forward", "LayerNorm"]),
        ("output", ["masked self-attention", "LayerNorm", "feed-forward", "LayerNorm"]),
        ("sandwich", ["LayerNorm", "masked self-attention", "LayerNorm", "LayerNorm", "feed-forward", "LayerNorm"]),
    ],
)
def test_norms_stand_where_the_configuration_says(place, expected):
    config = without_final_norm(norm_place=place)
    assert column(mb.draw(config), "LayerNorm", "masked self-attention", "feed-forward") == expected


def test_a_post_norm_follows_the_sum_and_an_output_norm_precedes_it():
    sums = {}
    for place in ("post", "output"):
        root = ElementTree.fromstring(mb.draw(without_final_norm(norm_place=place)).svg)
        norm = min(float(e.get("y")) for e in root.iter() if e.text == "LayerNorm")
        circles = [float(e.get("cy")) for e in root.iter() if e.tag.endswith("circle")]
        sums[place] = (norm, min(circles))
    assert sums["post"][0] < sums["post"][1]  # y grows downwards
    assert sums["output"][0] > sums["output"][1]


def test_an_encoder_decoder_has_cross_attention_in_the_decoder_only():
    picture = mb.draw("vaswani-base")
    words = ("self-attention", "masked self-attention", "cross-attention", "feed-forward")
    assert sorted(column(picture, *words)) == sorted([*words, "feed-forward"])
    assert {"source ids (B, S)", "target ids (B, T)", "that of the source", "sinusoids"} <= set(texts(picture))


def test_parallel_branches_have_their_own_norms_or_one():
    two, one = mb.draw("pythia-160m"), mb.draw("gptj-6b")
    assert len(column(two, "LayerNorm")) == 3  # with the norm after the last block
    assert len(column(one, "LayerNorm")) == 2


def test_experts_windows_positions_and_groups_are_named():
    mixtral, gemma = texts(mb.draw("mixtral-8x7b")), texts(mb.draw("gemma2-2b"))
    assert {"mixture of experts", "2 of 8 experts for each token", "router", "32 heads, 8 for keys and values"} <= {
        *mixtral
    }
    assert {"window of 4,096 (13 of 26)", "soft cap", "rotate"} <= {*gemma}
    assert "ALiBi positions" in texts(mb.draw("bloom-560m"))
    assert "relative positions, 32 buckets" in texts(mb.draw("t5-small"))
    assert {"token embedding", "30,000 × 128", "projection", "one set of weights"} <= {
        *texts(mb.draw("albert-xxlarge"))
    }


def test_every_kind_of_block_has_a_frame_with_its_layers():
    assert [text for text in texts(mb.draw("modernbert-base")) if re.match("× |layers? ", text)] == [
        "layer 0", "× 1", "layers 1 to 21", "× 21",
    ]  # fmt: skip


def test_a_model_and_a_changed_configuration_are_drawn():
    model = mb.Transformer(mb.llama(vocab=67, width=20, depth=3, heads=5, context=19))
    assert mb.draw(model).parameters == sum(parameter.numel() for parameter in model.parameters())
    assert mb.draw(model)._repr_svg_() == mb.draw(model.config).svg


def test_a_name_is_written_as_text():
    picture = mb.draw(mb.gpt(vocab=61, width=24, depth=5, heads=3, context=17), name="<script>alert(1)</script>")
    assert "<script" not in picture.svg


def test_only_transformers_are_drawn_and_only_as_svg(tmp_path):
    with pytest.raises(mb.ConfigError, match="only Transformers are drawn"):
        mb.draw(mb.RecurrentConfig(vocab=61, width=24))
    with pytest.raises(mb.ConfigError, match=r"got a GPT; give model\.to_monoblock\(\)"):
        mb.draw(lecture.GPT(61))
    with pytest.raises(mb.InputError, match=r"write .*block\.svg, not .*block\.png"):
        mb.draw("gpt2").save(tmp_path / "block.png")


def test_the_verb_writes_the_picture_of_a_changed_preset(tmp_path, capsys):
    path = tmp_path / "block.svg"
    assert run(["draw", "gpt2", "norm=rms", "gated=true", "--out", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert "RMSNorm" in path.read_text()
    assert "gpt2 norm=rms gated=true" in path.read_text()
    assert run(["draw", "gpt3", "--out", str(path)]) == 2
    assert "there is no preset 'gpt3'; did you mean" in capsys.readouterr().err


def test_the_picture_in_the_documentation_is_the_one_that_is_drawn():
    assert (PICTURES / "vaswani-base.svg").read_text(encoding="utf-8") == mb.draw("vaswani-base").svg


def test_the_router_weighs_the_outputs_of_the_experts_and_reads_what_they_read():
    inside = column(mb.draw("mixtral-8x7b"), "gate", "down", "router", "by a softmax of x (4,096 → 8)")
    assert inside == ["gate", "down", "by a softmax of x (4,096 → 8)", "router"]


def test_scales_and_windows_are_written_as_their_papers_write_them():
    assert "q · kᵀ / √256" in texts(mb.draw("gemma2-2b"))
    assert "q · kᵀ" in texts(mb.draw("t5-small"))  # no scale
    assert "window: 64 to each side (14 of 21)" in texts(mb.draw("modernbert-base"))


def test_a_distilled_vision_transformer_has_two_classifiers():
    assert "and of the distillation token" in texts(mb.draw("deit-base"))
    assert "first token" in texts(mb.draw("vit-b16"))


def test_a_configuration_without_a_name_is_titled_by_its_family_once_and_a_long_name_fits():
    config = mb.gpt(vocab=61, width=24, depth=5, heads=3, context=17)
    assert [text for text in texts(mb.draw(config)) if "decoder-only" in text] == ["decoder-only Transformer"]
    name = "a long name " * 20
    assert float(ElementTree.fromstring(mb.draw(config, name=name).svg).get("width")) > 10 * len(name)


class WithMore(mb.Transformer):
    """A Transformer with a layer and a parameter that its configuration does not describe."""

    def __init__(self, config):
        super().__init__(config)
        self.extra, self.scale = nn.Linear(24, 24), nn.Parameter(torch.zeros(3))


def test_parameters_that_are_not_drawn_are_named_below_the_title():
    config = mb.gpt(vocab=61, width=24, depth=5, heads=3, context=17)
    model = WithMore(config)
    plain = sum(weight.numel() for weight in mb.Transformer(config).parameters())
    more = sum(weight.numel() for weight in model.parameters()) - plain
    assert more == 24 * 24 + 24 + 3
    words = f"{plain:,} parameters, {more:,} more in modules that are not drawn"
    assert any(words in text for text in texts(mb.draw(model)))
    assert not any("not drawn" in text for text in texts(mb.draw(mb.Transformer(config))))
    model.decoder.blocks[1].feedforward = model.decoder.blocks[0].feedforward
    model.extra = model.scale = None
    fewer = 2 * 24 * 96 + 24 + 96
    assert any(f"{fewer:,} fewer in the modules of this model" in text for text in texts(mb.draw(model)))


def test_a_picture_that_cannot_be_written_is_reported_in_one_line(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.svg")
    (tmp_path / "folder.svg").mkdir()
    for name in ("pipe.svg", "folder.svg", "missing/block.svg"):
        path = tmp_path / name
        with pytest.raises(mb.FileError, match=f"{path} cannot be written"):
            mb.draw("gpt2").save(path)
        assert run(["draw", "gpt2", "--out", str(path)]) == 1
        assert "cannot be written" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"pipe.svg", "folder.svg"}
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    with pytest.raises(mb.FileError, match="not a regular file"):
        save_figure(create_figure((2, 3)), pipe)


def test_the_time_to_draw_and_to_count_does_not_grow_with_the_depth():
    def calls(function, depth):
        config = mb.vary(mb.gpt(vocab=61, width=24, depth=1, heads=3, context=17), depth=depth)
        profile = cProfile.Profile()
        profile.runcall(function, config)
        return pstats.Stats(profile).total_calls

    for function in (mb.draw, lambda config: mb.account(config).plan()):
        assert calls(function, 3000) < calls(function, 5) + 200 * 3000


def test_blocks_that_alternate_have_one_frame_around_them():
    dense = mb.llama(vocab=67, width=20, depth=1, heads=5, context=19)
    block = dense.decoder.pattern[0].blocks[0]
    experts = replace(block, feedforward=replace(block.feedforward, experts=mb.ExpertsConfig(count=5, top_k=2)))

    def frames(*pattern):
        config = replace(dense, decoder=replace(dense.decoder, pattern=pattern))
        assert mb.draw(config).parameters == mb.account(config).parameters
        found = texts(mb.draw(config))
        return [text for text in found if re.match("× |layers? |feed-forward$|mixture of experts$", text)]

    def repeat(*blocks, times=1):
        return mb.Repeat(blocks=blocks, times=times)

    pair = frames(repeat(block, experts, times=3))
    assert sorted(pair) == sorted(["layers 0, 2, 4", "feed-forward", "× 3", "layers 1, 3, 5", "mixture of experts"])
    assert frames(*map(repeat, (block, experts) * 3)) == pair
    apart = frames(repeat(block), repeat(experts, times=7))
    assert [text for text in apart if "×" in text] == ["× 1", "× 7"]
    last = frames(repeat(block, block, experts, times=3), repeat(block))
    assert [text for text in last if "×" in text] == ["× 2", "× 3", "× 1"]
    assert {"layers 0, 1, … 7", "layers 2, 5, 8", "layer 9"} <= {*last}


def test_a_folder_a_file_and_a_recipe_are_drawn_as_their_configurations(tmp_path):
    config = mb.llama(vocab=67, width=20, depth=3, heads=5, context=19)
    mb.Transformer(config).save_pretrained(tmp_path / "mine")
    expected = mb.draw(config, name="mine").svg
    for what in (tmp_path / "mine", str(tmp_path / "mine")):
        assert mb.draw(what).svg == expected
    assert mb.draw(tmp_path / "mine" / "config.json", name="mine").svg == expected
    recipe = tmp_path / "tiny.toml"
    sizes = "width = 24\ndepth = 5\nheads = 3\ncontext = 17\n"
    recipe.write_text(f'[data]\ncorpus = "reverse"\n[model]\nfamily = "gpt"\n{sizes}', encoding="utf-8")
    assert mb.draw(recipe).parameters == mb.account(recipe).parameters
    with pytest.raises(mb.FileError, match="there is no file or folder runs/x"):
        mb.draw("runs/x")


def test_activations_between_convolutions_and_clamps_are_drawn():
    words = mb.vaswani(vocab=61, width=24, depth=2, heads=3, context=17)
    frames = mb.FramesConfig(channels=5, context=17, positions=mb.Learned())
    speech = replace(words, input=frames, target=words.input, tie="none")
    assert mb.draw(speech).parameters == mb.account(speech).parameters
    assert {"3 × 5 → 24, GELU", "3 × 24 → 24, GELU"} <= {*texts(mb.draw(speech))}
    plain = mb.llama(vocab=67, width=20, depth=3, heads=5, context=19)
    block = plain.decoder.pattern[0].blocks[0]
    block = replace(
        block,
        attention=replace(block.attention, clip=11.0),
        feedforward=replace(block.feedforward, clamp=7.0),
    )
    config = replace(plain, decoder=replace(plain.decoder, pattern=(mb.Repeat(blocks=(block,), times=3),)))
    inside = column(mb.draw(config), "clamped to ±11", "of at most 7", "to ±7, plus 1", "gate and up clamped to 7")
    assert sorted(inside) == sorted(
        ["clamped to ±11"] * 3 + ["of at most 7", "to ±7, plus 1", "gate and up clamped to 7"]
    )
    assert "q, k, v clamped to ±11" in texts(mb.draw(config))
    assert not any("clamp" in text for text in texts(mb.draw(plain)))
