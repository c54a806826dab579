"""Evaluate a model on a corpus by the objective it was trained for; metrics/table.py says what the metrics are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from monoblock.baselines.lstm import Recurrent
from monoblock.data.corpora.table import CORPORA
from monoblock.data.readers.by_path import Holdout, find_path, is_single_file
from monoblock.errors import InputError
from monoblock.inference.runners.plain import evaluation_mode
from monoblock.model import Transformer
from monoblock.nn.generation_options import GenerationOptions
from monoblock.runs.build_data import Batch, CustomParts, build_custom_data
from monoblock.runs.load import load
from monoblock.runs.pipeline import Pipeline
from monoblock.runs.run import Run
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.table import task_of_model
from monoblock.tasks.task import Task, holdout_of
from monoblock.tasks.task_data import validate
from monoblock.tasks.text_to_text import TextToTextSection
from monoblock.training.loss import CrossEntropyLoss, FunctionLoss, Loss


def evaluate(
    model: str | Path | Pipeline | Run | Transformer,
    data: str | Path | Iterable[Batch],
    *,
    split: str | None = None,
    task: Task | None = None,
    limit: int | None = None,
    samples: int = 0,
    batch: int | None = None,
    folder: str | Path | None = None,
    device: str | None = None,
    **options: Unpack[GenerationOptions],
) -> Evaluation:
    """Evaluate a model; the metrics are those of `monoblock evaluate`.

        result = mb.evaluate("runs/kjv-web", "kjv-web")
        result["bleu"], result.metrics, result.samples

    model: a model folder, what `mb.load` or `mb.train` returned, or, for batches, a Transformer.
    data: a named corpus, a file or a folder; or batches (inputs, labels), on which loss and accuracy are computed.
    split: None is the split `test` if there is one, else `valid`.
    task: the task of the model, if it is not one of the package.
    limit: evaluate at most this many rows.
    samples: return this many predictions in `samples`.
    batch: number of rows evaluated at once; None: 64, and more if a GPU generates text.
    folder: folder with corpora.
    options: decoding options, for models that generate text.
    """
    if not isinstance(data, str | Path):
        network = model if isinstance(model, Transformer) else _to_pipeline(model, task, device).model
        known = task or (model.task if isinstance(model, Pipeline | Run) else None)
        return _evaluate_batches(network, data, known)
    request = EvaluationRequest(
        data=str(data),
        split=split,
        limit=limit,
        samples=samples,
        batch=batch,
        folder=None if folder is None else Path(folder),
        options=dict(options),
    )
    return evaluate_request(_to_pipeline(model, task, device), request)


def _to_pipeline(model: str | Path | Pipeline | Run | Transformer, task: Task | None, device: str | None) -> Pipeline:
    if isinstance(model, Pipeline):
        return model
    if isinstance(model, Run):
        model_class = type(model.model) if isinstance(model.model, Transformer) else Transformer
        return load(model.folder, task=task or model.task, model_class=model_class, device=device)
    if isinstance(model, Transformer):
        raise InputError("a Transformer has no tokenizer to read a corpus with; give a model folder, or batches")
    return load(model, task=task, device=device)


def _evaluate_batches(model: Transformer | Recurrent, batches: Iterable[Batch], task: Task | None) -> Evaluation:
    """Return loss and accuracy on batches, or the loss of the task if it has one of its own."""
    loss: Loss = CrossEntropyLoss(over_positions=task is not None and task.classes_are_positions)
    if task is not None and task.has_own_loss:
        loss = FunctionLoss(task.loss)
    evaluation = CustomParts(batches=batches, validation_batches=list(batches))
    with evaluation_mode(model):
        metrics = validate(model, build_custom_data(evaluation, None), loss, model.device)
    return Evaluation({name.removeprefix("val_"): value for name, value in metrics.items()})


def evaluate_request(loaded: LoadedModel, request: EvaluationRequest) -> Evaluation:
    """Evaluate a model on a corpus.

    A single file is evaluated as a whole, unless the model was trained on it: then only its held-out rows are used.
    """
    task = task_of_model(loaded)
    if task is None:
        raise InputError(f"evaluate has no metrics for {loaded.model.config.family} models; give another model")
    return task.evaluate(loaded, resolve_split(request, loaded))


def resolve_split(request: EvaluationRequest, loaded: LoadedModel) -> EvaluationRequest:
    """Return the request with the rows that were held out in training, or with split="all" for any other file.

    The split is unchanged if the request names one, or if word frequencies are tuned on the splits of the file
    (`rescore`).
    """
    for corpus, holdout in _training_corpora(loaded).items():
        if _is_same_corpus(corpus, request.data, request.folder):
            return replace(request, holdout=holdout)
    path = None if request.data in CORPORA else find_path(request.data, request.folder)
    if path is None or not is_single_file(path) or request.split is not None or request.rescore:
        return request
    return replace(request, split="all")


def _is_same_corpus(one: str, other: str, folder: Path | None) -> bool:
    if one in CORPORA or other in CORPORA:
        return one == other
    paths = [find_path(name, folder) for name in (one, other)]
    return None not in paths and len({Path(path).resolve() for path in paths if path is not None}) == 1


def _training_corpora(loaded: LoadedModel) -> dict[str, Holdout]:
    """Return the names and paths of the corpora that a model was trained on, and how rows of them were held out."""
    data = loaded.data_section
    if data is None:
        return {}
    synthetic, tasks = getattr(loaded.task_section, "synthetic", None), loaded.section(TextToTextSection).tasks
    names = [*([] if synthetic is None else [synthetic]), *(task.corpus for task in tasks)]
    others = {name: Holdout(data.split) for name in names}
    return others | {data.corpus: holdout_of(data)}
