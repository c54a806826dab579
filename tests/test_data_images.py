"""IDX files as MNIST has them: read by path under their own names, and one line for what is not whole."""

import gzip
import os
import struct

import numpy as np
import pytest

from monoblock.data import corpora
from monoblock.data.corpora import how_to_get, load, place_of
from monoblock.data.idx import read_idx
from monoblock.errors import FileError

COUNT, HEIGHT, WIDTH = 7, 3, 5


def idx(array):
    """An IDX file of bytes, written by its definition."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def drawn(seed=0, count=COUNT):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, HEIGHT, WIDTH)), random.integers(0, 10, count)


def put(folder, stem="train", dash="-", packed=True, seed=0, count=COUNT):
    images, labels = drawn(seed, count)
    for name, array in ((f"images{dash}idx3", images), (f"labels{dash}idx1", labels)):
        raw = idx(array)
        path = folder / f"{stem}-{name}-ubyte{'.gz' * packed}"
        path.write_bytes(gzip.compress(raw) if packed else raw)
    return images, labels


@pytest.mark.parametrize(("dash", "packed"), [("-", True), ("-", False), (".", True), (".", False)])
def test_images_and_labels_are_read_as_they_were_written(tmp_path, dash, packed):
    images, labels = put(tmp_path, dash=dash, packed=packed)
    found = load(tmp_path, "train")
    assert (found.kind, len(found)) == ("images", COUNT)
    for row, pixels, label in zip(found, images, labels, strict=True):
        assert row.pixels.shape == (1, HEIGHT, WIDTH)
        assert row.pixels.dtype == np.float32
        np.testing.assert_allclose(row.pixels[0] * 255, pixels, rtol=1e-6)
        assert row.label == label


def test_a_folder_with_the_published_names_has_a_training_and_a_test_split(tmp_path):
    put(tmp_path)
    put(tmp_path, "t10k", seed=1, count=2)
    assert [len(load(tmp_path, split)) for split in ("train", "test", "all")] == [COUNT, 2, COUNT + 2]
    whole = str(tmp_path / "{split}-images-idx3-ubyte.gz")
    assert len(load(whole, "test")) == 2
    assert len(load(tmp_path / "train-images-idx3-ubyte.gz", "valid")) == 1  # one file: the last tenth


def test_fashion_is_found_in_the_folder_of_corpora_and_else_where_the_system_has_it(tmp_path, monkeypatch):
    (tmp_path / "fashion").mkdir()
    (tmp_path / "system").mkdir()
    put(tmp_path / "fashion")
    put(tmp_path / "fashion", "t10k", count=2)
    put(tmp_path / "system", count=3)
    there = {**corpora.CORPORA["fashion"].__dict__, "system": ("a-package", str(tmp_path / "system"))}
    monkeypatch.setitem(corpora.CORPORA, "fashion", type(corpora.CORPORA["fashion"])(**there))
    assert place_of("fashion", tmp_path) == "folder"
    assert [len(load("fashion", split, folder=tmp_path)) for split in ("train", "test")] == [COUNT, 2]
    assert place_of("fashion") == "system"
    assert len(load("fashion")) == 3
    os.remove(tmp_path / "system/train-images-idx3-ubyte.gz")
    assert place_of("fashion") is None
    assert "apt-get install a-package, or put fashion/{split}-images" in how_to_get("fashion")


IMAGES, LABELS = (idx(array) for array in drawn())
HUGE = struct.pack(">BBBB3I", 0, 0, 8, 3, 2**31, 2**31, 2**31)
BAD = [
    (b"", LABELS, "is no IDX file of bytes with 3 axes"),
    (IMAGES[:9], LABELS, "is no IDX file of bytes with 3 axes"),
    (b"\0\0\x0d\3" + IMAGES[4:], LABELS, "is no IDX file of bytes with 3 axes"),  # floats
    (LABELS, LABELS, "is no IDX file of bytes with 3 axes"),
    (IMAGES, IMAGES, "is no IDX file of bytes with 1 axis"),
    (IMAGES[:-1], LABELS, "fewer bytes than the 7×3×5 it states"),
    (IMAGES + b"x", LABELS, "more bytes than the 7×3×5 it states"),
    (HUGE, LABELS, "is too short for them"),
    (struct.pack(">BBBB3I", 0, 0, 8, 3, 2, 0, 5), LABELS, "states 2×0×5; give one or more"),
    (IMAGES, idx(np.zeros(5)), "holds 7 images and train-labels-idx1-ubyte"),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("images", "labels", "said"), BAD)
def test_what_is_not_whole_is_one_line(tmp_path, images, labels, said, packed):
    for name, raw in (("images-idx3", images), ("labels-idx1", labels)):
        (tmp_path / f"train-{name}-ubyte{'.gz' * packed}").write_bytes(gzip.compress(raw) if packed else raw)
    with pytest.raises(FileError) as caught:
        load(tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_gzip_file_and_a_missing_file_of_labels_are_one_line(tmp_path):
    put(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for raw in (whole[:-11], b"no gzip", whole[:40] + b"????" + whole[44:]):
        path.write_bytes(raw)
        with pytest.raises(FileError, match=r"is no whole \.gz file") as caught:
            list(read_idx(path))
        assert "\n" not in str(caught.value)
    path.write_bytes(whole)
    os.remove(tmp_path / "train-labels-idx1-ubyte.gz")
    with pytest.raises(FileError, match=r"labels-idx1-ubyte\.gz cannot be read: No such file"):
        list(read_idx(path))
