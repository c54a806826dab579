"""Files from strangers: limits on sizes, nesting and numbers, one line for every error, and no way out of a folder."""

import gzip
import json
import os
import time
import zipfile

import numpy as np
import pytest
import torch

import monoblock as mb
from monoblock.config.parts import PatchConfig
from monoblock.data.readers.by_path import infer_kind, read_split
from monoblock.interop.adapters import load_adapter, save_adapter
from monoblock.interop.model_folder import ModelFolder, read_any_config
from monoblock.interop.save import save_model
from monoblock.nn.lora import add_lora
from monoblock.runs.load import load
from monoblock.runs.recipe import parse_recipe, read_recipe
from monoblock.tasks.images import read_pixels
from monoblock.training import checkpoint, resume_state
from monoblock.untrusted_files import parse_json, parse_toml, read_text, reading, write_atomically

RECIPE = '[data]\ncorpus = "reverse"\n[model]\nfamily = "gpt"\nwidth = 8\ndepth = 1\nheads = 1\ncontext = 8\n'
PICTURE = PatchConfig(image=8, patch=4, channels=3)


def assert_refused(message, function, *args):
    """Check that one line is raised, in little time."""
    start = time.process_time()
    with pytest.raises(mb.MonoblockError, match=message) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 300
    assert time.process_time() - start < 2


# -- text, JSON and TOML -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".".join(["a"] * 30_000) + " = 1", "a key of more than 16 parts"),
        (" . ".join(['"a"'] * 30_000) + " = 1", "a key of more than 16 parts"),
        (f"[{'.'.join(['a'] * 9000)}]", "a key of more than 16 parts"),
        ("x = " + "[" * 50_000, "nested too deep|not valid TOML"),
        ("x = " + "[" * 60 + "]" * 60, "nested deeper than 32 levels"),
        ("x = " + "9" * 5000, "not valid TOML"),
        ("x = 0x" + "f" * 9000, "more than 64 digits"),
        ("x = inf", "too large a number"),
    ],
)
def test_toml_with_dangerous_content_is_refused(text, message):
    assert_refused(message, parse_toml, text, "recipe.toml")


def test_ordinary_toml_is_read():
    text = 'a.b.c = 1\n[x."y.z"]\nlist = [0.1, 0.2, 0.3]\ntext = "a.b.c.d.e.f"\nwords = "one. two. three. four."\n'
    assert parse_toml(text, "x")["a"] == {"b": {"c": 1}}
    assert parse_toml("values = [" + ", ".join(["0.5"] * 1000) + "]", "x")["values"] == [0.5] * 1000


def test_a_number_of_many_digits_is_refused():
    assert_refused("too large a number", parse_json, b'{"a": ' + b"9" * 65 + b"}", "x")
    assert parse_json(b'{"a": 1000000000000000019884624838656}', "x")["a"] > 10**30  # in published tokenizers


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    (tmp_path / "recipe.toml").write_bytes(b"name = '\xff'")
    assert_refused("byte 8 is not UTF-8", read_recipe, tmp_path / "recipe.toml")
    assert_refused("byte 8 is not UTF-8", read_text, tmp_path / "recipe.toml")


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("x"), IndexError(), RecursionError(), MemoryError(), OSError(5, "io")]
)
def test_the_guard_turns_every_exception_into_one_that_names_the_file(error):
    with pytest.raises(mb.FileError, match="some/file") as caught, reading("some/file"):
        raise error
    assert caught.value.__cause__ is error


def test_the_guard_lets_interrupts_and_own_errors_pass():
    for error in (KeyboardInterrupt(), mb.InputError("x"), UserWarning("x")):
        with pytest.raises(type(error)), reading("file"):
            raise error


def test_a_message_has_at_most_300_characters_and_keeps_its_end():
    text = str(mb.FileError("start " + "x" * 1000 + "\n\x1b[31m end"))
    assert len(text) == 300
    assert text.startswith("start xxx")
    assert text.endswith("x [31m end")


