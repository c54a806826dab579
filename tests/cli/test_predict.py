"""`predict` and `evaluate` on models of a few steps: results per line, invalid input, metrics."""

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import monoblock as mb
from monoblock.cli.main import cli, run
from monoblock.data.readers.tables import read_conll

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


def train_model(folder, name, text, ending, model, objective, steps=60):
    corpus = folder / f"{name}.{ending}"
    if isinstance(text, str):
        corpus.write_text(text, encoding="utf-8")
    else:
        np.savez(corpus, **text)
    (folder / f"{name}.toml").write_text(RECIPE.format(corpus, model, objective, steps), encoding="utf-8")
    assert run(["train", str(folder / f"{name}.toml"), "--out", str(folder / name)]) == 0
    torch.use_deterministic_algorithms(False)
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("predict")


@pytest.fixture(scope="module")
def classifier(folder):
    return train_model(folder, "classes", CLASSES, "tsv", BERT.format(19), "classification")


@pytest.fixture(scope="module")
def tagger(folder):
    return train_model(folder, "names", NAMES, "conll", BERT.format(31), "token_classification", 90)


@pytest.fixture(scope="module")
def pixels():
    rng = np.random.default_rng(3)
    labels = np.arange(60) % 3
    images = rng.random((60, 8, 8)) * 0.2 + (labels / 2)[:, None, None] * 0.8
    return {"images": (images * 255).astype(np.uint8), "labels": labels}


@pytest.fixture(scope="module")
def vision_model(folder, pixels):
    return train_model(folder, "images", pixels, "npz", 'family = "vit"\npatch = 4\n', "classification")


# -- predict ----------------------------------------------------------------------------------------------------------


def test_results_keep_the_order_of_lines_and_an_empty_line_has_an_empty_result(classifier, run_verb, tmp_path):
    lines = ["the cat sat 3", "", "the dog ran", "  ", "the owl and the fox sat"]
    pipe = mb.load(classifier)
    expected = [pipe.classify(line, top=2) if line.strip() else [] for line in lines]
    stdin = "".join(f"{line}\n" for line in lines).encode()
    (tmp_path / "in.txt").write_bytes(stdin)
    for arguments in (["--batch-size", 1], ["--batch-size", 3], ["--file", tmp_path / "in.txt"]):
        code, out, _ = run_verb(["predict", classifier, "--top", 2, "--json", *arguments], stdin)
        assert code == 0
        rows = [json.loads(line) for line in out.splitlines()]
        assert [row["text"] for row in rows] == lines
        for row, choices in zip(rows, expected, strict=True):
            assert [one["label"] for one in row["labels"]] == [choice.label for choice in choices]
            likely = [choice.probability for choice in choices]
            assert [one["probability"] for one in row["labels"]] == pytest.approx(likely, abs=1e-4)
    code, out, _ = run_verb(["predict", classifier], stdin)
    assert out.splitlines() == [f"{row[0].label}\t{row[0].probability:.4f}" if row else "" for row in expected]


