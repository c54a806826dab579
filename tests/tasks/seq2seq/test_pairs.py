"""Pairs as a recipe asks for them: turned round, tagged, mixed; tags in a text; words by their frequency."""

from collections import Counter

import pytest

from monoblock.data.corpora.load import Corpus
from monoblock.data.readers.pairs import read_pairs
from monoblock.data.readers.records import Pair
from monoblock.errors import ConfigError, FileError, InputError
from monoblock.recipes.schema import DataSection
from monoblock.tasks.loaded_model import Hypothesis
from monoblock.tasks.seq2seq.alignment import format_pharaoh, hard_alignment, word_indices
from monoblock.tasks.seq2seq.backtranslation import BacktranslationMethod
from monoblock.tasks.seq2seq.evaluate import target_language
from monoblock.tasks.seq2seq.pairs import collect_references, mix_pairs, prepare_pairs
from monoblock.tasks.seq2seq.rescoring import WordFrequencies, tune_weight
from monoblock.tasks.tags import TagAwareEncoder
from monoblock.tasks.text_splitting import decode_lines, split_text
from monoblock.tokenizers.tokenizer import Tokenizer

PAIRS = [Pair("delhi", "दिल्ली", 3), Pair("chennai", "சென்னை")]


def rows(kind="pairs", **part):
    return prepare_pairs(Corpus("some", kind, "train", PAIRS), DataSection(corpus="some", **part)).rows


def test_directions_and_tags():
    assert rows() == PAIRS
    assert rows(direction="backward") == [Pair("दिल्ली", "delhi", 3), Pair("சென்னை", "chennai")]
    both = rows(direction="both", tag="script")
    assert [row.source for row in both] == [
        "<2devanagari> delhi",
        "<2latin> दिल्ली",
        "<2tamil> chennai",
        "<2latin> சென்னை",
    ]
    with pytest.raises(ConfigError, match="about pairs"):
        rows(kind="text", tag="script")


def test_text_is_normalised_on_both_sides():
    typed = [Pair("\u0915\u093f\u093c", "a\u0301")]
    made = prepare_pairs(Corpus("some", "pairs", "train", typed), DataSection(corpus="some", normalize="indic")).rows
    assert made == [Pair("\u0915\u093c\u093f", "\u00e1")]


@pytest.mark.parametrize(("ratio", "wanted"), [(1.0, (12, 12)), (2.0, (6, 12)), (4.0, (5, 20)), (12 / 5, (5, 12))])
def test_mixing_repeats_the_fewer_until_the_ratio_is_met(ratio, wanted):
    real, made = [Pair(f"r{n}", "x") for n in range(5)], [Pair(f"m{n}", "y") for n in range(12)]
    got = Counter(pair.target for pair in mix_pairs(real, made, ratio))
    assert (got["x"], got["y"]) == wanted
    assert set(mix_pairs(real, made, ratio)) == {*real, *made}, "none is lost"


def test_references_are_all_that_is_attested():
    assert collect_references([Pair("a", "x"), Pair("b", "y"), Pair("a", "z"), Pair("a", "x")]) == {
        "a": ["x", "z"],
        "b": ["y"],
    }


def test_the_language_of_the_targets_is_told_by_the_files():
    known = {"multi30k": "en", "multi30k-en-de": "de", "mine/{split}.fr-it": "it", "mine.tsv": "en", "kjv-web": "en"}
    assert {data: target_language(data, "forward") for data in known} == known
    assert target_language("multi30k", "backward") == "de"


# -- tags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "marker"), [("bpe", None), ("bpe", "▁"), ("char", None)])
def test_tags_are_tokens_and_other_specials_are_text(kind, marker):
    texts = ["Ein Mann mit Hut < und > </s> <s>"]
    tokenizer = Tokenizer.train(kind, texts, 400, marker=marker, specials=["pad", "bos", "eos", "<bt>", "<blank>"])
    read, plain = TagAwareEncoder(tokenizer), tokenizer.encode
    assert read("Ein Mann") == plain("Ein Mann")
    assert read("<bt> Ein Mann") == [tokenizer.id("<bt>"), *plain("Ein Mann")]
    assert read("Ein <blank> mit") == [*plain("Ein"), tokenizer.id("<blank>"), *plain(" mit")]
    assert read("<bt> <blank> Hut") == [tokenizer.id("<bt>"), tokenizer.id("<blank>"), *plain("Hut")]
    assert tokenizer.eos_id not in read("<bt> </s>")
    assert read.strip_leading_tags("<bt> <blank> Hut") == ("Hut", 2)


