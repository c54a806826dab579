"""predict and evaluate on models of a few steps: a line in, a result out, the bad lines, the figures."""

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import monoblock as mb
from monoblock.cli.main import cli, run
from monoblock.data.readers import read_conll

SIZES = "width = 16\ndepth = 1\nheads = 2\n"
RECIPE = (
    '[data]\ncorpus = "{}"\n[tokenizer]\nkind = "bpe"\nvocab = 300\n[model]\n{}'
    + SIZES
    + '[train]\nobjective = "{}"\nsteps = {}\nbatch = 7\nlr = 1e-2\nwarmup = 2\neval_every = 0\n'
    + 'device = "cpu"\ncompile = "no"\n'
)
BERT = 'family = "bert"\ncontext = {}\n'
ANIMALS = ["cat", "dog", "hen", "cow", "pig", "fox", "owl"]
CLASSES = "".join(
    f"{'yes' if n % 3 else 'no'}\tthe {ANIMALS[n % 7]} {'sat' if n % 3 else 'ran'} {n}\n" for n in range(80)
)
SIDES = ("first\tthe gold\tthe {}\n", "second\tthe {}\tthe gold\n")
PAIRS = "".join(SIDES[n % 2].format(ANIMALS[n % 7]) for n in range(80))
NAME = "the O\nMr O\n{} B-PER\n{} I-PER\nsaw O\n{} B-LOC\n\n"
NAMES = "".join(NAME.format(a, b, c) for a in ANIMALS for b in ANIMALS for c in "xyz")
MARKS = "And he said, Go. The LORD went; why? \n"


def trained(place, name, text, ending, model, objective, steps=60):
    corpus = place / f"{name}.{ending}"
    if isinstance(text, str):
        corpus.write_text(text, encoding="utf-8")
    else:
        np.savez(corpus, **text)
    (place / f"{name}.toml").write_text(RECIPE.format(corpus, model, objective, steps), encoding="utf-8")
    assert run(["train", str(place / f"{name}.toml"), "--out", str(place / name)]) == 0
    torch.use_deterministic_algorithms(False)
    return place / name


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("predict")


@pytest.fixture(scope="module")
def classifier(place):
    return trained(place, "classes", CLASSES, "tsv", BERT.format(19), "classify")


@pytest.fixture(scope="module")
def tagger(place):
    return trained(place, "names", NAMES, "conll", BERT.format(31), "label", 90)


@pytest.fixture(scope="module")
def pixels():
    draw = np.random.default_rng(3)
    labels = np.arange(60) % 3
    images = draw.random((60, 8, 8)) * 0.2 + (labels / 2)[:, None, None] * 0.8
    return {"images": (images * 255).astype(np.uint8), "labels": labels}


@pytest.fixture(scope="module")
def seer(place, pixels):
    return trained(place, "images", pixels, "npz", 'family = "vit"\npatch = 4\n', "classify")


@pytest.fixture
def ask(monkeypatch, capsys):
    """Run a verb on bytes from a pipe: exit code, stdout, stderr."""

    def asked(words, given=b""):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(given), isatty=lambda: False))
        capsys.readouterr()
        code = run([str(word) for word in words])
        return (code, *capsys.readouterr())

    return asked


# -- predict ----------------------------------------------------------------------------------------------------------


def test_lines_keep_their_order_and_an_empty_one_has_an_empty_result(classifier, ask, tmp_path):
    lines = ["the cat sat 3", "", "the dog ran", "  ", "the owl and the fox sat"]
    pipe = mb.load(classifier)
    wanted = [pipe.classify(line, top=2) if line.strip() else [] for line in lines]
    given = "".join(f"{line}\n" for line in lines).encode()
    (tmp_path / "in.txt").write_bytes(given)
    for words in (["--batch-size", 1], ["--batch-size", 3], ["--file", tmp_path / "in.txt"]):
        code, out, _ = ask(["predict", classifier, "--top", 2, "--json", *words], given)
        assert code == 0
        rows = [json.loads(line) for line in out.splitlines()]
        assert [row["text"] for row in rows] == lines
        for row, choices in zip(rows, wanted, strict=True):
            assert [one["label"] for one in row["labels"]] == [choice.label for choice in choices]
            likely = [choice.probability for choice in choices]
            assert [one["probability"] for one in row["labels"]] == pytest.approx(likely, abs=1e-4)
    code, out, _ = ask(["predict", classifier], given)
    assert out.splitlines() == [f"{row[0].label}\t{row[0].probability:.4f}" if row else "" for row in wanted]