@pytest.mark.parametrize("kind", [[], {}, 1, None])
def test_a_kind_that_is_not_a_word_is_refused(kind, tmp_path):
    data = mb.gpt(vocab=8, width=8, depth=1, heads=1, context=8).to_dict()
    data["input"]["kind"] = kind
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert_refused("kind", read_any_config, str(tmp_path / "config.json"))


def test_a_number_beyond_any_float_is_refused():
    data = mb.gpt(vocab=8, width=8, depth=1, heads=1, context=8).to_dict()
    data["init"]["std"] = 10**400
    assert_refused("is not a number", mb.ModelConfig.from_dict, data)


def make_adapter(folder, **changes):
    torch.manual_seed(0)
    model = mb.Transformer(mb.gpt(vocab=8, width=8, depth=1, heads=1, context=8))
    add_lora(model, rank=2)
    save_adapter(model, folder)
    config = json.loads((folder / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return mb.Transformer(mb.gpt(vocab=8, width=8, depth=1, heads=1, context=8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_dropout": 7}, "lora_dropout=7 is not a rate"),
        ({"lora_dropout": "x"}, "is not a rate"),
        ({"alpha_pattern": {"a": []}}, "alpha_pattern"),
        ({"rank_pattern": {"a": "b"}}, "rank_pattern"),
    ],
)
def test_an_adapter_with_a_wrong_configuration_is_refused(changes, message, tmp_path):
    assert_refused(message, load_adapter, make_adapter(tmp_path, **changes), tmp_path)


@pytest.mark.parametrize("shape", [(0, 8), (), (8,)])
def test_an_adapter_with_a_matrix_of_another_shape_is_refused(shape, tmp_path):
    from safetensors.torch import load_file, save_file

    model = make_adapter(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name] = torch.zeros(shape)
    if shape == (0, 8):
        tensors[name.replace("lora_A", "lora_B")] = torch.zeros(8, 0)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    assert_refused("adapter for another model", load_adapter, model, tmp_path)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"{}", b"[[1]]", b"\xff", b'["a", "b"', b"9" * 9000])
def test_labels_that_are_no_list_are_refused(content, tmp_path):
    (tmp_path / "labels.json").write_bytes(content)
    assert_refused("labels.json", lambda path: ModelFolder(path).labels, tmp_path)


SCALER = torch.amp.GradScaler("cpu").state_dict()
METADATA = {
    "tokens": 1,
    "micro_batches": 1,
    "guard": dict.fromkeys(("mean", "good", "bad_in_a_row", "good_in_a_row", "rollbacks"), 1),
    "best": {"step": 1, "loss": 0.5},
    "last_good": None,
    "identity": {},
    "environment": {},
    "scaler": {},
}
HUGE = 10**400  # beyond any float


@pytest.mark.parametrize(
    "change",
    [
        *({"tokens": value} for value in ("x", HUGE, True, 2**63)),
        *({"guard": value} for value in ([], {}, METADATA["guard"] | {"mean": HUGE}, METADATA["guard"] | {"mean": -1})),
        *({"best": value} for value in (None, {"step": 1}, {"step": "x", "loss": 1}, {"step": 1, "loss": HUGE})),
        *({"scaler": value} for value in (None, {"scale": 1.0}, SCALER | {"scale": "x"}, SCALER | {"scale": HUGE})),
        *({"last_good": 1.5}, {"micro_batches": 0}, {"identity": []}, {"environment": None}),
    ],
)
def test_an_edited_state_of_a_checkpoint_is_refused(change, tmp_path):
    checkpoint.save(tmp_path, checkpoint.Checkpoint(5, {"model": {"w": torch.zeros(2)}}, METADATA | change))
    resume_state.check_metadata(METADATA, SCALER)
    assert_refused(
        "of the checkpoint", resume_state.check_metadata, checkpoint.load_metadata(tmp_path / "step-5"), SCALER
    )


