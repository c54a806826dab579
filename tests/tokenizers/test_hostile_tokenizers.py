"""Tokenizer files that would take the library much time or memory, or end in a panic, are refused in one line."""

import base64
import json
import time

import pytest

import monoblock as mb

BASE = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "b": 2}, "unk_token": "[UNK]"},
}  # fmt: skip


def added(count, length):
    flags = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": 3 + n, "content": f"{n}".ljust(length, "x"), **flags} for n in range(count)]


def template(ids, text="A"):
    sequence, special = {"Sequence": {"id": text, "type_id": 0}}, {"SpecialToken": {"id": "a", "type_id": 0}}
    tokens = {"a": {"id": "a", "ids": ids, "tokens": ["a"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": [special, sequence], "pair": [sequence], "special_tokens": tokens}


def charsmap(raw):
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw).decode()}


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("added_tokens", added(100_000, 8), "at most 32,768"),
        ("added_tokens", added(4000, 500), "more than 262,144 characters"),
        ("post_processor", template([1] * 500_000), "has no list of ids, or a long one"),
        ("post_processor", template([10**9]), "an id is a whole number"),
        ("post_processor", template([1], "B"), "adds a second text to a single one"),
        ("normalizer", {"type": "Prepend", "prepend": ""}, "prepends not 1 to 8 characters"),
        ("normalizer", charsmap(b""), "states a size"),
        ("normalizer", charsmap(b"\xff\xff\xff\xff" + bytes(64)), "states a size"),
        ("normalizer", charsmap((1024).to_bytes(4, "little") + b"\xff" * 1024), "leads out of it"),
        ("normalizer", charsmap((1024).to_bytes(4, "little") + bytes(1024) + b"\xff"), "not UTF-8"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "%%"}, "not base 64"),
    ],
)
def test_a_dangerous_tokenizer_json_is_refused(section, value, message, tmp_path, capfd):
    (tmp_path / "tokenizer.json").write_text(json.dumps(BASE | {section: value}))
    start = time.process_time()
    with pytest.raises(mb.FileError, match=message) as caught:
        mb.Tokenizer.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
    assert not capfd.readouterr().err  # a Rust panic prints there
    assert time.process_time() - start < 2


def test_long_tokens_in_a_tiktoken_file_are_refused(tmp_path):
    tokens = [bytes([n]) for n in range(256)] + [n.to_bytes(2, "big") * 256 for n in range(1, 1500)]
    rows = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (tmp_path / "a.tiktoken").write_text("".join(rows))
    start = time.process_time()
    with pytest.raises(mb.FileError, match="too many long tokens"):
        mb.Tokenizer.from_pretrained(tmp_path)
    assert time.process_time() - start < 2


def test_compiled_rules_of_sentencepiece_are_accepted(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    from monoblock.tokenizers.formats.sentencepiece import parse_model
    from monoblock.tokenizers.validation import check_charsmap

    (tmp_path / "text.txt").write_text("hello world of pieces\nanother line\n" * 50)
    options = {"vocab_size": 40, "minloglevel": 2, "hard_vocab_limit": False}
    for rule in ("nmt_nfkc", "nmt_nfkc_cf"):
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "m"), normalization_rule_name=rule, **options
        )
        rules = parse_model((tmp_path / "m.model").read_bytes(), "m").charsmap
        check_charsmap(base64.b64encode(rules).decode())
        (tmp_path / "tokenizer.model").write_bytes((tmp_path / "m.model").read_bytes())
        assert mb.Tokenizer.from_pretrained(tmp_path).decode([5]) is not None
