"""Vision models: positions in two dimensions, pooling, other image sizes, recipes with augmentation."""

import json

import numpy as np
import pytest
import torch

import monoblock as mb
from monoblock.cli.main import run
from monoblock.data.augment import random_flip, random_shift, uniform_numbers
from monoblock.data.batches import BatchIndices
from monoblock.errors import ConfigError, FileError, InputError
from monoblock.nn.interpolate_positions import interpolate_grid
from monoblock.runs.build_data import build_task_data
from monoblock.runs.recipe import read_recipe
from monoblock.tasks.images import read_pixels

SIZES = {"image": 12, "patch": 4, "width": 20, "depth": 2, "heads": 2, "classes": 7}


def random_model(config, seed=0):
    torch.manual_seed(seed)
    model = mb.Transformer(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model.eval()


# -- places and pooling -----------------------------------------------------------------------------------------------


def test_sinusoids_of_patches_encode_row_and_column():
    model = random_model(mb.vit(**SIZES, positions="sinusoid"))
    D, side = 20, 3
    expected = torch.zeros(1 + side * side, D)
    for row in range(side):
        for column in range(side):
            for i in range(D // 4):
                for offset, position in ((0, row), (D // 2, column)):
                    angle = torch.tensor(position / 10000 ** (2 * i / (D / 2)), dtype=torch.float64)
                    expected[1 + side * row + column, offset + i] = angle.sin()
                    expected[1 + side * row + column, offset + D // 4 + i] = angle.cos()
    torch.testing.assert_close(model.input.position_table(), expected, rtol=0, atol=1e-6)
    assert "input.position.weight" not in model.state_dict()


def test_without_a_class_token_the_mean_of_the_patches_is_read():
    model = random_model(mb.vit(**SIZES, class_token=False))
    pixels = torch.randn(3, 3, 12, 12)
    hidden = model.encode(pixels)
    assert hidden.shape == (3, 9, 20)
    logits = hidden.mean(1) @ model.head.output.weight.T + model.head.bias
    torch.testing.assert_close(model(pixels), logits)
    first = random_model(mb.vit(**SIZES))
    hidden = first.encode(pixels)
    assert hidden.shape == (3, 10, 20)
    torch.testing.assert_close(first(pixels), hidden[:, 0] @ first.head.output.weight.T + first.head.bias)


def test_patches_are_added_to_in_full_precision_under_autocast():
    model = random_model(mb.vit(**SIZES, class_token=False, positions="sinusoid"))
    with torch.autocast("cpu", torch.bfloat16):
        assert model.input(torch.randn(2, 3, 12, 12)).dtype == torch.float32


# -- another size -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("image", [8, 20, 28])
def test_interpolated_positions_give_the_logits_of_transformers(image, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=12,
        patch_size=4,
        hidden_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=28,
        num_labels=7,
    )
    theirs = transformers.ViTForImageClassification(config).eval()
    torch.nn.init.normal_(theirs.vit.embeddings.position_embeddings)
    theirs.save_pretrained(tmp_path)
    model = mb.Transformer.from_pretrained(tmp_path).eval()
    pixels = torch.randn(3, 3, image, image)
    with torch.no_grad():
        expected = theirs(pixels, interpolate_pos_encoding=True).logits
        result = mb.interpolate(model, image)(pixels)
    torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("positions", ["learned", "sinusoid"])
def test_interpolation_to_the_same_size_changes_nothing_and_shares_nothing(positions):
    model = random_model(mb.vit(**SIZES, positions=positions))
    before = torch.random.get_rng_state()
    same = mb.interpolate(model, 12)
    assert torch.equal(torch.random.get_rng_state(), before), "nothing is drawn"
    pixels = torch.randn(2, 3, 12, 12)
    torch.testing.assert_close(same(pixels), model(pixels))
    with torch.no_grad():
        same.head.bias.add_(1)
    assert not torch.equal(same.head.bias, model.head.bias)


def test_interpolation_keeps_a_constant_table():
    table = torch.tensor([[2.0, -3.0]]).expand(25, 2)
    torch.testing.assert_close(interpolate_grid(table, 7), torch.tensor([[2.0, -3.0]]).expand(49, 2))


def test_rotary_positions_need_no_table():
    model = random_model(mb.vit(**SIZES, positions="rotary"))
    assert mb.interpolate(model, 20)(torch.randn(2, 3, 20, 20)).shape == (2, 7)


@pytest.mark.parametrize(
    ("config", "image", "message"),
    [
        (lambda: mb.vit(**SIZES), 14, "image=14 cannot be cut into whole patches of 4 pixels; try image=16"),
        (lambda: mb.vit(**SIZES), 0, "try image=4"),
        (lambda: mb.gpt(vocab=11, width=12, depth=1, heads=2, context=8), 12, "no patch positions to interpolate"),
    ],
)
def test_models_that_cannot_be_interpolated_are_refused_in_one_line(config, image, message):
    with pytest.raises(InputError) as caught:
        mb.interpolate(mb.Transformer(config()), image)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# -- recipes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path):
    random = np.random.default_rng(0)
    for split, count in (("train", 23), ("valid", 5)):
        labels = np.arange(count) % 3 * 2 + 1  # 1, 3, 5: numbers of classes are places among them
        np.savez(
            tmp_path / f"{split}.npz", images=random.integers(0, 256, (count, 8, 8), dtype=np.uint8), labels=labels
        )
    return tmp_path


def recipe(corpus, *options):
    return read_recipe("digits", [f"data.corpus={corpus}", "classification.augment={}", "train.batch=7", *options])


def test_batches_are_the_images_from_minus_one_to_one_and_labels_are_numbered(corpus):
    task_data = build_task_data(recipe(corpus), None)
    file = np.load(corpus / "train.npz")
    batch = task_data.build_batch(BatchIndices(0, np.array([4, 0, 11])))
    expected = torch.from_numpy(file["images"][[4, 0, 11], None]) / 127.5 - 1
    torch.testing.assert_close(batch.inputs["source"], expected.float())
    assert batch.labels.tolist() == [1, 0, 2]
    assert (task_data.labels, task_data.model_sizes) == (["1", "3", "5"], {"classes": 3, "channels": 1, "image": 8})
    assert sum(part.batch_size for part in task_data.evaluation_batches()) == 5


def test_training_images_are_varied_by_sample_and_epoch_and_evaluation_is_not(corpus):
    plain = build_task_data(recipe(corpus), None)
    task_data = build_task_data(recipe(corpus, "classification.augment={shift=1, flip=0.5}", "train.seed=5"), None)
    assert "varied by shift, flip" in task_data.summary
    pixels = torch.from_numpy(np.load(corpus / "train.npz")["images"][:, None] / 255).float()
    for epoch in (0, 1):
        numbers = torch.from_numpy(uniform_numbers(5, epoch, 23))
        expected = 2 * random_flip(random_shift(pixels, numbers[:, :2], 1), numbers[:, 4], 0.5) - 1
        for samples in (np.array([3, 17]), np.array([17])):
            batch = task_data.build_batch(BatchIndices(epoch, samples))
            torch.testing.assert_close(batch.inputs["source"], expected[samples])
    for batch_a, other in zip(task_data.evaluation_batches(), plain.evaluation_batches(), strict=True):
        assert torch.equal(batch_a.inputs["source"], other.inputs["source"])


def test_rows_can_be_held_back_for_validation(corpus):
    task_data = build_task_data(recipe(corpus, "data.validation_rows=4"), None)
    assert "19 images" in task_data.summary
    assert sum(part.batch_size for part in task_data.evaluation_batches()) == 4
    with pytest.raises(ConfigError, match=r"data\.validation_rows=23 leaves none of the 23 rows"):
        build_task_data(recipe(corpus, "data.validation_rows=23"), None)


def test_bad_images_are_one_line(corpus):
    images = np.zeros((4, 6, 8))
    np.savez(corpus / "train.npz", images=images, labels=np.arange(4))
    with pytest.raises(FileError, match="holds images of 6×8; make them square"):
        build_task_data(recipe(corpus), None)
    np.savez(corpus / "train.npz", images=np.zeros((4, 8, 8)), labels=np.arange(4))
    np.savez(corpus / "valid.npz", images=np.zeros((1, 8, 8)), labels=np.array([9]))
    with pytest.raises(InputError, match=r"split valid, row 1: the label '9' was not seen .* are 0, 1, 2, 3"):
        list(build_task_data(recipe(corpus), None).evaluation_batches())
    with pytest.raises(ConfigError, match="shift"):
        recipe(corpus, "classification.augment={shift=-1}")
    np.savez(corpus / "valid.npz", images=np.zeros((1, 12, 12)), labels=np.array([1]))
    with pytest.raises(FileError, match="training images of 1 × 8 × 8 and validation images of 1 × 12 × 12"):
        build_task_data(recipe(corpus), None)
    for wrong in (255.0, -0.5, np.nan):
        np.savez(corpus / "train.npz", images=np.full((4, 8, 8), wrong), labels=np.arange(4))
        with pytest.raises(FileError, match=r"train\.npz: pixels range from .*write floats from 0 to 1, or uint8"):
            build_task_data(recipe(corpus), None)
        with pytest.raises(FileError, match=r"train\.npz: pixels range from"):
            read_pixels(corpus / "train.npz", mb.tiny("deit-base").input)
    assert recipe(corpus, "classification.augment.rotate=5", "classification.augment.flip=0.5").task.augment.rotate == 5
    with pytest.raises(ConfigError, match="trun"):
        recipe(corpus, "classification.augment.trun=5")
    with pytest.raises(ConfigError, match=r"\[classification\] is for train\.objective='classification'"):
        build_task_data(read_recipe("reverse", ["classification.augment={shift=1}", "data.limit=9"]), 32)


@pytest.mark.parametrize("name", ["digits", "mnist", "fashion"])
def test_recipes_for_images_stay_small(name):
    from monoblock.accounting.report import account
    from monoblock.runs.recipe import build_model_config

    image = 8 if name == "digits" else 28
    config = build_model_config(read_recipe(name), None, classes=10, channels=1, image=image)
    assert account(config).parameters <= 210_000


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model of 8 × 8 pixels, and its test images twice as large."""
    folder = tmp_path_factory.mktemp("vision")
    random = np.random.default_rng(1)
    for split, side in (("train", 8), ("valid", 8), ("test", 16)):
        images = random.integers(0, 256, (12, side, side), dtype=np.uint8)
        np.savez(folder / f"{split}.npz", images=images, labels=np.arange(12) % 3)
    np.savez(folder / "one.npz", images=images[:1])
    options = ["train.steps=2", "train.warmup=1", "train.batch=4", "model.width=16", "model.depth=1", "model.heads=2"]
    corpus = [f"data.corpus={folder}", "--out", str(folder / "run"), "--json"]
    try:
        assert run(["train", "digits", *options, *corpus]) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    return folder


def test_images_of_another_size_are_refused_unless_positions_are_interpolated(trained, capsys):
    model, batch_a = str(trained / "run"), str(trained / "one.npz")
    for options in (["evaluate", model, str(trained)], ["predict", model, batch_a]):
        assert run(options) in (1, 2)
        message = capsys.readouterr().err.strip().splitlines()[-1]
        assert "1 × 16 × 16, but this model reads 1 × 8 × 8; resize it, or give --interpolate 16" in message
    assert run(["predict", model, batch_a, "--interpolate", "16", "--json"]) == 0
    prediction = json.loads(capsys.readouterr().out)
    larger = mb.interpolate(mb.Transformer.from_pretrained(model).eval(), 16).requires_grad_(False)
    pixels = torch.from_numpy(np.load(batch_a)["images"][:, None] / 127.5 - 1).float()
    assert prediction["labels"][0]["probability"] == pytest.approx(float(larger(pixels).softmax(-1).max()), abs=1e-3)
    assert run(["evaluate", model, str(trained), "--interpolate", "16", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    images = np.load(trained / "test.npz")
    logits = larger(torch.from_numpy(images["images"][:, None] / 127.5 - 1).float())
    right = (logits.argmax(-1).numpy() == images["labels"]).mean()
    assert result["accuracy"] == pytest.approx(right)
    assert run(["evaluate", model, str(trained), "--interpolate", "15"]) in (1, 2)
    assert "image=15 cannot be cut into whole patches of 2 pixels; try image=16" in capsys.readouterr().err
