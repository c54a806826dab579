"""`inspect` and `prune` on small models: pictures, JSON, pruned folders that train on, and errors of one line."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

import monoblock as mb
from monoblock.cli.main import run

pytest.importorskip("matplotlib")

TEXT = "".join(f"And the {n} sons of the king went up to the house of the LORD.\n" for n in range(40))
TAGS = "the O\nking B-PER\nsaw O\n{} B-LOC\n\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models with random weights: a decoder, an encoder-decoder, an encoder and a vision model."""
    parent = tmp_path_factory.mktemp("inspect")
    torch.manual_seed(3)
    tokenizer = mb.Tokenizer.train("bpe", [TEXT], 290)
    sizes = {"width": 24, "depth": 2, "heads": 3}
    vocab = tokenizer.vocab_size
    configs = {
        "decoder": mb.gpt(vocab=vocab, context=64, **sizes),
        "both": mb.vaswani(vocab=vocab, target_vocab=vocab, **sizes),
        "encoder": mb.bert(vocab=vocab, context=64, **sizes),
        "vision": mb.vit(image=8, patch=2, channels=1, classes=3, **sizes),
    }
    for name, config in configs.items():
        mb.Transformer(config).save_pretrained(parent / name)
        if name != "vision":
            tokenizer.save_pretrained(parent / name)
    (parent / "book.txt").write_text(TEXT, encoding="utf-8")
    (parent / "tags.conll").write_text("".join(TAGS.format(word) for word in "abcdefgh" * 3), encoding="utf-8")
    np.savez(parent / "image.npz", images=np.linspace(0, 1, 64, dtype=np.float32).reshape(1, 8, 8))
    return parent


def read_json(run_verb, *arguments):
    code, out, err = run_verb(["inspect", *arguments, "--json"])
    assert code == 0, err
    return json.loads(out)


def test_a_page_has_every_part(folders, run_verb, tmp_path):
    path = tmp_path / "page.html"
    code, out, err = run_verb(["inspect", folders / "decoder", "And the sons of the king", "--out", path])
    assert code == 0, err
    assert f"Saved {path}" in out
    text = path.read_text(encoding="utf-8")
    for title in ("Attention of every head", "Local and global heads", "Logit lens", "Norms by depth", "Positions"):
        assert f"<h2>{title}</h2>" in text
    assert text.count("<img ") >= 6


# Counts errors, presses the button of the next head, and says what the page then shows.
BROWSER_SCRIPT = """<script>window.addEventListener("load", () => {
  const get = (id) => document.getElementById(id), canvas = get("map"), first = get("head").value;
  get("after").click();
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  const pictures = [...document.images].filter((image) => image.complete && image.naturalWidth > 0).length;
  document.title = JSON.stringify({errors, first, head: get("head").value, hidden: get("viewer").hidden,
    layers: get("layer").length, spans: get("text").children.length, colors: new Set(pixels).size, pictures});
});</script></body>"""


