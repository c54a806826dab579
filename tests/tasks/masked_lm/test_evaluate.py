"""Masked tokens: of labelled rows the text alone, in training and in evaluation, in the frame they were trained in."""

import json

import pytest
from training_support import train_to_end, write_recipe

import monoblock as mb
from monoblock.data.corpora import load as corpora
from monoblock.recipes.parse import read_recipe
from monoblock.runs.build_data import build_task_data
from monoblock.runs.evaluate import evaluate
from monoblock.runs.finetune import build_finetuning_recipe
from monoblock.tasks.evaluation_report import EvaluationRequest

MODEL = {"family": "bert", "head": "masked_lm", "width": 16, "depth": 1, "heads": 2, "hidden": 23, "context": 19}
TEXTS = [f"the {n % 7} kings of the north went up{' and on' * (n % 5)} {n}" for n in range(70)]
FILES = {
    "texts.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in TEXTS),
    "labelled.tsv": "".join(f"QQ{n % 2}\t{text}\n" for n, text in enumerate(TEXTS)),
    "labelled.jsonl": "".join(json.dumps({"text": text, "label": f"QQ{n % 2}"}) + "\n" for n, text in enumerate(TEXTS)),
    "tagged.conll": "".join("".join(f"{word} QQ\n" for word in text.split()) + "\n" for text in TEXTS),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hiding")
    for name, content in FILES.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def recipe(place, corpus, **data):
    parts = {"data": {"corpus": corpus, **data}, "tokenizer": {"kind": "char", "vocab": 64}, "model": MODEL}
    path = write_recipe(
        place, {**parts, "train": {"objective": "masked", "steps": 2, "eval_every": 2, "mask_rate": 0.15}}
    )
    return path


@pytest.fixture(scope="module")
def documents(place):
    """A run a text at a time, and what it measured."""
    run, _ = train_to_end(recipe(place, "labelled.tsv", packing="documents"), place / "documents")
    return run


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("name", [name for name in FILES if name != "texts.jsonl"])
def test_labels_are_no_text(place, name, packing):
    made = build_task_data(read_recipe(str(recipe(place, name, packing=packing))), 19)
    assert "Q" not in made.tokenizer.content()[0]["model"]["vocab"]


def test_going_on_with_masked_tokens_reads_no_label_either(place, documents, monkeypatch):
    kinds = []
    load = corpora.load_corpus
    monkeypatch.setattr(corpora, "load_corpus", lambda *a, **how: kinds.append(how["kind"]) or load(*a, **how))
    for name in ("labelled.tsv", "tagged.conll"):
        build_finetuning_recipe(str(place / "documents"), str(place / name), objective="masked")
    assert set(kinds) == {"labelled", "tagged"}


def test_texts_are_framed_and_measured_as_they_were_trained(place, documents):
    pipe = mb.load(place / "documents")
    assert pipe.loaded.input_template().single == pipe.tokenizer.special_tokens_template(1) != [(None, 0)]
    figures = evaluate(pipe, EvaluationRequest(data=str(place / "labelled.tsv"), batch=12)).metrics
    assert figures["split"] == "valid"
    assert figures["tokens"] == documents.final_metrics["val_tokens"]
    assert figures["loss"] == pytest.approx(documents.final_metrics["val_loss"], rel=1e-5)
    cut = sum(len(text) + 2 > 19 for text in TEXTS[:63])
    assert f"({cut} of them cut to 19 tokens)" in documents.task_data.summary


def test_a_strange_file_is_measured_whole_whether_its_texts_have_labels_or_not(place, documents):
    pipe = mb.load(place / "documents")
    plain, labelled = (
        evaluate(pipe, EvaluationRequest(data=str(place / name))).metrics for name in ("texts.jsonl", "labelled.jsonl")
    )
    assert labelled == pytest.approx(plain)
    assert plain["split"] == "all"
    assert plain["tokens"] > 5 * documents.final_metrics["val_tokens"]