def test_bad_input_is_one_line(classifier, tagger, seer, ask, tmp_path, place):
    assert "there is no text" in ask(["predict", classifier])[2]
    code, out, err = ask(["predict", classifier], b"the cat\n\n" + b"the cat sat " * 20 + b"\n")
    assert (code, out) == (1, "")
    assert "error: line 3 has" in err
    assert err.splitlines()[-1].endswith("shorten it, or give --long cut or --long split")
    assert ask(["predict", classifier, "--long", "cut"], b"the cat sat " * 20)[0] == 0
    code, _, err = ask(["predict", classifier], b"a \xff\n")
    assert "standard input, line 1, byte 3: not UTF-8" in err
    assert ask(["predict", classifier, "x", "--file", "y"])[0] == 2
    np.savez(tmp_path / "small.npz", images=np.zeros((1, 5, 5), np.uint8))
    assert (
        "holds an image of 1 × 5 × 5, and this model looks at 1 × 8 × 8"
        in ask(["predict", seer, tmp_path / "small.npz"])[2]
    )
    assert "is no image" in ask(["predict", seer, "cat.txt"])[2]
    assert "line 2: 'catcat" in ask(["predict", classifier, "--long", "split"], b"the\n" + b"cat" * 40)[2]
    assert "a line with a tab is read as a pair" in ask(["predict", classifier], b"the\tcat\nthe\tcat\n")[2]
    for words, said in (
        (["predict", tagger, "x", "--top", 2], "--top does nothing for labels of words"),
        (["predict", seer, "x.png", "--long", "cut"], "--long does nothing here: images are of one size"),
        (["evaluate", classifier, place, "--stride", 3], "--stride is for language models"),
        (["evaluate", classifier, place, "--calibrate"], "--calibrate is for prompting; write --shots 0,4 as well"),
        (["evaluate", classifier, place, "--label", "a=b"], "--label is for prompting"),
        (["evaluate", classifier, place, "--picture", "x.doc"], "x.doc has no ending of a picture"),
        (["evaluate", classifier, place, "--picture", tmp_path / "no" / "x.png"], "there is no folder"),
    ):
        code, _, err = ask(words)
        assert (code in (1, 2), said in err.splitlines()[-1]) == (True, True), err
    assert ask(["predict", seer, tmp_path / "no.PNG"])[2].startswith(f"error: there is no file {tmp_path / 'no.PNG'}")


def test_entities_stand_in_brackets_in_columns_and_in_objects(tagger, ask):
    text = "the Mr cat fox saw x"
    code, out, _ = ask(["predict", tagger, text])
    assert (code, out) == (0, "the Mr [PER cat fox] saw [LOC x]\n"), "this much can be learnt in 90 steps"
    code, out, _ = ask(["predict", tagger, text, "--columns"])
    assert [row.split("\t") for row in out.splitlines()[:-1]] == [
        *(["the", "O"], ["Mr", "O"], ["cat", "B-PER"], ["fox", "I-PER"], ["saw", "O"], ["x", "B-LOC"])
    ]
    code, out, _ = ask(["predict", tagger, text, "--json"])
    told = json.loads(out)
    assert [(one["text"], one["label"], one["start"], one["end"]) for one in told["entities"]] == [
        *(("cat fox", "PER", 2, 4), ("x", "LOC", 5, 6))
    ]


