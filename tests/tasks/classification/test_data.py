"""Labelled ground: frames and what is cut, pairs and segments, IOB1, rows that are other in every epoch."""

import json

import numpy as np
import pytest
import torch

import monoblock as mb
from monoblock.config.schema import from_dict
from monoblock.data.readers.conll import read_conll
from monoblock.data.readers.labelled import read_labelled
from monoblock.data.readers.records import LabelledText, TaggedSentence
from monoblock.errors import FileError
from monoblock.recipes.schema import DataSection, Recipe
from monoblock.runs.build_data import build_task_data
from monoblock.tasks.input_template import InputTemplate, WordEncoder
from monoblock.tasks.token_classification.augment import (
    TaggedAugmenter,
    collect_mentions,
    concatenate_rows,
    group_rows,
    replace_mentions,
)
from monoblock.tasks.token_classification.bio import extract_entities
from monoblock.training.corruption import IGNORE_INDEX, sample_generator

TEXT = "the king of the north went up and the king of the south came down"
SPECIALS = ["pad", "cls", "sep", "mask"]


@pytest.fixture(scope="module")
def tokenizer():
    return mb.Tokenizer.train("bpe", [f" {TEXT}"], 300, specials=SPECIALS)


# -- frames -----------------------------------------------------------------------------------------------------------


def test_a_frame_is_what_the_library_puts_around_texts(tokenizer, tmp_path):
    library = pytest.importorskip("tokenizers")
    tokenizer.save_pretrained(tmp_path)
    theirs = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    one, other = "the king", "came down"
    frame = InputTemplate(tokenizer)
    alone, both = theirs.encode(one), theirs.encode(one, other)
    assert frame(tokenizer.encode(one))[:2] == (alone.ids, alone.type_ids)
    assert frame(tokenizer.encode(one), tokenizer.encode(other))[:2] == (both.ids, both.type_ids)
    assert InputTemplate(tokenizer, no_special_tokens=True)([7, 8, 9]).ids == [7, 8, 9]


@pytest.mark.parametrize("sizes", [(11, 3), (3, 11), (11, 13), (5, 5), (1, 1), (13, 0)])
def test_a_pair_that_is_too_long_loses_the_end_of_the_longer_text(tokenizer, sizes):
    library = pytest.importorskip("tokenizers")
    one, other = ([100 + n for n in range(size)] for size in sizes)
    got = InputTemplate(tokenizer, 13)(one, other)
    kept = list(sizes)
    while sum(kept) > 10:  # token by token, as transformers' longest_first does
        kept[0 if kept[0] > kept[1] else 1] -= 1
    assert len(got.ids) == sum(kept) + 3 <= 13
    assert got.num_truncated == sum(sizes) - sum(kept)
    specials = [tokenizer.cls_id, tokenizer.sep_id]
    assert got.ids == [specials[0], *one[: kept[0]], specials[1], *other[: kept[1]], specials[1]]
    assert library


@pytest.mark.parametrize("sizes", [(3, 0), (0, 3), (2, 2)])
def test_of_texts_without_any_room_nothing_is_kept(tokenizer, sizes):
    got = InputTemplate(tokenizer, 2)(*([7] * size for size in sizes))
    assert got.ids == [tokenizer.cls_id, tokenizer.sep_id, tokenizer.sep_id]
    assert got.num_truncated == sum(sizes)


def test_only_whole_words_are_kept(tokenizer):
    words = WordEncoder(tokenizer, InputTemplate(tokenizer, 9))
    ids, places = words(["king", "xyzxyz", "up"])
    assert len(places) == 2 - (words.encoded_length(["king", "xyzxyz"]) > 9)
    assert ids[places[0] : places[0] + len(words.encode_word("king"))] == words.encode_word("king")
    assert len(ids) <= 9


# -- rows ------------------------------------------------------------------------------------------------------------