def test_invalid_input_is_a_one_line_error(classifier, tagger, vision_model, run_verb, tmp_path, folder):
    assert "there is no input" in run_verb(["predict", classifier])[2]
    code, out, err = run_verb(["predict", classifier], b"the cat\n\n" + b"the cat sat " * 20 + b"\n")
    assert (code, out) == (1, "")
    assert "error: line 3 has" in err
    assert err.splitlines()[-1].endswith("shorten it, or give --long cut or --long split")
    assert run_verb(["predict", classifier, "--long", "cut"], b"the cat sat " * 20)[0] == 0
    code, _, err = run_verb(["predict", classifier], b"a \xff\n")
    assert "standard input, line 1, byte 3: not UTF-8" in err
    assert run_verb(["predict", classifier, "x", "--file", "y"])[0] == 2
    np.savez(tmp_path / "small.npz", images=np.zeros((1, 5, 5), np.uint8))
    assert (
        "holds an image of 1 × 5 × 5, but this model reads 1 × 8 × 8"
        in run_verb(["predict", vision_model, tmp_path / "small.npz"])[2]
    )
    assert "is not an image" in run_verb(["predict", vision_model, "cat.txt"])[2]
    assert "line 2: 'catcat" in run_verb(["predict", classifier, "--long", "split"], b"the\n" + b"cat" * 40)[2]
    assert "a line with a tab is read as a pair" in run_verb(["predict", classifier], b"the\tcat\nthe\tcat\n")[2]
    for arguments, message in (
        (["predict", tagger, "x", "--top", 2], "--top has no effect on tagging"),
        (
            ["predict", vision_model, "x.png", "--long", "cut"],
            "--long has no effect on this model, because images have a fixed size",
        ),
        (["evaluate", classifier, folder, "--stride", 3], "--stride is for models that predict the next token"),
        (
            ["evaluate", classifier, folder, "--calibrate"],
            "--calibrate has no effect without --shots",
        ),
        (["evaluate", classifier, folder, "--label", "a=b"], "--label has no effect without --shots"),
        (["evaluate", classifier, folder, "--picture", "x.doc"], "x.doc does not end in a format that can be written"),
        (["evaluate", classifier, folder, "--picture", tmp_path / "no" / "x.png"], "there is no folder"),
    ):
        code, _, err = run_verb(arguments)
        assert (code in (1, 2), message in err.splitlines()[-1]) == (True, True), err
    assert run_verb(["predict", vision_model, tmp_path / "no.PNG"])[2].startswith(
        f"error: there is no file {tmp_path / 'no.PNG'}"
    )


def test_entities_are_printed_in_brackets_columns_and_json(tagger, run_verb):
    text = "the Mr cat fox saw x"
    code, out, _ = run_verb(["predict", tagger, text])
    assert (code, out) == (0, "the Mr [PER cat fox] saw [LOC x]\n"), "90 steps are enough to learn this"
    code, out, _ = run_verb(["predict", tagger, text, "--columns"])
    assert [row.split("\t") for row in out.splitlines()[:-1]] == [
        *(["the", "O"], ["Mr", "O"], ["cat", "B-PER"], ["fox", "I-PER"], ["saw", "O"], ["x", "B-LOC"])
    ]
    code, out, _ = run_verb(["predict", tagger, text, "--json"])
    result = json.loads(out)
    assert [(one["text"], one["label"], one["start"], one["end"]) for one in result["entities"]] == [
        *(("cat fox", "PER", 2, 4), ("x", "LOC", 5, 6))
    ]


def test_images_are_classified_from_npz_and_png_files(vision_model, pixels, run_verb, tmp_path):
    image = pytest.importorskip("PIL.Image")
    expected = mb.load(vision_model).classify(pixels["images"][4][None] / np.float32(255))[0]
    np.savez(tmp_path / "one.npz", images=pixels["images"][4:5])
    image.fromarray(pixels["images"][4]).save(tmp_path / "one.png")
    for name in ("one.npz", "one.png"):
        code, out, _ = run_verb(["predict", vision_model, tmp_path / name])
        assert (code, out) == (0, f"{expected.label}\t{expected.probability:.4f}\n")
    (tmp_path / "near.txt").write_text(f"{tmp_path / 'one.npz'}\n")
    code, out, _ = run_verb(["predict", vision_model, tmp_path / "one.png", "--nearest", tmp_path / "near.txt"])
    assert (code, out) == (0, f"1.0000\t{tmp_path / 'one.npz'}\n")


def test_a_named_pipe_is_read_only_once(classifier, run_verb):
    reads, writes = os.pipe()
    os.write(writes, b"the cat\n")
    os.close(writes)
    code, out, _ = run_verb(["predict", classifier, "--file", f"/dev/fd/{reads}"])
    os.close(reads)
    assert (code, len(out.splitlines())) == (0, 1)


def test_embeddings_and_the_nearest_lines(classifier, run_verb, tmp_path):
    (tmp_path / "lines.txt").write_text("the cat sat 3\n\nthe pig\nthe owl ran 7\n")
    _, out, _ = run_verb(["predict", classifier, "the pig", "--embed"])
    vector = torch.tensor(json.loads(out))
    assert vector.norm().item() == pytest.approx(1, abs=1e-4)
    _code, out, _ = run_verb(["predict", classifier, "the pig", "--nearest", tmp_path / "lines.txt", "--top", 2])
    rows = [line.split("\t") for line in out.splitlines()]
    assert rows[0] == ["1.0000", "the pig"]
    assert len(rows) == 2
    (tmp_path / "none.txt").write_text("\n")
    assert "none.txt is empty" in run_verb(["predict", classifier, "x", "--nearest", tmp_path / "none.txt"])[2]