@pytest.mark.parametrize("name", ["state.json", "manifest.json", "model.safetensors"])
def test_a_link_out_of_a_checkpoint_is_not_read(name, tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoint.save(folder, checkpoint.Checkpoint(5, {"model": {"w": torch.zeros(2)}}, METADATA))
    (folder / "step-5" / name).rename(tmp_path / name)
    (folder / "step-5" / name).symlink_to(tmp_path / name)
    newest, problems = checkpoint.find_newest(folder)
    assert newest is None
    assert "link" in problems[0] or "outside" in problems[0]


# -- archives and pictures ---------------------------------------------------------------------------------------------


def test_an_npz_bomb_is_refused_before_it_is_read(tmp_path):
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (300000000, 2, 2)}".ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("images.npy", "w", force_zip64=True) as file:
            file.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
            for _ in range(300):
                file.write(bytes(2**20))
        archive.writestr("labels.npy", b"")
    assert_refused("would expand to 300 MB", read_split, str(tmp_path / "a.npz"), "all", None, "file")
    assert_refused("would expand to 300 MB", read_pixels, tmp_path / "a.npz", PICTURE)


def test_an_npz_header_that_states_more_than_the_file_has_is_refused(tmp_path):
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (3000000000000, 2, 2)}".ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("images.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    assert_refused("its header states 12,000,000,000,000 bytes", read_pixels, tmp_path / "a.npz", PICTURE)


def test_npz_arrays_are_read_as_numpy_reads_them(tmp_path):
    images = np.asfortranarray(np.random.default_rng(0).random((4, 8, 8)))
    np.savez_compressed(tmp_path / "a.npz", images=images, labels=np.arange(4))
    rows = read_split(str(tmp_path / "a.npz"), "all", None, "file").rows
    np.testing.assert_array_equal(np.stack([row.pixels[0] for row in rows]), images.astype(np.float32))


def test_a_gzip_bomb_is_refused_before_it_is_read(tmp_path):
    header = bytes((0, 0, 8, 3)) + b"".join(size.to_bytes(4, "big") for size in (300, 1024, 1024))
    path = tmp_path / "train-images-idx3-ubyte.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(header + bytes(300 * 2**20))
    assert_refused("would expand to 300 MB", read_split, str(path), "all", None, "file")


def test_a_picture_of_another_size_is_refused_before_it_is_decoded(tmp_path):
    from PIL import Image

    for suffix in ("png", "jpg", "gif", "bmp", "webp"):
        Image.new("RGB", (3000, 3000)).save(tmp_path / f"a.{suffix}")
        assert_refused("3 × 3000 × 3000", read_pixels, tmp_path / f"a.{suffix}", PICTURE)
        Image.new("RGB", (8, 8), (255, 255, 255)).save(tmp_path / f"b.{suffix}")
        assert read_pixels(tmp_path / f"b.{suffix}", PICTURE)[0].shape == (3, 8, 8)


def test_a_picture_in_another_format_is_refused(tmp_path):
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    assert_refused("not a picture in one of the formats PNG", read_pixels, tmp_path / "a.png", PICTURE)


# -- links and pipes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.npz", "a.jsonl", "a.txt", "a.json", "a.tsv", "train-images-idx3-ubyte.gz"])
def test_a_pipe_as_data_is_refused(name, tmp_path):
    os.mkfifo(tmp_path / name)
    assert_refused("not a regular file", read_split, str(tmp_path / name), "all", None, "file")


def test_a_pipe_as_recipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "recipe.toml")
    assert_refused("not a regular file", read_recipe, tmp_path / "recipe.toml")


