"""Tables with named columns: .csv files with quotes, headers of tab-separated files, unknown headers."""

import csv

import pytest

from monoblock.data.corpora.load import infer_corpus_kind, load_corpus
from monoblock.data.readers.records import LabelledText, Pair, TaggedSentence
from monoblock.data.readers.tables import read_conll, read_labelled, read_pairs
from monoblock.errors import FileError


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        return path

    return write


def test_a_csv_file_is_read_by_the_names_of_its_columns(write):
    path = write(
        "a.csv", '\ufeffid,Text,Label\r\n1,"good, very good",pos\r\n\r\n2,"two\nlines and a ""quote""",neg\r\n'
    )
    rows = [LabelledText("good, very good", "pos"), LabelledText('two\nlines and a "quote"', "neg")]
    assert list(read_labelled(path)) == rows
    corpus = load_corpus(path, "all")
    assert (corpus.kind, corpus.rows) == ("labelled", rows)


def test_what_the_csv_module_writes_is_read_back(tmp_path):
    rows = [LabelledText(text, label) for text, label in [('a "b", c', "x;y"), ("line\nline\ttab", "z"), ("", "x")]]
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([("label", "text"), *((row.label, row.text) for row in rows)])
    assert list(read_labelled(tmp_path / "a.csv")) == rows


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_the_separator_of_a_csv_file_is_found(write, separator):
    content = f'sentence1{separator}sentence2{separator}label\n"a, b"{separator}"c; d"{separator}1\n'
    assert list(read_labelled(write("a.csv", content))) == [LabelledText("a, b", "1", "c; d")]


def test_pairs_and_documents_are_read_from_csv(write):
    pairs = write("pairs.csv", "target,source\none,eins\n")
    assert load_corpus(pairs, "all").rows == list(read_pairs(pairs)) == [Pair("eins", "one")]
    texts = load_corpus(write("texts.csv", 'id,text\n1,"one, two"\n2,three\n'), "all")
    assert (texts.kind, texts.rows) == ("text", ["one, two", "three"])


def test_a_folder_may_have_csv_files(write, tmp_path):
    for name in ("train", "valid"):
        write(f"{name}.csv", f"label,text\na,{name} one\nb,{name} two\n")
    assert load_corpus(tmp_path, "valid").rows == [LabelledText("valid one", "a"), LabelledText("valid two", "b")]


@pytest.mark.parametrize(
    ("header", "row"),
    [("label\ttext", "pos\tgood"), ("Sentence\tLabel", "good\tpos"), ("id\ttext\tclass", "7\tgood\tpos")],
)
def test_the_header_of_a_tab_separated_file_is_no_class(write, header, row):
    path = write("a.tsv", f"{header}\n{row}\n")
    assert list(read_labelled(path)) == [LabelledText("good", "pos")]
    assert infer_corpus_kind(path, ("pairs", "labelled")) == "labelled"


def test_the_header_of_pairs_is_no_pair(write):
    assert list(read_pairs(write("a.tsv", "source\ttarget\tcount\neins\tone\t3\n"))) == [Pair("eins", "one", 3)]


@pytest.mark.parametrize("header", ["word label", "Token\tPOS\tTag"])
def test_the_header_of_tagged_words_is_no_word(write, header):
    columns = len(header.split())
    line = " ".join(["EU", "X", "B-ORG"][: columns - 1] + ["B-ORG"])
    assert list(read_conll(write("a.conll", f"{header}\n{line}\n"))) == [TaggedSentence(("EU",), ("B-ORG",))]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "good,pos\nbad,neg\n", r"the first line 'good, pos' has no column named label or text; name the"),
        ("a.csv", "label,text\npos,good, very\n", r"a\.csv, line 2: 3 columns, but the first line names 2; put cells"),
        ("a.csv", 'label,text\npos,"good\n', r"a\.csv, line 2: not CSV .*check the double quotes"),
        ("a.csv", "\n\n", r"a\.csv is empty"),
        ("a.csv", "label,text\n,good\n", r"a\.csv, line 2: the label is empty; fill it"),
        (
            "a.tsv",
            "Stars\tReview text\n5\tgood\n1\tbad\n4.5\tfine\n",
            r"line 1: the label 'Stars' is not a number, but",
        ),
        ("a.tsv", "label\ttext\npos\n", r"a\.tsv, line 2: 1 column, but the first line names 2"),
    ],
)
def test_a_table_that_cannot_be_read_raises_one_line(write, name, content, message):
    with pytest.raises(FileError, match=message) as caught:
        list(read_labelled(write(name, content)))
    assert "\n" not in str(caught.value)


def test_labels_are_not_read_as_pairs(write):
    with pytest.raises(FileError, match="has no column named source or target"):
        list(read_pairs(write("a.tsv", "text\tlabel\ngood\tpos\n")))
    with pytest.raises(FileError, match="has no column named source or target"):
        list(read_pairs(write("a.csv", "text,label\ngood,pos\n")))


@pytest.mark.parametrize(
    ("header", "row", "pair"),
    [
        ("en\tde", "one\teins", Pair("one", "eins")),
        ("English\tGerman\tcount", "one\teins\t3", Pair("one", "eins", 3)),
        ("id\ttext_en\ttext_hi", "7\tone\tएक", Pair("one", "एक")),
        ("eng_Latn\thin_Deva", "one\tएक", Pair("one", "एक")),
        ("pt_BR\tzh-Hant", "um\t一", Pair("um", "一")),
        ("Wort\tÜbersetzung\tAnzahl", "eins\tone\t3", Pair("eins", "one", 3)),
    ],
)
def test_a_header_of_pairs_in_other_words_is_no_pair_and_is_pointed_out(write, header, row, pair):
    path = write("a.tsv", f"{header}\n{row}\n")
    shown = header.replace("\t", ", ")
    for read in (read_pairs, lambda path: load_corpus(path, "all").rows):
        with pytest.warns(
            UserWarning, match=f"a.tsv: the first line, '{shown}', is read as names of columns"
        ) as caught:
            assert list(read(path)) == [pair]
        assert len(caught) == 1
    as_data = write("b.tsv", "source\ttarget\n" + "\n".join(["\t".join(pair[:2])]) + "\n")
    assert list(read_pairs(as_data)) == [Pair(*pair[:2])], "without a warning: warnings are errors"


@pytest.mark.parametrize("first", ["it\tes\t3", "de\tde", "is\tist sie", "English\tEnglisch", "one\teins"])
def test_a_first_pair_that_names_no_two_languages_is_kept(write, first):
    source, target, *count = first.split("\t")
    row = "one\teins" + "\t1" * len(count)
    expected = [Pair(source, target, *map(int, count)), Pair("one", "eins")]
    assert list(read_pairs(write("a.tsv", f"{first}\n{row}\n"))) == expected


def test_the_columns_of_a_csv_file_of_pairs_may_be_named_after_languages(write):
    path = write("a.csv", "id,de,en\n1,eins,one\n")
    corpus = load_corpus(path, "all")
    assert (corpus.kind, corpus.rows) == ("pairs", [Pair("eins", "one")])
    assert infer_corpus_kind(path, ("labelled", "pairs")) == "pairs"


def test_the_languages_are_those_of_iso_639():
    from monoblock.data.readers.tables import names_language

    pycountry = pytest.importorskip("pycountry")
    for language in pycountry.languages:
        if hasattr(language, "alpha_2"):
            name = language.name.partition(" (")[0]
            assert all(map(names_language, (language.alpha_2, language.alpha_3, name, f"text_{language.alpha_2}")))
    assert not any(map(names_language, ("", "one", "a sentence", "text", "ist", "de la")))
