"""IDX files as MNIST has them: read by path under their own names, and one line if a file is incomplete."""

import gzip
import os
import struct

import numpy as np
import pytest

from monoblock.data.corpora.load import CORPORA, corpus_location, install_hint, load_corpus
from monoblock.data.readers.images import read_idx
from monoblock.errors import FileError

COUNT, HEIGHT, WIDTH = 7, 3, 5


def idx_bytes(array):
    """Encode an array as an IDX file of bytes."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def random_arrays(seed=0, count=COUNT):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, HEIGHT, WIDTH)), rng.integers(0, 10, count)


def write_images(folder, stem="train", dash="-", compressed=True, seed=0, count=COUNT):
    images, labels = random_arrays(seed, count)
    for name, array in ((f"images{dash}idx3", images), (f"labels{dash}idx1", labels)):
        raw = idx_bytes(array)
        path = folder / f"{stem}-{name}-ubyte{'.gz' * compressed}"
        path.write_bytes(gzip.compress(raw) if compressed else raw)
    return images, labels


@pytest.mark.parametrize(("dash", "compressed"), [("-", True), ("-", False), (".", True), (".", False)])
def test_images_and_labels_are_read_as_they_were_written(tmp_path, dash, compressed):
    images, labels = write_images(tmp_path, dash=dash, compressed=compressed)
    corpus = load_corpus(tmp_path, "train")
    assert (corpus.kind, len(corpus)) == ("images", COUNT)
    for row, pixels, label in zip(corpus, images, labels, strict=True):
        assert row.pixels.shape == (1, HEIGHT, WIDTH)
        assert row.pixels.dtype == np.float32
        np.testing.assert_allclose(row.pixels[0] * 255, pixels, rtol=1e-6)
        assert row.label == label


def test_a_folder_with_the_published_names_has_a_training_and_a_test_split(tmp_path):
    write_images(tmp_path)
    write_images(tmp_path, "t10k", seed=1, count=2)
    assert [len(load_corpus(tmp_path, split)) for split in ("train", "test", "all")] == [COUNT, 2, COUNT + 2]
    template = str(tmp_path / "{split}-images-idx3-ubyte.gz")
    assert len(load_corpus(template, "test")) == 2
    assert len(load_corpus(tmp_path / "train-images-idx3-ubyte.gz", "valid")) == 1  # one file: the last tenth


def test_fashion_is_found_in_the_folder_of_corpora_or_in_the_system_package(tmp_path, monkeypatch):
    (tmp_path / "fashion").mkdir()
    (tmp_path / "system").mkdir()
    write_images(tmp_path / "fashion")
    write_images(tmp_path / "fashion", "t10k", count=2)
    write_images(tmp_path / "system", count=3)
    fields = {**CORPORA["fashion"].__dict__, "system_package": ("a-package", str(tmp_path / "system"))}
    monkeypatch.setitem(CORPORA, "fashion", type(CORPORA["fashion"])(**fields))
    assert corpus_location("fashion", tmp_path) == "folder"
    assert [len(load_corpus("fashion", split, folder=tmp_path)) for split in ("train", "test")] == [COUNT, 2]
    assert corpus_location("fashion") == "system"
    assert len(load_corpus("fashion")) == 3
    os.remove(tmp_path / "system/train-images-idx3-ubyte.gz")
    assert corpus_location("fashion") is None
    assert "apt-get install a-package, or put fashion/{split}-images" in install_hint("fashion")


IMAGES, LABELS = (idx_bytes(array) for array in random_arrays())
HUGE = struct.pack(">BBBB3I", 0, 0, 8, 3, 2**31, 2**31, 2**31)
BAD = [
    (b"", LABELS, "is not an IDX file of bytes with 3 axes"),
    (IMAGES[:9], LABELS, "is not an IDX file of bytes with 3 axes"),
    (b"\0\0\x0d\3" + IMAGES[4:], LABELS, "is not an IDX file of bytes with 3 axes"),  # floats
    (LABELS, LABELS, "is not an IDX file of bytes with 3 axes"),
    (IMAGES, IMAGES, "is not an IDX file of bytes with 1 axis"),
    (IMAGES[:-1], LABELS, "fewer bytes than the 7×3×5 that its header states"),
    (IMAGES + b"x", LABELS, "more bytes than the 7×3×5 that its header states"),
    (HUGE, LABELS, "bytes that its header states"),
    (struct.pack(">BBBB3I", 0, 0, 8, 3, 2, 0, 5), LABELS, "states the shape 2×0×5; no size may be 0"),
    (IMAGES, idx_bytes(np.zeros(5)), "holds 7 images, but train-labels-idx1-ubyte"),
]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("images", "labels", "message"), BAD)
def test_an_incomplete_file_raises_one_line(tmp_path, images, labels, message, compressed):
    for name, raw in (("images-idx3", images), ("labels-idx1", labels)):
        (tmp_path / f"train-{name}-ubyte{'.gz' * compressed}").write_bytes(gzip.compress(raw) if compressed else raw)
    with pytest.raises(FileError) as caught:
        load_corpus(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_gzip_file_and_a_missing_file_of_labels_raise_one_line(tmp_path):
    write_images(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    complete = path.read_bytes()
    for raw in (complete[:-11], b"no gzip", complete[:40] + b"????" + complete[44:]):
        path.write_bytes(raw)
        with pytest.raises(FileError, match=r"is not a complete \.gz file") as caught:
            list(read_idx(path))
        assert "\n" not in str(caught.value)
    path.write_bytes(complete)
    os.remove(tmp_path / "train-labels-idx1-ubyte.gz")
    with pytest.raises(FileError, match=r"has no file .train-labels-idx1-ubyte\.gz"):
        list(read_idx(path))