@pytest.mark.parametrize("name", ["recipe.toml", "1_Pooling"])
def test_a_link_out_of_a_model_folder_is_refused(name, tmp_path):
    folder, outside = tmp_path / "model", tmp_path / "outside"
    tokenizer = mb.Tokenizer.train("char", ["abc"], 20)
    save_model(mb.Transformer(mb.gpt(vocab=20, width=8, depth=1, heads=1, context=8)), folder)
    tokenizer.save_pretrained(folder)
    outside.mkdir()
    (outside / "recipe.toml").write_text(RECIPE)
    (outside / "config.json").write_text("{}")
    (folder / name).symlink_to(outside / name if name == "recipe.toml" else outside)
    assert_refused("link", load, folder)


def test_a_link_to_the_configuration_of_another_folder_is_refused(tmp_path):
    folder = tmp_path / "model"
    save_model(mb.Transformer(mb.gpt(vocab=20, width=8, depth=1, heads=1, context=8)), folder)
    read_any_config(str(folder))
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    assert_refused("a link that leads out of the folder", read_any_config, str(folder))
    read_any_config(str(folder / "config.json"))  # the user names it


def test_a_link_out_of_a_data_folder_is_refused(tmp_path):
    (tmp_path / "secret.tsv").write_text("one\teins\n")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.tsv").symlink_to(tmp_path / "secret.tsv")
    assert_refused("a link that leads out of the folder", read_split, str(folder), "train", None, "file")
    assert_refused("a link that leads out of the folder", infer_kind, str(folder), ("pairs", "labelled"))
    for path in (folder / "train.tsv", folder / "{split}.tsv"):  # the user names the file
        assert len(read_split(str(path), "train", None, "file").rows) == 1


def test_labels_that_are_a_link_out_of_the_folder_of_their_images_are_refused(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train-images-idx3-ubyte").write_bytes(bytes((0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 9)))
    (tmp_path / "secret").write_bytes(bytes((0, 0, 8, 1, 0, 0, 0, 1, 7)))
    (folder / "train-labels-idx1-ubyte").symlink_to(tmp_path / "secret")
    for path in (folder, folder / "train-images-idx3-ubyte"):
        assert_refused("a link that leads out of the folder", read_split, str(path), "train", None, "file")


def test_quantize_does_not_copy_a_file_that_a_link_leads_to(tmp_path):
    model = mb.Transformer(mb.gpt(vocab=20, width=8, depth=1, heads=1, context=8))
    folder = tmp_path / "model"
    save_model(model, folder)
    (tmp_path / "secret").write_text("{}")
    (folder / "labels.json").symlink_to(tmp_path / "secret")
    loaded = mb.Transformer.from_pretrained(folder)
    assert_refused("a link that leads out of the folder", save_model, loaded, tmp_path / "out")


@pytest.mark.parametrize("name", ["../../../X", "/tmp/x", "a/b", "..", "", "a\\nb", "x" * 200])
def test_the_name_of_a_recipe_cannot_be_a_path(name):
    data = parse_toml(RECIPE, "x")
    assert parse_recipe(data | {"name": "my-run.1 =2"}).name == "my-run.1 =2"
    assert_refused("is not the name of a folder in runs/", parse_recipe, data | {"name": name})


def test_a_file_or_a_link_to_one_is_replaced_and_a_folder_a_pipe_and_a_device_are_not(tmp_path):
    (tmp_path / "target").write_text("target")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "file").write_text("before")
    for name in ("file", "link", "new"):
        write_atomically(tmp_path / name, "é")
        assert (tmp_path / name).read_bytes() == "é".encode()
        assert not (tmp_path / name).is_symlink()
    assert (tmp_path / "target").read_text() == "target"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "device", "folder"):
        with pytest.raises(mb.FileError, match=f"{name} cannot be written: it is not a regular file"):
            write_atomically(tmp_path / name, "é")
    with pytest.raises(mb.FileError, match="cannot be written: No such file or directory"):
        write_atomically(tmp_path / "missing/file", "é")
    assert not list(tmp_path.glob("*.tmp"))
