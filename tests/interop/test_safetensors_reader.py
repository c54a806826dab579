"""Valid safetensors and JSON files are read unchanged; malformed_files.py has the others."""

import json
import random
import struct

import pytest
import torch
from safetensors.torch import save, save_file

import monoblock as mb
from monoblock.interop.model_folder import ModelFolder
from monoblock.interop.weights import DTYPES, read_header
from monoblock.untrusted_files import parse_json, read_json, safe_join


def random_tensors(seed):
    """Draw tensors of random shapes and dtypes, among them empty ones and scalars."""
    rng, result = random.Random(seed), {}
    for n in range(rng.randint(1, 9)):
        shape = [rng.choice([0, 1, 2, 3, 5, 7]) for _ in range(rng.randint(0, 4))]
        dtype = rng.choice(list(DTYPES.values()))
        values = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=torch.Generator().manual_seed(n))
        result[f"layer.{n}.weight{'é' * rng.randint(0, 1)}"] = values.to(dtype)
    return result


def equal_tensors(weights, expected):
    return set(weights) == set(expected) and all(
        weights[name].dtype == tensor.dtype and torch.equal(weights[name].double(), tensor.double())
        for name, tensor in expected.items()
    )


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_files_of_the_safetensors_library_are_read_unchanged(first, tmp_path):
    for seed in range(first, first + 50):
        expected = random_tensors(seed)
        save_file(expected, tmp_path / "model.safetensors", metadata={"format": "pt"})
        weights = ModelFolder(tmp_path).weights
        assert equal_tensors(weights, expected)
        assert weights.shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}
        assert weights.nbytes == sum(tensor.nbytes for tensor in expected.values())


def test_shards_are_read_as_one_mapping(tmp_path):
    expected = random_tensors(3) | {"x": torch.randn(5, 7)}
    names = sorted(expected)
    weight_map = {name: f"model-{n % 3}.safetensors" for n, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: expected[name] for name in names if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert equal_tensors(ModelFolder(tmp_path).weights, expected)


def test_a_header_of_any_length_is_read(tmp_path):
    raw = save({"a": torch.arange(6.0)})
    length = struct.unpack("<Q", raw[:8])[0]
    for padding in range(9):  # tensors that start at unaligned offsets too
        path = tmp_path / "model.safetensors"
        path.write_bytes(struct.pack("<Q", length + padding) + raw[8 : 8 + length] + b" " * padding + raw[8 + length :])
        assert read_header(path)["a"].shape == (6,)
        assert torch.equal(ModelFolder(tmp_path).weights["a"].clone(), torch.arange(6.0))


def test_symlinks_into_the_blobs_of_the_hub_cache_are_followed_and_others_refused(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(3)}, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert torch.equal(ModelFolder(snapshot).weights["a"], torch.ones(3))
    save_file({"a": torch.ones(3)}, tmp_path / "outside")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../outside")
    with pytest.raises(mb.FileError, match="leads out of the folder"):
        _ = ModelFolder(snapshot).weights


def test_a_folder_may_be_a_symlink(tmp_path):
    (tmp_path / "real").mkdir()
    save_file({"a": torch.ones(3)}, tmp_path / "real" / "model.safetensors")
    (tmp_path / "link").symlink_to("real")
    assert list(ModelFolder(tmp_path / "link").weights) == ["a"]
    assert safe_join(tmp_path / "link", "model.safetensors").is_file()


def test_json_is_read_as_the_standard_library_reads_it(tmp_path):
    data = {"a": [1, -2.5, True, None, "é\n\u2028"], "b": {"c": {"d": [[], {}]}}, "": 1e300}
    (tmp_path / "x.json").write_text(json.dumps(data))
    assert read_json(tmp_path / "x.json") == data
    assert parse_json(b"\xef\xbb\xbf[1]", "text") == [1]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' occurs twice"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": 1e999}', "too large a number"),
        (b"[" * 40 + b"]" * 40, "nested deeper than 32 levels"),
        (b"[" * 100_000, "nested too deep"),
        (b"[" + b"0," * 1_000_001 + b"0]", "more than 1,000,000 values"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b'{"a"', "is not JSON"),
    ],
)
def test_ambiguous_or_malformed_json_is_refused(raw, message):
    with pytest.raises(mb.FileError, match=message):
        parse_json(raw, "text")
