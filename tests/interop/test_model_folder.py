"""A folder of any format is read through `ModelFolder`: every file is opened at most once, whoever asks."""

import sys
from collections import Counter

import pytest
import torch
from tokenizer_support import spm_tokenizer

import monoblock as mb
from monoblock.interop.convert import open_model, write_model
from monoblock.interop.gguf.writer import save_gguf
from monoblock.interop.model_folder import ModelFolder
from monoblock.runs.diagnose import read_folder

TEXT = "".join(f"And the {n} sons of the king went up to the house of the LORD.\n" for n in range(60))
opened: Counter[str] | None = None  # file -> how often Python opened it; None while nobody counts


def _note(event, arguments):
    if event == "open" and opened is not None and isinstance(arguments[0], str) and not arguments[2] & 3:  # to read
        opened[arguments[0]] += 1


sys.addaudithook(_note)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run, with weights in several files."""
    root = tmp_path_factory.mktemp("model_folder")
    (root / "book.txt").write_text(TEXT)
    options = {"data.corpus": str(root / "book.txt"), "tokenizer.vocab": 290, "train.steps": 1, "train.batch": 2}
    sizes = {"model.width": 12, "model.heads": 2, "model.depth": 2, "train.device": "cpu", "train.compile": "no"}
    mb.train("gpt-tiny", options | sizes, out=root / "run", progress=False)
    pipe = mb.load(root / "run", device="cpu")
    pipe.model.save_pretrained(root / "run", max_shard_size=4_000)
    return root / "run"


@pytest.fixture(scope="module")
def folders(run):
    """A folder of each format; the GGUF file has another model, since it cannot hold the tokenizer of the run."""
    with open_model(run) as source:
        write_model(source, run.parent / "hf", "hf")
    tokenizer = mb.Tokenizer.from_content(*spm_tokenizer())
    torch.manual_seed(0)
    model = mb.Transformer(mb.vary(mb.tiny("llama3-8b"), vocab=tokenizer.vocab_size))
    gguf, generation = run.parent / "model.gguf", {"do_sample": True, "temperature": 0.8}
    save_gguf(model, gguf, tokenizer=tokenizer, generation=generation, kind="f32")
    return {"monoblock": run, "hf": run.parent / "hf", "gguf": gguf}


@pytest.fixture(params=["monoblock", "hf", "gguf"])
def folder(request, folders):
    return folders[request.param]


USES = {
    "load": lambda folder: mb.load(folder, device="cpu"),
    "from_pretrained": mb.Transformer.from_pretrained,
    "account": mb.account,
    "diagnose": lambda folder: read_folder(ModelFolder(folder)),
    "everything": lambda folder: everything(ModelFolder(folder)),
}


def everything(folder):
    return (
        (folder.config, dict(folder.weights), folder.tokenizer, folder.generation, folder.labels, folder.recipe),
        (folder.load_tokenizer(), folder.published_fields, folder.has_tokenizer, folder.format),
    )


def count_opens(path, use):
    global opened
    opened = Counter()
    try:
        use()
        return {name: count for name, count in opened.items() if name.startswith(str(path))}
    finally:
        opened = None


@pytest.mark.parametrize("name", USES)
def test_every_file_is_opened_at_most_once(folder, name):
    counts = count_opens(folder, lambda: USES[name](folder))
    assert counts, "the hook sees no file"
    assert max(counts.values()) == 1, counts


@pytest.mark.parametrize("target", ["monoblock", "hf"])
def test_a_conversion_opens_every_file_of_the_source_at_most_once(folder, target, tmp_path):
    def convert():
        with open_model(folder) as source:
            write_model(source, tmp_path / "out", target)

    counts = count_opens(folder, convert)
    assert max(counts.values()) == 1, counts


def test_a_folder_says_what_it_holds(run, folder, folders):
    stored = ModelFolder(folder)
    assert folders[stored.format] == folder
    assert stored.config.family == "decoder-only"
    assert stored.tokenizer.decode(stored.tokenizer.encode("the house")).strip() == "the house"
    assert stored.labels == []
    assert (stored.recipe is not None) == (folder == run)
    assert stored.generation["do_sample"] is True
    assert stored.generation["temperature"] == pytest.approx(0.8)


def test_the_same_weights_are_read_from_either_folder(folders):
    ours, theirs = (mb.Transformer.from_pretrained(folders[name]).state_dict() for name in ("monoblock", "hf"))
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, rtol=0, atol=0)


def test_weights_of_a_gguf_file_can_be_changed(tmp_path):
    """They share the memory of the file as it is mapped, but a change is not written to it."""
    save_gguf(mb.Transformer(mb.tiny("llama3-8b")), tmp_path / "model.gguf", kind="f32")
    before = (tmp_path / "model.gguf").read_bytes()
    model = mb.Transformer.from_pretrained(tmp_path / "model.gguf")
    for weight in model.parameters():
        weight.data.zero_()
    assert (tmp_path / "model.gguf").read_bytes() == before