def test_labelled_rows_may_have_two_texts(tmp_path):
    (tmp_path / "a.tsv").write_text("yes\tone\ttwo\nno\tthree\tfour\n")
    assert list(read_labelled(tmp_path / "a.tsv")) == [
        LabelledText("one", "yes", "two"),
        LabelledText("three", "no", "four"),
    ]
    rows = [{"text": "one", "text_pair": "two", "label": 1}, {"text": "three", "label": "no"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(read_labelled(tmp_path / "a.jsonl")) == [LabelledText("one", "1", "two"), LabelledText("three", "no")]
    (tmp_path / "b.tsv").write_text("yes\tone\nno\tthree\tfour\n")
    with pytest.raises(FileError, match="line 2: 3 columns; write label<TAB>text"):
        list(read_labelled(tmp_path / "b.tsv"))


def ground(tmp_path, name, text, objective, *, context=31, **parts):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    data = {
        "data": {"corpus": str(path), **parts.pop("data", {})},
        "tokenizer": {"kind": "bpe", "vocab": 300, **parts.pop("tokenizer", {})},
        "model": {"family": "bert", "width": 16, "depth": 1, "heads": 2, "context": context, **parts.pop("model", {})},
        "train": {"objective": objective, "batch": 5},
    }
    return build_task_data(from_dict(Recipe, data), context)


def test_pairs_are_given_with_segments_where_the_model_knows_them(tmp_path):
    text = "".join(f"l{n % 2}\tthe king {n}\tcame down {n} times\n" for n in range(40))
    batch = (made := ground(tmp_path, "a.tsv", text, "classify")).build_batch(made.batch_plan.batch_at(0))
    row, segments = batch.inputs["source"][0].tolist(), batch.inputs["segments"][0].tolist()
    first = row.index(made.tokenizer.sep_id)
    assert segments[: first + 1] == [0] * (first + 1)
    assert segments[first + 1 : row.index(made.tokenizer.sep_id, first + 1) + 1][0] == 1
    plain = ground(tmp_path, "a.tsv", text, "classify", model={"segments": 0})
    assert "segments" not in plain.build_batch(plain.batch_plan.batch_at(0)).inputs
    alone = ground(tmp_path, "b.tsv", text.replace("\tcame", " came"), "classify")
    assert "segments" not in alone.build_batch(alone.batch_plan.batch_at(0)).inputs


def test_what_is_cut_is_said(tmp_path):
    text = "".join(f"l{n % 2}\t{'king ' * (40 if n % 10 == 3 else 2)}\n" for n in range(40))
    made = ground(tmp_path, "a.tsv", text, "classify", context=13)
    assert "(4 of them cut to 13 tokens)" in made.summary
    assert max(made.build_batch(made.batch_plan.batch_at(n)).inputs["source"].shape[1] for n in range(8)) == 13
    tagged = "".join("".join(f"king T{n % 2}\n" for _ in range(40 if n % 10 == 3 else 2)) + "\n" for n in range(40))
    assert "(4 of them cut to 13 tokens)" in ground(tmp_path, "a.conll", tagged, "label", context=13).summary
    assert "cut" not in ground(tmp_path, "b.conll", tagged, "label", context=97).summary


def test_iob1_becomes_bio_and_that_is_said(tmp_path):
    made = ground(tmp_path, "a.conll", "the O\nking I-PER\nof I-PER\nnorth B-PER\n\n" * 30, "label")
    assert made.labels == ["B-PER", "I-PER", "O"]
    assert "IOB1" in made.summary
    batch = made.build_batch(made.batch_plan.batch_at(0))
    asked = [made.labels[n] for n in batch.labels[0].tolist() if n != IGNORE_INDEX]
    assert asked == ["O", "B-PER", "I-PER", "B-PER"]


def test_one_slip_leaves_a_corpus_that_marks_ends_as_it_is(tmp_path):
    row = "the O\nking B-PER\nof I-PER\nnorth E-PER\n\n"
    made = ground(tmp_path, "a.conll", "the O\nking I-PER\n\n" + row * 30, "label")
    assert made.labels == ["B-PER", "E-PER", "I-PER", "O"]
    assert "IOB1" not in made.summary


# -- other in every epoch ---------------------------------------------------------------------------------------------

ROWS = [
    TaggedSentence(("the", "king", "of", "north"), ("O", "B-PER", "I-PER", "I-PER")),
    TaggedSentence(("up", "south", "came"), ("O", "B-LOC", "O")),
    TaggedSentence(("king", "and", "north"), ("B-PER", "O", "B-LOC")),
]


def test_entities_are_exchanged_for_others_of_their_kind():
    known = collect_mentions(ROWS)
    assert {kind: [row.words for row in some] for kind, some in known.items()} == {
        "PER": [("king", "of", "north"), ("king",)],
        "LOC": [("south",), ("north",)],
    }
    seen = set()
    for epoch in range(40):
        (row,) = replace_mentions([ROWS[2]], known, 1.0, sample_generator(1, epoch, 2))
        assert [one.kind for one in extract_entities(row.labels)] == ["PER", "LOC"]
        outside = [word for word, label in zip(row.words, row.labels, strict=True) if label == "O"]
        assert outside == ["and"]
        seen.add(row.words)
        two = replace_mentions([ROWS[2], ROWS[2]], known, 0.5, sample_generator(2, epoch, 2))
        assert two[0] == two[1], "the same words become the same"
    assert len(seen) == 4, "two of each kind"
    assert replace_mentions([ROWS[2]], known, 0.0, sample_generator(1, 0, 2)) == [ROWS[2]]


def test_rows_are_the_same_again_and_others_in_other_epochs(tokenizer):
    part = DataSection(corpus="x", exchange=0.5, hide=0.2, join=2)
    words = WordEncoder(tokenizer, InputTemplate(tokenizer, 47))
    one, other = (TaggedAugmenter(ROWS, words, part, 0.3, seed=5) for _ in range(2))
    first = [one(n, 0) for n in range(3)]
    one(1, 7)
    assert [other(n, 0) for n in range(3)] == first
    assert len({tuple(one(1, epoch)[1].ids) for epoch in range(20)}) > 10
    for row, framed in (one(n, epoch) for n in range(3) for epoch in range(20)):
        assert len(framed.word_positions) == len(row.words) == len(row.labels)
        assert framed.ids[0] == tokenizer.cls_id
        assert framed.ids[-1] == tokenizer.sep_id


def test_hidden_words_are_as_many_as_asked_for(tokenizer):
    words = WordEncoder(tokenizer, InputTemplate(tokenizer))
    varied = TaggedAugmenter(ROWS, words, DataSection(corpus="x", hide=0.2), 0.0, seed=5)
    hidden = sum(varied(0, epoch)[1].ids.count(tokenizer.mask_id) for epoch in range(1000))
    assert abs(hidden - 800) < 5 * (4000 * 0.2 * 0.8) ** 0.5


def test_rows_in_capitals_are_as_many_as_asked_for(tokenizer):
    words = WordEncoder(tokenizer, InputTemplate(tokenizer))
    varied = TaggedAugmenter(ROWS, words, DataSection(corpus="x", capitals=0.3), 0.0, seed=5)
    made = [varied(0, epoch) for epoch in range(1000)]
    shouted = [tokenizer.decode(framed.ids).strip() == "THE KING OF NORTH" for _, framed in made]
    assert abs(sum(shouted) - 300) < 5 * (1000 * 0.3 * 0.7) ** 0.5
    assert {row.labels for row, _ in made} == {ROWS[0].labels}


def test_dropped_merges_spell_the_same_word(tokenizer):
    words = WordEncoder(tokenizer, InputTemplate(tokenizer))
    varied = TaggedAugmenter(ROWS, words, DataSection(corpus="x"), 0.5, seed=5)
    found = {tuple(varied(0, epoch)[1].ids) for epoch in range(30)}
    assert len(found) > 5
    assert {tokenizer.decode(ids).split()[-1] for ids in found} == {"north"}


def test_neighbours_are_read_together_as_far_as_they_fit(tokenizer):
    words = WordEncoder(tokenizer, InputTemplate(tokenizer, 13))
    rows = [("king",) * 3, ("up",), ("king",) * 10, ("up",) * 2, ("up",) * 2, ("up",) * 2]
    got = group_rows(rows, 2, words)
    assert [number for some in got for number in some] == list(range(6)), "every row once, in order"
    assert all(len(some) <= 2 for some in got)
    made = [words.encode_rows([rows[n] for n in some]) for some in got]
    assert [len(one.word_positions) for one in made] == [sum(len(rows[n]) for n in some) for some in got], (
        "none is cut off"
    )
    assert all(len(one.ids) <= 13 for one in made)
    assert [one.ids.count(tokenizer.sep_id) for one in made] == [len(some) for some in got]
    assert [len(some) for some in got] == [2, 1, 2, 1]
    assert concatenate_rows(ROWS[:2]).words == (*ROWS[0].words, *ROWS[1].words)


def test_together_or_alone_every_word_is_asked_once(tmp_path):
    text = "".join("".join(f"{word} T{len(word)}\n" for word in TEXT.split()[n % 5 :]) + "\n" for n in range(60))
    made = ground(tmp_path, "a.conll", text, "label", context=53, data={"join": 3})
    rows = list(read_conll(tmp_path / "a.conll"))[54:]
    assert sum(batch.target_count for batch in made.evaluation_batches()) == sum(len(row.words) for row in rows)
    batch = made.build_batch(made.batch_plan.batch_at(0))
    assert torch.equal(batch.labels, made.build_batch(made.batch_plan.batch_at(0)).labels)
    assert np.median((batch.labels != IGNORE_INDEX).sum(1).numpy()) > 12
