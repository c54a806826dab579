"""Pictures: folders of classes to train and evaluate on, every form of an image to predict, resizing as published."""

import json
import re

import numpy as np
import pytest
import torch

import monoblock as mb
from monoblock.cli.main import run
from monoblock.config.model import PatchConfig
from monoblock.data.batches import BatchIndices
from monoblock.data.corpora.load import load_corpus
from monoblock.errors import ConfigError, FileError, InputError, MonoblockError
from monoblock.runs.build_data import build_task_data
from monoblock.runs.recipe import read_recipe
from monoblock.untrusted_files import Folder

PIL = pytest.importorskip("PIL.Image")
HEIGHT, WIDTH, SIDE = 13, 17, 8


def draw(random, color, size=(WIDTH, HEIGHT)):
    """A picture of noise, in which one channel is brighter."""
    pixels = random.integers(0, 120, (size[1], size[0], 3), dtype=np.uint8)
    pixels[..., color] += 130
    return PIL.fromarray(pixels)


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    """Pictures of two classes, of several sizes and formats."""
    folder = tmp_path_factory.mktemp("pets")
    random = np.random.default_rng(0)
    for color, name in enumerate(("cats", "dogs")):
        (folder / name).mkdir()
        for number in range(11):
            suffix = ("png", "jpg", "bmp")[number % 3]
            picture = draw(random, color, (WIDTH + number, HEIGHT))
            picture.save(folder / name / f"{number:02}.{suffix}", **({"quality": 95} if suffix == "jpg" else {}))
    (folder / "cats" / ".hidden.png").write_bytes(b"not read")
    return folder