@pytest.mark.slow
def test_a_browser_draws_the_page_and_its_viewer(folders, run_verb, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("neither chromium nor google-chrome is installed")
    path, text = tmp_path / "page.html", "And the sons of the king"
    assert run_verb(["inspect", folders / "decoder", text, "--out", path])[0] == 0
    page = path.read_text(encoding="utf-8")
    listener = "<script>let errors = 0; window.addEventListener('error', () => errors++, true);</script>"
    page = page.replace("<head>", f"<head>{listener}", 1).replace("</body>", BROWSER_SCRIPT, 1)
    path.write_text(page, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [browser, *options, "--virtual-time-budget=5000", "--dump-dom", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    seen = json.loads(re.search("<title>(.*?)</title>", shown)[1])
    tokens = json.loads(re.search('<script id="data" type="application/json">(.*?)</script>', shown, re.DOTALL)[1])
    assert seen["errors"] == 0
    assert (seen["first"], seen["head"], seen["hidden"], seen["layers"]) == ("0", "1", False, 2)
    assert seen["spans"] == len(tokens[0]["keys"])
    assert seen["colors"] > 10
    assert seen["pictures"] == page.count("<img ") >= 6
    assert re.search('id="readout"[^>]*>“[^”]+” \\(1\\) attends to: “', shown)


def test_one_head_is_drawn_and_its_weights_are_in_json(folders, run_verb, tmp_path):
    options = ("--layer", "1", "--head", "2", "--out", tmp_path / "head.svg")
    data = read_json(run_verb, folders / "decoder", "And the sons", *options)["attention"]
    assert (data["layer"], data["head"]) == ("decoder.1.attention", 2)
    assert np.allclose(np.sum(data["weights"], -1), 1, atol=1e-4)
    assert len(data["queries"]) == len(data["weights"])
    assert (tmp_path / "head.svg").read_text().startswith("<?xml")


def test_an_encoder_decoder_has_three_grids_and_takes_a_target(folders, run_verb, tmp_path):
    arguments = ["inspect", folders / "both", "the sons", "--target", "of the king", "--out", tmp_path / "grid.png"]
    assert run_verb(arguments)[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"grid.png", "grid-2.png", "grid-3.png"}
    options = ("--target", "of the king", "--layer", "decoder.0.cross", "--head", "0")
    data = read_json(run_verb, folders / "both", "the sons", *options)
    assert len(data["attention"]["weights"][0]) == len(data["attention"]["keys"])
    assert data["attention"]["queries"] == data["tokens"]


def test_json_has_the_numbers_of_every_part(folders, run_verb):
    data = read_json(run_verb, folders / "decoder", "And the sons of the king")
    assert {"attention", "heads", "scores", "lens", "norms", "positions", "masks", "parameters"} <= set(data)
    assert len(data["heads"]) == len(data["scores"]) == 6
    assert sum(data["parameters"].values()) == sum(
        p.numel() for p in mb.Transformer.from_pretrained(folders / "decoder").parameters()
    )
    assert [layer["layer"] for layer in data["lens"]["layers"]] == ["input", "layer 0", "layer 1"]


def test_a_vision_model_reads_an_image(folders, run_verb, tmp_path):
    code, _, err = run_verb(["inspect", folders / "vision", folders / "image.npz", "--out", tmp_path / "a.png"])
    assert code == 0, err
    assert (tmp_path / "a.png").stat().st_size > 1000
    code, _, err = run_verb(["inspect", folders / "vision", folders / "image.npz", "--out", tmp_path / "a.html"])
    assert code == 0, err
    assert "positions of image patches" in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_an_image_of_another_size_is_refused_or_read_with_interpolated_positions(folders, run_verb, tmp_path):
    path = tmp_path / "large.npz"
    np.savez(path, images=np.zeros((1, 12, 12), np.float32))
    code, _, err = run_verb(["inspect", folders / "vision", path, "--json"])
    assert code == 1
    assert "resize it, or give --interpolate 12" in err
    data = read_json(run_verb, folders / "vision", path, "--interpolate", "12", "--show", "attention")
    assert len(data["tokens"]) == 1 + 6 * 6


def test_without_a_text_json_has_no_tokens(folders, run_verb):
    assert set(read_json(run_verb, folders / "decoder", "--show", "parameters")) == {"model", "parameters"}


def test_profile_and_probes(folders, run_verb):
    options = ("--show", "profile", "--lengths", "8,16", "--batches", "1,2", "--probe", folders / "tags.conll")
    data = read_json(run_verb, folders / "encoder", *options)
    assert {(row["length"], row["batch"]) for row in data["profile"]["by_kind"]} == {(8, 1), (16, 1), (8, 2), (16, 2)}
    assert {row["part"] for row in data["profile"]["by_layer"]} >= {"encoder.0", "encoder.1", "total"}
    assert [row["layer"] for row in data["probes"]["layers"]] == ["input", "layer 0", "layer 1"]
    assert data["probes"]["layers"][0]["accuracy"] > 0.9  # the label of a word is in its embedding


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decoder"], "TEXT is missing"),
        (["decoder", "a", "--show", "lenz"], "there is no part 'lenz' to show; did you mean 'lens'?"),
        (["decoder", "a", "--head", "1"], "--head needs --layer"),
        (["decoder", "a", "--layer", "7", "--head", "1"], "there is no layer '7'; the model has layers 0 to 1"),
        (["decoder", "a", "--layer", "0", "--head", "9"], "decoder.0.attention has heads 0 to 2, but head 9"),
        (["decoder", "a", "--target", "b"], "a target is for an encoder-decoder"),
        (["decoder", "a", "--out", "a.txt"], "a.txt does not end in a format that can be written; write .html, .png,"),
        (["decoder", "a", "--out", "a.gif"], "a.gif does not end in a format that can be written; write .html, .png,"),
        (["missing", "a", "--out", "a.gif"], "a.gif does not end in a format that can be written; write .html, .png,"),
        (["decoder", " "], "the text to inspect is empty"),
        (["decoder", ""], "the text to inspect is empty"),
        (["decoder", "--show", "coreference"], "coreference is measured in an encoder"),
        (["decoder", "--show", "profile", "--lengths", "a"], "is not a list of numbers"),
        (["decoder", "a", "--lengths", "8"], "--lengths and --batches are for --show profile"),
        (["decoder", "--show", "probes"], "probes need labelled data"),
        (["both", "a", "--layer", "0", "--head", "0"], "there are 3 layers 0; write one of"),
        (["decoder", "king " * 2100], "a picture of"),
        (["vision", "--show", "masks"], "give the path of an image as TEXT"),
    ],
)
def test_errors_are_one_line(folders, run_verb, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = run_verb(["inspect", folders / arguments[0], *arguments[1:]])
    assert code in (1, 2)
    assert err.count("\n") == 1
    assert message in err
    assert not list(tmp_path.iterdir())


def test_weights_that_take_too_much_memory_are_refused(folders, run_verb, monkeypatch, tmp_path):
    monkeypatch.setattr("monoblock.runs.inspect.MAX_WEIGHT_BYTES", 50)
    code, _, err = run_verb(["inspect", folders / "decoder", "And the sons", "--out", tmp_path / "a.png"])
    assert code == 1
    assert "the attention weights of 2 layers on" in err
    assert "--show attention --layer 1" in err


# -- prune ----------------------------------------------------------------------------------------------------------


def test_a_pruned_model_is_smaller_by_what_the_accounting_says_and_trains_on(folders, run_verb, tmp_path):
    out = tmp_path / "pruned"
    arguments = ["prune", folders / "decoder", folders / "book.txt", "--remove", "3", "--batches", "2", "--out", out]
    arguments += ["--rounds", "2"]
    code, text, err = run_verb([*arguments, "--json"])
    assert code == 0, err
    data = json.loads(text)
    before, after = (mb.Transformer.from_pretrained(folder) for folder in (folders / "decoder", out))
    counts = [sum(p.numel() for p in model.parameters()) for model in (before, after)]
    assert [data["parameters"]["before"], data["parameters"]["after"]] == counts
    assert counts[1] == mb.account(after.config).parameters == data["accounted_parameters"]
    width, size = 24, 8
    assert counts[0] - counts[1] == 3 * (4 * width * size + 3 * size)  # with the biases of query, key and value
    assert data["heads"] == {"before": 6, "after": 3}
    assert data["rounds"] == 2
    assert data["max_logit_difference"] < 1e-5
    assert sum(map(len, data["removed"].values())) == 3
    assert set(data["metrics"]["after"]) >= {"loss"}
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    edits = [mb.ablate(f"{layer}.heads", heads=heads) for layer, heads in data["removed"].items()]
    masked = mb.trace(before.eval(), ids, names=(), edits=edits).logits
    torch.testing.assert_close(after.eval()(ids), masked, rtol=0, atol=1e-5)
    assert not torch.allclose(before(ids), masked, atol=1e-3)
    options = ["train.steps=2", "train.epochs=none", "train.device=cpu", "train.compile=no", "train.batch=2"]
    code, _, err = run_verb(
        ["finetune", out, folders / "book.txt", *options[:1], *options[2:], "--out", tmp_path / "t"]
    )
    assert code == 0, err
    torch.use_deterministic_algorithms(False)
    trained = mb.Transformer.from_pretrained(tmp_path / "t")
    assert trained.config == after.config


def test_layers_are_chosen_by_a_pattern_and_a_fraction(folders, run_verb, tmp_path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"the {n} sons\tthe {n} kings\n" for n in range(40)), encoding="utf-8")
    arguments = ["prune", folders / "both", pairs, "--keep", "0.5", "--layers", "encoder.*", "--batches", "1"]
    code, out, err = run_verb([*arguments, "--method", "ablation", "--out", tmp_path / "half"])
    assert code == 0, err
    assert "encoder." in out
    assert "decoder." not in out
    config = mb.Transformer.from_pretrained(tmp_path / "half").config
    assert sum(block.attention.heads for block in config.encoder.layers()) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give either --remove N or --keep F"),
        (["--remove", "1", "--keep", "0.5"], "give either --remove N or --keep F"),
        (["--remove", "5"], "at most 4 of 6 can be removed; give --remove 4 or less"),
        (["--keep", "0"], "at most 4 of 6 can be removed; give --keep 0.34 or more"),
        (["--keep", "0.1"], "give --keep 0.34 or more"),
        (["--keep", "nan"], "nan is not a number"),
        (["--remove", "1", "--rounds", "0"], "0 is not in the range x>=1"),
        (["--keep", "1"], "no head would be removed"),
        (["--remove", "1", "--layers", "encoder.*"], "no layer matches 'encoder.*'"),
    ],
)
def test_wrong_requests_are_refused(folders, run_verb, tmp_path, options, message):
    arguments = ["prune", folders / "decoder", folders / "book.txt", "--batches", "1", "--out", tmp_path / "out"]
    code, _, err = run_verb([*arguments, *options])
    assert code in (1, 2)
    assert message in err
    assert not (tmp_path / "out").exists()


def test_help_shows_the_parts(capsys):
    assert run(["inspect", "--help"]) == 0
    assert "coreference:  the head that resolves pronouns best" in capsys.readouterr().out


def test_the_demo_ends_with_a_picture_of_the_attention(folders):
    from monoblock.cli.demo import save_attention_map

    path = save_attention_map(folders / "decoder")
    assert path == str(folders / "decoder" / "attention.png")
    assert (folders / "decoder" / "attention.png").stat().st_size > 1000
