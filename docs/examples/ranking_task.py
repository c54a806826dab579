"""A task that is not in the package: learn from pairs (better text, worse text) to score texts.

python ranking_task.py PAIRS.tsv RUN_FOLDER
"""

import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import monoblock as mb
from monoblock.tasks.evaluation_report import EvaluationRequest, read_corpus
from monoblock.tasks.loaded_model import LoadedModel


def encode(tokenizer: mb.Tokenizer, texts: list[str]) -> dict[str, Tensor]:
    ids = [torch.tensor([tokenizer.cls_id, *tokenizer.encode(text)]) for text in texts]
    masks = [torch.ones_like(row) for row in ids]
    source = pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_id or 0)
    return {"source": source, "attention_mask": pad_sequence(masks, batch_first=True)}


def collate(tokenizer: mb.Tokenizer, rows: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs (B, 2, T), so that the two texts of a pair are never separated; each pair is one target."""
    inputs = encode(tokenizer, [text for row in rows for text in (row.source, row.target)])
    return {name: tensor.view(len(rows), 2, -1) for name, tensor in inputs.items()}, torch.zeros(len(rows))


class Ranking(mb.Task):
    name = "ranking"
    head = "regression"
    families = ("encoder-only",)
    corpus_kinds = ("pairs",)

    def data(self, inputs: mb.TaskInputs) -> mb.TaskData:
        valid = None if inputs.valid is None else inputs.valid.rows
        function = partial(collate, inputs.text_tokenizer)
        return inputs.task_data(inputs.train.rows, function, validation=valid, unit="pairs")

    def loss(self, model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        """Return the sum of -log sigmoid(score of the better text - score of the worse text)."""
        scores = model(**{name: tensor.flatten(0, 1) for name, tensor in inputs.items()}).view(-1, 2)
        return -F.logsigmoid(scores[:, 0] - scores[:, 1]).sum()

    @torch.inference_mode()
    def predict(self, loaded: LoadedModel, texts: Any) -> list[float]:
        return loaded.model(**encode(loaded.tokenizer, list(texts)))[:, 0].tolist()

    def evaluate(self, loaded: LoadedModel, request: EvaluationRequest) -> mb.Evaluation:
        rows = read_corpus(request, "pairs").rows
        better = torch.tensor(self.predict(loaded, [row.source for row in rows]))
        worse = torch.tensor(self.predict(loaded, [row.target for row in rows]))
        return mb.Evaluation({"accuracy": (better > worse).float().mean().item()})


if __name__ == "__main__":
    pairs, folder = sys.argv[1:]
    recipe = {
        "data": {"corpus": pairs, "validation_rows": 20},
        "tokenizer": {"kind": "char", "vocab": 64},
        "model": {"family": "bert", "width": 32, "depth": 2, "heads": 4, "context": 64},
        "train": {"steps": 60, "batch": 16, "lr": 3e-3, "warmup": 10},
    }
    run = mb.train(recipe, task=Ranking(), out=folder)
    print(run.metrics["val_loss"], mb.evaluate(run, pairs)["accuracy"])