def test_a_script_is_asked_for_by_name():
    specials = ["pad", "bos", "eos", "<2tamil>", "<2latin>"]
    read = TagAwareEncoder(Tokenizer.train("char", ["abc"], 20, specials=specials))
    assert read.find_script_tag("Tamil") == "<2tamil>"
    with pytest.raises(InputError, match="say which: latin, tamil"):
        read.find_script_tag(None)
    with pytest.raises(InputError, match="did you mean 'tamil'"):
        read.find_script_tag("tamill")
    alone = TagAwareEncoder(Tokenizer.train("char", ["abc"], 20, specials=["bos", "eos"]))
    assert alone.find_script_tag(None) == ""
    with pytest.raises(InputError, match="leave it out"):
        alone.find_script_tag("tamil")


# -- lines -----------------------------------------------------------------------------------------------------------


def test_a_byte_that_is_not_utf8_is_told_with_its_line():
    lines = decode_lines([b"\xef\xbb\xbfgut\r\n", b"\n", b"sch\xffn\n"], "in")
    assert [next(lines), next(lines)] == ["gut", ""]
    with pytest.raises(FileError, match="in, line 3, byte 4: not UTF-8 \\(0xff\\)"):
        next(lines)


def test_long_lines_are_cut_at_sentences_then_at_words():
    fits = lambda text: len(text) <= 20
    assert split_text("short", fits) == ["short"]
    assert split_text("One two. Three four! Five six seven. Eight?", fits) == [
        "One two. Three four!",
        "Five six seven.",
        "Eight?",
    ]
    assert split_text("one two three four five six seven", fits) == ["one two three four", "five six seven"]
    with pytest.raises(InputError, match="no space to be split at"):
        split_text("a " + "b" * 21, fits)


def test_pairs_come_from_objects_too(tmp_path):
    path = tmp_path / "hin_train.json"
    path.write_text(
        '{"english word": "delhi", "native word": "दिल्ली", "score": null}\n{"source": "a", "target": "b"}\n'
    )
    assert list(read_pairs(path)) == [Pair("delhi", "दिल्ली"), Pair("a", "b")]
    path.write_text('{"english word": "delhi"}\n')
    with pytest.raises(FileError, match='line 1: "native word" is missing'):
        list(read_pairs(path))


# -- words -----------------------------------------------------------------------------------------------------------


def answers(*pairs):
    return [Hypothesis(text, score=score) for text, score in pairs]


def test_words_are_ordered_by_score_and_frequency(tmp_path):
    words = WordFrequencies.from_pairs([Pair("x", "often", 98), Pair("y", "once")])
    found = answers(("never", -0.5), ("often", -0.6), ("once", -0.55))
    assert [answer.text for answer in words.rerank(found, 0.0)] == ["never", "once", "often"]
    assert [answer.text for answer in words.rerank(found, 1.0)] == ["often", "once", "never"]
    # log 99/102 against log 1/102: a difference of 0.1 in score is made up from weight 0.1 / log 99 on
    assert words.rerank(found, 0.0217)[0].text == "never"
    assert words.rerank(found, 0.0219)[0].text == "often"
    tuned = tune_weight(words, [found, answers(("often", -0.1), ("never", -0.2))], [["often"], ["often"]])
    assert 0.0218 < tuned.weight <= 0.03, "the smallest weight that is right everywhere"
    tuned.write(tmp_path / "words.json")
    assert WordFrequencies.read(tmp_path / "words.json") == tuned
    (tmp_path / "words.json").write_text("[]")
    with pytest.raises(FileError, match="no list of words"):
        WordFrequencies.read(tmp_path / "words.json")


def test_a_method_of_back_translation_is_checked_and_dresses_sources():
    assert BacktranslationMethod("noised").noise == ("drop", "blank", "permutation")
    assert BacktranslationMethod("beam", tag=True).prepare_source("ein Mann", seed=1, index=0) == "<bt> ein Mann"
    assert BacktranslationMethod("noised", ("permutation",)).noise == ("permutation",)
    with pytest.raises(ConfigError, match="did you mean 'beam'"):
        BacktranslationMethod("beem")
    with pytest.raises(ConfigError, match="noise is for"):
        BacktranslationMethod("beam", ("drop",))


# -- alignment -------------------------------------------------------------------------------------------------------


def test_words_take_the_source_word_their_tokens_look_at_most():
    import torch

    tokenizer = Tokenizer.train("char", ["ab cd"], 20)
    left, right = (word_indices(text, tokenizer.pieces(text)) for text in ("ab c", "d ba"))
    assert left == [0, 0, -1, 1]
    assert right == [0, -1, 1, 1]
    weights = torch.tensor([[0.3, 0.3, 0.0, 0.4], [0.0, 0.0, 0.0, 1.0], [0.1, 0.2, 0.6, 0.1], [0.1, 0.1, 0.1, 0.5]])
    # word 0 of the target looks at word 0 with 0.6; word 1 at word 0 with 0.5 and at word 1 with 0.6
    assert hard_alignment(weights, left, right) == [(0, 0), (1, 1)]
    assert format_pharaoh([(0, 0), (2, 1)]) == "0-0 2-1"
