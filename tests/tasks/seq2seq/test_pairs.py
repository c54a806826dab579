"""Pairs in both directions, tagged and mixed; tags as tokens; reranking by word frequency; word alignment."""

from collections import Counter

import pytest
import torch

from monoblock.data.corpora.load import Corpus
from monoblock.data.readers.records import Pair
from monoblock.data.readers.tables import read_pairs
from monoblock.errors import ConfigError, FileError, InputError
from monoblock.tasks.backtranslation import BacktranslationMethod
from monoblock.tasks.input_template import decode_lines, split_text
from monoblock.tasks.loaded_model import Hypothesis
from monoblock.tasks.seq2seq import Seq2SeqSection, collect_references, mix_pairs, prepare_pairs, target_language
from monoblock.tasks.tags import TagAwareEncoder
from monoblock.tasks.word_alignment import format_pharaoh, hard_alignment, word_indices
from monoblock.tasks.word_frequencies import WordFrequencies, tune_weight
from monoblock.tokenizers.tokenizer import Tokenizer

PAIRS = [Pair("delhi", "दिल्ली", 3), Pair("chennai", "சென்னை")]


def prepare(pairs=PAIRS, **section):
    """The rows of a corpus after `prepare_pairs` with these options."""
    return prepare_pairs(Corpus("name", "pairs", "train", pairs), Seq2SeqSection(**section)).rows


def test_pairs_are_swapped_and_tagged_by_direction_and_script():
    assert prepare() == PAIRS
    assert prepare(direction="backward") == [Pair("दिल्ली", "delhi", 3), Pair("சென்னை", "chennai")]
    both_directions = prepare(direction="both", tag="script")
    assert [row.source for row in both_directions] == [
        "<2devanagari> delhi",
        "<2latin> दिल्ली",
        "<2tamil> chennai",
        "<2latin> சென்னை",
    ]


def test_sources_and_targets_are_normalized():
    assert prepare([Pair("\u0915\u093f\u093c", "a\u0301")], normalize="indic") == [Pair("\u0915\u093c\u093f", "\u00e1")]


@pytest.mark.parametrize(("ratio", "expected"), [(1.0, (12, 12)), (2.0, (6, 12)), (4.0, (5, 20)), (12 / 5, (5, 12))])
def test_mixing_repeats_the_smaller_set_until_the_ratio_is_met(ratio, expected):
    real, synthetic = [Pair(f"r{n}", "real") for n in range(5)], [Pair(f"s{n}", "synthetic") for n in range(12)]
    mixed = mix_pairs(real, synthetic, ratio)
    counts = Counter(pair.target for pair in mixed)
    assert (counts["real"], counts["synthetic"]) == expected
    assert set(mixed) == {*real, *synthetic}, "no pair is lost"


def test_all_targets_of_a_source_are_its_references():
    assert collect_references([Pair("a", "x"), Pair("b", "y"), Pair("a", "z"), Pair("a", "x")]) == {
        "a": ["x", "z"],
        "b": ["y"],
    }


def test_the_language_of_the_targets_follows_from_the_file_names():
    languages = {
        "multi30k": "en",
        "multi30k-en-de": "de",
        "mine/{split}.fr-it": "it",
        "mine.tsv": "en",
        "kjv-web": "en",
    }
    assert {data: target_language(data, "forward") for data in languages} == languages
    assert target_language("multi30k", "backward") == "de"


# -- tags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "marker"), [("bpe", None), ("bpe", "▁"), ("char", None)])
def test_tags_are_special_tokens_and_other_special_tokens_are_text(kind, marker):
    texts = ["Ein Mann mit Hut < und > </s> <s>"]
    tokenizer = Tokenizer.train(kind, texts, 400, marker=marker, specials=["pad", "bos", "eos", "<bt>", "<blank>"])
    encode, plain = TagAwareEncoder(tokenizer), tokenizer.encode
    assert encode("Ein Mann") == plain("Ein Mann")
    assert encode("<bt> Ein Mann") == [tokenizer.id("<bt>"), *plain("Ein Mann")]
    assert encode("Ein <blank> mit") == [*plain("Ein"), tokenizer.id("<blank>"), *plain(" mit")]
    assert encode("<bt> <blank> Hut") == [tokenizer.id("<bt>"), tokenizer.id("<blank>"), *plain("Hut")]
    assert tokenizer.eos_id not in encode("<bt> </s>")
    assert encode.strip_leading_tags("<bt> <blank> Hut") == ("Hut", 2)


def test_a_script_tag_is_found_by_name():
    specials = ["pad", "bos", "eos", "<2tamil>", "<2latin>"]
    encode = TagAwareEncoder(Tokenizer.train("char", ["abc"], 20, specials=specials))
    assert encode.find_script_tag("Tamil") == "<2tamil>"
    with pytest.raises(InputError, match="choose one with `to`: latin, tamil"):
        encode.find_script_tag(None)
    with pytest.raises(InputError, match="did you mean 'tamil'"):
        encode.find_script_tag("tamill")
    untagged = TagAwareEncoder(Tokenizer.train("char", ["abc"], 20, specials=["bos", "eos"]))
    assert untagged.find_script_tag(None) == ""
    with pytest.raises(InputError, match="leave out `to`"):
        untagged.find_script_tag("tamil")


# -- lines ------------------------------------------------------------------------------------------------------------