def test_punctuation_is_restored_as_text(folder, run_verb):
    from monoblock.data.corpora.punctuation import strip_punctuation

    sentence = strip_punctuation(MARKS)
    lines = "".join(f"{word} {label}\n" for word, label in zip(sentence.words, sentence.labels, strict=True))
    rows = f"{lines}\n" * 70
    model = train_model(folder, "marks", rows, "conll", BERT.format(31), "token_classification", 80)
    code, out, _ = run_verb(["predict", model, "AND he SAID go the lord went why"])
    assert (code, out) == (0, "And he said, Go. The LORD went; why?\n")
    code, out, _ = run_verb(["evaluate", model, folder / "marks.conll", "--json"])
    result = json.loads(out)
    assert result["f1"] == pytest.approx(100)
    assert result["margin"] == pytest.approx(result["f1"] - result["baseline"])
    assert set(result["kinds"]) == {"COMMA", "PERIOD", "SEMICOLON", "QUESTION", "CAP", "UPPER"}


def test_masks_are_filled(folder, run_verb):
    text = "".join(f"the {ANIMALS[n % 7]} sat on the mat and the {ANIMALS[n % 5]} ran.\n" for n in range(300))
    model = train_model(folder, "hidden", text, "txt", BERT.format(17), "masked_lm")
    code, out, _ = run_verb(["predict", model, "the [MASK] sat on the [MASK]", "--top", 3, "--json"])
    result = json.loads(out)
    assert code == 0
    assert [len(choices) for choices in result["masks"]] == [3, 3]
    assert result["masks"][1][0]["probability"] > 0.1
    assert "has no [MASK]" in run_verb(["predict", model, "the cat"])[2]
    code, out, _ = run_verb(["evaluate", model, folder / "hidden.txt", "--json"])
    result = json.loads(out)
    assert result["perplexity"] == pytest.approx(np.exp(result["loss"]))
    assert 0 < result["accuracy"] < 1


# -- evaluate ---------------------------------------------------------------------------------------------------------


def test_the_metrics_of_a_classifier_are_those_of_its_predictions(classifier, folder, run_verb, tmp_path):
    metrics = pytest.importorskip("sklearn.metrics")
    rows = [line.split("\t") for line in CLASSES.splitlines()]
    predictions = [row[0].label for row in mb.load(classifier).classify([text for _, text in rows])]
    labels = [label for label, _ in rows]
    arguments = ["evaluate", classifier, folder / "classes.tsv", "--split", "all"]
    code, out, _err = run_verb([*arguments, "--json", "--picture", tmp_path / "a.png"])
    assert code == 0
    result = json.loads(out)
    assert result["accuracy"] == pytest.approx(metrics.accuracy_score(labels, predictions))
    assert result["f1"] == pytest.approx(100 * metrics.f1_score(labels, predictions, average="macro"))
    assert result["confusion"]["labels"] == ["no", "yes"]
    assert result["confusion"]["counts"] == metrics.confusion_matrix(labels, predictions, labels=["no", "yes"]).tolist()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert run_verb([*arguments, "--at-least", "accuracy=0"])[0] == 0
    assert run_verb([*arguments, "--at-least", "f1=101"])[0] == 3
    shown = run_verb(arguments)[1].splitlines()
    assert f"{100 * result['accuracy']:.2f} %" in next(line for line in shown if line.startswith("accuracy"))
    assert f"{result['ece']:.2f} %" in next(line for line in shown if line.startswith("ece"))
    assert result["majority"] == max(labels.count(label) for label in set(labels)) / len(labels)
    (tmp_path / "long.tsv").write_text("yes\t" + "the cat sat " * 20 + "\nno\tthe dog\n")
    assert (
        "1 of 2 texts were cut to 19 tokens"
        in run_verb(["evaluate", classifier, tmp_path / "long.tsv", "--split", "all"])[2]
    )