def test_pictures_are_looked_at(seer, pixels, ask, tmp_path):
    image = pytest.importorskip("PIL.Image")
    wanted = mb.load(seer).classify(pixels["images"][4][None] / np.float32(255))[0]
    np.savez(tmp_path / "one.npz", images=pixels["images"][4:5])
    image.fromarray(pixels["images"][4]).save(tmp_path / "one.png")
    for name in ("one.npz", "one.png"):
        code, out, _ = ask(["predict", seer, tmp_path / name])
        assert (code, out) == (0, f"{wanted.label}\t{wanted.probability:.4f}\n")
    (tmp_path / "near.txt").write_text(f"{tmp_path / 'one.npz'}\n")
    code, out, _ = ask(["predict", seer, tmp_path / "one.png", "--nearest", tmp_path / "near.txt"])
    assert (code, out) == (0, f"1.0000\t{tmp_path / 'one.npz'}\n")


def test_a_pipe_is_read_once(classifier, ask):
    reads, writes = os.pipe()
    os.write(writes, b"the cat\n")
    os.close(writes)
    code, out, _ = ask(["predict", classifier, "--file", f"/dev/fd/{reads}"])
    os.close(reads)
    assert (code, len(out.splitlines())) == (0, 1)


def test_embeddings_and_the_nearest_lines(classifier, ask, tmp_path):
    (tmp_path / "lines.txt").write_text("the cat sat 3\n\nthe pig\nthe owl ran 7\n")
    _, out, _ = ask(["predict", classifier, "the pig", "--embed"])
    vector = torch.tensor(json.loads(out))
    assert vector.norm().item() == pytest.approx(1, abs=1e-4)
    _code, out, _ = ask(["predict", classifier, "the pig", "--nearest", tmp_path / "lines.txt", "--top", 2])
    rows = [line.split("\t") for line in out.splitlines()]
    assert rows[0] == ["1.0000", "the pig"]
    assert len(rows) == 2
    (tmp_path / "none.txt").write_text("\n")
    assert "none.txt is empty" in ask(["predict", classifier, "x", "--nearest", tmp_path / "none.txt"])[2]


def test_punctuation_comes_back_as_text(place, ask):
    from monoblock.data.punctuation import strip

    rows = "".join("".join(f"{w} {t}\n" for w, t in zip(*strip(MARKS), strict=True)) + "\n" for _ in range(70))
    folder = trained(place, "marks", rows, "conll", BERT.format(31), "label", 80)
    code, out, _ = ask(["predict", folder, "AND he SAID go the lord went why"])
    assert (code, out) == (0, "And he said, Go. The LORD went; why?\n")
    code, out, _ = ask(["evaluate", folder, place / "marks.conll", "--json"])
    told = json.loads(out)
    assert told["f1"] == pytest.approx(100)
    assert told["margin"] == pytest.approx(told["f1"] - told["baseline"])
    assert set(told["kinds"]) == {"COMMA", "PERIOD", "SEMICOLON", "QUESTION", "CAP", "UPPER"}


def test_masks_of_a_model_of_ours(place, ask):
    text = "".join(f"the {ANIMALS[n % 7]} sat on the mat and the {ANIMALS[n % 5]} ran.\n" for n in range(300))
    folder = trained(place, "hidden", text, "txt", BERT.format(17), "masked")
    code, out, _ = ask(["predict", folder, "the [MASK] sat on the [MASK]", "--top", 3, "--json"])
    told = json.loads(out)
    assert code == 0
    assert [len(choices) for choices in told["masks"]] == [3, 3]
    assert told["masks"][1][0]["probability"] > 0.1
    assert "has no [MASK]" in ask(["predict", folder, "the cat"])[2]
    code, out, _ = ask(["evaluate", folder, place / "hidden.txt", "--json"])
    told = json.loads(out)
    assert told["perplexity"] == pytest.approx(np.exp(told["loss"]))
    assert 0 < told["accuracy"] < 100


# -- evaluate ---------------------------------------------------------------------------------------------------------


