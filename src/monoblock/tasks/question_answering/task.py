"""Extractive question answering: the start and end of the answer in a context (Rajpurkar et al. 2016)."""

from __future__ import annotations

from monoblock.tasks.question_answering.data import build_question_answering_data
from monoblock.tasks.question_answering.evaluate import evaluate_question_answering, score_validation_answers
from monoblock.tasks.question_answering.predict import best_answers
from monoblock.tasks.question_answering.section import QuestionAnsweringSection
from monoblock.tasks.task import Task, TrainingDefaults
from monoblock.training.loss import CrossEntropyLoss

QUESTION_ANSWERING = Task(
    name="question_answering",
    about="mark the start and end of the answer in a context",
    build_data=build_question_answering_data,
    head="spans",
    families=("encoder-only",),
    corpus_kinds=("questions",),
    section=QuestionAnsweringSection,
    special_tokens=lambda recipe, train: ["pad", "cls", "sep", "mask"],
    required_tokens=("cls",),
    loss=CrossEntropyLoss(over_positions=True),
    predict=best_answers,
    evaluate=evaluate_question_answering,
    score_validation=score_validation_answers,
    metrics=("f1", "exact"),
    supports_adversarial=True,
    defaults=TrainingDefaults(2, 16, 384),
    old_names=("answers",),
    old_keys={"data.stride": "stride", "data.impossible": "unanswerable"},
)