def test_a_bound_on_accuracy_is_a_fraction(classifier, folder, run_verb):
    arguments = ["evaluate", classifier, folder / "classes.tsv", "--split", "all"]
    for option in ("--at-least", "--at-most"):
        code, _, err = run_verb([*arguments, option, "accuracy=90"])
        assert code == 2
        assert "accuracy is a fraction from 0 to 1; write accuracy=0.9" in err
    accuracy = json.loads(run_verb([*arguments, "--json"])[1])["accuracy"]
    assert run_verb([*arguments, "--at-least", f"accuracy={accuracy}"])[0] == 0
    code, _, err = run_verb([*arguments, "--at-most", f"accuracy={accuracy / 2}"])
    assert code == 3
    assert f"check failed: accuracy {100 * accuracy:.2f} % is above {50 * accuracy:.2f} %" in err


def test_a_classifier_of_text_pairs_is_trained(folder, run_verb):
    model = train_model(folder, "pairs", PAIRS, "tsv", BERT.format(23), "classification", 120)
    code, out, _ = run_verb(["evaluate", model, folder / "pairs.tsv", "--split", "all", "--json"])
    assert code == 0
    assert json.loads(out)["accuracy"] > 0.9, "the label depends on which of the two texts is gold"
    code, out, _ = run_verb(["predict", model, "the gold\tthe cow", "--json"])
    result = json.loads(out)
    assert result["text_pair"] == "the cow"
    assert result["labels"][0]["label"] == "first"


def test_the_metrics_of_a_tagger_are_of_whole_entities(tagger, folder, run_verb):
    _code, out, _ = run_verb(["evaluate", tagger, folder / "names.conll", "--split", "all", "--json"])
    result = json.loads(out)
    rows = list(read_conll(folder / "names.conll"))
    predictions = mb.load(tagger).tag([row.words for row in rows])
    correct = sum(
        [word.label for word in one.words] == list(row.labels) for one, row in zip(predictions, rows, strict=True)
    )
    assert correct == len(rows)
    assert result["f1"] == result["kinds"]["PER"]["f1"] == 100
    assert result["kinds"]["PER"]["there"] == len(rows)
    assert result["words"] == 6 * len(rows)


def test_a_label_not_seen_in_training_is_an_error(tagger, classifier, vision_model, pixels, run_verb, tmp_path):
    (tmp_path / "a.conll").write_text("the O\ncat B-PERS\n")
    code, _, err = run_verb(["evaluate", tagger, tmp_path / "a.conll", "--split", "all"])
    assert code == 1
    assert "row 1: the label 'B-PERS' was not seen in training; did you mean 'B-PER'" in err
    (tmp_path / "a.tsv").write_text("yess\tthe cat\n")
    assert (
        "row 1: the label 'yess' was not seen"
        in run_verb(["evaluate", classifier, tmp_path / "a.tsv", "--split", "all"])[2]
    )
    np.savez(tmp_path / "a.npz", images=pixels["images"][:1], labels=np.array([9]))
    assert "the label '9' was not seen" in run_verb(["evaluate", vision_model, tmp_path / "a.npz", "--split", "all"])[2]
    (tmp_path / "b.conll").write_text("the O\ncat\n")
    assert "b.conll, line 2: 1 column" in run_verb(["evaluate", tagger, tmp_path / "b.conll", "--split", "all"])[2]


def test_images_are_evaluated_and_the_worst_mistakes_plotted(vision_model, folder, run_verb, tmp_path):
    code, out, _ = run_verb(
        ["evaluate", vision_model, folder / "images.npz", "--split", "all", "--json", "--picture", tmp_path / "a.png"]
    )
    assert code == 0
    assert sum(map(sum, json.loads(out)["confusion"]["counts"])) == 60
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_the_options_in_the_documentation_exist():
    page = (Path(__file__).parents[2] / "docs/labels.md").read_text(encoding="utf-8")
    lines = [line.partition("#")[0].split() for line in page.splitlines() if line.startswith("monoblock ")]
    assert len(lines) > 8
    for _, verb, *arguments in lines:
        options = {name for one in cli.get_command(None, verb).params for name in one.opts}
        assert {word for word in arguments if word.startswith("--")} <= options, (verb, arguments)


