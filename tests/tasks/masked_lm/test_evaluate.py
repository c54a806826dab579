"""Masked language modelling: labels are ignored in training and evaluation, which encode documents alike."""

import json

import pytest
from training_support import train_to_end, write_recipe

import monoblock as mb
from monoblock.data.corpora.load import load_corpus
from monoblock.runs.build_data import build_task_data
from monoblock.runs.evaluate import evaluate_request
from monoblock.runs.finetune import build_finetuning_recipe
from monoblock.runs.recipe import read_recipe
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
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked_lm")
    for name, content in FILES.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def make_recipe(folder, corpus, **data):
    sections = {"data": {"corpus": corpus, **data}, "tokenizer": {"kind": "char", "vocab": 64}, "model": MODEL}
    train = {"objective": "masked_lm", "steps": 2, "eval_every": 2}
    return write_recipe(folder, {**sections, "train": train})


@pytest.fixture(scope="module")
def document_run(workspace):
    """A finished run on single documents."""
    run, _ = train_to_end(make_recipe(workspace, "labelled.tsv", packing="documents"), workspace / "documents")
    return run


@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("name", [name for name in FILES if name != "texts.jsonl"])
def test_labels_are_not_part_of_the_text(workspace, name, packing):
    task_data = build_task_data(read_recipe(str(make_recipe(workspace, name, packing=packing))), 19)
    assert "Q" not in task_data.tokenizer.content()[0]["model"]["vocab"]


def test_fine_tuning_reads_labelled_files_by_their_kind(workspace, document_run, monkeypatch):
    kinds = []

    def record_kind(*args, **options):
        kinds.append(options["kind"])
        return load_corpus(*args, **options)

    for module in ("data.corpora.load", "runs.finetune"):
        monkeypatch.setattr(f"monoblock.{module}.load_corpus", record_kind)
    for name in ("labelled.tsv", "tagged.conll"):
        build_finetuning_recipe(str(workspace / "documents"), str(workspace / name), objective="masked_lm")
    assert set(kinds) == {"labelled", "tagged"}


def test_evaluation_encodes_and_scores_texts_as_training_did(workspace, document_run):
    pipe = mb.load(workspace / "documents")
    assert pipe.input_template().single == pipe.tokenizer.special_tokens_template(1) != [(None, 0)]
    metrics = evaluate_request(pipe, EvaluationRequest(data=str(workspace / "labelled.tsv"), batch=12)).metrics
    assert metrics["split"] == "valid"
    assert metrics["tokens"] == document_run.metrics["val_tokens"]
    assert metrics["loss"] == pytest.approx(document_run.metrics["val_loss"], rel=1e-5)
    num_truncated = sum(len(text) + 2 > 19 for text in TEXTS[:63])
    assert f"({num_truncated} of them cut to 19 tokens)" in document_run.task_data.summary


def test_another_file_is_evaluated_as_a_whole_with_or_without_labels(workspace, document_run):
    pipe = mb.load(workspace / "documents")
    plain, labelled = (
        evaluate_request(pipe, EvaluationRequest(data=str(workspace / name))).metrics
        for name in ("texts.jsonl", "labelled.jsonl")
    )
    assert labelled == pytest.approx(plain)
    assert plain["split"] == "all"
    assert plain["tokens"] > 5 * document_run.metrics["val_tokens"]
