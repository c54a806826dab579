"""Names on the hub: downloaded if possible, else a one-line error, and never when a local folder is meant."""

import sys
import warnings
from types import SimpleNamespace

import pytest

import monoblock as mb
from monoblock.cli.main import run
from monoblock.errors import FileError
from monoblock.interop.model_folder import ALLOW_PATTERNS, resolve_model_path


def replace_hub(monkeypatch, download):
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))


def test_a_model_is_downloaded_without_code_and_pickles(monkeypatch, tmp_path):
    model = mb.Transformer(mb.gpt(vocab=11, width=12, depth=1, heads=3, context=13))
    model.save_pretrained(tmp_path)
    calls = []

    def download(name, revision, allow_patterns):
        calls.append((name, revision, allow_patterns))
        return str(tmp_path)

    replace_hub(monkeypatch, download)
    loaded = mb.Transformer.from_pretrained("someone/a-model")
    assert loaded.config == model.config
    assert calls == [("someone/a-model", None, list(ALLOW_PATTERNS))]
    assert not any(pattern.endswith((".py", ".bin", ".pt", ".pkl")) for pattern in ALLOW_PATTERNS)


def test_a_failed_download_is_a_one_line_error(monkeypatch):
    def download(name, revision, allow_patterns):
        raise OSError("no network\nat all")

    replace_hub(monkeypatch, download)
    with pytest.raises(FileError, match=r"no folder a/b here, and the download failed \(no network at all"):
        mb.Transformer.from_pretrained("a/b")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileError, match="pip install huggingface_hub"):
        mb.load("someone/a-model")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("revision", [None, "main", "v1.0", "refs/pr/1", COMMIT])
def test_a_revision_is_pinned_and_the_commit_that_was_loaded_is_named(revision, monkeypatch, tmp_path):
    folder, calls = tmp_path / "snapshots" / COMMIT, []
    mb.Transformer(mb.gpt(vocab=11, width=12, depth=1, heads=3, context=13)).save_pretrained(folder)

    def download(name, revision, allow_patterns):
        calls.append((name, revision))
        return str(folder)

    replace_hub(monkeypatch, download)
    name = "someone/a-model" if revision is None else f"someone/a-model@{revision}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert resolve_model_path(name) == folder
    assert calls == [("someone/a-model", revision)]
    expected = f"{name} may change; this is someone/a-model@{COMMIT}, and that name always gives the same model"
    assert [str(warning.message) for warning in caught] == ([] if revision == COMMIT else [expected])


@pytest.mark.parametrize(
    "path", ["./nowhere", "/nowhere/at/all", "../up", "a/b/c", "mine", "runs/mine", "a/b@", "a/b@-x", "runs/x@y"]
)
def test_a_path_is_never_looked_up_on_the_hub(path, monkeypatch):
    replace_hub(monkeypatch, lambda *_, **__: pytest.fail("the hub was asked"))
    assert str(resolve_model_path(path)).rstrip("/") in path


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("gpt2", "write openai-community/gpt2 for the model of the Hugging Face hub, or the path of a folder"),
        ("gpt2-xl", "write openai-community/gpt2-xl for"),
        ("bert-base-uncased", "write google-bert/bert-base-uncased for"),
        ("roberta-large", "write FacebookAI/roberta-large for"),
        ("t5-small", "write google-t5/t5-small for"),
        ("distilgpt2", "write distilbert/distilgpt2 for"),
        (
            "llama2-70b",
            "the preset llama2-70b has no weights; write mb.Transformer(mb.preset('llama2-70b')) to train it",
        ),
    ],
)
def test_a_name_without_an_owner_is_answered_with_what_to_write(name, advice, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for load in (mb.Transformer.from_pretrained, mb.load):
        with pytest.raises(FileError) as caught:
            load(name)
        assert f"there is no folder {name} here" in str(caught.value)
        assert advice in str(caught.value)
        assert "\n" not in str(caught.value)
    assert run(["generate", name, "Hello"]) == 1
    assert advice in capsys.readouterr().err
    mb.Transformer(mb.gpt(vocab=11, width=12, depth=1, heads=3, context=13)).save_pretrained(name)
    assert mb.Transformer.from_pretrained(name).config.input.vocab == 11  # a folder of that name