def test_a_byte_that_is_not_utf8_is_reported_with_its_line():
    lines = decode_lines([b"\xef\xbb\xbfgut\r\n", b"\n", b"sch\xffn\n"], "in")
    assert [next(lines), next(lines)] == ["gut", ""]
    with pytest.raises(FileError, match="in, line 3, byte 4: not UTF-8 \\(0xff\\)"):
        next(lines)


def test_long_lines_are_split_at_sentences_then_at_words():
    fits = lambda text: len(text) <= 20
    assert split_text("short", fits) == ["short"]
    assert split_text("One two. Three four! Five six seven. Eight?", fits) == [
        "One two. Three four!",
        "Five six seven.",
        "Eight?",
    ]
    assert split_text("one two three four five six seven", fits) == ["one two three four", "five six seven"]
    with pytest.raises(InputError, match="no space to split it at"):
        split_text("a " + "b" * 21, fits)


def test_pairs_are_read_from_json_objects(tmp_path):
    path = tmp_path / "hin_train.json"
    path.write_text(
        '{"english word": "delhi", "native word": "दिल्ली", "score": null}\n{"source": "a", "target": "b"}\n'
    )
    assert list(read_pairs(path)) == [Pair("delhi", "दिल्ली"), Pair("a", "b")]
    path.write_text('{"english word": "delhi"}\n')
    with pytest.raises(FileError, match='line 1: "native word" is missing'):
        list(read_pairs(path))


# -- rescoring --------------------------------------------------------------------------------------------------------


def build_hypotheses(*pairs):
    return [Hypothesis(text, score=score) for text, score in pairs]


def test_hypotheses_are_reranked_by_score_and_frequency(tmp_path):
    frequencies = WordFrequencies.from_pairs([Pair("x", "often", 98), Pair("y", "once")])
    hypotheses = build_hypotheses(("never", -0.5), ("often", -0.6), ("once", -0.55))
    assert [row.text for row in frequencies.rerank(hypotheses, 0.0)] == ["never", "once", "often"]
    assert [row.text for row in frequencies.rerank(hypotheses, 1.0)] == ["often", "once", "never"]
    # log 99/102 against log 1/102: a weight of 0.1 / log 99 outweighs a difference of 0.1 in score
    assert frequencies.rerank(hypotheses, 0.0217)[0].text == "never"
    assert frequencies.rerank(hypotheses, 0.0219)[0].text == "often"
    second = build_hypotheses(("often", -0.1), ("never", -0.2))
    tuned = tune_weight(frequencies, [hypotheses, second], [["often"], ["often"]])
    assert 0.0218 < tuned.weight <= 0.03, "the smallest weight that is right for both sources"
    tuned.write(tmp_path / "words.json")
    assert WordFrequencies.read(tmp_path / "words.json") == tuned
    (tmp_path / "words.json").write_text("[]")
    with pytest.raises(FileError, match=r"has no word frequencies|does not contain a JSON object"):
        WordFrequencies.read(tmp_path / "words.json")


def test_word_frequencies_never_have_a_negative_weight(tmp_path):
    frequencies = WordFrequencies.from_pairs([Pair("x", "seen", 5)])
    hypotheses = build_hypotheses(("seen", -0.1), ("new", -0.2))
    assert tune_weight(frequencies, [hypotheses], [["new"]]).weight == 0, "as with splits that share no word"
    with pytest.raises(InputError, match="must be 0 or more, not -1"):
        frequencies.rerank(hypotheses, -1.0)
    errors = {"-0.5": r"words\.json: a weight of word frequencies must be 0 or more", "NaN": "NaN is not a JSON number"}
    for weight, error in errors.items():
        (tmp_path / "words.json").write_text(f'{{"weight": {weight}, "counts": {{"seen": 5}}}}')
        with pytest.raises(FileError, match=error):
            WordFrequencies.read(tmp_path / "words.json")


def test_a_back_translation_method_is_validated_and_adds_its_tag():
    assert BacktranslationMethod("noised").noise == ("drop", "blank", "permutation")
    assert BacktranslationMethod("beam", tag=True).prepare_source("ein Mann", seed=1, index=0) == "<bt> ein Mann"
    assert BacktranslationMethod("noised", ("permutation",)).noise == ("permutation",)
    with pytest.raises(ConfigError, match="did you mean 'beam'"):
        BacktranslationMethod("beem")
    with pytest.raises(ConfigError, match="noise has no effect"):
        BacktranslationMethod("beam", ("drop",))


# -- alignment --------------------------------------------------------------------------------------------------------


def test_a_target_word_is_aligned_to_the_source_word_its_tokens_attend_to_most():
    tokenizer = Tokenizer.train("char", ["ab cd"], 20)
    source_words, target_words = (word_indices(text, tokenizer.pieces(text)) for text in ("ab c", "d ba"))
    assert source_words == [0, 0, -1, 1]
    assert target_words == [0, -1, 1, 1]
    weights = torch.tensor([[0.3, 0.3, 0.0, 0.4], [0.0, 0.0, 0.0, 1.0], [0.1, 0.2, 0.6, 0.1], [0.1, 0.1, 0.1, 0.5]])
    # target word 0 attends to source word 0 with 0.6; target word 1 to word 0 with 0.5 and to word 1 with 0.6
    assert hard_alignment(weights, source_words, target_words) == [(0, 0), (1, 1)]
    assert format_pharaoh([(0, 0), (2, 1)]) == "0-0 2-1"
