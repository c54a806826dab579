"""Token shards: what was written is read back, folders are complete or absent, and damage is detected."""

import json
import pickle

import numpy as np
import pytest

from monoblock.data.token_folder import (
    MANIFEST_FILE,
    SplitTokens,
    SplitWriter,
    TokenDataset,
    read_manifest,
    token_dtype,
    verify_files,
    write_manifest,
)
from monoblock.errors import FileError, InputError

VOCAB = 101


def documents(count=23, seed=0, vocab=VOCAB):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, size=rng.integers(0, 17)).tolist() for _ in range(count)]


def write_tokens(folder, rows, vocab=VOCAB, shard_tokens=10_000):
    folder.mkdir()
    dtype = token_dtype(vocab)
    with SplitWriter(folder, "train", dtype, shard_tokens) as writer:
        for row in rows:
            writer.append(SplitTokens(bytearray(np.array(row, dtype).tobytes()), [len(row)]))
        return write_manifest(folder, vocab, "f00d", {"train": writer.finish()})


@pytest.mark.parametrize("shard_tokens", [1, 7, 50, 10_000])
@pytest.mark.parametrize(("vocab", "dtype"), [(101, "uint16"), (2**16, "uint16"), (2**16 + 1, "uint32")])
def test_documents_are_read_back_for_any_shard_size(tmp_path, shard_tokens, vocab, dtype):
    rows = documents(vocab=vocab)
    manifest = write_tokens(tmp_path / "t", rows, vocab, shard_tokens)
    tokens = TokenDataset(tmp_path / "t")
    verify_files(tmp_path / "t", manifest.train)
    flat = [token for row in rows for token in row]
    assert manifest.dtype == dtype
    assert len(tokens) == len(flat)
    assert np.split(np.array(flat), tokens.document_offsets.astype(int)[1:-1])[3].tolist() == rows[3]
    assert np.diff(tokens.document_offsets.astype(int)).tolist() == list(map(len, rows))
    for start, stop in [(0, len(flat)), (5, 43), (0, 0), (len(flat) - 1, len(flat)), (6, 8)]:
        assert tokens.read(start, stop).tolist() == flat[start:stop]
    assert (tokens.vocab, tokens.fingerprint) == (vocab, "f00d")


def test_memory_and_disk_give_the_same_tokens(tmp_path):
    rows = documents()
    write_tokens(tmp_path / "t", rows, VOCAB, 11)
    disk, memory = TokenDataset(tmp_path / "t"), TokenDataset.from_documents(rows, VOCAB)
    assert disk.read(0, len(disk)).tolist() == memory.read(0, len(memory)).tolist()
    assert disk.document_offsets.tolist() == memory.document_offsets.tolist()


def test_a_dataset_on_disk_is_pickled_as_its_path(tmp_path):
    write_tokens(tmp_path / "t", [list(range(100))] * 1000, VOCAB)
    tokens = TokenDataset(tmp_path / "t")
    pickled = pickle.dumps(tokens)
    assert len(pickled) < 1000
    assert pickle.loads(pickled).read(3, 9).tolist() == tokens.read(3, 9).tolist()
    small = pickle.loads(pickle.dumps(TokenDataset.from_documents([[1, 2]], VOCAB)))
    assert small.read(0, 2).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, 2], [VOCAB]], "document 1 is not a list of ids from 0 to 100"),
        ([[-1]], "document 0"),
        ([], "no tokens"),
        ([[], []], "no tokens"),
    ],
)
def test_invalid_documents_are_refused(rows, message):
    with pytest.raises(InputError, match=message):
        TokenDataset.from_documents(rows, VOCAB)


def test_a_folder_without_tokens_is_not_written(tmp_path):
    with pytest.raises(InputError, match="no tokens"):
        write_tokens(tmp_path / "t", [[], []])
    assert not (tmp_path / "t" / MANIFEST_FILE).exists()


def write_folder(tmp_path):
    write_tokens(tmp_path / "t", documents(), VOCAB, 31)
    return tmp_path / "t"


def test_a_truncated_file_is_detected_on_opening(tmp_path):
    folder = write_folder(tmp_path)
    shard = folder / "train-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(FileError, match=r"train-00001\.bin has 60 bytes where the manifest states 62"):
        TokenDataset(folder)


def test_a_flipped_bit_is_detected_with_verify(tmp_path):
    folder = write_folder(tmp_path)
    shard = folder / "train-00000.bin"
    raw = bytearray(shard.read_bytes())
    raw[4] ^= 1
    shard.write_bytes(raw)
    TokenDataset(folder)
    with pytest.raises(FileError, match="damaged"):
        verify_files(folder, read_manifest(folder).train)


def test_an_id_beyond_the_vocabulary_never_reaches_a_model(tmp_path):
    folder = write_folder(tmp_path)
    shard = folder / "train-00000.bin"
    shard.write_bytes(b"\xff\xff" + shard.read_bytes()[2:])
    with pytest.raises(FileError, match="beyond its vocabulary"):
        TokenDataset(folder).read(0, 5)


def test_invalid_document_offsets_are_detected(tmp_path):
    folder = write_folder(tmp_path)
    offsets = np.fromfile(folder / "train-documents.bin", "<u8")
    offsets[3], offsets[4] = offsets[-1], 0
    offsets.tofile(folder / "train-documents.bin")
    with pytest.raises(FileError, match="does not fit the tokens"):
        TokenDataset(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "object"}, "dtype='object' is not one of"),
        ({"train.shards": [{"file": "../x", "count": 1, "sha256": ""}]}, "outside the folder"),
        ({"train.shards": [{"file": "gone.bin", "count": 1, "sha256": ""}]}, "gone.bin is missing"),
        ({"train.shards": 3}, "cannot be"),
        ({"vocab": 0}, "too small"),
        ({"extra": 1}, "no field 'extra'"),
        ({"format": "other"}, "format='other'"),
    ],
)
def test_a_manifest_is_not_trusted(tmp_path, change, message):
    folder = write_folder(tmp_path)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        (manifest[section] if section else manifest)[name] = value
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(FileError, match=message):
        TokenDataset(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 100_000])
def test_an_invalid_manifest_raises_one_line(tmp_path, content):
    (tmp_path / MANIFEST_FILE).write_text(content)
    with pytest.raises(FileError) as caught:
        read_manifest(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_link_out_of_the_folder_is_rejected(tmp_path):
    folder = write_folder(tmp_path)
    shard = folder / "train-00000.bin"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileError, match="link"):
        TokenDataset(folder)


def test_reading_out_of_range_is_rejected():
    tokens = TokenDataset.from_documents([[1, 2, 3]], VOCAB)
    for start, stop in [(-1, 2), (0, 4), (2, 1)]:
        with pytest.raises(InputError, match="there are 3"):
            tokens.read(start, stop)
