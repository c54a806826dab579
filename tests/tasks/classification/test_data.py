"""Data of text and token classification: special tokens, truncation, segments, IOB1, augmentation."""

import json

import numpy as np
import pytest
import torch

import monoblock as mb
from monoblock.data.encode import IGNORE_INDEX
from monoblock.data.readers.records import LabelledText, TaggedSentence
from monoblock.data.readers.tables import read_conll, read_labelled
from monoblock.errors import FileError
from monoblock.recipes.schema import TokenizerSection
from monoblock.runs.build_data import build_task_data
from monoblock.runs.recipe import parse_recipe
from monoblock.tasks.bio import extract_entities
from monoblock.tasks.input_template import InputTemplate, WordEncoder
from monoblock.tasks.task_data import SubwordSampler
from monoblock.tasks.token_classification import (
    TaggedAugmenter,
    TokenClassificationSection,
    collect_mentions,
    concatenate_rows,
    group_rows,
    replace_mentions,
)
from monoblock.training.collate import sample_generator

TEXT = "the king of the north went up and the king of the south came down"
SPECIALS = ["pad", "cls", "sep", "mask"]


@pytest.fixture(scope="module")
def tokenizer():
    return mb.Tokenizer.train("bpe", [f" {TEXT}"], 300, specials=SPECIALS)


# -- input template ---------------------------------------------------------------------------------------------------


def test_the_special_tokens_are_those_of_the_tokenizers_library(tokenizer, tmp_path):
    library = pytest.importorskip("tokenizers")
    tokenizer.save_pretrained(tmp_path)
    theirs = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    first, second = "the king", "came down"
    template = InputTemplate(tokenizer)
    single, pair = theirs.encode(first), theirs.encode(first, second)
    assert template(tokenizer.encode(first))[:2] == (single.ids, single.type_ids)
    assert template(tokenizer.encode(first), tokenizer.encode(second))[:2] == (pair.ids, pair.type_ids)
    assert InputTemplate(tokenizer, no_special_tokens=True)([7, 8, 9]).ids == [7, 8, 9]


@pytest.mark.parametrize("sizes", [(11, 3), (3, 11), (11, 13), (5, 5), (1, 1), (13, 0)])
def test_a_pair_that_is_too_long_loses_the_end_of_the_longer_text(tokenizer, sizes):
    first, second = ([100 + n for n in range(size)] for size in sizes)
    encoded = InputTemplate(tokenizer, 13)(first, second)
    kept = list(sizes)
    while sum(kept) > 10:  # token by token, as transformers' longest_first does
        kept[0 if kept[0] > kept[1] else 1] -= 1
    assert len(encoded.ids) == sum(kept) + 3 <= 13
    assert encoded.num_truncated == sum(sizes) - sum(kept)
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    assert encoded.ids == [cls, *first[: kept[0]], sep, *second[: kept[1]], sep]


@pytest.mark.parametrize("sizes", [(3, 0), (0, 3), (2, 2)])
def test_if_only_special_tokens_fit_no_text_is_kept(tokenizer, sizes):
    encoded = InputTemplate(tokenizer, 2)(*([7] * size for size in sizes))
    assert encoded.ids == [tokenizer.cls_id, tokenizer.sep_id, tokenizer.sep_id]
    assert encoded.num_truncated == sum(sizes)


def test_only_whole_words_are_kept(tokenizer):
    words = WordEncoder(tokenizer, InputTemplate(tokenizer, 9))
    ids, positions = words(["king", "xyzxyz", "up"])
    assert len(positions) == 2 - (words.encoded_length(["king", "xyzxyz"]) > 9)
    assert ids[positions[0] : positions[0] + len(words.encode_word("king"))] == words.encode_word("king")
    assert len(ids) <= 9


# -- task data --------------------------------------------------------------------------------------------------------


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


def build_data(tmp_path, name, text, objective, *, context=31, **sections):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    model = {"family": "bert", "width": 16, "depth": 1, "heads": 2, "context": context}
    recipe = {
        "data": {"corpus": str(path), "split": "last", **sections.pop("data", {})},
        "tokenizer": {"kind": "bpe", "vocab": 300, **sections.pop("tokenizer", {})},
        "model": model | sections.pop("model", {}),
        "train": {"objective": objective, "batch": 5},
        **sections,
    }
    return build_task_data(parse_recipe(recipe), context)


def batch_at(task_data, step):
    return task_data.build_batch(task_data.batch_plan.batch_at(step))


