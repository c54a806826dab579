"""The rows that are held out for validation: a fixed seed, each class by its share, rows that belong together."""

import json
from collections import Counter

import numpy as np
import pytest

from monoblock.data.corpora.load import load_corpus
from monoblock.data.readers.by_path import Holdout, choose_held_out
from monoblock.data.readers.records import LabelledImage, LabelledText, Pair, Question, TaggedSentence
from monoblock.errors import ConfigError


def held_out(rows, *, count=0, method="random"):
    indices, selection = choose_held_out(rows, Holdout(method, count))
    assert indices == sorted(set(indices))
    return [rows[index] for index in indices], selection


def labelled(**counts):
    """Rows sorted by class, with a text of their own each."""
    return [LabelledText(f"{label} {n}", label) for label, count in counts.items() for n in range(count)]


def split(path, **options):
    return [load_corpus(path, name, **options).rows for name in ("train", "valid")]


def test_a_file_sorted_by_class_has_every_class_by_its_share_in_both_splits(tmp_path):
    path = tmp_path / "sorted.tsv"
    path.write_text("".join(f"{row.label}\t{row.text}\n" for row in labelled(neg=70, pos=30)), encoding="utf-8")
    train, valid = split(path, kind="labelled")
    assert Counter(row.label for row in valid) == {"neg": 7, "pos": 3}
    assert Counter(row.label for row in train) == {"neg": 63, "pos": 27}
    assert split(path, kind="labelled") == [train, valid], "the split depends on the file alone"


def test_images_are_split_by_class():
    rows = [LabelledImage(np.zeros((1, 2, 2), np.float32), label) for label in (3, 5) for _ in range(50)]
    valid, _ = held_out(rows)
    assert Counter(row.label for row in valid) == {3: 5, 5: 5}


def test_shares_are_rounded_by_the_largest_remainders_and_add_up():
    valid, selection = held_out(labelled(a=53, b=29, c=11, d=7), count=13)
    assert Counter(row.label for row in valid) == {"a": 7, "b": 4, "c": 1, "d": 1}  # 6.89, 3.77, 1.43 and 0.91
    assert selection == "drawn at random with a fixed seed, the same share of each class"


def test_a_class_with_a_single_row_is_trained_on():
    valid, _ = held_out(labelled(a=19, once=1))
    assert Counter(row.label for row in valid) == {"a": 2}


def test_the_numbers_of_a_regression_are_drawn_without_classes():
    rows = [LabelledText(f"text {n}", f"{n / 8}") for n in range(200)]
    valid, selection = held_out(rows)
    numbers = [float(row.label) for row in valid]
    assert len(numbers) == 20
    assert min(numbers) < 8 < 17 < max(numbers), "numbers of the whole range, though the file is sorted"
    assert selection == "drawn at random with a fixed seed"


def test_sentences_of_a_document_are_held_out_together(tmp_path):
    path = tmp_path / "a.conll"
    path.write_text("".join(f"-DOCSTART- O\n\n{doc} O\n\n{doc} O\n\n" for doc in range(30)), encoding="utf-8")
    train, valid = split(path)
    assert len(valid) == 6
    assert not {row.document for row in train} & {row.document for row in valid}


@pytest.mark.parametrize(
    ("rows", "key"),
    [
        ([Question(f"q {n}", f"context {n // 3}", ("a",), (0,)) for n in range(60)], "context"),
        ([Pair(f"source {n // 3}", f"target {n}") for n in range(60)], "source"),
        ([LabelledText(f"text {n // 3}", "ab"[n // 3 % 2]) for n in range(60)], "text"),
    ],
)
def test_rows_that_share_their_input_are_held_out_together(rows, key):
    valid, selection = held_out(rows)
    assert 3 <= len(valid) <= 6
    keys = {getattr(row, key) for row in valid}
    assert sum(getattr(row, key) in keys for row in rows) == len(valid)
    assert selection.endswith(f"rows of one {key} together")


def test_a_file_of_few_large_groups_is_split_by_rows():
    valid, selection = held_out([Question(f"q {n}", "one context", ("a",), (0,)) for n in range(20)])
    assert len(valid) == 2
    assert "together" not in selection


def test_sentences_without_documents_are_drawn_one_by_one():
    valid, _ = held_out([TaggedSentence((f"w{n}",), ("O",)) for n in range(40)])
    assert len(valid) == 4


def test_documents_of_a_jsonl_file_are_drawn(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(40)), encoding="utf-8")
    train, valid = split(path)
    assert len(valid) == 4
    assert valid != [f"document {n}" for n in range(36, 40)]
    assert sorted(train + valid) == sorted(f"document {n}" for n in range(40))


@pytest.mark.parametrize("method", ["random", "last"])
def test_a_count_is_of_all_rows_of_a_file(tmp_path, method):
    path = tmp_path / "a.tsv"
    path.write_text("".join(f"s{n}\tt{n}\n" for n in range(100)), encoding="utf-8")
    train, valid = split(path, holdout=Holdout(method, 25))
    assert (len(train), len(valid)) == (75, 25)
    assert (valid[0].source == "s75") == (method == "last")


def test_a_count_holds_out_training_rows_of_a_folder(tmp_path):
    rows = "".join(f"{row.label}\t{row.text}\n" for row in labelled(neg=20, pos=20))
    (tmp_path / "train.tsv").write_text(rows, encoding="utf-8")
    (tmp_path / "valid.tsv").write_text("pos\tanother\n", encoding="utf-8")
    train, valid = split(tmp_path, kind="labelled", holdout=Holdout(count=6))
    assert Counter(row.label for row in valid) == {"neg": 3, "pos": 3}
    assert len(train) == 34


def test_rows_of_a_running_text_cannot_be_counted(tmp_path):
    (tmp_path / "a.txt").write_text("a running text " * 9, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"is one running text, of which the last tenth.*leave out data\.validation"):
        load_corpus(tmp_path / "a.txt", holdout=Holdout(count=3))
