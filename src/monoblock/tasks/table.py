"""The list of tasks: what each objective reads and how its models are evaluated."""

from __future__ import annotations

from collections.abc import Callable

from monoblock.data.readers.records import CorpusKind
from monoblock.tasks.chat.evaluate import evaluate_chat
from monoblock.tasks.classification.evaluate import evaluate_classifier
from monoblock.tasks.evaluation_report import Evaluation, EvaluationRequest
from monoblock.tasks.language_modeling.evaluate import evaluate_language_model
from monoblock.tasks.loaded_model import LoadedModel
from monoblock.tasks.masked_lm.data import MASKED_LM_CORPUS_KINDS
from monoblock.tasks.masked_lm.evaluate import evaluate_masked_lm
from monoblock.tasks.question_answering.evaluate import evaluate_question_answering, score_validation_answers
from monoblock.tasks.seq2seq.evaluate import evaluate_pairs, score_validation_pairs
from monoblock.tasks.token_classification.evaluate import evaluate_tagger, score_validation_tags

# Objective -> the kinds of corpus it reads; a path is read by its suffix, or as the first kind.
CORPUS_KINDS: dict[str, tuple[CorpusKind, ...]] = {
    "causal": ("text",),
    "masked": MASKED_LM_CORPUS_KINDS,
    "spans": ("text",),
    "pairs": ("pairs",),
    "classify": ("labelled", "images"),
    "label": ("tagged",),
    "answers": ("questions",),
    "chat": ("chat",),
}
# Objective -> its evaluation.
EVALUATORS: dict[str, Callable[[LoadedModel, EvaluationRequest], Evaluation]] = {
    "causal": evaluate_language_model,
    "pairs": evaluate_pairs,
    "answers": evaluate_question_answering,
    "classify": evaluate_classifier,
    "label": evaluate_tagger,
    "masked": evaluate_masked_lm,
    "chat": evaluate_chat,
}
# Objective -> the metrics of the first validation rows for the model card.
VALIDATION_SCORERS: dict[str, Callable[..., dict[str, float]]] = {
    "pairs": score_validation_pairs,
    "answers": score_validation_answers,
    "label": score_validation_tags,
}
# The objective of a model without a recipe, by its head or its family.
OBJECTIVE_BY_HEAD = {"classifier": "classify", "tagger": "label", "masked_lm": "masked", "spans": "answers"}
OBJECTIVE_BY_FAMILY = {"decoder-only": "causal", "encoder-decoder": "pairs"}


def objective_of(loaded: LoadedModel) -> str:
    """Return the objective to evaluate a model by: of its head, else its recipe, else its family; "" if unknown."""
    config = loaded.model.config
    head = getattr(config, "head", None)
    by_head = OBJECTIVE_BY_HEAD.get(head.kind if head is not None else "")
    return by_head or loaded.objective or OBJECTIVE_BY_FAMILY.get(config.family, "")