def test_pairs_have_segments_if_the_model_has_them(tmp_path):
    text = "".join(f"l{n % 2}\tthe king {n}\tcame down {n} times\n" for n in range(40))
    task_data = build_data(tmp_path, "a.tsv", text, "classification")
    batch = batch_at(task_data, 0)
    row, segments = batch.inputs["source"][0].tolist(), batch.inputs["segments"][0].tolist()
    first = row.index(task_data.tokenizer.sep_id)
    assert segments[: first + 1] == [0] * (first + 1)
    assert segments[first + 1 : row.index(task_data.tokenizer.sep_id, first + 1) + 1][0] == 1
    without_segments = build_data(tmp_path, "a.tsv", text, "classification", model={"segments": 0})
    assert "segments" not in batch_at(without_segments, 0).inputs
    single = build_data(tmp_path, "b.tsv", text.replace("\tcame", " came"), "classification")
    assert "segments" not in batch_at(single, 0).inputs


def test_the_summary_counts_truncated_rows(tmp_path):
    text = "".join(f"l{n % 2}\t{'king ' * (40 if n % 10 == 3 else 2)}\n" for n in range(40))
    task_data = build_data(tmp_path, "a.tsv", text, "classification", context=13)
    assert "(4 of them cut to 13 tokens)" in task_data.summary
    assert max(batch_at(task_data, step).inputs["source"].shape[1] for step in range(8)) == 13
    tagged = "".join("".join(f"king T{n % 2}\n" for _ in range(40 if n % 10 == 3 else 2)) + "\n" for n in range(40))
    assert (
        "(4 of them cut to 13 tokens)"
        in build_data(tmp_path, "a.conll", tagged, "token_classification", context=13).summary
    )
    assert "cut" not in build_data(tmp_path, "b.conll", tagged, "token_classification", context=97).summary


def test_iob1_is_converted_to_bio_and_the_summary_says_so(tmp_path):
    task_data = build_data(
        tmp_path, "a.conll", "the O\nking I-PER\nof I-PER\nnorth B-PER\n\n" * 30, "token_classification"
    )
    assert task_data.labels == ["B-PER", "I-PER", "O"]
    assert "IOB1" in task_data.summary
    targets = batch_at(task_data, 0).labels[0].tolist()
    names = [task_data.labels[target] for target in targets if target != IGNORE_INDEX]
    assert names == ["O", "B-PER", "I-PER", "B-PER"]


def test_a_single_error_in_iobes_labels_does_not_make_them_iob1(tmp_path):
    row = "the O\nking B-PER\nof I-PER\nnorth E-PER\n\n"
    task_data = build_data(tmp_path, "a.conll", "the O\nking I-PER\n\n" + row * 30, "token_classification")
    assert task_data.labels == ["B-PER", "E-PER", "I-PER", "O"]
    assert "IOB1" not in task_data.summary


# -- augmentation -----------------------------------------------------------------------------------------------------

ROWS = [
    TaggedSentence(("the", "king", "of", "north"), ("O", "B-PER", "I-PER", "I-PER")),
    TaggedSentence(("up", "south", "came"), ("O", "B-LOC", "O")),
    TaggedSentence(("king", "and", "north"), ("B-PER", "O", "B-LOC")),
]


def test_entities_are_replaced_by_others_of_their_type():
    mentions = collect_mentions(ROWS)
    assert {kind: [mention.words for mention in known] for kind, known in mentions.items()} == {
        "PER": [("king", "of", "north"), ("king",)],
        "LOC": [("south",), ("north",)],
    }
    sentences = set()
    for epoch in range(40):
        (row,) = replace_mentions([ROWS[2]], mentions, 1.0, sample_generator(1, epoch, 2))
        assert [entity.kind for entity in extract_entities(row.labels)] == ["PER", "LOC"]
        outside = [word for word, label in zip(row.words, row.labels, strict=True) if label == "O"]
        assert outside == ["and"]
        sentences.add(row.words)
        first, second = replace_mentions([ROWS[2], ROWS[2]], mentions, 0.5, sample_generator(2, epoch, 2))
        assert first == second, "the same entity has the same replacement"
    assert len(sentences) == 4, "two entities of either type"
    assert replace_mentions([ROWS[2]], mentions, 0.0, sample_generator(1, 0, 2)) == [ROWS[2]]


