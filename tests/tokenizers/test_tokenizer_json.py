"""tokenizer.json: training gives the same bytes, every reader the same ids, and a bad file one line."""

import copy
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizer_support import KINDS, TEXTS, get_tokenizer, random_strings

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
    rng = random.Random(5)
    words = ["".join(rng.choices("abcdeéनम्", k=rng.randrange(1, 9))) for _ in range(700)]
    texts = [" ".join(rng.choices(words, k=31)) for _ in range(151)]  # many ties
    outputs = set()
    for hash_seed, threads, parallel in (("1", "1", "false"), ("2", "2", "true"), ("3", "5", "true")):
        folder = tmp_path / hash_seed
        folder.mkdir()
        variables = {"PYTHONHASHSEED": hash_seed, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": parallel}
        result = subprocess.run(
            [sys.executable, "-c", TRAINING],
            input=json.dumps([texts, KINDS]),
            env={**os.environ, **variables, "PYTHONPATH": SOURCE},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert result.returncode == 0, result.stderr
        outputs.add(result.stdout)
    assert len(outputs) == 1


def test_training_does_not_depend_on_the_order_of_texts():
    first = mb.Tokenizer.train("unigram", TEXTS, 400)
    assert mb.Tokenizer.train("unigram", iter(TEXTS[::-1]), 400).fingerprint == first.fingerprint


@pytest.mark.parametrize(("kind", "marker"), KINDS)
def test_a_saved_tokenizer_loads_as_the_same(kind, marker, tmp_path):
    from tokenizers import Tokenizer

    tokenizer = get_tokenizer(kind, marker, specials="span_corruption")
    tokenizer.save_pretrained(tmp_path)
    loaded = mb.Tokenizer.from_pretrained(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.kind, loaded.special_tokens_map, loaded.vocab_size) == (
        kind,
        tokenizer.special_tokens_map,
        tokenizer.vocab_size,
    )
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in [*TEXTS, *random_strings(200)]:
        ids = tokenizer.encode(text)
        assert loaded.encode(text) == library.encode(text, add_special_tokens=False).ids == ids
    before = (tmp_path / "tokenizer.json").read_bytes()
    loaded.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_a_tokenizer_can_be_pickled():
    tokenizer = get_tokenizer("bpe", None)
    copied = pickle.loads(pickle.dumps(tokenizer))
    assert copied.encode("<pad> the") == tokenizer.encode("<pad> the")


def test_fingerprints_distinguish_tokenizers():
    assert len({get_tokenizer(kind, marker).fingerprint for kind, marker in KINDS}) == len(KINDS)
    assert get_tokenizer("bpe", None).fingerprint != get_tokenizer("bpe", None, specials="masked_lm").fingerprint


def test_sampling_leaves_no_dropout_in_the_file():
    tokenizer = get_tokenizer("bpe", None)
    tokenizer.sample("the", seed=1, dropout=0.5)
    assert tokenizer._tokenizer_json["model"]["dropout"] is None


def test_dropout_truncation_and_padding_of_a_published_file_are_not_applied(tmp_path):
    data = copy.deepcopy(get_tokenizer("bpe", None)._tokenizer_json)
    data["model"]["dropout"] = 0.9
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    loaded = mb.Tokenizer.from_pretrained(tmp_path)
    assert loaded.encode(TEXTS[0]) == get_tokenizer("bpe", None).encode(TEXTS[0])
    assert loaded.fingerprint == get_tokenizer("bpe", None).fingerprint


@pytest.mark.parametrize(("kind", "marker"), KINDS)
def test_the_type_of_a_model_is_inferred_as_for_gpt2(kind, marker, tmp_path):
    data = copy.deepcopy(get_tokenizer(kind, marker)._tokenizer_json)
    del data["model"]["type"]
    if data["model"].get("unk_token", "") is None:
        data["model"]["unk_token"] = ""
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert mb.Tokenizer.from_pretrained(tmp_path).fingerprint == get_tokenizer(kind, marker).fingerprint


def test_roles_in_the_config_come_first(tmp_path):
    get_tokenizer("bpe", None).save_pretrained(tmp_path)
    config = {"pad_token": {"content": "</s>"}, "bos_token": None, "eos_token": "<none such>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = mb.Tokenizer.from_pretrained(tmp_path)
    assert loaded.pad_id == loaded.eos_id == loaded.id("</s>")


# Bad files


def change(kind, marker, path, value):
    """Return a valid file with one value replaced."""
    data = copy.deepcopy(get_tokenizer(kind, marker)._tokenizer_json)
    container = data
    for key in path[:-1]:
        container = container[key]
    container[path[-1]] = value
    return json.dumps(data)


REGEX_BOMB = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
BAD = {
    "empty": (b"", "is not JSON"),
    "cut": (change("bpe", None, ["padding"], None)[:3000].encode(), "is not JSON"),
    "not text": (b"\xff\xfe\x00", "is not JSON"),
    "deep": (b"[" * 100_000, "nested too deep"),
    "list": (b"[]", "does not contain a JSON object"),
    "nothing": (b"{}", "it has no model"),
    "model": (change("bpe", None, ["model", "type"], "Evil"), "of the type 'Evil', which is not allowed"),
    "regex": (change("bpe", None, ["pre_tokenizer"], REGEX_BOMB), "an unknown regular expression"),
    "nested": (
        change("bpe", None, ["pre_tokenizer"], {"type": "Sequence", "pretokenizers": [REGEX_BOMB]}),
        "an unknown regular expression",
    ),
    "bomb": (
        change("bpe", None, ["normalizer"], {"type": "Sequence", "normalizers": [GROWING] * 30}),
        "by a longer text",
    ),
    "many": (
        change("bpe", None, ["normalizer"], {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 99}),
        "too deep or too long",
    ),
    "id": (change("bpe", None, ["model", "vocab", "a"], 2**40), "an id is a whole number below 2,000,000"),
    "minus": (change("bpe", None, ["model", "vocab", "a"], -1), "an id is a whole number"),
    "float": (change("bpe", None, ["model", "vocab", "a"], 1.5), "an id is a whole number"),
    "twice": (change("bpe", None, ["model", "vocab", "a"], 3), "the same id"),
    "merge": (change("bpe", None, ["model", "merges", 0], ["q", "☃"]), "not in its vocabulary"),
    "triple": (change("bpe", None, ["model", "merges", 0], "a b c"), "is not a pair"),
    "prefix": (change("bpe", None, ["model", "continuing_subword_prefix"], "a" * 99), "not in its vocabulary"),
    "template": (change("bpe", None, ["post_processor", "special_tokens"], {}), "is not in its special_tokens"),
    "added": (change("bpe", None, ["added_tokens", 0, "id"], 900), "cannot have the id 900"),
    "huge": (change("bpe", None, ["added_tokens", 0, "id"], 10**9), "an id is a whole number"),
    "nameless": (change("bpe", None, ["added_tokens"], [{"id": 5, "content": "", **ADDED}]), "is not a token of 1 to"),
    "unk": (change("word", None, ["model", "unk_token"], "<none>"), "its unknown token is not in its vocabulary"),
    "long": (change("wordpiece", None, ["model", "max_input_chars_per_word"], 10**9), "is not from 1 to 200"),
    "unk_id": (change("unigram", None, ["model", "unk_id"], 5000), "its unk_id is not in its vocabulary"),
    "score": (change("unigram", None, ["model", "vocab", 3], ["a", "b"]), "not a list of pieces and scores"),
    "infinite": (change("unigram", None, ["model", "vocab", 3], ["zz", float("inf")]), "is not JSON: Infinity"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_raises_one_line(name, tmp_path, capfd):
    content, match = BAD[name]
    (tmp_path / "tokenizer.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(mb.FileError, match=match) as caught:
        mb.Tokenizer.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_file_beyond_the_limit_is_not_read(tmp_path):
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(64 * 2**20 + 1)
    with pytest.raises(mb.FileError, match="larger than 64 MB"):
        mb.Tokenizer.from_pretrained(tmp_path)


def test_a_missing_file_raises_one_line(tmp_path):
    with pytest.raises(mb.FileError, match=r"it has no tokenizer\.json"):
        mb.Tokenizer.from_pretrained(tmp_path)
    with pytest.raises(mb.FileError, match="no such folder"):
        mb.Tokenizer.from_pretrained(tmp_path / "none")


def test_a_folder_that_cannot_be_written_raises_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(mb.FileError, match="cannot be written"):
        get_tokenizer("bpe", None).save_pretrained(tmp_path / "file")


def damage(text, rng):
    """Return a valid file with a few random values or bytes replaced."""
    if rng.random() < 0.3:
        raw = bytearray(text.encode())
        for _ in range(rng.randrange(1, 9)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return bytes(raw)
    data = json.loads(text)
    for _ in range(rng.randrange(1, 3)):
        container, key = data, rng.choice(list(data))
        while isinstance(container[key], (dict, list)) and container[key] and rng.random() < 0.85:
            container = container[key]
            key = rng.choice(list(container)) if isinstance(container, dict) else rng.randrange(len(container))
        container[key] = rng.choice(
            [None, -1, 2**31, 2**64, 0.5, "", "x", "a" * 99, [], {}, [[]], True, {"type": "BPE"}]
        )
    return json.dumps(data).encode()


@pytest.mark.parametrize(("kind", "marker"), KINDS)
def test_a_damaged_file_raises_one_line_or_loads(kind, marker, tmp_path, capfd):
    rng = random.Random(11)
    text = json.dumps(mb.Tokenizer.train(kind, TEXTS, 300, marker=marker)._tokenizer_json)
    for _ in range(60):
        raw = damage(text, rng)
        (tmp_path / "tokenizer.json").write_bytes(raw)
        try:
            tokenizer = mb.Tokenizer.from_pretrained(tmp_path)
        except mb.FileError as problem:
            output = str(problem)
        else:
            output = "".join(tokenizer.decode(tokenizer.encode(x, add_specials=True)) for x in ("the ж", "", "<unk>"))
        assert "\n" not in output
        assert "panicked" not in capfd.readouterr().err, raw[:200]
