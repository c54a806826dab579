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
from monoblock.recipes.schema import DataSection
from monoblock.runs.pipeline import Pipeline
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.table import EVALUATORS, objective_of

LOWER_IS_BETTER = {"loss", "perplexity", "bits_per_byte", "cer", "ece"}


def evaluate(model: Pipeline | LoadedModel, request: EvaluationRequest) -> Evaluation:
    """Evaluate a model on a corpus; a single file that the model was not trained on is evaluated as a whole."""
    loaded = model.loaded if isinstance(model, Pipeline) else model
    objective = objective_of(loaded)
    if objective not in EVALUATORS:
        raise InputError(
            f"evaluate has no metrics for {objective or loaded.model.config.family} models; give another model"
        )
    return EVALUATORS[objective](loaded, resolve_split(request, loaded.data_section))


def resolve_split(request: EvaluationRequest, section: DataSection | None) -> EvaluationRequest:
    """Return the request with split="all" if the data are a single file.

    The request is unchanged if it names a split, if the model was trained on the file, or if word frequencies are tuned
    on the splits of the file (`rescore`).
    """
    path = None if request.data in CORPORA else find_path(request.data, request.folder)
    if path is None or not is_single_file(path) or request.split is not None or request.rescore:
        return request
    trained = [] if section is None else [section.corpus, section.synthetic, *(task.corpus for task in section.tasks)]
    paths = [find_path(corpus, request.folder) for corpus in trained if corpus is not None]
    known = any(Path(one).resolve() == Path(path).resolve() for one in paths if one is not None)
    return request if known else replace(request, split="all")