# -- tables -----------------------------------------------------------------------------------------------------------

ROWS = ["the cat sat 3", 'the "dog", ran', "the owl\nand the fox", ""]


def write_table(path, header, rows):
    """Write a .csv file with csv, or a tab-separated file."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        if path.suffix == ".csv":
            csv.writer(file).writerows([header, *rows])
        else:
            file.writelines("\t".join(row) + "\n" for row in [header, *rows])
    return path


@pytest.mark.parametrize(("header", "options"), [("Text", []), ("Comment body", ["--text-column", "comment BODY"])])
def test_rows_of_a_csv_file_are_predicted_by_the_name_of_their_column(classifier, run_verb, tmp_path, header, options):
    path = write_table(tmp_path / "in.csv", ["id", header], [[str(n), text] for n, text in enumerate(ROWS)])
    code, out, _ = run_verb(["predict", classifier, "--file", path, "--json", *options])
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["text"] for row in rows] == ROWS, "quotes and line breaks are those of the cells"
    pipe = mb.load(classifier)
    for row, text in zip(rows, ROWS, strict=True):
        assert [one["label"] for one in row["labels"]] == [one.label for one in pipe.classify([text])[0] if text]


def test_the_columns_of_pairs_and_of_tab_separated_files_are_found(classifier, tagger, run_verb, tmp_path):
    path = write_table(tmp_path / "in.tsv", ["label", "sentence2", "sentence1"], [["yes", "the dog", "the cat"]])
    code, out, _ = run_verb(["predict", classifier, "--file", path, "--json"])
    assert (code, [json.loads(out)[name] for name in ("text", "text_pair")]) == (0, ["the cat", "the dog"])
    assert json.loads(out)["labels"][0]["label"] == mb.load(classifier).classify(("the cat", "the dog"))[0].label
    plain = write_table(tmp_path / "plain.tsv", ["the cat", "the dog"], [["the cat", "sat"]])
    assert len(run_verb(["predict", classifier, "--file", plain])[1].splitlines()) == 2, "without a header"
    path = write_table(tmp_path / "tag.csv", ["text"], [["the cat"], ["Mr dog"]])
    assert len(run_verb(["predict", tagger, "--file", path])[1].splitlines()) == 2


def test_pictures_are_found_by_the_column_path(vision_model, pixels, run_verb, tmp_path):
    np.savez(tmp_path / "one.npz", images=pixels["images"][:1])
    path = write_table(tmp_path / "in.csv", ["path", "taken"], [[str(tmp_path / "one.npz"), "2020"]])
    assert (
        run_verb(["predict", vision_model, "--file", path])[1:2]
        == run_verb(["predict", vision_model, tmp_path / "one.npz"])[1:2]
    )


def test_a_table_whose_column_is_not_known_is_one_line_with_the_option(classifier, run_verb, tmp_path):
    for header, options, message in (
        (["a", "b"], [], "in.csv: the first line 'a, b' has no column named text or sentence or sentence1; name the"),
        (["text", "review"], [], "in.csv has the columns text and review; say which to read: --text-column text"),
        (["a", "b"], ["--text-column", "c"], "--text-column c: the first line of"),
        (["a", "b"], ["--text-column", "a"] * 3, "--text-column is given 3 times, but this model reads 1 or 2 columns"),
    ):
        path = write_table(tmp_path / "in.csv", header, [["the cat", "the dog"]])
        code, out, err = run_verb(["predict", classifier, "--file", path, *options])
        assert (code in (1, 2), out, message in err.splitlines()[-1]) == (True, "", True), err
    code, _, err = run_verb(["predict", classifier, "the cat", "--text-column", "text"])
    assert (code, "--text-column names a column of a .csv or .tsv file; give one with --file" in err) == (2, True)
    path = write_table(tmp_path / "long.csv", ["text"], [["the cat"], ["the cat sat " * 20]])
    assert "error: line 3 has" in run_verb(["predict", classifier, "--file", path])[2]