@pytest.fixture(scope="module")
def trained(pets, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    sizes = ["model.patch=4", "model.width=12", "model.depth=1", "model.heads=2", f"model.image={SIDE}"]
    steps = ["train.steps=30", "train.warmup=3", "train.batch=7", "classification.augment={}"]
    try:
        assert run(["train", "digits", f"data.corpus={pets}", *sizes, *steps, "--out", str(out), "--json"]) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    return out


# -- folders of classes ------------------------------------------------------------------------------------------------


def test_each_folder_of_pictures_is_a_class_and_a_tenth_of_each_is_held_out(pets):
    corpus = load_corpus(pets, "all")
    assert (corpus.kind, len(corpus), corpus.labels()) == ("images", 22, ["cats", "dogs"])
    names = [(row.label, row.path.rsplit("/", 1)[-1][:2]) for row in corpus.rows]
    assert names == [(label, f"{number:02}") for label in ("cats", "dogs") for number in range(11)]
    valid = load_corpus(pets, "valid")
    assert sorted(row.label for row in valid.rows) == ["cats", "cats", "dogs"][: len(valid)]
    assert not {row.path for row in valid.rows} & {row.path for row in load_corpus(pets, "train").rows}


def test_gray_pictures_have_one_channel_and_one_size_needs_no_key(tmp_path):
    random = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(5):
            pixels = random.integers(0, 256, (SIDE, SIDE), dtype=np.uint8)
            PIL.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    options = [f"data.corpus={tmp_path}", "model.patch=4", "classification.augment={}", "train.batch=3"]
    data = build_task_data(read_recipe("digits", options), None)
    assert data.model_sizes == {"classes": 2, "channels": 1, "image": SIDE}
    rows = load_corpus(tmp_path, "train").rows
    expected = np.stack([np.asarray(PIL.open(row.path)) for row in rows])[[4, 0], None] / 127.5 - 1
    batch = data.build_batch(BatchIndices(0, np.array([4, 0])))
    torch.testing.assert_close(batch.inputs["source"], torch.from_numpy(expected).float())


def test_folders_of_splits_hold_folders_of_classes(tmp_path):
    random = np.random.default_rng(0)
    for split, count in (("train", 3), ("val", 1), ("test", 2)):
        for color, name in enumerate(("a", "b")):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                draw(random, color).save(folder / f"{number}.png")
    counts = {split: len(load_corpus(tmp_path, split)) for split in ("train", "valid", "test", "all")}
    assert counts == {"train": 6, "valid": 2, "test": 4, "all": 12}
    assert len(load_corpus(f"{tmp_path}/{{split}}", "valid")) == 2


def test_a_class_may_have_the_name_of_a_split(tmp_path):
    for name in ("train", "car"):
        (tmp_path / name).mkdir()
        draw(np.random.default_rng(0), 0).save(tmp_path / name / "0.png")
    assert load_corpus(tmp_path, "all").labels() == ["car", "train"]


def test_a_model_is_trained_on_folders_of_pictures_and_evaluated(trained, pets, capsys):
    assert json.loads((trained / "labels.json").read_text()) == ["cats", "dogs"]
    assert run(["evaluate", str(trained), str(pets), "--split", "all", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    # The independent computation: Pillow resizes, and the model reads pixels from −1 to 1.
    model, right = mb.Transformer.from_pretrained(trained).eval(), 0
    rows = load_corpus(pets, "all").rows
    for row in rows:
        picture = PIL.open(row.path).convert("RGB").resize((SIDE, SIDE), PIL.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)[None] / 127.5 - 1
        right += ["cats", "dogs"][model(pixels).argmax()] == row.label
    assert result["sources"] == len(rows)
    assert result["accuracy"] == pytest.approx(right / len(rows))
    assert right > 0.9 * len(rows), "the brighter channel is the class"


def test_what_cannot_be_trained_on_is_one_line_that_says_what_to_write(pets, tmp_path, capsys):
    options = ["model.patch=4", "model.width=12", "model.depth=1", "model.heads=2", "train.steps=2"]
    assert run(["train", "digits", f"data.corpus={pets}", *options, "--out", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "holds pictures of 13×17 and of 13×18 pixels; write model.image=32, or another size, to resize" in error
    draw(np.random.default_rng(0), 0).save(tmp_path / "0.png")
    with pytest.raises(FileError, match="its pictures have no classes: put those of each class into a folder"):
        load_corpus(tmp_path, "train")


def test_other_files_among_pictures_are_counted_in_a_warning_and_links_out_are_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        draw(np.random.default_rng(0), 0).save(tmp_path / name / "0.png")
    (tmp_path / "a" / "notes.txt").write_text("text")
    with pytest.warns(UserWarning, match="a: 1 of 2 files, such as 'notes.txt', are left out: pictures are .png, "):
        assert len(load_corpus(tmp_path, "all")) == 2
    (tmp_path / "a" / "notes.txt").unlink()
    (tmp_path / "b" / "1.png").symlink_to(tmp_path / "a" / "0.png")
    with pytest.raises(FileError, match="is a link that leads out of the folder"):
        load_corpus(tmp_path, "all")


# -- every form of an image --------------------------------------------------------------------------------------------


def test_every_form_of_an_image_gives_the_same_prediction(trained, pets, capsys):
    pipe, path = mb.load(trained), pets / "dogs" / "06.png"
    picture = PIL.open(path).convert("RGB")
    last = np.asarray(picture)  # (H, W, C)
    first = np.ascontiguousarray(last.transpose(2, 0, 1))
    (expected,) = pipe.classify([path], top=2)
    assert run(["predict", str(trained), str(path), "--top", "2", "--json"]) == 0
    assert [choice["label"] for choice in json.loads(capsys.readouterr().out)["labels"]] == [e.label for e in expected]
    for image in (str(path), path, picture, last, first, torch.from_numpy(first), first / 255, last / np.float32(255)):
        assert pipe.classify(image, top=2) == [
            (label, pytest.approx(probability, abs=2e-2)) for label, probability in expected
        ]
    for batch in ([last, path, picture], np.stack([last, last]), torch.from_numpy(np.stack([first, first]))):
        assert len(pipe.classify(batch)) == len(batch)
        assert pipe.embed(batch).shape == (len(batch), 12)
    assert pipe.embed(last).shape == pipe.embed(path).shape == (12,)


def test_bytes_are_scaled_to_the_range_the_model_was_trained_on():
    model = mb.Transformer(mb.vit(image=SIDE, patch=4, width=12, depth=1, heads=2, classes=3)).eval()
    image = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    pipe = pipeline_of(model)
    expected = model(torch.from_numpy(image).permute(2, 0, 1)[None] / 127.5 - 1).softmax(-1)[0]
    assert pipe.classify(image)[0].probability == pytest.approx(expected.max().item(), abs=1e-6)


def pipeline_of(model):

    return mb.Pipeline(model, None, labels=["0", "1", "2"])


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((HEIGHT, WIDTH, 3), np.uint8), "an image of 3 × 13 × 17, but this model reads 3 × 8 × 8; resize it"),
        (np.zeros((SIDE, SIDE, 4), np.uint8), "an image of 8 × 8 × 4, but this model reads 3 × 8 × 8"),
        (np.zeros((SIDE, SIDE), np.uint8), "an image of 1 × 8 × 8, but this model reads 3 × 8 × 8"),
        (np.full((3, SIDE, SIDE), 200.0), "pixels range from 200 to 200; write floats from 0 to 1, or uint8"),
        (np.zeros((3, SIDE, SIDE), np.int64), "pixels of type torch.int64; give uint8 from 0 to 255, or floats"),
        (np.zeros(5), "classify takes images, but element 0 of the list is an object of type float64"),
        ("nowhere.png", "there is no file nowhere.png; give the path of an image"),
        ("picture.tiff", "picture.tiff is not an image file; this model reads .npz, .png, "),
        (5, "classify takes one input or a list of inputs, but got an object of type int"),
        ([None], "classify takes images, but element 0 of the list is None"),
    ],
)
def test_an_input_that_is_no_image_for_the_model_is_one_line(image, message):
    pipe = pipeline_of(mb.Transformer(mb.vit(image=SIDE, patch=4, width=12, depth=1, heads=2, classes=3)).eval())
    with pytest.raises(MonoblockError, match=re.escape(message)) as caught:
        pipe.classify(image)
    assert "\n" not in str(caught.value)


def test_arrays_in_npz_files_may_have_their_channels_last(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (5, SIDE, SIDE, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(5))
    rows = load_corpus(tmp_path / "a.npz", "all").rows
    np.testing.assert_array_equal(
        np.stack([row.pixels for row in rows]), images.transpose(0, 3, 1, 2) / np.float32(255)
    )


# -- preprocessor_config.json ------------------------------------------------------------------------------------------

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # of ImageNet
SQUARE = {"size": {"height": SIDE, "width": SIDE}}


@pytest.mark.parametrize(
    "fields",
    [
        {"do_resize": True, "resample": 2, **SQUARE},
        {"do_resize": True, "resample": 3, **SQUARE, "image_mean": MEAN, "image_std": STD},
        {"do_resize": True, "resample": 3, "size": {"height": 9, "width": 9}, "do_center_crop": True}
        | {"crop_size": {"height": SIDE, "width": SIDE}, "image_mean": MEAN, "image_std": STD},
        {"do_resize": True, **SQUARE, "do_rescale": False, "do_normalize": False},
        {"do_resize": True, **SQUARE, "rescale_factor": 1 / 127.5, "do_normalize": False},
    ],
)
def test_pictures_are_prepared_as_transformers_does(fields, pets, tmp_path):
    transformers = pytest.importorskip("transformers")
    from monoblock.tasks.images import read_image, read_image_preprocessing

    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "ViTImageProcessor", **fields})
    )
    path = pets / "cats" / "03.png"
    theirs = transformers.models.vit.image_processing_pil_vit.ViTImageProcessorPil.from_pretrained(tmp_path)
    expected = theirs(PIL.open(path).convert("RGB"), return_tensors="pt")["pixel_values"][0]
    preprocessing = read_image_preprocessing(Folder(tmp_path))
    config = PatchConfig(image=SIDE, patch=4, channels=3)
    for image in (path, PIL.open(path), np.asarray(PIL.open(path))):
        result = preprocessing(read_image(image, config, preprocessing))
        step = preprocessing.scale / 255 / min(preprocessing.std)  # Pillow and torch may round a byte differently
        torch.testing.assert_close(result, expected.float(), rtol=0, atol=1.01 * step)
        assert (result - expected).abs().mean() < 0.2 * step


