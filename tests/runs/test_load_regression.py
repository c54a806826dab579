"""A folder of a regression model: its numbers have the names that the folder gives them."""

import json

import pytest
import torch

import monoblock as mb
from monoblock.interop.model_folder import write_labels

NAMES = ["warmth", "length"]


@pytest.fixture(scope="module")
def tokenizer():
    return mb.Tokenizer.train("bpe", ["a small cat sat on a mat"], 270)


def save(folder, tokenizer, model_format):
    torch.manual_seed(0)
    config = mb.bert(vocab=tokenizer.vocab_size, width=12, depth=1, heads=3, context=37, head="regression", classes=2)
    model = mb.Transformer(config).eval()
    model.save_pretrained(folder) if model_format == "monoblock" else mb.export_hf(model, folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.mark.parametrize("model_format", ["monoblock", "hf"])
def test_the_labels_of_a_regression_are_the_names_of_its_numbers(tmp_path, tokenizer, model_format):
    model = save(tmp_path, tokenizer, model_format)
    pipe = mb.load(tmp_path, device="cpu")
    assert pipe.model.config.head == model.config.head
    assert pipe.labels == ["LABEL_0", "LABEL_1"]
    write_labels(tmp_path, NAMES, model_format)
    assert mb.load(tmp_path, device="cpu").labels == NAMES
    if model_format == "hf":
        assert json.loads((tmp_path / "config.json").read_text())["problem_type"] == "regression"
