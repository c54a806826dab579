"""tokenizer.json: the same bytes from every training, the same ids from every reader, one line for every bad file."""

import copy
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
from test_tokenizers import EVERY, TEXTS, odd_strings, trained

import monoblock as mb

SOURCE = str(Path(mb.__file__).parents[1])
TRAINING = """
import hashlib, json, sys
import monoblock as mb
texts, every = json.load(sys.stdin)
for kind, marker in every:
    for lowercase in (False, True):
        mb.Tokenizer.train(kind, texts, 419, marker=marker, lowercase=lowercase).save_pretrained("t")
        print(kind, marker, hashlib.sha256(open("t/tokenizer.json", "rb").read()).hexdigest())
"""


def test_training_gives_the_same_bytes_in_every_process(tmp_path):
    chance = random.Random(5)
    words = ["".join(chance.choices("abcdeéनम्", k=chance.randrange(1, 9))) for _ in range(700)]
    texts = [" ".join(chance.choices(words, k=31)) for _ in range(151)]  # many ties
    said = set()
    for hash_seed, threads, parallel in (("1", "1", "false"), ("2", "2", "true"), ("3", "5", "true")):
        folder = tmp_path / hash_seed
        folder.mkdir()
        chosen = {"PYTHONHASHSEED": hash_seed, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": parallel}
        done = subprocess.run(
            [sys.executable, "-c", TRAINING],
            input=json.dumps([texts, EVERY]),
            env={**os.environ, **chosen, "PYTHONPATH": SOURCE},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        said.add(done.stdout)
    assert len(said) == 1


def test_training_does_not_depend_on_how_the_texts_come():
    first = mb.Tokenizer.train("unigram", TEXTS, 400)
    assert mb.Tokenizer.train("unigram", iter(TEXTS[::-1]), 400).fingerprint == first.fingerprint


@pytest.mark.parametrize(("kind", "marker"), EVERY)
def test_saved_and_loaded_is_the_same_tokenizer(kind, marker, tmp_path):
    from tokenizers import Tokenizer

    tokenizer = trained(kind, marker, specials="spans")
    tokenizer.save_pretrained(tmp_path)
    loaded = mb.Tokenizer.from_pretrained(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.kind, loaded.roles, loaded.vocab_size) == (kind, tokenizer.roles, tokenizer.vocab_size)
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in [*TEXTS, *odd_strings(200)]:
        ids = tokenizer.encode(text)
        assert loaded.encode(text) == library.encode(text, add_special_tokens=False).ids == ids
    before = (tmp_path / "tokenizer.json").read_bytes()
    loaded.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_a_tokenizer_travels_to_another_process():
    tokenizer = trained("bpe", None)
    sent = pickle.loads(pickle.dumps(tokenizer))
    assert sent.encode("<pad> the") == tokenizer.encode("<pad> the")


def test_the_fingerprint_tells_tokenizers_apart():
    assert len({trained(kind, marker).fingerprint for kind, marker in EVERY}) == len(EVERY)
    assert trained("bpe", None).fingerprint != trained("bpe", None, specials="masked").fingerprint


def test_the_saved_file_holds_no_chance():
    tokenizer = trained("bpe", None)
    tokenizer.sample("the", seed=1, dropout=0.5)
    assert tokenizer._data["model"]["dropout"] is None


def test_dropout_truncation_and_padding_of_a_foreign_file_are_not_applied(tmp_path):
    data = copy.deepcopy(trained("bpe", None)._data)
    data["model"]["dropout"] = 0.9
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    loaded = mb.Tokenizer.from_pretrained(tmp_path)
    assert loaded.encode(TEXTS[0]) == trained("bpe", None).encode(TEXTS[0])
    assert loaded.fingerprint == trained("bpe", None).fingerprint


@pytest.mark.parametrize(("kind", "marker"), EVERY)
def test_a_model_without_its_type_is_read_as_gpt2s_file_is(kind, marker, tmp_path):
    data = copy.deepcopy(trained(kind, marker)._data)
    del data["model"]["type"]
    if data["model"].get("unk_token", "") is None:
        data["model"]["unk_token"] = ""
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert mb.Tokenizer.from_pretrained(tmp_path).fingerprint == trained(kind, marker).fingerprint


def test_roles_named_in_the_config_come_first(tmp_path):
    trained("bpe", None).save_pretrained(tmp_path)
    named = {"pad_token": {"content": "</s>"}, "bos_token": None, "eos_token": "<none such>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    loaded = mb.Tokenizer.from_pretrained(tmp_path)
    assert loaded.pad_id == loaded.eos_id == loaded.id("</s>")


# Bad files


def changed(kind, marker, path, value):
    """A good file with one thing in it replaced."""
    data = copy.deepcopy(trained(kind, marker)._data)
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(data)


SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
BAD = {
    "empty": (b"", "is not JSON"),
    "cut": (changed("bpe", None, ["padding"], None)[:3000].encode(), "is not JSON"),
    "not text": (b"\xff\xfe\x00", "is not JSON"),
    "deep": (b"[" * 100_000, "is not JSON"),
    "list": (b"[]", "holds no object"),
    "nothing": (b"{}", "it has no model"),
    "model": (changed("bpe", None, ["model", "type"], "Evil"), "of a kind we do not run, 'Evil'"),
    "regex": (changed("bpe", None, ["pre_tokenizer"], SPLIT), "a regular expression we do not know"),
    "nested": (
        changed("bpe", None, ["pre_tokenizer"], {"type": "Sequence", "pretokenizers": [SPLIT]}),
        "a regular expression we do not know",
    ),
    "bomb": (
        changed("bpe", None, ["normalizer"], {"type": "Sequence", "normalizers": [GROWING] * 30}),
        "by something longer",
    ),
    "many": (
        changed("bpe", None, ["normalizer"], {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 99}),
        "too deep or too long",
    ),
    "id": (changed("bpe", None, ["model", "vocab", "a"], 2**40), "an id is a whole number below 2,000,000"),
    "minus": (changed("bpe", None, ["model", "vocab", "a"], -1), "an id is a whole number"),
    "float": (changed("bpe", None, ["model", "vocab", "a"], 1.5), "an id is a whole number"),
    "twice": (changed("bpe", None, ["model", "vocab", "a"], 3), "the same id"),
    "merge": (changed("bpe", None, ["model", "merges", 0], ["q", "☃"]), "not in its vocabulary"),
    "triple": (changed("bpe", None, ["model", "merges", 0], "a b c"), "is no pair"),
    "prefix": (changed("bpe", None, ["model", "continuing_subword_prefix"], "a" * 99), "not in its vocabulary"),
    "template": (changed("bpe", None, ["post_processor", "special_tokens"], {}), "it does not describe"),
    "added": (changed("bpe", None, ["added_tokens", 0, "id"], 900), "cannot have the id 900"),
    "huge": (changed("bpe", None, ["added_tokens", 0, "id"], 10**9), "an id is a whole number"),
    "nameless": (changed("bpe", None, ["added_tokens"], [{"id": 5, "content": "", **ADDED}]), "is no token of 1 to"),
    "unk": (changed("word", None, ["model", "unk_token"], "<none>"), "its unknown token is not in its vocabulary"),
    "long": (changed("wordpiece", None, ["model", "max_input_chars_per_word"], 10**9), "is not from 1 to 200"),
    "unk_id": (changed("unigram", None, ["model", "unk_id"], 5000), "its unk_id is not in its vocabulary"),
    "score": (changed("unigram", None, ["model", "vocab", 3], ["a", "b"]), "no list of pieces and scores"),
    "infinite": (changed("unigram", None, ["model", "vocab", 3], ["zz", float("inf")]), "is not JSON: Infinity"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line(name, tmp_path, capfd):
    content, match = BAD[name]
    (tmp_path / "tokenizer.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(mb.FileError, match=match) as caught:
        mb.Tokenizer.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_file_beyond_the_limit_is_refused_unread(tmp_path):
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(64 * 2**20 + 1)
    with pytest.raises(mb.FileError, match="larger than 64 MB"):
        mb.Tokenizer.from_pretrained(tmp_path)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(mb.FileError, match=r"it has no tokenizer\.json"):
        mb.Tokenizer.from_pretrained(tmp_path)
    with pytest.raises(mb.FileError, match="no such folder"):
        mb.Tokenizer.from_pretrained(tmp_path / "none")


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(mb.FileError, match="cannot be written"):
        trained("bpe", None).save_pretrained(tmp_path / "file")


def damaged(text, chance):
    """A good file with a few of its values or its bytes spoilt."""
    if chance.random() < 0.3:
        raw = bytearray(text.encode())
        for _ in range(chance.randrange(1, 9)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        return bytes(raw)
    data = json.loads(text)
    for _ in range(chance.randrange(1, 3)):
        place, key = data, chance.choice(list(data))
        while isinstance(place[key], (dict, list)) and place[key] and chance.random() < 0.85:
            place = place[key]
            key = chance.choice(list(place)) if isinstance(place, dict) else chance.randrange(len(place))
        place[key] = chance.choice(
            [None, -1, 2**31, 2**64, 0.5, "", "x", "a" * 99, [], {}, [[]], True, {"type": "BPE"}]
        )
    return json.dumps(data).encode()


@pytest.mark.parametrize(("kind", "marker"), EVERY)
def test_a_damaged_file_is_one_line_or_a_tokenizer(kind, marker, tmp_path, capfd):
    chance = random.Random(11)
    text = json.dumps(mb.Tokenizer.train(kind, TEXTS, 300, marker=marker)._data)
    for _ in range(60):
        raw = damaged(text, chance)
        (tmp_path / "tokenizer.json").write_bytes(raw)
        try:
            tokenizer = mb.Tokenizer.from_pretrained(tmp_path)
        except mb.FileError as problem:
            said = str(problem)
        else:
            said = "".join(tokenizer.decode(tokenizer.encode(x, add_specials=True)) for x in ("the ж", "", "<unk>"))
        assert "\n" not in said
        assert "panicked" not in capfd.readouterr().err, raw[:200]