def test_without_do_resize_another_size_is_an_error_and_bad_fields_are_named(tmp_path):
    from monoblock.tasks.images import read_image, read_image_preprocessing

    config, file = PatchConfig(image=SIDE, patch=4, channels=3), tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"do_resize": False, **SQUARE}))
    with pytest.raises(InputError, match="but this model reads 3 × 8 × 8; resize it"):
        read_image(np.zeros((HEIGHT, WIDTH, 3), np.uint8), config, read_image_preprocessing(Folder(tmp_path)))
    for fields, message in (
        ({"do_resize": True, "size": {"height": 8, "width": 9}}, "is not the size of a square"),
        ({"do_resize": True, "size": "8"}, "size='8' is not the size of a square"),
        ({**SQUARE, "resample": 1}, r"resample=1 is not known here; write one of 0 \(nearest\), 2 \(bilinear\)"),
        ({"rescale_factor": "1/255"}, "rescale_factor='1/255' must be a number above 0"),
    ):
        file.write_text(json.dumps(fields))
        with pytest.raises(FileError, match=message):
            read_image_preprocessing(Folder(tmp_path))


def test_a_text_model_refuses_an_image():
    model = mb.Transformer(mb.gpt(vocab=11, width=12, depth=1, heads=2, context=8))

    with pytest.raises((InputError, ConfigError), match="embed takes"):
        mb.Pipeline(model, object()).embed(np.zeros((SIDE, SIDE, 3), np.uint8))
