"""Token shards: what was written is read, whole or not at all, and damage is seen."""

import json
import pickle

import numpy as np
import pytest

from monoblock.data.shards import DOCUMENTS, MANIFEST, Tokens, read_manifest, write_shards
from monoblock.errors import FileError, InputError

VOCAB = 101


def documents(count=23, seed=0, vocab=VOCAB):
    chance = np.random.default_rng(seed)
    return [chance.integers(0, vocab, size=chance.integers(0, 17)).tolist() for _ in range(count)]


@pytest.mark.parametrize("shard_tokens", [1, 7, 50, 10_000])
@pytest.mark.parametrize(("vocab", "dtype"), [(101, "uint16"), (2**16, "uint16"), (2**16 + 1, "uint32")])
def test_shards_hold_the_documents_whatever_their_size(tmp_path, shard_tokens, vocab, dtype):
    rows = documents(vocab=vocab)
    manifest = write_shards(tmp_path / "t", iter(rows), vocab, shard_tokens, fingerprint="f00d")
    tokens = Tokens(tmp_path / "t", verify=True)
    flat = [token for row in rows for token in row]
    assert manifest.dtype == dtype
    assert len(tokens) == len(flat)
    assert tokens.documents == len(rows)
    assert [tokens.document(number).tolist() for number in range(len(rows))] == rows
    for start, stop in [(0, len(flat)), (5, 43), (0, 0), (len(flat) - 1, len(flat)), (6, 8)]:
        assert tokens.read(start, stop).tolist() == flat[start:stop]
    assert (tokens.vocab, tokens.fingerprint) == (vocab, "f00d")


def test_memory_and_disk_are_twins(tmp_path):
    rows = documents()
    write_shards(tmp_path / "t", rows, VOCAB, 11)
    disk, memory = Tokens(tmp_path / "t"), Tokens.from_documents(rows, VOCAB)
    assert disk.read(0, len(disk)).tolist() == memory.read(0, len(memory)).tolist()
    assert disk.offsets.tolist() == memory.offsets.tolist()


def test_tokens_travel_to_another_process_as_a_path(tmp_path):
    write_shards(tmp_path / "t", [list(range(100))] * 1000, VOCAB)
    tokens = Tokens(tmp_path / "t")
    travelled = pickle.dumps(tokens)
    assert len(travelled) < 1000
    assert pickle.loads(travelled).read(3, 9).tolist() == tokens.read(3, 9).tolist()
    small = pickle.loads(pickle.dumps(Tokens.from_documents([[1, 2]], VOCAB)))
    assert small.read(0, 2).tolist() == [1, 2]


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "t").mkdir()
    with pytest.raises(FileError, match="is there already"):
        write_shards(tmp_path / "t", documents(), VOCAB)
    assert not any((tmp_path / "t").iterdir())


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[1, 2], [VOCAB]], "document 1 is no row of ids from 0 to 100"),
        ([[-1]], "document 0"),
        ([], "not one token"),
        ([[], []], "not one token"),
    ],
)
def test_what_cannot_be_written_leaves_nothing_behind(tmp_path, rows, said):
    with pytest.raises(InputError, match=said):
        write_shards(tmp_path / "t", rows, VOCAB)
    with pytest.raises(InputError, match=said):
        Tokens.from_documents(rows, VOCAB)
    assert not any(tmp_path.iterdir())


def test_an_interrupted_writer_leaves_nothing_behind(tmp_path):
    def broken():
        yield [1, 2, 3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path / "t", broken(), VOCAB, 2)
    assert not any(tmp_path.iterdir())


def test_an_impossible_place_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be written"):
        write_shards(tmp_path / "file" / "t", [[1]], VOCAB)


def written(tmp_path):
    write_shards(tmp_path / "t", documents(), VOCAB, 31)
    return tmp_path / "t"


def test_a_shortened_file_is_seen_at_once(tmp_path):
    folder = written(tmp_path)
    shard = folder / "tokens-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(FileError, match=r"tokens-00001\.bin has 60 bytes where the manifest says 62"):
        Tokens(folder)


def test_a_flipped_bit_is_seen_on_request(tmp_path):
    folder = written(tmp_path)
    shard = folder / "tokens-00000.bin"
    raw = bytearray(shard.read_bytes())
    raw[4] ^= 1
    shard.write_bytes(raw)
    Tokens(folder)
    with pytest.raises(FileError, match="damaged"):
        Tokens(folder, verify=True)


def test_an_id_beyond_the_vocabulary_never_reaches_a_model(tmp_path):
    folder = written(tmp_path)
    shard = folder / "tokens-00000.bin"
    shard.write_bytes(b"\xff\xff" + shard.read_bytes()[2:])
    with pytest.raises(FileError, match="beyond its vocabulary"):
        Tokens(folder).read(0, 5)


def test_document_boundaries_that_do_not_fit_are_seen(tmp_path):
    folder = written(tmp_path)
    places = np.fromfile(folder / DOCUMENTS, "<u8")
    places[3], places[4] = places[-1], 0
    places.tofile(folder / DOCUMENTS)
    with pytest.raises(FileError, match="does not fit the tokens"):
        Tokens(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "object"}, "dtype='object' cannot be"),
        ({"shards": [{"file": "../x", "count": 1, "sha256": ""}]}, "outside the folder"),
        ({"shards": [{"file": "gone.bin", "count": 1, "sha256": ""}]}, "lacks gone.bin"),
        ({"shards": 3}, "cannot be"),
        ({"vocab": 0}, "too small"),
        ({"extra": 1}, "no field 'extra'"),
        ({"format": "other"}, "format='other'"),
    ],
)
def test_a_manifest_is_not_trusted(tmp_path, change, said):
    folder = written(tmp_path)
    manifest = json.loads((folder / MANIFEST).read_text()) | change
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(FileError, match=said):
        Tokens(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 100_000])
def test_a_manifest_that_is_none_is_one_line(tmp_path, content):
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(FileError) as caught:
        read_manifest(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    folder = written(tmp_path)
    shard = folder / "tokens-00000.bin"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileError, match="link"):
        Tokens(folder)


def test_reading_outside_is_refused():
    tokens = Tokens.from_documents([[1, 2, 3]], VOCAB)
    for start, stop in [(-1, 2), (0, 4), (2, 1)]:
        with pytest.raises(InputError, match="there are 3"):
            tokens.read(start, stop)
