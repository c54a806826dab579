"""Evaluate a model on a corpus by the objective it was trained for.

The names of the metrics are those of the command line: loss, perplexity, bits_per_byte, bleu, bleu_tokenized, chrf,
cer, accuracy, top_k, f1, ece; `signature` identifies the variant of BLEU.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from monoblock.data.corpora.table import CORPORA
from monoblock.data.readers.by_path import find_path, is_single_file
from monoblock.errors import InputError
from monoblock.runs.pipeline import Pipeline
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.table import task_of_model
from monoblock.tasks.text_to_text.section import TextToTextSection

LOWER_IS_BETTER = {"loss", "perplexity", "bits_per_byte", "cer", "ece"}


def evaluate(model: Pipeline | LoadedModel, request: EvaluationRequest) -> Evaluation:
    """Evaluate a model on a corpus; a single file that the model was not trained on is evaluated as a whole."""
    loaded = model.loaded if isinstance(model, Pipeline) else model
    task = (model.task if isinstance(model, Pipeline) else None) or task_of_model(loaded)
    if task is None or task.evaluate is None:
        name = loaded.model.config.family if task is None else task.name
        raise InputError(f"evaluate has no metrics for {name} models; give another model")
    return task.evaluate(loaded, resolve_split(request, loaded))


def resolve_split(request: EvaluationRequest, loaded: LoadedModel) -> EvaluationRequest:
    """Return the request with split="all" if the data are a single file.

    The request is unchanged if it names a split, if the model was trained on the file, or if word frequencies are tuned
    on the splits of the file (`rescore`).
    """
    path = None if request.data in CORPORA else find_path(request.data, request.folder)
    if path is None or not is_single_file(path) or request.split is not None or request.rescore:
        return request
    paths = [find_path(corpus, request.folder) for corpus in _training_corpora(loaded)]
    known = any(Path(one).resolve() == Path(path).resolve() for one in paths if one is not None)
    return request if known else replace(request, split="all")


def _training_corpora(loaded: LoadedModel) -> list[str]:
    """Return the names and paths of the corpora that a model was trained on."""
    section = loaded.section(TextToTextSection)
    synthetic = getattr(loaded.task_section, "synthetic", None)
    names = [None if loaded.data_section is None else loaded.data_section.corpus, synthetic]
    return [name for name in [*names, *(task.corpus for task in section.tasks)] if name is not None]