def test_augmentation_is_a_function_of_row_and_epoch(tokenizer):
    section = TokenClassificationSection(replace_entities=0.5, mask_words=0.2, join_rows=2)
    words = WordEncoder(tokenizer, InputTemplate(tokenizer, 47))
    sampler = SubwordSampler(tokenizer, TokenizerSection(kind="bpe", dropout=0.3), seed=5)
    augmenter, other = (TaggedAugmenter(ROWS, words, section, sampler, seed=5) for _ in range(2))
    first = [augmenter(index, 0) for index in range(3)]
    augmenter(1, 7)
    assert [other(index, 0) for index in range(3)] == first
    assert len({tuple(augmenter(1, epoch)[1].ids) for epoch in range(20)}) > 10
    for row, encoded in (augmenter(index, epoch) for index in range(3) for epoch in range(20)):
        assert len(encoded.word_positions) == len(row.words) == len(row.labels)
        assert encoded.ids[0] == tokenizer.cls_id
        assert encoded.ids[-1] == tokenizer.sep_id


def make_augmenter(tokenizer, dropout=0.0, **options):
    words = WordEncoder(tokenizer, InputTemplate(tokenizer))
    sampler = SubwordSampler(tokenizer, TokenizerSection(kind="bpe", dropout=dropout), seed=5) if dropout else None
    return TaggedAugmenter(ROWS, words, TokenClassificationSection(**options), sampler, seed=5)


def test_the_expected_share_of_words_is_masked(tokenizer):
    augmenter = make_augmenter(tokenizer, mask_words=0.2)
    num_masked = sum(augmenter(0, epoch)[1].ids.count(tokenizer.mask_id) for epoch in range(1000))
    assert abs(num_masked - 800) < 5 * (4000 * 0.2 * 0.8) ** 0.5


def test_the_expected_share_of_rows_is_in_capitals(tokenizer):
    augmenter = make_augmenter(tokenizer, uppercase_rows=0.3)
    samples = [augmenter(0, epoch) for epoch in range(1000)]
    in_capitals = [tokenizer.decode(encoded.ids).strip() == "THE KING OF NORTH" for _, encoded in samples]
    assert abs(sum(in_capitals) - 300) < 5 * (1000 * 0.3 * 0.7) ** 0.5
    assert {row.labels for row, _ in samples} == {ROWS[0].labels}


def test_bpe_dropout_changes_the_segmentation_and_not_the_words(tokenizer):
    augmenter = make_augmenter(tokenizer, dropout=0.5)
    segmentations = {tuple(augmenter(0, epoch)[1].ids) for epoch in range(30)}
    assert len(segmentations) > 5
    assert {tokenizer.decode(ids).split()[-1] for ids in segmentations} == {"north"}


def test_neighbouring_rows_are_grouped_if_they_fit(tokenizer):
    words = WordEncoder(tokenizer, InputTemplate(tokenizer, 13))
    rows = [("king",) * 3, ("up",), ("king",) * 10, ("up",) * 2, ("up",) * 2, ("up",) * 2]
    groups = group_rows(rows, 2, words)
    assert [index for group in groups for index in group] == list(range(6)), "every row once, in order"
    assert all(len(group) <= 2 for group in groups)
    encoded = [words.encode_rows([rows[index] for index in group]) for group in groups]
    num_words = [sum(len(rows[index]) for index in group) for group in groups]
    assert [len(group.word_positions) for group in encoded] == num_words, "no word is truncated"
    assert all(len(group.ids) <= 13 for group in encoded)
    assert [group.ids.count(tokenizer.sep_id) for group in encoded] == [len(group) for group in groups]
    assert [len(group) for group in groups] == [2, 1, 2, 1]
    assert concatenate_rows(ROWS[:2]).words == (*ROWS[0].words, *ROWS[1].words)


def test_every_word_is_a_target_once_if_rows_are_joined(tmp_path):
    text = "".join("".join(f"{word} T{len(word)}\n" for word in TEXT.split()[n % 5 :]) + "\n" for n in range(60))
    task_data = build_data(
        tmp_path, "a.conll", text, "token_classification", context=53, token_classification={"join_rows": 3}
    )
    rows = list(read_conll(tmp_path / "a.conll"))[54:]
    assert sum(batch.target_count for batch in task_data.evaluation_batches()) == sum(len(row.words) for row in rows)
    labels = batch_at(task_data, 0).labels
    assert torch.equal(labels, batch_at(task_data, 0).labels)
    assert np.median((labels != IGNORE_INDEX).sum(1).numpy()) > 12
