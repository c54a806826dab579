"""Model folders: saved completely, read strictly, and every kind of damage is a one-line error."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import assert_bit_equal, example_inputs, tiny_model
from training_support import train_until, write_recipe

import monoblock as mb
from monoblock.cli.main import run as cli
from monoblock.errors import FileError
from monoblock.interop.model_folder import ModelFolder
from monoblock.model import Transformer


@pytest.fixture
def folder(tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def assert_refused(message, folder, **options):
    with pytest.raises(FileError, match=message) as error:
        Transformer.from_pretrained(folder, **options)
    assert "\n" not in str(error.value)


def change_config(folder, change):
    path = folder / "config.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_folder_holds_two_files_and_no_temporary_one(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert ModelFolder(folder).config == tiny_model("gpt2").config


def test_saving_again_replaces_what_was_there(folder):
    tiny_model("llama-7b").save_pretrained(folder)
    assert Transformer.from_pretrained(folder).config == tiny_model("llama-7b").config


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_weights_are_read_in_the_requested_dtype(folder, dtype):
    model = Transformer.from_pretrained(folder, dtype=dtype)
    assert {weight.dtype for weight in model.parameters()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_any_dtype_is_saved_and_read_back_bit_for_bit(tmp_path, dtype):
    model = tiny_model("gpt2", dtype)
    model.save_pretrained(tmp_path)
    loaded = Transformer.from_pretrained(tmp_path, dtype=dtype).eval()
    for key, weight in model.state_dict().items():
        assert_bit_equal(loaded.state_dict()[key], weight)
    assert_bit_equal(loaded(*example_inputs(model)), model(*example_inputs(model)))


def test_a_loaded_model_can_be_trained(folder):
    model = Transformer.from_pretrained(folder)
    assert all(weight.requires_grad and not weight.is_meta for weight in model.parameters())
    model(*example_inputs(model)).sum().backward()


@pytest.mark.parametrize("name", ["bart-base", "t5-small", "vit-b16"])
def test_buffers_are_saved_and_loaded(name, tmp_path):
    tiny_model(name).save_pretrained(tmp_path)
    loaded = Transformer.from_pretrained(tmp_path)
    assert dict(loaded.named_buffers()).keys() == dict(tiny_model(name).named_buffers()).keys()
    assert not any(buffer.is_meta for buffer in loaded.buffers())


def test_a_missing_folder_or_file_is_named(folder, tmp_path):
    assert_refused("is not a model folder: it has no config.json", tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    assert_refused("has no model.safetensors", folder)
    (folder / "config.json").unlink()
    assert_refused("has no config.json", folder)


@pytest.mark.parametrize("text", ["", "{", "[1, 2", "\x00\x01", '{"format": "monoblock"'])
def test_a_config_that_is_not_json_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    assert_refused("config.json is not JSON", folder)


def test_a_config_that_is_not_utf8_is_refused(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x00\x80")
    assert_refused("config.json", folder)


@pytest.mark.parametrize("text", ["[]", "{}", "3", '{"format": "other"}', '{"model_type": "gpt2"}'])
def test_a_config_of_another_program_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(FileError):
        _ = ModelFolder(folder).config


def test_deeply_nested_json_is_refused_in_one_line(folder):
    (folder / "config.json").write_text("[" * 100_000)
    assert_refused("config.json", folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("model"), "must be an object"),
        (lambda data: data["model"].update(dekoder=None), "did you mean 'decoder'"),
        (lambda data: data["model"]["input"].update(vocab="many"), "vocab='many' is not a whole number"),
        (lambda data: data["model"].update(tie="three_way"), "this model has only one input"),
        (lambda data: data["model"]["input"].update(vocab=59), r"has shape \(61, 36\).*\(59, 36\)"),
        (lambda data: data["model"].update(tie="none"), "lacks the tensor: 'head.output.weight'"),
        (lambda data: data["model"].update(head=None, tie="none", decoder={**data["model"]["decoder"], "norm": None}),
         "has a tensor that the model does not use: 'decoder.norm"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused_with_the_reason(folder, change, message):
    change_config(folder, change)
    assert_refused(message, folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("decoder.norm.weight"), "lacks the tensor: 'decoder.norm.weight'"),
        (lambda tensors: [tensors.pop(key) for key in list(tensors)[:3]], "and 2 more"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), "does not use: 'extra'"),
        (lambda tensors: tensors.update({"decoder.norm.weight": torch.zeros(35)}), r"has shape \(35,\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(folder, change, message):
    change_weights(folder, change)
    assert_refused(message, folder)


def test_integer_weights_are_refused(folder):
    change_weights(folder, lambda t: t.update({"decoder.norm.weight": torch.ones(36, dtype=torch.int64)}))
    assert_refused("decoder.norm.weight", folder)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 5000])
def test_weights_cut_short_are_refused(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused("cut short|not a safetensors file|damaged", folder)


def test_weights_with_a_damaged_header_are_refused(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[10:40] = b"\xff" * 30
    path.write_bytes(bytes(data))
    assert_refused("the header is not JSON", folder)
    path.write_bytes(b"\xff" * 200)
    assert_refused("damaged: its header claims", folder)


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    path = tmp_path / "taken"
    path.write_text("x")
    with pytest.raises(FileError, match="cannot be written"):
        tiny_model("gpt2").save_pretrained(path)
    assert path.read_text() == "x"


def test_an_unfinished_run_says_how_to_continue_it(tmp_path):
    recipe = write_recipe(tmp_path)
    train_until(recipe, tmp_path / "out", 7, save=True)
    command = f"monoblock train {tmp_path / 'out' / 'recipe.toml'} --out {tmp_path / 'out'} --resume"
    for load in (Transformer.from_pretrained, mb.load):
        with pytest.raises(FileError, match=r"has not finished; continue it with monoblock train .* --resume") as error:
            load(tmp_path / "out")
        assert command in str(error.value)
    assert cli(command.split()[1:]) == 0
    torch.use_deterministic_algorithms(False)
    assert Transformer.from_pretrained(tmp_path / "out").config.family == "decoder-only"