def test_a_classifiers_figures_are_those_of_its_answers(classifier, place, ask, tmp_path):
    metrics = pytest.importorskip("sklearn.metrics")
    rows = [line.split("\t") for line in CLASSES.splitlines()]
    found = [row[0].label for row in mb.load(classifier).classify([text for _, text in rows])]
    there = [label for label, _ in rows]
    words = ["evaluate", classifier, place / "classes.tsv", "--split", "all"]
    code, out, _err = ask([*words, "--json", "--picture", tmp_path / "a.png"])
    assert code == 0
    told = json.loads(out)
    assert told["accuracy"] == pytest.approx(100 * metrics.accuracy_score(there, found))
    assert told["f1"] == pytest.approx(100 * metrics.f1_score(there, found, average="macro"))
    assert told["confusion"]["labels"] == ["no", "yes"]
    assert told["confusion"]["counts"] == metrics.confusion_matrix(there, found, labels=["no", "yes"]).tolist()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert ask([*words, "--at-least", "accuracy=0"])[0] == 0
    assert ask([*words, "--at-least", "f1=101"])[0] == 3
    (tmp_path / "long.tsv").write_text("yes\t" + "the cat sat " * 20 + "\nno\tthe dog\n")
    assert (
        "1 of 2 texts were cut to 19 tokens"
        in ask(["evaluate", classifier, tmp_path / "long.tsv", "--split", "all"])[2]
    )


def test_pairs_of_texts_are_learnt(place, ask):
    folder = trained(place, "pairs", PAIRS, "tsv", BERT.format(23), "classify", 120)
    code, out, _ = ask(["evaluate", folder, place / "pairs.tsv", "--split", "all", "--json"])
    assert code == 0
    assert json.loads(out)["accuracy"] > 90, "which of the two texts it is decides"
    code, out, _ = ask(["predict", folder, "the gold\tthe cow", "--json"])
    told = json.loads(out)
    assert told["text_pair"] == "the cow"
    assert told["labels"][0]["label"] == "first"


def test_a_taggers_figures_are_of_whole_entities(tagger, place, ask):
    _code, out, _ = ask(["evaluate", tagger, place / "names.conll", "--split", "all", "--json"])
    told = json.loads(out)
    rows = list(read_conll(place / "names.conll"))
    found = mb.load(tagger).tag([row.words for row in rows])
    right = sum([word.label for word in one.words] == list(row.labels) for one, row in zip(found, rows, strict=True))
    assert right == len(rows)
    assert told["f1"] == told["kinds"]["PER"]["f1"] == 100
    assert told["kinds"]["PER"]["there"] == len(rows)
    assert told["words"] == 6 * len(rows)


def test_a_label_that_training_did_not_see_is_refused(tagger, classifier, seer, pixels, ask, tmp_path):
    (tmp_path / "a.conll").write_text("the O\ncat B-PERS\n")
    code, _, err = ask(["evaluate", tagger, tmp_path / "a.conll", "--split", "all"])
    assert code == 1
    assert "row 1: the label 'B-PERS' was not seen in training; did you mean 'B-PER'" in err
    (tmp_path / "a.tsv").write_text("yess\tthe cat\n")
    assert (
        "row 1: the label 'yess' was not seen" in ask(["evaluate", classifier, tmp_path / "a.tsv", "--split", "all"])[2]
    )
    np.savez(tmp_path / "a.npz", images=pixels["images"][:1], labels=np.array([9]))
    assert "the label 9 was not seen" in ask(["evaluate", seer, tmp_path / "a.npz", "--split", "all"])[2]
    (tmp_path / "b.conll").write_text("the O\ncat\n")
    assert "b.conll, line 2: 1 column" in ask(["evaluate", tagger, tmp_path / "b.conll", "--split", "all"])[2]


def test_images_are_measured_and_the_worst_drawn(seer, place, ask, tmp_path):
    code, out, _ = ask(
        ["evaluate", seer, place / "images.npz", "--split", "all", "--json", "--picture", tmp_path / "a.png"]
    )
    assert code == 0
    assert sum(map(sum, json.loads(out)["confusion"]["counts"])) == 60
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_the_commands_of_the_page_have_the_options_they_name():
    page = (Path(__file__).parent.parent / "docs/labels.md").read_text(encoding="utf-8")
    lines = [line.partition("#")[0].split() for line in page.splitlines() if line.startswith("monoblock ")]
    assert len(lines) > 8
    for _, verb, *words in lines:
        options = {name for one in cli.get_command(None, verb).params for name in one.opts}
        assert {word for word in words if word.startswith("--")} <= options, (verb, words)
