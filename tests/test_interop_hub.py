"""Names on the hub: fetched where that can be done, one line where not, and never when a folder is meant."""

import sys
from types import SimpleNamespace

import pytest

import monoblock as mb
from monoblock.errors import FileError
from monoblock.interop.hub import WANTED, at_hand


def hub(monkeypatch, fetch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=fetch))


def test_a_name_is_fetched_without_code_and_pickles(monkeypatch, tmp_path):
    model = mb.Transformer(mb.gpt(vocab=11, width=12, depth=1, heads=3, context=13))
    model.save_pretrained(tmp_path)
    asked = []

    def fetch(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    hub(monkeypatch, fetch)
    loaded = mb.Transformer.from_pretrained("someone/a-model")
    assert loaded.config == model.config
    assert asked == [("someone/a-model", list(WANTED))]
    assert not any(pattern.endswith((".py", ".bin", ".pt", ".pkl")) for pattern in WANTED)


def test_what_cannot_be_fetched_is_one_line(monkeypatch):
    def fetch(name, allow_patterns):
        raise OSError("no network\nat all")

    hub(monkeypatch, fetch)
    with pytest.raises(FileError, match=r"no folder a/b here, and the hub did not give it \(no network at all"):
        mb.Transformer.from_pretrained("a/b")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileError, match="pip install huggingface_hub"):
        mb.load("someone/a-model")


@pytest.mark.parametrize("place", ["./nowhere", "/nowhere/at/all", "../up", "a/b/c", "gpt2", "runs/mine"])
def test_a_path_is_no_name(place, monkeypatch):
    hub(monkeypatch, lambda *_, **__: pytest.fail("the hub was asked"))
    assert str(at_hand(place)).rstrip("/") in place
