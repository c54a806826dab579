"""Readers return the rows of a file, or one line that names the file and the line."""

import json

import numpy as np
import pytest

from monoblock.data.readers.images import read_images
from monoblock.data.readers.records import LabelledText, Pair, TaggedSentence
from monoblock.data.readers.tables import read_aligned_pairs, read_conll, read_documents, read_labelled, read_pairs
from monoblock.data.readers.text import read_text
from monoblock.errors import FileError


@pytest.fixture
def write_file(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_a_text_file_is_one_unchanged_document(write_file):
    text = "one\n\n  two\nthree"
    assert list(read_text(write_file("a.txt", text))) == [text]


def test_blank_lines_separate_documents_and_windows_line_ends_do_not_matter(write_file):
    path = write_file("a.txt", "\ufeffone\r\ntwo\r\n \r\n\r\n\r\nthree\r\n")
    assert list(read_text(path, "blank-lines")) == ["one\ntwo", "three"]


def test_documents_are_streamed(write_file):
    path = write_file("a.txt", b"first\n\nsecond\n\n\xff\xfe\n")
    documents = read_text(path, "blank-lines")
    assert [next(documents), next(documents)] == ["first", "second"]
    with pytest.raises(FileError, match="line 5: a byte is not UTF-8"):
        next(documents)


def test_pairs_with_and_without_counts(write_file):
    assert list(read_pairs(write_file("a.tsv", "eins\tone\n\nzwei\ttwo\t3\n"))) == [
        Pair("eins", "one", 1),
        Pair("zwei", "two", 3),
    ]


def test_aligned_files_are_paired_line_by_line(write_file):
    pairs = read_aligned_pairs(write_file("a.de", "eins\n\nzwei\n"), write_file("a.en", "one\n\ntwo\n"))
    assert list(pairs) == [Pair("eins", "one"), Pair("zwei", "two")]


def test_labelled_text_in_columns_and_in_objects(write_file):
    rows = [LabelledText("very good", "pos"), LabelledText("bad", "0")]
    assert list(read_labelled(write_file("a.tsv", "pos\tvery good\n0\tbad\n"))) == rows
    objects = [{"text": "very good", "label": "pos"}, {"text": "bad", "label": 0}]
    assert list(read_labelled(write_file("a.jsonl", "\n".join(map(json.dumps, objects))))) == rows


def test_conll_columns(write_file):
    text = "-DOCSTART- -X- O O\n\nEU NNP I-NP B-ORG\nrejects VBZ I-VP O\n\nGerman JJ I-NP B-MISC"
    assert list(read_conll(write_file("a.conll", text))) == [
        TaggedSentence(("EU", "rejects"), ("B-ORG", "O"), document=1),
        TaggedSentence(("German",), ("B-MISC",), document=1),
    ]


def test_images_become_numbers_from_0_to_1_with_channels_first(tmp_path):
    images = np.arange(3 * 5 * 7, dtype=np.uint8).reshape(3, 5, 7)
    np.savez(tmp_path / "a.npz", images=images, labels=np.array([2, 0, 1]))
    rows = list(read_images(tmp_path / "a.npz"))
    assert [row.label for row in rows] == [2, 0, 1]
    assert rows[1].pixels.shape == (1, 5, 7)
    assert np.allclose(rows[1].pixels, images[1] / 255)


BAD = [
    (read_text, "a.txt", b"one\n\xff\n", "a.txt, line 2: a byte is not UTF-8"),
    (read_text, "a.txt", " \n\n", "a.txt is empty"),
    (read_pairs, "a.tsv", "a\tb\nalone\n", "a.tsv, line 2: 1 column; write source<TAB>target"),
    (read_pairs, "a.tsv", "a\tb\tc\td\n", "a.tsv, line 1: 4 columns"),
    (read_pairs, "a.tsv", "a\tb\tmany\n", "a.tsv, line 1: the third column 'many' is not a count"),
    (read_pairs, "a.tsv", "a\t \n", "a.tsv, line 1: one side of the pair is empty"),
    (read_pairs, "a.tsv", b"a\tb\n\xff\tc\n", "a.tsv, line 2: a byte is not UTF-8"),
    (read_pairs, "a.tsv", "", "a.tsv is empty"),
    (read_labelled, "a.tsv", "good\n", "a.tsv, line 1: 1 column; write label<TAB>text"),
    (read_labelled, "a.tsv", "", "a.tsv is empty"),
    (read_labelled, "a.jsonl", '{"text": "a", "label": "b"}\n{"text": 3}', 'a.jsonl, line 2: "text" is missing'),
    (read_labelled, "a.jsonl", '{"text": "a"}', 'a.jsonl, line 1: "label" is missing'),
    (read_labelled, "a.jsonl", "{", "a.jsonl, line 1: not JSON"),
    (read_labelled, "a.jsonl", "[" * 100_000, "a.jsonl, line 1: not JSON"),
    (read_labelled, "a.jsonl", "[1]", "a.jsonl, line 1: not an object"),
    (read_documents, "a.jsonl", "\n", "a.jsonl is empty"),
    (read_conll, "a.conll", "EU B-ORG\n\nalone\n", "a.conll, line 3: 1 column; write word … label"),
    (read_conll, "a.conll", "EU\n", "a.conll, line 1: 1 column"),
    (read_conll, "a.conll", "\n-DOCSTART- O\n", "a.conll is empty"),
    (read_images, "a.npz", b"PK nonsense", "a.npz is not a .npz file"),
    (read_images, "a.npz", b"", "a.npz is not a .npz file"),
]


@pytest.mark.parametrize(("reader", "name", "content", "message"), BAD)
def test_a_malformed_file_raises_one_line_that_names_it(write_file, reader, name, content, message):
    path = write_file(name, content)
    with pytest.raises(FileError) as caught:
        list(reader(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_raises_one_line(tmp_path):
    for reader in (read_text, read_pairs, read_conll, read_images):
        with pytest.raises(FileError, match="No such file"):
            list(reader(tmp_path / "none.txt"))


def test_aligned_files_of_different_lengths_name_the_shorter(write_file):
    with pytest.raises(FileError, match=r"a\.de ends before line 2"):
        list(read_aligned_pairs(write_file("a.de", "eins\n"), write_file("a.en", "one\ntwo\n")))
    with pytest.raises(FileError, match=r"b\.en, line 1: empty where the other file has text"):
        list(read_aligned_pairs(write_file("b.de", "eins\n"), write_file("b.en", "\n")))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((2, 3, 5))}, "lacks the array 'labels'"),
        ({"images": np.zeros((2, 3)), "labels": np.zeros(2, int)}, "give images of shape \\(count, height, width\\)"),
        ({"images": np.zeros((2, 3, 5)), "labels": np.zeros(3, int)}, "give images of shape \\(count"),
        ({"images": np.zeros((0, 3, 5)), "labels": np.zeros(0, int)}, "give at least one"),
        ({"images": np.array([[[object()]]]), "labels": np.zeros(1, int)}, "not a .npz file of plain arrays"),
    ],
)
def test_arrays_that_are_not_images_are_rejected(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(FileError, match=message):
        list(read_images(tmp_path / "a.npz"))
