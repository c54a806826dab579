"""Files that do not lie: every one a library writes is read, as it is, from where it may lie."""

import json
import random
import struct

import pytest
import torch
from safetensors.torch import save, save_file

import monoblock as mb
from monoblock.interop.safely import DTYPES, open_weights, read_header
from monoblock.untrusted import inside, parse_json, read_json


def tensors(seed):
    """A few tensors of drawn shapes and formats, empty ones and numbers by themselves among them."""
    draw, made = random.Random(seed), {}
    for n in range(draw.randint(1, 9)):
        shape = [draw.choice([0, 1, 2, 3, 5, 7]) for _ in range(draw.randint(0, 4))]
        dtype = draw.choice(list(DTYPES.values()))
        whole = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=torch.Generator().manual_seed(n))
        made[f"layer.{n}.weight{'é' * draw.randint(0, 1)}"] = whole.to(dtype)
    return made


def same(found, wanted):
    return set(found) == set(wanted) and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name].double(), tensor.double())
        for name, tensor in wanted.items()
    )


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_what_the_library_writes_is_read_as_it_is(first, tmp_path):
    for seed in range(first, first + 50):
        wanted = tensors(seed)
        save_file(wanted, tmp_path / "model.safetensors", metadata={"format": "pt"})
        found = open_weights(tmp_path)
        assert same(found, wanted)
        assert found.shapes == {name: tuple(tensor.shape) for name, tensor in wanted.items()}
        assert found.nbytes == sum(tensor.nbytes for tensor in wanted.values())


def test_shards_are_one_table(tmp_path):
    wanted = tensors(3) | {"x": torch.randn(5, 7)}
    names = sorted(wanted)
    places = {name: f"model-{n % 3}.safetensors" for n, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: wanted[name] for name in names if places[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert same(open_weights(tmp_path), wanted)


def test_a_header_of_any_length_is_read(tmp_path):
    raw = save({"a": torch.arange(6.0)})
    length = struct.unpack("<Q", raw[:8])[0]
    for more in range(9):  # numbers that begin at odd places too
        path = tmp_path / "model.safetensors"
        path.write_bytes(struct.pack("<Q", length + more) + raw[8 : 8 + length] + b" " * more + raw[8 + length :])
        assert read_header(path)["a"].shape == (6,)
        assert torch.equal(open_weights(tmp_path)["a"].clone(), torch.arange(6.0))


def test_the_cache_of_the_hub_is_a_folder_though_its_files_are_links(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(3)}, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert torch.equal(open_weights(snapshot)["a"], torch.ones(3))
    save_file({"a": torch.ones(3)}, tmp_path / "outside")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../outside")
    with pytest.raises(mb.FileError, match="leads out of the folder"):
        open_weights(snapshot)


def test_a_folder_may_be_a_link_itself(tmp_path):
    (tmp_path / "real").mkdir()
    save_file({"a": torch.ones(3)}, tmp_path / "real" / "model.safetensors")
    (tmp_path / "link").symlink_to("real")
    assert list(open_weights(tmp_path / "link")) == ["a"]
    assert inside(tmp_path / "link", "model.safetensors").is_file()


def test_json_is_read_as_the_standard_library_reads_it(tmp_path):
    data = {"a": [1, -2.5, True, None, "é\n\u2028"], "b": {"c": {"d": [[], {}]}}, "": 1e300}
    (tmp_path / "x.json").write_text(json.dumps(data))
    assert read_json(tmp_path / "x.json") == data
    assert parse_json(b"\xef\xbb\xbf[1]", "text") == [1]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' stands there twice"),
        (b'{"a": NaN}', "NaN is no number of JSON"),
        (b'{"a": -Infinity}', "-Infinity is no number of JSON"),
        (b'{"a": 1e999}', "too large a number"),
        (b"[" * 40 + b"]" * 40, "nested deeper than 32 levels"),
        (b"[" * 100_000, "nested too deep"),
        (b"[" + b"0," * 1_000_001 + b"0]", "more than 1,000,000 values"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b'{"a"', "is not JSON"),
    ],
)
def test_json_that_could_be_read_in_two_ways_is_read_in_none(raw, says):
    with pytest.raises(mb.FileError, match=says):
        parse_json(raw, "text")
